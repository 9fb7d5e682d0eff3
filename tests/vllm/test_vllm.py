"""Rollouts, aborts, updates and proofs against real vLLM servers (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import whet
from tests.train.tiny_policy import rollout_samples
from tests.vllm.servers import ARGS, python, starter
from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.engine.base import EngineLost
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.servers.hosts import StartedServer, free_port
from whet.engine.servers.http import HttpServer
from whet.engine.servers.member import ServerMember
from whet.engine.servers.pool import direct_names
from whet.engine.servers.start import ServerAddress, answers
from whet.engine.vllm.start import Vllm
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.meta import without_contents
from whet.train.remote_teacher import RemoteTeacher
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.base import DiskTicket
from whet.transport.folder import FolderWriter
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig
from whet.types import Finish, Request, SamplingParams
from whet.types.columns import Ints

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
DEADLINE_S = 120
PROMPT = (5, 17, 30, 2, 44)


@pytest.fixture(scope="module")
def member(folder, renderer):
    """A server, for tests that leave it as it was."""
    made = starter("vllm 0", folder, renderer.decode, direct_names(trained(folder)))(threading.Event())
    yield made
    made.stop()


def trained(folder, seed=None):
    """The policy, or another one of its shape."""
    model = load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=True)
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for _, weight in model.named_weights():
                weight.add_(torch.randn_like(weight) * 0.05)
    return model


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


async def chunks_of(member, request):
    return [chunk async for chunk in member.generate(request)]


def tokens_of(chunks):
    return [token for chunk in chunks for token in chunk.tokens]


def logprobs_of(chunks):
    return [each for chunk in chunks for each in chunk.logprobs]


def reference(folder, tokens, num_prompt, temperature=1.0):
    """Log-probs of a reply's tokens by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    found = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return found[num_prompt - 1 :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_of_the_distribution_that_is_sampled_from(member, folder, temperature):
    async def play():
        sampling = SamplingParams(64, temperature=temperature, seed=3)
        return await chunks_of(member, Request(f"t{temperature}", PROMPT, sampling, chunk_tokens=16))

    chunks = run(play())
    tokens = tokens_of(chunks)
    assert len(tokens) == 64 and chunks[-1].finish is Finish.LENGTH
    assert logprobs_of(chunks) == pytest.approx(reference(folder, [*PROMPT, *tokens], len(PROMPT), temperature), abs=1e-4)


def test_a_reply_ends_at_its_own_stop_tokens_alone(member, renderer):
    async def play():
        free = await chunks_of(member, Request("free", PROMPT, SamplingParams(200, temperature=0.0)))
        tokens = tokens_of(free)
        place = 20
        stopped = await chunks_of(member, Request("stop", PROMPT, SamplingParams(200, temperature=0.0, stop_token_ids=(tokens[place],))))
        biased = SamplingParams(30, seed=1, logit_bias=((renderer.tokenizer.eos_token_id, 100.0),))
        ends = await chunks_of(member, Request("eos", PROMPT, biased))
        return tokens, tokens_of(stopped), stopped[-1].finish, tokens_of(ends)

    tokens, stopped, finish, ends = run(play())
    assert stopped == tokens[: tokens.index(stopped[-1]) + 1] and finish is Finish.STOP
    assert ends == [renderer.tokenizer.eos_token_id] * 30, "the end of the model's files is none that the request names"


def test_a_paused_reply_goes_on_from_its_tokens_and_an_aborted_one_keeps_them(member, folder):
    async def play():
        asked = [Request(f"p{i}", (*PROMPT, i), SamplingParams(480, seed=i), chunk_tokens=8) for i in range(48)]
        replies = [[] for _ in asked]

        async def read(request, chunks):
            async for chunk in member.generate(request):
                chunks.append(chunk)

        async def growing(counts):
            """The first of some replies that grows."""
            while not (grown := [i for i, count in counts.items() if len(replies[i]) > count]):
                await asyncio.sleep(0.002)
            return grown[0]

        reading = [asyncio.ensure_future(read(*pair)) for pair in zip(asked, replies, strict=True)]
        await growing(dict.fromkeys(range(48), 1))
        await member.pause()
        before = await member.score(Ints(PROMPT))
        counts = {i: len(chunks) for i, chunks in enumerate(replies) if not reading[i].done()}
        assert len(counts) > 3, "replies are in the middle"
        await asyncio.sleep(0.3)
        assert {i: len(replies[i]) for i in counts} == counts and not any(reading[i].done() for i in counts)
        await member.resume()
        aborted = await growing(counts)
        await member.abort(f"p{aborted}")
        await asyncio.gather(*reading)
        return replies, before, aborted, [i for i in counts if i != aborted and counts[i]][:3]

    replies, scored, aborted, paused = run(play())
    for i in paused:
        chunks = replies[i]
        assert len(tokens_of(chunks)) == 480 and chunks[-1].finish is Finish.LENGTH
        expected = reference(folder, [*PROMPT, i, *tokens_of(chunks)], len(PROMPT) + 1)
        assert logprobs_of(chunks) == pytest.approx(expected, abs=1e-4)
    assert paused and replies[aborted][-1].finish is Finish.ABORT and 0 < len(tokens_of(replies[aborted])) < 480
    assert list(scored.logprobs) == pytest.approx(reference(folder, list(PROMPT), 1), abs=1e-4)


