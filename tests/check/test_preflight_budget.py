"""Limits, and the memory plan against the device."""

import asyncio

import pytest
import torch

from tests.check.small_run import look, of
from whet.build.parts import build_parts, read_texts
from whet.check import budget
from whet.check.saved import checkpoint_sizes
from whet.config import load_config
from whet.plan.memory import ALWAYS, MemoryPlan, Part
from whet.runfolder import machine
from whet.settings.rl import RunConfig
from whet.types import Request, SamplingParams

AREAS = ("batch", "algorithm", "device", "model", "tokenizer", "environment", "data", "evaluation", "limits", "memory")


def test_limits_are_the_engines(here):
    config = load_config(RunConfig, here / "run.toml")
    with build_parts(config, read_texts(config), trainable=False) as parts:
        longest = parts.engine.capabilities.max_tokens
    texts = of(look("model", "limits")[0], "limits", "ok")
    assert texts[0] == f"trajectories of up to 96 tokens in 2 turns; the engine runs {longest}"
    assert texts[1].startswith("test: trajectories of up to 96 tokens")
    overrides = [f"rollout.max_tokens={longest}", f"evaluate.sets.test.rollout.max_tokens={longest + 1}"]
    findings, _ = look("model", "limits", overrides=overrides)
    assert len(of(findings, "limits", "ok")) == 1
    (fault,) = of(findings, "limits", "FAIL")
    assert fault.startswith(f"test: rollout.max_tokens is {longest + 1}, but the engine runs sequences of {longest}")


def test_a_length_that_nobody_chose_is_what_the_engine_runs(here):
    text = (here / "run.toml").read_text()
    (here / "run.toml").write_text(text.replace("max_tokens = 96, ", ""))
    findings, context = look(*AREAS)
    assert of(findings, "limits", "ok")[0] == "trajectories of up to 512 tokens in 2 turns; the engine runs 512"
    assert {finding.status for finding in findings} == {"ok"}
    assert max(budget.workload(context).lengths) == 2048, "the model's positions, as the cache is not known yet"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_of_a_file_is_what_its_run_holds(here, dtype):
    """Parameters and cache of the objects that `whet train` builds from the same file."""
    overrides = [f"model.dtype={dtype}", "algo.kl_coef=0.1"]
    findings, context = look(*AREAS, overrides=overrides)
    assert {finding.status for finding in findings} == {"ok"}
    config = load_config(RunConfig, here / "run.toml", overrides)
    with build_parts(config, read_texts(config), trainable=True) as parts:

        async def one_reply():
            request = Request("r", (1, 2, 3), SamplingParams(max_tokens=2))
            _ = [chunk async for chunk in parts.engine.generate(request)]
            size = parts.engine.core.store.size_bytes
            await parts.engine.close()  # gives the cache back
            return size

        cache = asyncio.run(one_reply())
        weights = sum(p.nbytes for _, p in parts.model.named_weights())
    plan = context.memory
    assert (plan.bytes_of("parameters"), plan.bytes_of("reference model"), plan.bytes_of("KV cache")) == (weights, weights, cache)


def test_the_workload_follows_the_file(here):
    _, context = look(*AREAS)
    work = budget.workload(context)
    assert work.lengths == (96, 96, 64) and not work.reference and not work.entropy_grad
    assert work.sampling.rows == 8, "4 prompts x 2 samples; the evaluation plays 2"
    assert [params.temperature for params in work.sampling.params] == [1.0, 0.0]
    _, context = look(*AREAS, overrides=["algo.kl_coef=0.1", "algo.entropy_coef=0.1", "engine.embedded.max_running=3"])
    work = budget.workload(context)
    assert work.reference and work.entropy_grad and work.sampling.rows == 3
    several = {"limit": 3, "samples_per_prompt": 5, "rollout.temperature": 1}
    _, context = look(*AREAS, overrides=[f"evaluate.sets.test.{key}={value}" for key, value in several.items()])
    assert budget.workload(context).sampling.rows == 15
    _, context = look(*AREAS, file="sft.toml")
    work = budget.workload(context)
    assert work.sampling is None and work.lengths == context.longest * 3


