"""vLLM servers as an engine: what is asked on the wire, and every fault of a server named, with nothing lost."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

import pytest
from pydantic import ValidationError

from tests.engine.engine_setup import DEADLINE_S, reply_to
from tests.engine.http_member import score_of
from tests.engine.test_engine_conformance import model
from tests.engine.vllm_server import LONGEST, FakeVllm, VllmPool, letters
from whet.engine.base import EngineFailed, EngineLost, EngineRefused, StaleCache
from whet.engine.pool.member import State
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.start import ServerAddress, ServerAt, ServerStarter
from whet.engine.servers.wire import seed_of
from whet.engine.vllm.start import OWN_ARGS, Vllm
from whet.observe.metrics import flatten
from whet.settings.rl import RunConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.base import BroadcastTicket, DiskTicket
from whet.transport.folder import FolderWriter
from whet.types import Finish, Grammar, Proof, Request, SamplingParams
from whet.types.columns import Ints

PROMPT = (1, 2, 3)


def ask(name="r", num=40, chunk=4, begun=0, **sampling):
    return Request(name, PROMPT, SamplingParams(num, **{"seed": 1, **sampling}), chunk_tokens=chunk, num_begun=begun)


def expected(num=40):
    return tuple(((len(PROMPT) + i) * 7 + 5) % 97 for i in range(num))


@pytest.fixture
def server():
    made = FakeVllm(model())
    yield made
    made.die()


def member_of(server, key=None):
    return ServerAt(Vllm(), "vllm 0", server.url, letters, None, 5.0)(threading.Event())


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def play(server, request):
    """The reply of a member for the server."""
    member = member_of(server)
    try:
        return run(reply_to(member, request))
    finally:
        member.stop()


def test_a_request_says_everything_that_the_server_would_otherwise_choose_by_itself(server):
    reply = play(server, ask(temperature=1.0, stop_token_ids=(98,), logit_bias=((5, 1.5),)))
    (body,) = server.bodies
    assert reply.tokens == expected() and reply.logprobs == pytest.approx([-token / 10 for token in expected()])
    assert body["token_ids"] == list(PROMPT) and body["stream"] and body["cache_salt"] == "whet-default" and body["model"] == "tiny"
    assert body["sampling_params"] == {
        "max_tokens": 40,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "stop_token_ids": [98],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "logit_bias": {"5": 1.5},
    }


def test_the_rest_of_a_reply_has_other_noise_than_its_beginning():
    seeds = [seed_of(7, begun) for begun in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**63 for seed in seeds) and seeds[0] == 7


def test_a_grammar_travels_and_its_reply_cannot_be_continued(server):
    play(server, ask(grammar=Grammar("regex", "a+")))
    assert server.bodies[-1]["sampling_params"]["structured_outputs"] == {"regex": "a+"}
    for option in ({"grammar": Grammar("regex", "a+")}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        with pytest.raises(EngineRefused, match="cannot continue a reply under a grammar"):
            play(server, ask(begun=2, **option))


def test_a_reply_that_cannot_be_continued_is_sampled_again_after_a_pause(server):
    async def paused():
        member = member_of(server)
        reading = asyncio.ensure_future(reply_to(member, ask(num=200, presence_penalty=0.5)))
        while not server.engine.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await member.pause()
        assert not reading.done()
        await member.resume()
        reply = await reading
        member.stop()
        return reply, member.num_dropped

    reply, num_dropped = run(paused())
    assert reply.tokens == expected(200) and len(reply.chunks) == 1 and num_dropped > 0
    assert [body["token_ids"] for body in server.bodies] == [list(PROMPT)] * 2


def test_a_stop_text_ends_a_reply_within_an_event_and_what_follows_is_dropped_by_name(server):
    text = letters(expected())

    def many_at_once(event):
        (choice,) = event["choices"]
        if choice["finish_reason"] is None and len(choice["token_ids"]) == 1 and choice["token_ids"][0] == expected()[5]:
            entry = {"token_id": 1, "logprob": -1.0, "rank": 1, "top_logprobs": []}
            choice["token_ids"] += [1, 2]
            choice["logprobs"]["content"] += [entry, {**entry, "token_id": 2}]

    server.alter = many_at_once
    member = member_of(server)
    reply = run(reply_to(member, ask(stop=(text[4:6],))))
    assert reply.finish is Finish.STOP and reply.tokens == expected(6)
    assert member.num_dropped == 2
    member.stop()


def test_log_probs_that_the_server_does_not_have_are_refused_before_anything_is_sampled(server):
    assert play(server, ask(raw_logprobs=True)).tokens == expected()
    for option in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"logit_bias": ((1, 1.0),)}):
        with pytest.raises(EngineRefused, match="no log-probs of the model's own distribution"):
            play(server, ask(raw_logprobs=True, **option))
    assert len(server.bodies) == 1


def fewer_logprobs(event):
    event["choices"][0]["logprobs"]["content"] = []


def impossible(event):
    for entry in event["choices"][0]["logprobs"]["content"]:
        entry["logprob"] = -9999.0


def no_logprobs(event):
    event["choices"][0]["logprobs"] = None


def two_choices(event):
    event["choices"] *= 2


def strange_finish(event):
    event["choices"][0]["finish_reason"] = "repetition"


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (fewer_logprobs, "1 tokens came with 0 log-probs"),
        (no_logprobs, "1 tokens came with 0 log-probs"),
        (impossible, "--logprobs-mode processed_logprobs"),
        (two_choices, "not as vLLM's"),
        (strange_finish, "finish reason 'repetition'"),
    ],
)
def test_an_answer_that_lacks_what_was_asked_for_fails_the_request_by_name(server, alter, words):
    server.alter = alter
    with pytest.raises(EngineFailed, match=words):
        play(server, ask())


def test_without_the_mask_of_what_was_drawn_from_a_narrowed_request_fails(server):
    with pytest.raises(EngineFailed, match="--return-sampling-mask"):
        play(server, ask(top_p=0.9, nucleus=True))


def test_the_mask_of_what_was_drawn_from_comes_with_each_token(server):
    def mask(event):
        (choice,) = event["choices"]
        choice["sampling_mask"] = [[token, token + 1] for token in choice["token_ids"]]

    server.alter = mask
    reply = play(server, ask(num=5, chunk=0, top_p=0.9, nucleus=True))
    (chunk,) = reply.chunks
    assert list(chunk.nucleus.ids) == [each for token in expected(5) for each in (token, token + 1)]


def test_the_log_prob_of_a_greedy_token_is_that_of_a_distribution_with_one_point(server):
    assert set(play(server, ask(temperature=0.0)).logprobs) == {0.0}


def test_weights_that_somebody_else_changed_are_found_by_their_label(server):
    def relabel(event):
        for span in event["choices"][0]["weight_versions"] or ():
            span["version"] = "theirs"

    server.alter = relabel
    with pytest.raises(StaleCache, match="'theirs', and whet left 'default' there"):
        play(server, ask())


@pytest.mark.parametrize(
    ("status", "text", "error", "words"),
    [
        (400, "Token id 999 is out of vocabulary", EngineRefused, "HTTP 400: Token id 999 is out of vocabulary"),
        (403, "Scale-out endpoints are disabled", EngineRefused, "--enable-scale-out"),
        (401, "Unauthorized", EngineRefused, KEY),
        (429, "too many", EngineFailed, "HTTP 429"),
        (503, "paused", EngineFailed, "HTTP 503"),
        (500, "boom", EngineFailed, "HTTP 500: boom"),
    ],
)
def test_a_status_is_named_with_what_to_do(server, status, text, error, words):
    server.statuses = [(status, text)]
    with pytest.raises(error, match=words):
        play(server, ask())


def test_an_abort_names_the_request_as_the_server_does():
    """The bare id would be answered as done, and abort nothing."""
    server = FakeVllm(model())
    member = member_of(server)

    async def aborted():
        reading = asyncio.ensure_future(reply_to(member, ask(num=200)))
        while not server.engine.running:
            await asyncio.sleep(0.005)
        await member.abort("r")
        return await reading

    reply = run(aborted())
    member.stop()
    server.die()
    assert reply.finish is Finish.ABORT and len(reply.tokens) < 200 and reply.tokens == expected(200)[: len(reply.tokens)]


def test_a_server_that_dies_in_the_middle_of_a_reply_costs_no_token():
    pool = VllmPool(model(), 2)

    async def killed():
        pool.open("c")
        reading = asyncio.ensure_future(reply_to(pool, replace(ask("r", 200), conversation="c")))
        while not (pool._requests.replies.get("r") and pool._requests.replies["r"].num_sampled >= 8):
            await asyncio.sleep(0.002)
        await asyncio.to_thread(pool.servers[0].die)
        reply = await reading
        while pool.slots[0].state is not State.SERVING:
            await asyncio.sleep(0.01)
        await pool.close()
        return reply

    reply = run(killed())
    assert reply.tokens == expected(200) and reply.logprobs == pytest.approx([-token / 10 for token in expected(200)])
    assert any("vllm 0" in incident.cause for incident in pool.incidents)


def test_a_request_that_fails_at_one_server_is_sampled_by_the_other():
    pool = VllmPool(model(), 2)
    pool.servers[0].statuses = [(500, "boom")]

    async def asked():
        reply = await reply_to(pool, ask())
        await pool.close()
        return reply

    assert run(asked()).tokens == expected()


def test_a_server_whose_engine_died_while_its_routes_answer_is_a_lost_one():
    """As vLLM's: the request fails with 500, `/health` answers 503, and the process ends somewhat later."""
    pool = VllmPool(model(), 1)
    pool.servers[0].statuses = [(500, "EngineCore encountered an issue.")] * 4
    pool.servers[0].failing["/health"] = 503

    async def asked():
        replies = await asyncio.gather(*(reply_to(pool, ask(f"r{i}")) for i in range(4)))
        await pool.close()
        return replies

    assert all(reply.tokens == expected() for reply in run(asked())) and len(pool.servers) == 2
    assert "EngineCore encountered an issue" in pool.incidents[0].cause


