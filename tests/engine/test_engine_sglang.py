"""SGLang servers as an engine: against `whet serve`, which speaks the same routes, and against events of SGLang's shape."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from tests.engine.engine_setup import DEADLINE_S, reply_to
from tests.serve.serve_setup import live, model_folder
from whet.engine.base import EngineFailed, EngineLost, EngineRefused
from whet.engine.servers.start import ServerAddress, ServerAt
from whet.engine.servers.wire import seed_of
from whet.engine.sglang.start import OWN_ARGS, Sglang
from whet.engine.sglang.wire import ReplyStream, body_of
from whet.model.attention import PackedRow
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.routing import Routers
from whet.model.tensor_files import save_model
from whet.transport.base import BroadcastTicket, DiskTicket
from whet.types import Finish, Grammar, Request, SamplingParams

PROMPT = (5, 6, 7)


def ask(name="r", num=40, chunk=4, begun=0, **sampling):
    return Request(name, PROMPT, SamplingParams(num, **{"seed": 1, **sampling}), chunk_tokens=chunk, num_begun=begun)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape."""
    return [model_folder(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)]


@pytest.fixture
def server(folders):
    with live(folders[0]) as made:
        yield made


def letters(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


def member_of(server):
    return ServerAt(Sglang(), "sglang 0", server.url, letters, None, 10.0)(threading.Event())


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def play(server, request):
    member = member_of(server)
    try:
        return run(reply_to(member, request))
    finally:
        member.stop()


def trainer_logprobs(folder: Path, tokens) -> list[float]:
    """The model's own log-probs of a row, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0]
    table = torch.log_softmax(logits.float(), -1)
    return [float(table[place, token]) for place, token in enumerate(list(tokens)[1:])]


def test_a_reply_has_the_log_probs_of_what_was_sampled(server, folders):
    reply = play(server, ask())
    assert reply.finish is Finish.LENGTH and len(reply.tokens) == 40
    assert reply.logprobs == pytest.approx(trainer_logprobs(folders[0], (*PROMPT, *reply.tokens))[2:], abs=1e-4)


def test_a_narrowed_reply_has_the_ids_that_it_was_drawn_from(server, folders):
    reply = play(server, ask(top_k=3, temperature=0.7, nucleus=True))
    kept = [list(memoryview(ids).cast("i")) for chunk in reply.chunks for ids in chunk.nucleus]
    assert all(len(ids) == 3 and token in ids for token, ids in zip(reply.tokens, kept, strict=True)) and len(kept) == 40
    logits = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)(torch.tensor([[*PROMPT, *reply.tokens]])).logits[0]
    for place, (token, ids) in enumerate(zip(reply.tokens, kept, strict=True)):
        here = torch.log_softmax(logits[len(PROMPT) - 1 + place, ids] / 0.7, -1)
        assert reply.logprobs[place] == pytest.approx(float(here[ids.index(token)]), abs=1e-4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model with experts, and the tokenizer of the others."""
    folder = model_folder(tmp_path_factory.mktemp("mixture"))
    kept = AutoConfig.from_pretrained(folder).to_dict()
    dense = {key: kept[key] for key in kept if key not in ("architectures", "model_type", "layer_types", "transformers_version")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    model = random_causal(Qwen3MoeConfig(**(dense | experts)), ModelConfig(path="", device="cpu"), seed=0)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_model(model.hf, folder)
    return folder, model


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_reply_has_the_experts_of_its_tokens(mixture, first):
    folder, model = mixture
    with live(folder) as server:
        reply = play(server, replace(ask(num=12, routes=True), routes_from=first))
    tokens = torch.tensor([*PROMPT, *reply.tokens])
    row = PackedRow([len(tokens)], model.device)
    with torch.no_grad(), Routers(model.hf).watched() as seen:
        model.hidden(tokens, row.positions, row)
    assert [bool(chunk.routes) for chunk in reply.chunks] == [False] * (len(reply.chunks) - 1) + [True] and len(reply.chunks) == 1
    flat = reply.chunks[-1].routes
    found = flat.numpy().reshape(len(flat), 2, 2)
    expected = seen.routes().roll(1, 0)
    expected[0] = 0
    assert np.array_equal(np.sort(found), np.sort(expected.numpy()[first:]))


def test_a_server_of_a_dense_model_refuses_to_tell_experts(server):
    with pytest.raises(EngineRefused, match="Qwen3ForCausalLM has no experts"):
        play(server, ask(routes=True))


def test_a_score_is_the_models(server, folders):
    member = member_of(server)
    tokens = tuple(range(3, 40))
    scored = run(member.score(tokens, top_logprobs=3))
    assert list(scored.logprobs) == pytest.approx(trainer_logprobs(folders[0], tokens), abs=1e-4)
    assert all(len(place) == 3 for place in scored.top_logprobs)
    with pytest.raises(EngineRefused, match="SGLang scores tokens at temperature 1 alone"):
        run(member.score(tokens, temperature=0.5))
    member.stop()


def test_a_pause_ends_what_runs_and_replies_go_on_under_new_weights(server, folders):
    async def updated():
        member = member_of(server)
        whole = asyncio.ensure_future(reply_to(member, ask(num=400, chunk=1)))
        while server.service.gate.num_running == 0:
            await asyncio.sleep(0.005)
        await member.pause()
        receipt = await member.update(DiskTicket(1, folders[1]), 1)
        scored = await member.score(PROMPT)
        await member.resume()
        reply = await whole
        member.stop()
        return receipt, scored, reply

    receipt, scored, reply = run(updated())
    assert receipt.version == 1 and receipt.wire is None and server.get("/model_info")[1]["weight_version"] == "1"
    assert list(scored.logprobs) == pytest.approx(trainer_logprobs(folders[1], PROMPT), abs=1e-4)
    assert len(reply.tokens) == 400 and {chunk.version for chunk in reply.chunks} == {0, 1}
    changed = next(place for place, version in enumerate(reply.versions) if version == 1)
    theirs = trainer_logprobs(folders[1], (*PROMPT, *reply.tokens))[2:]
    assert reply.logprobs[changed:] == pytest.approx(theirs[changed:], abs=1e-4)
    assert reply.logprobs[:changed] != pytest.approx(theirs[:changed], abs=1e-2)


def test_an_abort_keeps_what_was_sampled(server):
    async def aborted():
        member = member_of(server)
        reading = asyncio.ensure_future(reply_to(member, ask(num=400, chunk=1)))
        while server.service.gate.num_running == 0:
            await asyncio.sleep(0.005)
        await member.abort("r")
        reply = await reading
        member.stop()
        return reply

    assert run(aborted()).finish is Finish.ABORT


def test_weights_that_the_server_refuses_cost_the_server(server, tmp_path):
    member = member_of(server)
    with pytest.raises(EngineLost, match="version 1 arrived in part"):
        run(member.update(DiskTicket(1, tmp_path), 1))
    with pytest.raises(ValueError, match=r"sync\.transport=disk"):
        run(member.update(BroadcastTicket(2, "127.0.0.1", 1, 1, ("a",), "gloo", 1.0), 2))
    member.stop()


def test_a_reply_ends_at_a_stop_token_of_the_request_and_at_no_other(server):
    """The server also ends replies at the stop tokens of its tokenizer; such a reply goes on."""
    reply = play(server, ask())
    stop = reply.tokens[10]
    stopped = play(server, ask(stop_token_ids=(stop,)))
    assert stopped.finish is Finish.STOP and stopped.tokens == reply.tokens[: reply.tokens.index(stop) + 1]
    own = server.service.renderer.stop_token_ids[0]
    forced = play(server, ask(num=3, logit_bias=((own, 100.0),)))
    assert forced.finish is Finish.LENGTH and forced.tokens == (own,) * 3


def test_what_sglang_cannot_run_is_refused():
    with pytest.raises(EngineRefused, match="no grammars of the kind lark"):
        body_of(ask(grammar=Grammar("lark", "start: A")), "x")
    with pytest.raises(EngineRefused, match="leaves out the prompt"):
        body_of(ask(repetition_penalty=1.2), "x")
    with pytest.raises(EngineRefused, match="cannot continue a reply under a grammar"):
        body_of(ask(begun=2, presence_penalty=0.5), "x")
    with pytest.raises(EngineRefused, match="log-probs of the model's own distribution"):
        body_of(ask(temperature=0.5, raw_logprobs=True), "x")


def test_a_request_says_everything_that_the_server_would_otherwise_choose_by_itself():
    body = body_of(ask(temperature=0.7, top_p=0.9, stop_token_ids=(9,), min_tokens=6, begun=4, logit_bias=((5, 1.5),)), "x")
    assert body == {
        "rid": "x",
        "input_ids": list(PROMPT),
        "sampling_params": {
            "max_new_tokens": 40,
            "min_new_tokens": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [9],
            "sampling_seed": seed_of(1, 4),
            "stream_interval": 4,
            "logit_bias": {"5": 1.5},
        },
        "return_logprob": True,
        "top_logprobs_num": 0,
        "stream": True,
        "return_sampling_mask": True,
    }, "`ignore_eos` is left out: with it SGLang ignores `stop_token_ids`, too"


def event(tokens, total, finish=None, logprobs=None, **meta):
    """An event as SGLang 0.5.23 sends it."""
    entries = [[-0.5 - token, token, None] for token in tokens] if logprobs is None else logprobs
    found = {"id": "x", "finish_reason": finish, "completion_tokens": total, "weight_version": "7", "output_token_logprobs": entries}
    return {"text": "", "output_ids": list(tokens), "meta_info": {**found, **meta}}


def test_events_hold_all_tokens_so_far_or_what_is_new():
    everything = [[0.0 - 0.5 - token, token, None] for token in (1, 2, 3)]
    for second in (event([1, 2, 3], 3), event([2, 3], 3), event([2, 3], 3, logprobs=everything)):
        stream = ReplyStream(ask())
        assert stream.sampled(event([1], 1)).tokens == [1]
        found = stream.sampled(second)
        assert found.tokens == [2, 3] and found.logprobs == [-2.5, -3.5] and found.labels == ["7"]


MASKS = {"output_token_sampling_mask": [[1, 4], [2]], "output_token_sampling_logprobs": [-0.1, 0.0]}


def test_a_narrowed_reply_has_the_log_probs_on_what_was_kept():
    found = ReplyStream(ask(top_p=0.9, nucleus=True)).sampled(event([1, 2], 2, **MASKS))
    assert found.logprobs == [-0.1, 0.0] and found.nuclei == [[1, 4], [2]]


@pytest.mark.parametrize(
    ("sampling", "told", "words"),
    [
        ({}, event([1, 2], 3), "3 new tokens of 3 came with 2 of output_ids"),
        ({}, event([1, 2], 2, logprobs=[]), "came with 0 of output_token_logprobs"),
        ({}, event([1, 2], 2, logprobs=[[-1.0, 1, None], [-1.0, 9, None]]), "log-probs are of other tokens"),
        ({}, event([1], 1, logprobs=[[None, 1, None]]), "not as SGLang's"),
        ({}, {"output_ids": [1]}, "not as SGLang's"),
        ({"top_p": 0.5}, event([1], 1), "routers lose"),
        ({}, event([1], 1, {"type": "abort", "message": "mask too large", "status_code": 400}), "the server gave it up: mask too large"),
    ],
)
def test_an_answer_that_lacks_what_was_asked_for_fails_the_request_by_name(sampling, told, words):
    with pytest.raises(EngineFailed, match=words):
        ReplyStream(ask(**sampling)).sampled(told)


def test_the_log_prob_of_a_greedy_token_is_that_of_a_distribution_with_one_point():
    assert ReplyStream(ask(temperature=0.0)).sampled(event([1, 2], 2)).logprobs == [0.0, 0.0]


def test_the_routes_of_sleep_and_a_cache_in_use_are_sglangs():
    """SGLang's shapes: answers without JSON, and 400 while the cache is in use."""
    calls = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        calls.append((request.path, body))
        if request.path == "/flush_cache" and len(calls) == 1:
            return web.Response(status=400, text="Flush cache failed. Please wait for the running requests to finish.\n")
        models = {"data": [{"max_model_len": 64}]}
        answers = {"/server_info": {"tp_size": 2}, "/model_info": {"weight_version": "default"}, "/v1/models": models}
        return web.json_response(answers[request.path]) if request.path in answers else web.Response(text="done\n")

    async def asked():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        member = await asyncio.to_thread(ServerAt(Sglang(), "sglang 0", url, letters, None, 10.0), threading.Event())
        calls.clear()
        await member.flush()
        await member.sleep()
        member.stop()
        await runner.cleanup()
        return member.receivers, url

    receivers, url = run(asked())
    assert receivers == [f"{url} rank 0", f"{url} rank 1"]
    assert calls == [
        ("/flush_cache", {}),
        ("/flush_cache", {}),
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    ]


def test_the_command_line_of_a_server_has_sglangs_own_names(tmp_path):
    line = " ".join(Sglang().command(tmp_path, ServerAddress(80), "bfloat16", {"tp_size": 2, "enable_memory_saver": True}))
    assert line.startswith("sglang.launch_server --model-path ") and "--tp-size 2 --enable-memory-saver" in line
    assert "--incremental-streaming-output" in line and "--dtype bfloat16" in line
    for name in ("model_path", "port", "admin_api_key", *OWN_ARGS):
        with pytest.raises(ValueError, match=f"engine.sglang.args: {name} is set by whet"):
            Sglang().command(tmp_path, ServerAddress(80), "bfloat16", {name: 1})
    assert "engine.python has no SGLang" in Sglang().why(["ModuleNotFoundError: No module named 'sglang'"])
