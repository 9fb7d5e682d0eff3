from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, GPT2Config, LlamaConfig, Qwen3Config, Qwen3ForSequenceClassification

from whet.model.attention import PackedRow
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.scalar import ScalarModel, load_scalar

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")
TOKENS = torch.tensor([5, 4, 60, 0, 17, 9])
GPT2 = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=None)


def qwen3(**changes):
    return Qwen3Config(**{**SIZES, "head_dim": 4, **changes})


def config(**changes):
    return ModelConfig(**{"path": "tiny", "device": DEVICE, **changes})


def scores(model, tokens=TOKENS):
    row = PackedRow([len(tokens)], model.device)
    return model.scores(model.hidden(tokens.to(model.device), row.positions, row)).cpu()


@pytest.fixture
def causal(tmp_path):
    random_causal(qwen3(), config(), seed=0).hf.save_pretrained(tmp_path / "causal")
    return tmp_path / "causal"


def classifier(folder, **changes):
    torch.manual_seed(1)
    hf = AutoModelForSequenceClassification.from_config(qwen3(**{"num_labels": 1, **changes}))
    hf.save_pretrained(folder)
    return folder, hf


@pytest.mark.parametrize("pad", [None, 52])  # 52 ends one of the sequences that a model is checked with
def test_a_reward_model_in_hugging_face_format_has_transformers_score_at_its_last_token(tmp_path, pad):
    folder, hf = classifier(tmp_path, pad_token_id=pad)
    mine = load_scalar(folder, config(), trainable=False)
    with torch.no_grad():
        found, expected = scores(mine), [hf(input_ids=TOKENS[None, :n]).logits[0, 0] for n in range(1, len(TOKENS) + 1)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert found.abs().min() > 1e-3


def test_what_is_saved_loads_in_transformers_and_here_with_the_same_scores(causal, tmp_path):
    model = load_scalar(causal, config(), trainable=True, new_head="normal", seed=3)
    model.hf.save_pretrained(tmp_path / "out")
    assert tuple(load_file(tmp_path / "out" / "model.safetensors")["score.weight"].shape) == (1, 16)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is Qwen3ForSequenceClassification and theirs.config._attn_implementation != "whet"
    again = dict(load_scalar(tmp_path / "out", config(), trainable=False).named_weights())
    assert all(torch.equal(again[name], weight) for name, weight in model.named_weights())
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=TOKENS[None]).logits[0, 0], scores(model)[-1], rtol=1e-5, atol=1e-5)


