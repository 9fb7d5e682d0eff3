"""The model folder as a run would find it: device, configuration, weights, attention, tokenizer."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer, Gemma2Config

from tests.check.small_run import ROWS, SHAPE, look, module, of
from whet.check import model as preflight_model
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.quickstart.model import make_model


def change_json(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def change_file(here, begin, line):
    """Put a line of run.toml in another's place."""
    path = here / "run.toml"
    path.write_text("".join(f"{line}\n" if each.startswith(begin) else each for each in path.read_text().splitlines(keepends=True)))


def test_a_sound_folder_is_described(here):
    findings, context = look("device", "model", "attention", "tokenizer")
    assert {finding.status for finding in findings} == {"ok"}
    loaded = load_causal(here / "model", ModelConfig(path="x", device="cpu"), trainable=False)
    count = sum(p.numel() for p in loaded.hf.parameters())
    description, weights = of(findings, "model")
    assert "Qwen3ForCausalLM, 2 layers" in description and f"{count / 1e6:.1f}M parameters" in description
    assert f"{len(load_file(here / 'model/model.safetensors'))} tensors in 1 file" in weights and "float32" in weights
    assert all(p.is_meta for p in context.model.hf.parameters()), "nothing was loaded"
    names = of(findings, "tokenizer")[1]
    assert names == "eos '<|im_end|>' (2), pad '<|endoftext|>' (0); a turn ends at '<|im_end|>' (2)"


def test_the_weights_are_not_read(here, monkeypatch):
    """Not a byte behind the headers: the file is cut to zeros there, in its right length."""
    path = here / "model/model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:header] + bytes(len(content) - header))
    assert {finding.status for finding in look("model")[0]} == {"ok"}


def test_a_device_that_is_not_there_fails(here):
    assert "torch does not know" in of(look("device", overrides=["model.device=abacus"])[0], "device", "FAIL")[0]
    if torch.cuda.device_count() < 8:
        assert "CUDA devices" in of(look("device", overrides=["model.device=cuda:8"])[0], "device", "FAIL")[0]


def test_missing_misfitting_and_unused_weights_are_told_apart(here):
    path = here / "model/model.safetensors"
    whole = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "FAIL asks for": {key: value for key, value in whole.items() if key != name},
        "FAIL do not fit": {**whole, name: whole[name][:-1].contiguous()},
        "FAIL have no place": {**whole, "spare.weight": whole[name].clone()},
    }
    for what, tensors in cases.items():
        status, _, words = what.partition(" ")
        save_file(tensors, path, {"format": "pt"})
        texts = of(look("model")[0], "model", status)
        assert len(texts) == 1 and words in texts[0] and ("spare.weight" if "spare.weight" in tensors else name) in texts[0]


def test_weights_in_torchs_own_format_fail_with_the_remedy(here):
    path = here / "model/model.safetensors"
    torch.save(load_file(path), here / "model/pytorch_model.bin")
    path.unlink()
    (text,) = of(look("model")[0], "model", "FAIL")
    assert "in torch's own format (pytorch_model.bin), a pickle, which is not read: write them as safetensors" in text


def test_no_model_folder_no_config_and_damaged_weights_fail(here):
    assert "there is no model folder 'gone'" in of(look("model", overrides=["model.path=gone"])[0], "model", "FAIL")[0]
    path = here / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    findings, context = look("model", "attention", "tokenizer")
    assert "is cut short or damaged" in of(findings, "model", "FAIL")[0]
    assert context.model is not None and of(findings, "attention", "ok"), "config.json tells enough for these"
    (here / "model/config.json").unlink()
    findings, _ = look("model", "attention", "tokenizer")
    assert "has no config.json" in of(findings, "model", "FAIL")[0]
    assert of(findings, "attention") == ["not checked: needs the model's config.json"]
    assert [finding.status for finding in findings if finding.area == "tokenizer"] == ["skip", "ok", "ok", "ok"]


def test_an_architecture_that_whet_cannot_run_fails_and_one_that_cannot_be_asked_is_not_compared(here, monkeypatch):
    sizes = {"vocab_size": 480, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16).save_pretrained(here / "model")
    findings, _ = look("model", "attention")
    assert "window of 4096 tokens" in of(findings, "attention", "FAIL")[0] and "2 of its layers" in of(findings, "attention", "FAIL")[0]

    def no_twin(*_):
        raise preflight_model.NoTwin("ValueError: too odd")

    monkeypatch.setattr(preflight_model, "small_twin", no_twin)
    assert "not compared" in of(look("model", "attention")[0], "attention", "skip")[0]


def test_quantized_weights_fail(here):
    change_json(here / "model/config.json", quantization_config={"quant_method": "fp8"})
    assert "holds quantized weights" in of(look("model")[0], "model", "FAIL")[0]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("int4", "FAIL", r"engine\.quantization=int4: .* groups of 32 divide, and the model has some of 48 entries"),
        ("fp8", "FAIL", r"engine\.quantization=fp8: servers join .*_proj with other layers, so that blocks of 128 must divide its"),
        ("fp9", "FAIL", r"engine\.quantization is 'fp9': write fp8, int4, or a quantized checkpoint's folder"),
        ("model", "FAIL", r"engine\.quantization=model: .*has no quantization_config: it is no quantized checkpoint"),
    ],
)
def test_weights_that_servers_are_to_hold_quantized(here, name, status, words):
    change_file(here, "engine = ", 'engine = { name = "vllm" }')
    assert any(re.search(words, each) for each in of(look("model", overrides=[f"engine.quantization={name}"])[0], "model", status))


