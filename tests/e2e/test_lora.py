"""Adapters through the real commands: the engine samples what the trainer trains, the base stays, resumes are exact, files are peft's."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.tiny_pairs import make_pairs, pair_settings
from tests.e2e.tiny_run import make_files, metrics_of, run_config
from whet.check.check import check
from whet.config import dump_toml
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.supervised import DpoRunConfig

pytestmark = pytest.mark.long

LORA = {"optim": {"lr": 2e-2}, "lora": {"rank": 4, "export_merged": True}}
FILE = "model/adapter_model.safetensors"


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 2, 44, 17, 3, 8]]), use_cache=False).logits


@pytest.mark.parametrize("own_weights", [False, True])
def test_the_engine_samples_from_the_adapted_model_and_the_reference_is_its_base(tmp_path, own_weights):
    make_files(tmp_path)
    algo = {"name": "grpo", "kl_coef": 0.01}
    config = run_config(tmp_path, "run", train=LORA, algo=algo, engine={"embedded": {"own_weights": own_weights}})
    train(config)
    rows = [row for row in metrics_of(tmp_path / "run") if "policy/loss" in row]
    assert max(row["mismatch/logprob_max"] for row in rows) < 1e-5
    assert max(row["sync/probe_nats"] for row in rows) < 1e-4
    assert rows[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-9) and rows[-1]["policy/kl_ref"] > 1e-4
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    first = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged")
    adapted = PeftModel.from_pretrained(base, tmp_path / "run/model").eval()
    assert float((logits(adapted) - logits(merged)).abs().max()) < 1e-5
    assert float((logits(adapted) - first).abs().max()) > 1e-3


def test_a_second_start_gives_the_bits_of_one_long_run(tmp_path):
    make_files(tmp_path)
    lora = {"optim": {"lr": 2e-2}, "lora": {"rank": 4}}
    train(run_config(tmp_path, "whole", train=lora))
    train(run_config(tmp_path, "parts", train=lora, num_rollouts=2))
    train(run_config(tmp_path, "parts", train=lora))
    whole, parts = (load_file(tmp_path / name / FILE) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not (tmp_path / "whole/merged").exists()


@pytest.mark.parametrize("flipped", [False, True])
def test_an_adapter_learns_a_preference_without_a_second_model(tmp_path, flipped):
    make_pairs(tmp_path, flipped=flipped)
    settings = pair_settings(tmp_path, "run", train=LORA)
    path = tmp_path / "dpo.toml"
    path.write_text(dump_toml(DpoRunConfig.model_validate(settings)))
    found = check(path, [], lambda finding: None)
    assert found.failed == 0, [f for f in found.findings if f.status == "FAIL"]
    assert "reference model" not in found.memory
    assert 0 < found.memory["optimizer moments"] < found.memory["parameters"]
    values = train_on_data(DpoRunConfig.model_validate(settings))
    assert values["eval/dpo/accuracy"] == (0.0 if flipped else 1.0)