def test_a_language_models_decoder_gets_a_head_of_zeros_or_a_seeded_normal_one(causal):
    base = dict(random_causal(qwen3(), config(), seed=0).named_weights())
    zeros = load_scalar(causal, config(), trainable=True, new_head="zeros")
    assert torch.equal(scores(zeros), torch.zeros(len(TOKENS)))
    assert all(torch.equal(base[name], w) for name, w in zeros.named_weights() if name != "score.weight")
    state = torch.random.get_rng_state()
    one, same, other = (
        load_scalar(causal, config(), trainable=True, new_head="normal", seed=s).head.weight for s in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_normal_heads_standard_deviation_is_one_over_the_root_of_its_inputs_and_one(tmp_path):
    wide = qwen3(hidden_size=4096, num_attention_heads=2, num_key_value_heads=1, head_dim=2, intermediate_size=4, vocab_size=53)
    random_causal(wide, config(), seed=0).hf.save_pretrained(tmp_path)
    weight = load_scalar(tmp_path, config(), trainable=True, new_head="normal", check=False).head.weight
    assert float(weight.detach().std()) * 4097**0.5 == pytest.approx(1.0, abs=0.05)


def test_a_head_that_is_there_is_kept_whatever_a_new_one_would_be(tmp_path):
    folder, hf = classifier(tmp_path)
    for new_head in ("zeros", "normal", None):
        assert torch.equal(load_scalar(folder, config(), trainable=True, new_head=new_head).head.weight.cpu(), hf.score.weight)


@pytest.mark.parametrize("family", [LlamaConfig(**SIZES), GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_other_families_and_types_run(family, dtype, tmp_path):
    random_causal(family, config(), seed=0).hf.save_pretrained(tmp_path)
    model = load_scalar(tmp_path, config(dtype=dtype), trainable=True, new_head="normal")
    assert model.dtype == getattr(torch, dtype) and model.head.weight.dtype == model.dtype
    assert scores(model).dtype == (torch.float64 if dtype == "float64" else torch.float32)


def test_a_language_model_is_no_reward_model(causal):
    with pytest.raises(ValueError, match=r"reward: .* is a language model \(Qwen3ForCausalLM\) without a score head; name a folder"):
        load_scalar(causal, config(), trainable=False, key="reward")


def test_several_labels_are_refused(tmp_path):
    folder, _ = classifier(tmp_path, num_labels=3)
    with pytest.raises(ValueError, match=r"critic.path: .* tells 3 classes apart \(num_labels in config.json\)"):
        load_scalar(folder, config(), trainable=True, new_head="zeros", key="critic.path")


def test_weights_that_lack_a_head_or_have_one_of_another_shape_are_refused(tmp_path):
    folder, _ = classifier(tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({name: w for name, w in weights.items() if name != "score.weight"}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"critic.path: .* lack 1 tensors that its config.json asks for, among them score.weight"):
        load_scalar(folder, config(), trainable=True, new_head="zeros", key="critic.path")
    save_file({**weights, "score.weight": torch.zeros(2, 16)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors of other shapes .* score.weight: \(2, 16\), not \(1, 16\)"):
        load_scalar(folder, config(), trainable=True, new_head="zeros")


def test_a_decoder_that_lacks_tensors_is_refused_though_its_head_is_new(causal):
    path = causal / "model.safetensors"
    gone = "model.layers.1.mlp.up_proj.weight"
    save_file({name: w for name, w in load_file(path).items() if name != gone}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lack 1 tensors that its config.json asks for, among them {gone}"):
        load_scalar(causal, config(), trainable=True, new_head="zeros")


def test_a_folder_without_such_a_model_is_refused(causal, tmp_path):
    with pytest.raises(ValueError, match=r"critic.path: .*nowhere has no config.json"):
        load_scalar(tmp_path / "nowhere", config(), trainable=True, new_head="zeros", key="critic.path")
    settings = {"model_type": "granite_speech", "architectures": ["GraniteSpeechForConditionalGeneration"]}
    (causal / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"critic.path: .* cannot be loaded as a sequence classification model"):
        load_scalar(causal, config(), trainable=True, new_head="zeros", key="critic.path")


def test_models_with_another_head_are_refused():
    class Biased(Qwen3ForSequenceClassification):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.score = torch.nn.Linear(16, 1)

    with pytest.raises(ValueError, match="Biased has no linear layer 'score' without bias"):
        ScalarModel(Biased._from_config(qwen3(num_labels=1), attn_implementation="whet"))


class Louder(Qwen3ForSequenceClassification):
    """Scales its scores in a place that whet does not know."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.3
        return out


def test_a_forward_that_differs_is_caught():
    model = ScalarModel(Louder._from_config(qwen3(num_labels=1), attn_implementation="whet").eval())
    with pytest.raises(ValueError, match="Louder gives other scores through whet's attention than through its own"):
        model.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_cancel_to_almost_zero_are_no_difference(dtype):
    torch.manual_seed(0)
    hf = Qwen3ForSequenceClassification._from_config(qwen3(num_labels=1), attn_implementation="whet")
    model = ScalarModel(hf.to(DEVICE, getattr(torch, dtype)).eval())
    seen = []
    handle = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2).float()))
    model.check()
    handle.remove()
    weight = model.head.weight
    states = torch.cat(seen).T  # [hidden, positions]: fewer positions than hidden sizes, so a head can be orthogonal to all
    assert states.shape[1] < states.shape[0]
    orthogonal = weight.float() - (states @ torch.linalg.lstsq(states, weight.float().T).solution).T
    with torch.no_grad():
        weight.copy_(orthogonal)
    model.check()


def test_what_leaks_between_the_segments_of_a_row_is_caught_under_a_head_of_zeros(causal):
    model = load_scalar(causal, config(), trainable=False, new_head="zeros")

    def convolve(module, args, out):
        return out + torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    model.hf.model.embed_tokens.register_forward_hook(convolve)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification gives other hidden states"):
        model.check()