def test_weights_that_can_be_quantized_are_counted(here):
    change_file(here, "engine = ", 'engine = { name = "vllm" }')
    make_model(here / "model", [row["prompt"] for row in ROWS], SHAPE.model_copy(update={"intermediate_size": 64}), seed=0)
    found = of(look("model", overrides=["engine.quantization=int4"])[0], "model", "ok")
    assert any(re.search(r"engine\.quantization: int4, \d\d tensors are sent to the servers", each) for each in found)


def test_a_tokenizer_with_tokens_that_the_model_does_not_have_fails(here):
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    tokenizer.add_tokens([AddedToken(f"<extra_{i}>") for i in range(5)])
    tokenizer.save_pretrained(here / "model")
    findings, context = look("model", "tokenizer")
    fault = of(findings, "tokenizer", "FAIL")[0]
    assert "has 5 tokens that its model does not have, among them '<extra_0>'" in fault
    assert context.renderer is None


def test_padding_beyond_the_model_is_told_and_fails_where_a_prompt_has_it(here):
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(here / "model")
    findings, _ = look("model", "tokenizer")
    assert of(findings, "tokenizer", "warn") == [f"{size + 1} tokens, but the model knows {size}: a text with one of the others cannot run"]
    (here / "train.jsonl").write_text('{"prompt": "say <padding>", "label": "1"}\n')
    assert not of(look("model", "tokenizer", "environment", "data")[0], "data", "FAIL")  # it is text
    findings, _ = look("model", "tokenizer", "environment", "data", overrides=["data.special_tokens_in_text=true"])
    assert f"token ids up to {size}, but the model knows 0 to {size - 1}" in of(findings, "data", "FAIL")[0]


def test_tokenizers_without_what_a_run_needs_fail(here):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / "model" / name).rename(here / name)
    assert "has no tokenizer.json" in of(look("model", "tokenizer")[0], "tokenizer", "FAIL")[0]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / name).rename(here / "model" / name)
    change_json(here / "model/tokenizer_config.json", eos_token=None)
    assert "no eos_token" in of(look("model", "tokenizer")[0], "tokenizer", "FAIL")[0]


def test_a_chat_template_is_needed_where_prompts_are_messages(here):
    (here / "model/chat_template.jinja").unlink()
    assert "no chat template: put" in of(look("model", "tokenizer")[0], "tokenizer", "FAIL")[0]
    assert "plain text" in of(look("model", "tokenizer", overrides=["data.chat=false"])[0], "tokenizer", "ok")[-2]
    assert "no chat template: put" in of(look("model", "tokenizer", file="sft.toml")[0], "tokenizer", "FAIL")[0]


@pytest.mark.parametrize(("eos", "warned"), [(2, False), ([0, 2], False), (None, False), (0, True), ([0, 1], True)])
def test_the_models_own_end_is_compared_with_the_tokenizers(here, eos, warned):
    change_json(here / "model/generation_config.json", eos_token_id=eos)
    texts = of(look("model", "tokenizer")[0], "tokenizer", "warn")
    assert bool(texts) == warned
    if warned:
        assert "'<|endoftext|>' (0)" in texts[0] and "'<|im_end|>' (2)" in texts[0]


def test_generation_settings_that_cannot_be_read_fail(here):
    (here / "model/generation_config.json").write_text("{")
    assert "generation_config.json cannot be read" in of(look("model", "tokenizer")[0], "tokenizer", "FAIL")[0]


def test_stop_tokens_that_do_not_exist_fail(here):
    findings, _ = look("model", "tokenizer", overrides=["rollout.stop_token_ids=[3, 100000]"])
    assert "stop tokens [100000]" in of(findings, "tokenizer", "FAIL")[0]
    assert "'<tool_call>'" not in of(findings, "tokenizer", "ok")[1] and "(3)" in of(findings, "tokenizer", "ok")[1]


def test_a_parser_of_the_users_is_imported_under_guard(here):
    module(here, "parsers.py", "raise RuntimeError('at import')\n")
    assert "RuntimeError: at import" in of(look("model", "tokenizer", overrides=["env.parser=parsers.py:parse"])[0], "tokenizer", "FAIL")[0]


def test_sequences_beyond_the_reach_of_their_rotary_scaling_fail(here):
    """Of a run's trajectories and of supervised rows alike."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    change_json(here / "model/config.json", max_position_embeddings=32, rope_parameters=scaling)
    findings, _ = look("model", "limits")
    assert "sequences of up to 32 tokens" in of(findings, "model")[1]
    assert "rollout.max_tokens is 96, but the engine runs sequences of 32" in of(findings, "limits", "FAIL")[0]
    change_json(here / "model/config.json", max_position_embeddings=8)
    (failed,) = of(look("model", "tokenizer", "data", file="sft.toml")[0], "data", "FAIL")
    assert "beyond 8 the rotary scaling of Qwen3ForCausalLM depends on the longest sequence" in failed


def test_routing_replay_of_a_model_without_experts_fails(here):
    findings, _ = look("model", overrides=["train.routing_replay=rollout"])
    assert any("Qwen3ForCausalLM has no experts, so there is no routing to replay; leave it out" in text for text in of(findings, "model"))
    assert any(finding.status == "FAIL" for finding in findings)