def test_a_stop_text_ends_a_reply(member, renderer):
    async def play():
        free = await chunks_of(member, Request("f", PROMPT, SamplingParams(60, temperature=0.0)))
        text = renderer.decode(tokens_of(free)[30:33])
        return text, await chunks_of(member, Request("s", PROMPT, SamplingParams(60, temperature=0.0, stop=(text,))))

    text, chunks = run(play())
    assert chunks[-1].finish is Finish.STOP and text in renderer.decode(tokens_of(chunks))
    assert text not in renderer.decode(tokens_of(chunks)[:-1])


def pool_of(member, model, transport):
    bare = without_contents(model)
    config = PoolConfig(restarts=0)
    sender = sender_of(SyncConfig(transport=transport), bare, Path(mkdtemp(prefix="whet-vllm-")), "127.0.0.1")

    def no_other(given_up):
        raise AssertionError("the server was lost")

    slots = [Slot(member.name, no_other, member, breaker_of(config))]
    return EnginePool(slots, WeightSync(sender, dict(bare.named_weights())), config, deterministic=False, tolerance=1e-3)


def publish(pool, model, version):
    async def published():
        with ThreadPoolExecutor(1) as thread:
            return await EnginePublisher(TorchBackend(model, TrainConfig(), None), model, pool, thread).publish(version)

    return run(published())


def test_a_teacher_at_a_server_has_the_log_probs_of_its_model(member, folder):
    teacher = RemoteTeacher([member._server.url], 60.0)
    teacher.connect()
    batch = batch_of([replace(sample, temperature=1.0) for sample in rollout_samples()])
    expected = TorchBackend(trained(folder), TrainConfig(), None).annotate(batch, Need.TEACHER_LOGPROBS).teacher_logprobs
    assert torch.allclose(teacher.annotate(batch, Need.TEACHER_LOGPROBS).teacher_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("transport", "version"), [("disk", 1), ("broadcast", 2), ("disk", 3)])
def test_new_weights_are_proven_by_what_arrived_and_by_the_probe(member, folder, transport, version):
    model = trained(folder, seed=version)
    pool = pool_of(member, model, transport)
    publication = publish(pool, model, version)
    (receipt,) = publication.receipt.members
    assert receipt.wire is not None and set(receipt.wire) == {name for name, _ in model.named_weights()}
    assert 0 < publication.proof.memory_share < 1, "norms and embeddings are as they were loaded; this build packs the linear layers"
    assert publication.proof.probe_nats < 1e-4, "the head, which is tied to the embeddings, is new, too"

    async def play():
        return await chunks_of(member, Request(f"after {version}", PROMPT, SamplingParams(20, seed=1)))

    assert {chunk.version for chunk in run(play())} == {version}


def fresh(folder, renderer, without=()):
    """A server of its own, which a test may spoil; `without` some of whet's arguments."""
    at = ServerAddress(free_port())
    words = Vllm().command(folder, at, "float32", ARGS)
    for name in without:
        place = words.index(name)
        del words[place : place + 2]
    process = StartedServer("vllm alone", [python(), "-m", *words], Vllm().environment(at))
    url = at.url
    deadline = time.monotonic() + 300
    while not answers(url + "/health"):
        assert process.ended is None and time.monotonic() < deadline, process.last_lines()
        time.sleep(0.5)
    server = HttpServer("vllm alone", url)
    return ServerMember(server, Vllm().connect(server, None, direct_names(trained(folder))), renderer.decode, process)


def test_the_stale_head_of_a_tied_model_is_found_by_the_probe(folder, renderer):
    """Without the plugin this build keeps a packed copy of the old head, and every route answers 200."""
    alone = fresh(folder, renderer, without=["--weight-transfer-config", "--worker-extension-cls"])
    try:
        model = trained(folder, seed=5)
        with pytest.raises(SyncError, match=r"scores the probe .* nats away from the trainer"):
            publish(pool_of(alone, model, "disk"), model, 1)
    finally:
        alone.stop()


