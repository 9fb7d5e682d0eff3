"""Runs of a mixture of experts with routing replay: settings to update, and on from a stop in the middle of a rollout."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, Qwen3MoeConfig

from tests.e2e.test_stop import ask_at
from tests.e2e.tiny_run import HERE, checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.engine.embedded.core import EngineCore
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.tensor_files import save_model
from whet.runs.commands import train
from whet.stop import Stopped
from whet.types import Finish
from whet.types.json_codec import trajectory_from_json

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_files(folder)
    dense = AutoConfig.from_pretrained(folder / "model").to_dict()
    kept = {key: dense[key] for key in dense if key not in ("architectures", "model_type", "layer_types", "transformers_version")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    model = random_causal(Qwen3MoeConfig(**(kept | experts)), ModelConfig(path="", device="cpu"), seed=0)
    for file in (folder / "model").glob("*.safetensors"):
        file.unlink()
    save_model(model.hf, folder / "model")
    return folder


def moe_config(folder, name, replay, **changes):
    settings = {
        "env": {"name": f"{HERE / 'two_turns.py'}:TwoTurns"},
        "train": {"optim": {"lr": 1e-2}, "routing_replay": replay},
        "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 3, "steps_per_rollout": 2},
        "num_rollouts": 3,
    }
    return run_config(folder, name, **(settings | changes))


def test_a_run_replays_every_expert_of_its_engine(folder):
    sets = {"interval": 1, "sets": {"same": {"path": str(folder / "train.jsonl")}}}  # what an evaluation caches is not known
    train(moe_config(folder, "rollout", "rollout", evaluate=sets, num_rollouts=2))
    lines = [line for line in metrics_of(folder / "rollout") if "policy/loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["routing/unknown"] == 0 and 0 < line["routing/differs"] < 1, "the second step has other weights"
        assert line["mismatch/logprob_max"] < 1e-5 and line["routing/mismatch"] < 1e-6 and "routing/mismatch_without" in line


@pytest.mark.parametrize("replay", ["rollout", "old"])
def test_a_run_with_replay_that_is_stopped_goes_on_bit_for_bit(folder, monkeypatch, stop, replay):
    undisturbed, config = moe_config(folder, f"whole-{replay}", replay), moe_config(folder, f"cut-{replay}", replay)
    train(undisturbed)
    for count in (5, 30):
        with monkeypatch.context() as patch:
            ask_at(patch, EngineCore, "step", stop, count)
            with pytest.raises(Stopped):
                train(config)
        stop._number = None
    train(config)
    assert metrics_of(folder / f"cut-{replay}") == metrics_of(folder / f"whole-{replay}")
    assert weights_of(folder / f"cut-{replay}") == weights_of(folder / f"whole-{replay}")
    assert all("routing/differs" in line for line in metrics_of(folder / f"cut-{replay}"))


def test_a_half_finished_trajectory_keeps_its_experts_in_a_checkpoint(folder, monkeypatch, stop):
    settings = {"control": {"max_staleness": 1}, "deterministic": False, "checkpoint": {"interval": 1}, "env": {"name": "single_turn"}}
    config = moe_config(folder, "half", "rollout", rollout={"max_turn_tokens": 40, "max_tokens": 160}, **settings)
    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, 20)
        with pytest.raises(Stopped):
            train(config)
    newest = folder / "half/checkpoints" / checkpoints_of(folder / "half")[-1]
    runs = json.loads((newest / "state.json").read_text())["others"]["rollouts"]["group_runs"]
    cut = [trajectory_from_json(t).turns[-1] for run in runs for t in run["interrupted"]]
    begun = [turn for turn in cut if turn.finish is Finish.ABORT and turn.tokens]
    assert begun and all(turn.routes.layers == 2 and turn.routes.top_k == 2 and any(turn.routes[-1]) for turn in begun)
    stop._number = None
    train(config)
    assert all(line["routing/unknown"] == 0 for line in metrics_of(folder / "half"))
