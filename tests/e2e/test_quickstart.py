"""The quickstart, shortened: the whole path from random weights to reinforcement learning with real tool calls."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.sampling_spy import Spy
from whet.config import load_config
from whet.observe.records import read_records
from whet.quickstart.problems import draw_many
from whet.quickstart.run import QuickstartConfig, run_quickstart
from whet.settings.rl import RunConfig
from whet.types import Origin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy = Spy(monkeypatch)
        config = QuickstartConfig(
            seed=3, run_dir=str(folder / "run"), num_demonstrations=1200, warmup_steps=110, num_rollouts=5, num_held_out=24
        )
        results = run_quickstart(config, folder / "summary.json")
    return folder, results, spy


def test_the_summary_has_what_it_promises(quickstart):
    folder, results, _ = quickstart
    written = json.loads((folder / "summary.json").read_text())
    assert written == results
    assert {
        "accuracy_before",
        "accuracy_warmup",
        "accuracy_rl",
        "tool_call_validity_warmup",
        "tool_call_validity_rl",
        "seconds",
        "seconds_by_phase",
        "tokens_per_second",
        "run_dir",
    } <= written.keys()
    assert written["accuracy_before"] == 0.0
    assert written["tool_call_validity_warmup"] > 0.5, "110 steps of warm-up teach the form of a tool call"
    assert sum(written["seconds_by_phase"].values()) == pytest.approx(written["seconds"], rel=0.05)


def test_the_mask_is_what_was_sampled(quickstart):
    """Every run of trained tokens is a turn that the engine sampled, every sampled turn trains, and no tool reply does."""
    folder, _, spy = quickstart
    assert spy.steps == 5
    assert spy.environment_tokens > 100, "tools were called, so replies were in context"
    spy.check()
    for row in read_records(folder / "run/rl/rollouts"):
        assert [o == Origin.MODEL for o in row["origin"]] == row["loss_mask"]


def test_engine_and_trainer_agree_at_every_step(quickstart):
    folder, _, _ = quickstart
    rows = [json.loads(line) for line in (folder / "run/rl/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    assert len(steps) == 5
    for row in steps:
        assert row["mismatch/logprob_mean"] < 1e-6
        assert row["mismatch/logprob_max"] < 1e-4


def test_every_sampled_token_is_trained_dropped_or_held(quickstart):
    folder, _, _ = quickstart
    rows = [json.loads(line) for line in (folder / "run/rl/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    for row in steps:
        assert row["tokens/unaccounted"] == 0 < row["tokens/trained"]
        assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/dropped"] and not row["tokens/held"]
    recorded = list(read_records(folder / "run/rl/rollouts"))
    assert sum(row["tokens/trained"] for row in steps) == sum(sum(row["loss_mask"]) for row in recorded if row["valid"])


def test_every_step_reports_what_users_look_for(quickstart):
    folder, _, _ = quickstart
    rows = [json.loads(line) for line in (folder / "run/rl/metrics.jsonl").read_text().splitlines()]
    wanted = {
        "reward/total",
        "reward/math",
        "response/tokens/mean",
        "outcome/truncated",
        "outcome/failed",
        "groups/zero_variance",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/kl_old",
        "optim/grad_norm",
        "optim/lr",
        "mismatch/logprob_mean",
        "mismatch/logprob_max",
        "tokens_per_second/rollout",
        "tokens_per_second/update",
        "memory/rss_gib",
        "time/rollout_s",
        "time/update_s",
    }
    for row in rows:
        if "policy/loss" in row:
            assert wanted <= row.keys(), wanted - row.keys()


def test_the_exported_model_is_the_one_that_was_trained(quickstart):
    """transformers loads it, and greedy decoding there gives the tokens that the engine's evaluation gave."""
    folder, _, _ = quickstart
    model = AutoModelForCausalLM.from_pretrained(folder / "run/rl/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "run/rl/model")
    rows = read_records(next((folder / "run/rl/evaluations/held_out/rollouts").glob("*.parquet")))
    for row in rows[:4]:
        num_prompt = row["origin"].index(Origin.MODEL)
        first = [t for t, o in zip(row["tokens"], row["origin"], strict=True) if o == Origin.MODEL or o == Origin.PROMPT]
        prompt = torch.tensor([row["tokens"][:num_prompt]])
        num_new = row["turns"][0]["num_tokens"]
        out = model.generate(prompt, max_new_tokens=num_new, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert out[0, num_prompt:].tolist() == first[num_prompt : num_prompt + num_new]


def test_held_out_problems_never_train(quickstart):
    folder, _, _ = quickstart

    def keys(name: str) -> set[str]:
        rows = [json.loads(line)["metadata"] for line in (folder / "run/data" / name).read_text().splitlines()]
        return {json.dumps(row) for row in rows}

    assert not keys("train.jsonl") & keys("held_out.jsonl")
    prompts = {json.loads(line)["prompt"] for line in (folder / "run/data/held_out.jsonl").read_text().splitlines()}
    shown = {json.loads(line)["messages"][0]["content"] for line in (folder / "run/data/demonstrations.jsonl").read_text().splitlines()}
    assert not prompts & shown
    assert not set(draw_many(300, 0, held_out=False)) & set(draw_many(300, 0, held_out=True))


def test_started_again_it_is_complete(quickstart):
    """Nothing trains twice; the results are those of the first time. Other settings need another folder."""
    folder, results, _ = quickstart
    config = load_config(QuickstartConfig, folder / "run/quickstart.toml")
    log = (folder / "run/rl/metrics.jsonl").read_text()
    again = run_quickstart(config)
    accuracies = [name for name in results if name.startswith("accuracy")]
    assert [again[name] for name in accuracies] == [results[name] for name in accuracies]
    assert (folder / "run/rl/metrics.jsonl").read_text().count("policy/loss") == log.count("policy/loss") == 5
    with pytest.raises(ValueError, match="other settings"):
        run_quickstart(config.model_copy(update={"num_rollouts": 6}))


def test_a_run_says_how_to_repeat_it(quickstart):
    folder, _, _ = quickstart
    config = load_config(RunConfig, Path(folder / "run/rl/config.toml"))
    assert config.num_rollouts == 5
    assert config.env.tools == ["calculator"]


def test_the_front_pages_pictures_are_drawn_from_its_folder(quickstart):
    folder, results, _ = quickstart
    subprocess.run([sys.executable, ROOT / "docs/draw_front_page.py", folder / "run", folder], check=True, timeout=120)
    learning, terminal = ("".join(ElementTree.parse(folder / name).getroot().itertext()) for name in ("learning.svg", "terminal.svg"))
    assert f"{results['accuracy_warmup']:.3f}" in learning and f"{results['accuracy_rl']:.3f}" in learning
    shown = terminal.replace("\xa0", " ")
    assert "5/5" in shown and f"{results['accuracy_rl']:.4g}" in shown and "tool_call" in shown