def test_greedy_trajectories_are_sampled_beside_the_others(here):
    _, context = look(*AREAS, overrides=["algo.name=remax", "rollout.top_k=5", "evaluate.sets={}"])
    sampling = budget.workload(context).sampling
    assert sampling.rows == 12, "4 prompts x (2 samples + 1 greedy)"
    assert [(params.temperature, params.top_k) for params in sampling.params] == [(1.0, 5), (0.0, 0)]


def plan(size):
    return MemoryPlan(
        (
            Part("small", 1, ALWAYS, "nothing"),
            Part("huge", size - 1, ("loss",), "train.max_tokens_per_device", estimate=True),
            Part("elsewhere", 5, ("rollout",), "engine.embedded.cache_tokens"),
        )
    )


@pytest.mark.parametrize(("size", "status"), [(90, "ok"), (91, "warn"), (100, "warn"), (101, "FAIL")])
def test_a_plan_is_judged_by_what_the_device_has(size, status):
    note = budget.judge(plan(size), 100, "memory")
    assert note.status == status
    assert f"{size} B at its peak (log-probs), {size}% of 100 B (memory)" in note.text
    assert ("huge" in note.text and "(train.max_tokens_per_device)" in note.text) == (status != "ok")
    assert "elsewhere" not in note.text
    assert [text.split("  ")[-1] for text in note.lines] == ["small (always)", "huge (log-probs), estimate", "elsewhere (sampling)"]


def test_a_device_that_is_too_small_fails_and_names_settings(here, monkeypatch):
    monkeypatch.setattr(budget, "device_memory", lambda device: (1000, "memory"))
    findings, context = look(*AREAS)
    text = of(findings, "memory", "FAIL")[0]
    for part in context.memory.largest(3):
        assert part.name in text and part.advice in text


def test_the_memory_of_a_cpu_is_the_processs_limit(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: (123, "somewhere"))
    assert budget.device_memory(torch.device("cpu")) == (123, "somewhere")


def test_without_a_device_or_a_model_nothing_is_planned(here):
    assert of(look(*AREAS, overrides=["model.device=cuda:9"])[0], "memory", "skip") == ["not planned: needs the device"]
    assert of(look(*AREAS, overrides=["model.path=gone"])[0], "memory", "skip") == ["not checked: needs the model's config.json"]
    assert of(look(*AREAS, overrides=["algo.name=gone.py:make"])[0], "memory", "skip") == ["not checked: needs the algorithm"]


SHARD, COPIES = "train.parallel.shard=2", "train.parallel.replicate=2"


@pytest.mark.parametrize(
    ("degrees", "policy", "critic"),
    [
        ([], 1, 1),
        ([SHARD], 2, 2),
        ([COPIES], 1, 1),
        ([SHARD, "critic.parallel.replicate=2"], 2, 1),
        ([COPIES, "critic.parallel.shard=2"], 1, 2),
    ],
    ids=str,
)
def test_the_copy_of_a_checkpoint_that_is_written_beside_computation_is_planned(here, degrees, policy, critic):
    """Of policy and critic, as each process has them: so many have parts of them."""
    overrides = ["algo.name=ppo", *degrees]
    _, plain = look(*AREAS, overrides=overrides)
    findings, context = look(*AREAS, overrides=[*overrides, "checkpoint.async_save=true"])
    sizes, copied = checkpoint_sizes(context, context.model, spread=bool(degrees)), context.memory.bytes_of("copy of a checkpoint")
    assert sizes.keys() == {"policy", "critic"} and sizes["critic"] != sizes["policy"]
    assert copied == sizes["policy"] // policy + sizes["critic"] // critic > 0
    assert context.memory.peak_bytes == plain.memory.peak_bytes + copied
    assert any("copy of a checkpoint (always)" in line for f in findings for line in f.lines)