@pytest.mark.parametrize("calls", [["pause"], ["pause", "resume"], ["score"], ["pause", "score"]])
def test_a_server_that_shuts_down_is_lost_whatever_is_asked_of_it(calls):
    """One that lives and answers an error is not: another in its place would do no better."""

    async def asked(*failing):
        server = FakeVllm(model())
        member = member_of(server)
        await member.resume()
        server.failing |= dict.fromkeys(failing, 503)
        arguments = {"score": (Ints(PROMPT),)}
        try:
            for call in calls:
                await getattr(member, call)(*arguments.get(call, ()))
        finally:
            member.stop()
            server.die()

    routes = ["/pause", "/resume", "/inference/v1/generate"]
    with pytest.raises(EngineLost, match=r"HTTP 503.*; and .*/health"):
        run(asked(*routes, "/health"))
    with pytest.raises(EngineFailed, match="HTTP 503") as lives:
        run(asked(*routes))
    assert not isinstance(lives.value, EngineLost)


def publisher(pool):
    thread = ThreadPoolExecutor(1)
    trained = model(3)
    backend = TorchBackend(trained, TrainConfig(), total_steps=1)
    return EnginePublisher(backend, trained, pool, thread)


def publish_all(pool, *versions):
    async def published():
        try:
            return [await publisher(pool).publish(version) for version in versions]
        finally:
            await pool.close()

    return run(published())


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_whose_update_fails_in_the_middle_is_a_lost_one(route):
    server = FakeVllm(model())
    server.failing[route] = 500
    member = member_of(server)

    async def updated():
        await member.pause()
        with pytest.raises(EngineLost, match=r"version 1 arrived in part, if at all: .*planted"):
            await member.update(DiskTicket(1, model_folder()), 1)

    try:
        run(updated())
    finally:
        member.stop()
        server.die()