def test_a_tensor_left_out_is_named_and_its_server_is_lost(folder, renderer):
    alone = fresh(folder, renderer)
    try:
        model = trained(folder, seed=6)
        left_out = "model.layers.2.mlp.down_proj.weight"
        where = Path(mkdtemp(prefix="whet-vllm-"))
        FolderWriter(model, 2**30).write(where, ((name, each) for name, each in model.named_weights() if name != left_out))

        async def update():
            await alone.pause()
            await alone.update(DiskTicket(1, where), 1)

        with pytest.raises(EngineLost, match=r"version 1 arrived in part.*"):
            run(update())
    finally:
        alone.stop()


REWARD = """
def ones(trajectory):
    text = trajectory.response
    return text.count("1") / max(1, len(text))
"""


def settings(folder, run_dir, steps, **sync):
    table = {
        "run_dir": str(run_dir),
        "num_rollouts": steps,
        "model": {"path": str(folder), "device": "cpu"},
        "data": {"train": str(run_dir.parent / "rows.jsonl"), "prompt_key": "messages", "label_key": "label"},
        "reward": {"name": f"{run_dir.parent}/reward.py:ones"},
        "algo": {"name": "grpo"},
        "batch": {"prompts_per_rollout": 8, "samples_per_prompt": 4},
        "rollout": {"max_tokens": 300, "max_turn_tokens": 100},
        "train": {"optim": {"lr": 3e-3}},
        "engine": {"name": "vllm", "servers": 2, "python": python(), "vllm": {"args": ARGS}},
        **sync,
    }
    (run_dir.parent / "reward.py").write_text(REWARD)
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + {i + 1}?"}], "label": "1"} for i in range(32)]
    (run_dir.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = run_dir.parent / "run.json"
    file.write_text(json.dumps(table))
    return table


def begin(table, tmp_path):
    script = "import json, whet\nfrom whet.settings.rl import RunConfig\nfrom whet.runs.job import alone\n"
    script += f"alone(RunConfig.model_validate(json.load(open({str(tmp_path / 'run.json')!r}))), 'test', ())\n"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def engine_processes(parent):
    """Ids of the processes that compute, of all servers of a run."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in found]
    mine, out = {parent}, []
    for _ in range(6):
        mine |= {int(pid) for pid, above, _ in rows if int(above) in mine}
    for pid, _, args in rows:
        if int(pid) in mine and "VLLM::Engine" in args:
            out.append(int(pid))
    return out


def test_a_run_learns_though_a_server_dies_in_the_middle(folder, tmp_path):
    run_dir = tmp_path / "run"
    process = begin(settings(folder, run_dir, 14), tmp_path)
    lines, killed = [], False
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if not killed and line.startswith("step  3"):
            os.kill(engine_processes(process.pid)[0], signal.SIGKILL)
            killed = True
    assert process.wait(60) == 0, "".join(lines[-30:])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/total" in row]
    assert killed and any("it is started again" in line for line in lines)
    assert max(row["mismatch/logprob_mean"] for row in steps) < 1e-3
    assert len(steps) == 14 and steps[-1]["reward/total"] > steps[0]["reward/total"] + 0.1
    assert engine_processes(process.pid) == [], "no server outlives its run"


def test_a_run_by_broadcast(folder, tmp_path):
    run_dir = tmp_path / "run"
    process = begin(settings(folder, run_dir, 3, sync={"transport": "broadcast"}), tmp_path)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["sync/probe_nats"] < 1e-3 for row in rows if "sync/probe_nats" in row)


def test_a_run_whose_server_takes_the_adapter_alone(folder, tmp_path):
    run_dir = tmp_path / "run"
    engine = {"name": "vllm", "python": python(), "vllm": {"args": {**ARGS, "enable_lora": True}}}
    train = {"optim": {"lr": 3e-2}, "lora": {"rank": 4}}
    process = begin(settings(folder, run_dir, 4, train=train, engine=engine), tmp_path)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/total" in row]
    adapter = load_file(run_dir / "model/adapter_model.safetensors")
    assert len(steps) == 4 and max(row["mismatch/logprob_mean"] for row in steps) < 1e-3
    for row in steps:
        assert row["sync/probe_nats"] < 1e-3 and row["sync/bytes"] == sum(tensor.nbytes for tensor in adapter.values())
        assert row["sync/proven_arrival"] == 0


def test_a_server_replies_as_the_embedded_engine_does_with_the_most_likely_tokens(folder):
    how = {"rollout": {"max_turn_tokens": 16, "max_tokens": 300, "temperature": 0}, "model__device": "cpu"}
    prompts = [f"What is {i} + {i + 1}?" for i in range(6)]
    embedded = whet.generate(folder, prompts, **how)
    found = whet.generate(folder, prompts, engine={"name": "vllm", "python": python(), "vllm": {"args": ARGS}}, **how)
    assert [list(each.turns[0].tokens) for each in found] == [list(each.turns[0].tokens) for each in embedded]
    for mine, other in zip(found, embedded, strict=True):
        assert list(mine.turns[0].logprobs) == pytest.approx(list(other.turns[0].logprobs), abs=1e-3)