def model_folder():
    folder = Path(mkdtemp(prefix="whet-vllm-"))
    FolderWriter(model(), 2**30).write(folder, model().named_weights())
    return folder


def test_an_update_resets_the_prefix_cache_and_waits_until_the_server_let_go_of_it():
    server = FakeVllm(model())
    server.resets = [False, False, True]
    member = member_of(server)

    async def updated():
        await member.pause()
        receipt = await member.update(DiskTicket(1, model_folder()), 1)
        await member.resume()
        await reply_to(member, ask())
        return receipt

    receipt = run(updated())
    member.stop()
    server.die()
    assert receipt.version == 1 and server.calls.count("/reset_prefix_cache") == 3
    order = ["/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [call for call in server.calls if call in order] == order
    assert server.bodies[-1]["cache_salt"] == "whet-1", "nothing of another version is found in the cache"


def test_a_server_without_the_plugin_reads_folders_and_says_that_a_broadcast_needs_it():
    server = FakeVllm(model(), plugin=False)
    member = member_of(server)

    async def updated():
        await member.pause()
        with pytest.raises(ValueError, match="started without whet-vllm"):
            await member.update(BroadcastTicket(1, "127.0.0.1", 1, 1, ("a",), "gloo", 1.0), 1)
        return await member.update(DiskTicket(1, model_folder()), 1)

    receipt = run(updated())
    member.stop()
    server.die()
    assert receipt.wire is None and receipt.resident is None and server.label == "1"


def test_a_stale_head_behind_right_digests_is_found_by_the_probe():
    """All routes answer 200 and all digests agree; the score alone shows it."""
    with pytest.raises(SyncError, match=r"scores the probe .* nats away from the trainer"):
        publish_all(VllmPool(model(), 1), 1)  # the fake's scores are not the trainer's


class Agreeing(EnginePublisher):
    """A publisher whose trainer scores as the first fake server does."""

    def _score(self):
        return list(score_of(self._engine.servers[0]._digests, self._probe).logprobs)


def proven(pool):
    """What the pool's servers proved of version 1, by a publication and in the table of the run."""
    trained = model(3)

    async def published():
        try:
            made = Agreeing(TorchBackend(trained, TrainConfig(), total_steps=1), trained, pool, ThreadPoolExecutor(1))
            publication = await made.publish(1)
            assert made.proofs == {1: publication.proof}
            return publication
        finally:
            await pool.close()

    return run(published())


def checksums_of(trained, *names):
    weights = dict(trained.named_weights())
    return {f"dp0:pp0:pcp0:tp0:{name}": sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in names}


def test_the_proof_of_a_version_is_that_of_the_server_that_tells_least():
    pool = VllmPool(model(), 2)
    norms = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    for server in pool.servers:
        server.checksums = checksums_of(model(3), *norms)
    pool.servers[1].checksums |= {"dp0:pp0:pcp0:tp0:something.of.its.own": "0", "dp0:pp0:pcp0:tp0:another": "0"}
    found = proven(pool)
    assert found.proof == Proof(arrival=True, memory_share=0.5, probe_nats=0.0)
    metrics = flatten(found.metrics())
    assert [metrics[f"sync/{name}"] for name in ("proven_arrival", "proven_share", "probe_nats")] == [1.0, 0.5, 0.0]
    assert found.proof.words() == "arrival compared, 50% of memory compared, probe within 0 nats"


def test_servers_without_the_plugin_prove_a_version_by_the_probe_alone():
    found = proven(VllmPool(model(), 1, plugin=False))
    assert found.proof == Proof(arrival=False, memory_share=0.0, probe_nats=0.0) and found.proof.words() == "probe within 0 nats"
    assert flatten(found.metrics())["sync/proven_arrival"] == 0.0


def test_a_server_that_took_a_version_over_later_is_within_its_proof():
    pool = VllmPool(model(), 2)
    for server in pool.servers:
        server.checksums = checksums_of(model(3), "model.norm.weight")
    trained = model(3)

    async def play():
        try:
            made = Agreeing(TorchBackend(trained, TrainConfig(), total_steps=1), trained, pool, ThreadPoolExecutor(1))
            await made.publish(1)
            assert made.proofs == {1: Proof(True, 1.0, 0.0)}
            pool.servers[1].die()
            while len(pool.servers) < 3 or pool.slots[1].state is not State.SERVING:
                await asyncio.sleep(0.01)
            kept = made.state()
            again = Agreeing(made._backend, trained, pool, made._thread)
            again.restore(kept)
            return made.proofs, again.proofs
        finally:
            await pool.close()

    found, again = run(play())
    assert found == {1: Proof(True, 0.0, 0.0)}, "the new server has no route that tells what it holds"
    assert again == found, "a checkpoint holds it"


def test_tensors_that_arrive_swapped_are_named_by_their_digests():
    tensors = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    plain = FakeVllm._update

    async def swapped(self, request):
        answer = await plain(self, request)
        one, other = tensors
        self._digests[one], self._digests[other] = self._digests[other], self._digests[one]
        return answer

    FakeVllm._update = swapped
    try:
        with pytest.raises(SyncError, match=f"{tensors[0]} and {tensors[1]} are swapped"):
            publish_all(VllmPool(model(), 1), 1)
    finally:
        FakeVllm._update = plain


@pytest.mark.parametrize(
    ("route", "words"), [("/inference/v1/generate", "--enable-scale-out"), ("/pause", "VLLM_SERVER_DEV_MODE=1")]
)
def test_a_server_without_a_needed_route_is_refused_with_what_to_do(server, route, words):
    server.missing = {route}
    with pytest.raises(EngineFailed, match=words):
        member_of(server)


def test_a_key_is_read_from_the_environment(monkeypatch):
    server = FakeVllm(model(), key="secret")
    try:
        with pytest.raises(EngineFailed, match=KEY):
            member_of(server)
        monkeypatch.setenv(KEY, "secret")
        assert play(server, ask()).tokens == expected()
    finally:
        server.die()


def test_an_address_is_a_servers():
    for wrong in ("localhost:8000", "ftp://x", "http://", "http://x?y=1"):
        with pytest.raises(ValueError, match="is not the address of a server"):
            HttpServer("vllm 0", wrong)


def test_requests_that_are_too_long_are_refused(server):
    with pytest.raises(EngineRefused, match=f"runs {LONGEST}"):
        play(server, ask(num=LONGEST))


def test_a_call_that_waits_ends_when_the_server_is_cut_off(server):
    async def cut():
        member = member_of(server)
        await reply_to(member, ask())
        server.bodies.clear()
        await server.engine.pause()
        reading = asyncio.ensure_future(reply_to(member, ask()))
        while not server.bodies:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(member.kill)
        with pytest.raises(EngineLost, match="cut off"):
            await reading
        with pytest.raises(EngineLost, match="cut off"):
            await member.health()

    run(cut())


def test_every_stream_ends_when_the_server_is_cut_off(server):
    """A session that is closed forgets its streams: who reads one that was not broken off before would wait forever."""

    async def cut(round):
        member, begun = member_of(server), 0

        async def read(i):
            nonlocal begun
            async for chunk in member.generate(ask(f"r{round} {i}", num=200)):
                begun += not chunk.finish

        reading = [asyncio.ensure_future(read(i)) for i in range(12)]
        while begun < 12:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(member.kill)
        found = await asyncio.gather(*reading, return_exceptions=True)
        assert all(each is None or isinstance(each, EngineLost) for each in found) and any(found), found

    for round in range(5):
        run(cut(round))


# Starts.


def test_the_command_line_of_a_server_has_vllms_own_names(tmp_path):
    more = {"tensor_parallel_size": 2, "enforce_eager": True, "enable_prefix_caching": False, "x": [1, 2]}
    found = Vllm().command(tmp_path, ServerAddress(80), "bfloat16", more)
    line = " ".join(found)
    assert "--tensor-parallel-size 2 --enforce-eager --no-enable-prefix-caching --x 1 2" in line and '{"backend": "whet"}' in line
    assert "--logprobs-mode processed_logprobs" in line and "--dtype bfloat16" in line
    for name in ("model", "port", "api_key", *OWN_ARGS):
        with pytest.raises(ValueError, match=f"{name} is set by whet"):
            Vllm().command(tmp_path, ServerAddress(80), "bfloat16", {name: 1})


def test_why_a_server_did_not_start():
    assert "engine.python" in Vllm().why(["Traceback", "ModuleNotFoundError: No module named 'vllm'"])
    for without in ("ModuleNotFoundError: No module named 'whet_vllm'", "python: No module named whet_vllm.serve"):
        assert "install the package whet-vllm there" in Vllm().why([without])
    usage = "usage: api_server.py [--tensor-parallel-size X] [--max-model-len X]"
    words = Vllm().why([usage, "api_server.py: error: unrecognized arguments: --tensor-paralel-size 2"])
    assert words == "engine.vllm.args: the installed vLLM has no --tensor-paralel-size; it has --tensor-parallel-size"
    where = "(VllmWorker-0 pid=27936) ERROR 11-25 14:39:45 [multiproc_executor.py:953] "
    words = Vllm().why(
        [
            "WARNING failed to raise a limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
            where + "Traceback (most recent call last):\r",
            where + "    raise ValueError(\r",
            where + "ValueError: Available memory on node 0 (18.77/23.54 GiB) on startup is less than desired\r",
            *["(EngineCore pid=27910) ERROR a frame"] * 90,
            "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.",
            "    raise RuntimeError(",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    assert words == "ValueError: Available memory on node 0 (18.77/23.54 GiB) on startup is less than desired"


def starter(tmp_path, python, timeout_s=20.0):
    return ServerStarter(Vllm(), "vllm 0", python, tmp_path, "float32", {}, letters, None, timeout_s)


def test_a_python_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EngineFailed, match="there is no /nowhere/python"):
        starter(tmp_path, "/nowhere/python")(threading.Event())


def test_a_server_that_ends_as_it_starts_says_why(tmp_path):
    with pytest.raises(EngineFailed, match=r"engine.python has no whet-vllm; name the Python of vLLM's environment"):
        starter(tmp_path, sys.executable)(threading.Event())


def test_a_start_that_nobody_waits_for_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("whet.engine.servers.hosts.END_S", 0.1)
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    script.chmod(0o755)
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    with pytest.raises(EngineFailed, match="closed"):
        starter(tmp_path, str(script))(given_up)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# Settings.

RUN = {"model": {"path": "m"}, "data": {"train": "t.jsonl", "prompt_key": "q", "label_key": "a"}, "reward": {"name": "math"}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"servers": 2}, "servers=2 has no effect"),
        ({"name": "vllm", "urls": ["http://x"], "servers": 2}, "servers=2 has no effect"),
        ({"name": "vllm", "embedded": {"copies": 2}}, "embedded"),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate({**RUN, "engine": settings})


def test_a_server_that_a_client_before_left_paused_answers():
    server = FakeVllm(model())
    before = member_of(server)
    run(before.pause())
    before.stop()
    try:
        assert play(server, ask()).tokens == expected()
        assert server.calls.count("/resume") == 1
    finally:
        server.die()


def test_an_update_that_a_client_before_left_in_the_middle_is_ended_and_made_again():
    server = FakeVllm(model())
    member = member_of(server)
    server._session, server.label = True, "torn"

    async def updated():
        await member.pause()
        return await member.update(DiskTicket(1, model_folder()), 1)

    try:
        assert run(updated()).version == 1 and server.label == "1"
        assert [call for call in server.calls if "weight_update" in call] == [
            "/start_weight_update", "/finish_weight_update", "/start_weight_update", "/finish_weight_update",
        ]  # fmt: skip
    finally:
        member.stop()
        server.die()
