from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from whet.model.attention import PackedRow
from whet.model.causal import load_causal, pick_device, prepare, random_causal, read_config
from whet.model.config import ModelConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig

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
TOKENS = torch.tensor([5, 4, 60, 0, 17, 9])


def qwen3(**changes):
    return Qwen3Config(**{**SIZES, "head_dim": 4, **changes})


def config(**changes):
    return ModelConfig(**{"path": "tiny", "device": "cpu", **changes})


def logits(model, tokens=TOKENS):
    row = PackedRow([len(tokens)], model.device)
    return model.logits(model.hidden(tokens, row.positions, row))


@pytest.fixture
def folder(tmp_path):
    random_causal(qwen3(), config(), seed=0).hf.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_exported_is_an_ordinary_model_with_the_same_logits(tied, tmp_path):
    model = random_causal(qwen3(tie_word_embeddings=tied), config(), seed=3)
    TorchBackend(model, TrainConfig(), total_steps=1).export(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    assert "whet" not in (tmp_path / "config.json").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config._attn_implementation != "whet"
    with torch.no_grad():
        expected = theirs.eval()(input_ids=TOKENS[None]).logits[0]
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        again = load_causal(tmp_path, config(), trainable=False)
        assert torch.equal(logits(again), logits(model))
    greedy = theirs.generate(TOKENS[None], max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    mine = TOKENS
    with torch.no_grad():
        for _ in range(8):
            mine = torch.cat([mine, logits(model, mine)[-1:].argmax(-1)])
    assert mine.tolist() == greedy.tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_has_one_name_and_tied_ones_share_it(tied):
    model = random_causal(qwen3(tie_word_embeddings=tied), config(), seed=0)
    names = [name for name, _ in model.named_weights()]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) == (not tied)
    assert (model.lm_head.weight is model.decoder.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_folder_is_loaded_in_the_dtype_asked_for(folder, dtype):
    model = load_causal(folder, config(dtype=dtype), trainable=True)
    assert model.dtype == getattr(torch, dtype) and model.vocab_size == 61 and model.max_positions == 64
    assert all(p.requires_grad and p.dtype == model.dtype for p in model.hf.parameters())
    with torch.no_grad():
        expected = logits(load_causal(folder, config(), trainable=False))
        near = {"rtol": 0.05, "atol": 0.1} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(logits(model).float(), expected, **near)


def test_a_frozen_model_has_no_gradients(folder):
    assert not any(p.requires_grad for p in load_causal(folder, config(), trainable=False).hf.parameters())


def test_folders_that_hold_no_model_are_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"nowhere has no config.json"):
        load_causal(tmp_path / "nowhere", config(), trainable=False)
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"", b"not a tensor", whole[: len(whole) // 2], whole[:-1]):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.path: .*model\.safetensors is cut short or damaged .*; copy or download it again"):
            load_causal(folder, config(), trainable=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights \(model\.safetensors\)"):
        load_causal(folder, config(), trainable=False)
    for content, words in (
        (json.dumps({"model_type": "unheard_of"}), "ValueError: .*unheard_of"),
        (json.dumps({"hidden_size": 8}), "ValueError: Unrecognized model"),
        ("{", "OSError: .*not a valid JSON"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"config\.json cannot be used: {words}"):
            load_causal(folder, config(), trainable=False)


def test_what_is_loaded_does_not_change_with_its_file(folder):
    model = load_causal(folder, config(), trainable=False)
    before = {name: weight.clone() for name, weight in model.named_weights()}
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size - file.tell()))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_weights())
    changed = load_file(path)
    assert any(not torch.equal(changed[name], weight) for name, weight in before.items())


def test_weights_that_lack_tensors_are_refused(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    gone = "model.layers.1.mlp.up_proj.weight"
    save_file({name: w for name, w in weights.items() if name != gone}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lack 1 tensors that its config.json asks for, among them {gone}"):
        load_causal(folder, config(), trainable=False)


def test_weights_of_other_shapes_are_refused(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 32}))
    words = r"have 6 tensors of other shapes .* among them model\.layers\.0\.mlp\.down_proj\.weight: \(16, 24\), not \(16, 32\)"
    with pytest.raises(ValueError, match=words):
        load_causal(folder, config(), trainable=False)


def test_devices_that_are_not_there_are_refused():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cuda", "mps", "cpu")
    with pytest.raises(ValueError, match=r"model.device is 'gpu', which torch does not know; use auto"):
        pick_device("gpu")
    with pytest.raises(ValueError, match=r"model.device is 'cuda:99', but torch sees \d+ CUDA devices"):
        pick_device("cuda:99")
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match=r"model.device is 'mps', but torch has no Metal device"):
            pick_device("mps")


@pytest.mark.parametrize(
    "family",
    [
        LlamaConfig(**SIZES),
        GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.5),
        CohereConfig(**SIZES, logit_scale=0.25),
        MistralConfig(**SIZES, sliding_window=None),
        GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=None),
    ],
    ids=lambda family: family.model_type,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_with_other_arithmetic_run(family, dtype):
    random_causal(family, config(dtype=dtype), seed=0)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (MistralConfig(**SIZES, sliding_window=8), "mistral attends to a window of 8 tokens"),
        (Gemma2Config(**SIZES, head_dim=4, sliding_window=16), "gemma2 attends to a window of 16 tokens"),
        (BloomConfig(vocab_size=61, hidden_size=16, n_layer=2, n_head=4), "BloomForCausalLM does not use transformers'"),
    ],
    ids=["sliding", "alternating", "no-interface"],
)
def test_models_that_need_another_attention_are_refused_by_name(family, message):
    with pytest.raises(ValueError, match=message):
        random_causal(family, config(), seed=0)


class Louder(Qwen3ForCausalLM):
    """Scales its logits in a place that whet does not know."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.3
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_forward_that_differs_is_caught(dtype):
    hf = Louder._from_config(qwen3(), attn_implementation="whet", dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match="Louder gives other logits through whet's attention than through its own"):
        prepare(hf, config(dtype=dtype), trainable=True)


@pytest.mark.parametrize("name", ["logits_scaling", "logit_scale", "final_logit_softcapping"])
def test_an_attribute_that_the_model_does_not_heed_is_caught(name):
    with pytest.raises(ValueError, match="gives other logits"):
        random_causal(qwen3(**{name: 1.5}), config(), seed=0)


def test_what_leaks_between_the_segments_of_a_row_is_caught():
    hf = Qwen3ForCausalLM._from_config(qwen3(), attn_implementation="whet")

    def convolve(module, args, out):
        return out + torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    hf.model.embed_tokens.register_forward_hook(convolve)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM gives other logits"):
        prepare(hf, config(), trainable=False)


def test_a_layer_that_does_not_attend_is_caught():
    hf = Qwen3ForCausalLM._from_config(qwen3(), attn_implementation="whet")
    hf.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: only 1 of its 2 layers attend"):
        prepare(hf, config(), trainable=False)


def test_the_check_leaves_whets_attention_in_place():
    assert random_causal(qwen3(), config(), seed=0).hf.config._attn_implementation == "whet"


def test_random_weights_depend_on_their_seed_alone():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one, two = (dict(random_causal(qwen3(), config(), seed=s).named_weights()) for s in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = dict(random_causal(qwen3(), config(), seed=0).named_weights())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[name], again[name]) and not torch.equal(one[name], two[name])


def test_gradient_checkpointing_recomputes_layers_and_turns_no_dropout_on():
    family = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=None, resid_pdrop=0.5
    )
    calls, results = {}, {}
    for recompute in (False, True):
        model = random_causal(family, config(gradient_checkpointing=recompute), seed=0)
        seen = calls.setdefault(recompute, [])
        model.decoder.h[0].ln_1.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        out = logits(model)
        out.sum().backward()
        results[recompute] = out.detach()
    assert (len(calls[False]), len(calls[True])) == (1, 2)
    assert torch.equal(results[False], results[True])


@pytest.mark.parametrize(
    ("settings", "products", "norms"),
    [
        ({}, 0, 0),
        ({"gradient_checkpointing": True}, 2 * 7, 2 * 2),
        ({"gradient_checkpointing": True, "gradient_checkpointing_every": 2}, 7, 2),
        ({"gradient_checkpointing": "selective"}, 0, 2 * 2),
        ({"gradient_checkpointing": "selective", "gradient_checkpointing_every": 2}, 0, 2),
    ],
)
def test_what_is_computed_again_is_what_was_asked_for(settings, products, norms):
    """In the backward pass of two layers: matrix products beside those of the gradients, and norms; every gradient is the plain one."""
    shape = qwen3(num_hidden_layers=2)
    grads, counts = [], []
    for each in ({}, settings):
        model = random_causal(shape, config(**each), seed=0)
        loss = logits(model).square().sum()
        with Counted() as counted:
            loss.backward()
        counts.append(counted)
        grads.append({name: p.grad for name, p in model.hf.named_parameters()})
    plain, again = counts
    assert again.calls["aten::mm"] - plain.calls["aten::mm"] <= products, "the last one of a layer may be left out"
    assert again.calls["aten::mm"] - plain.calls["aten::mm"] >= products - 2
    assert again.calls["aten::rsqrt"] - plain.calls["aten::rsqrt"] == 2 * norms, "four norms a layer"
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


class Counted(TorchDispatchMode):
    """Calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_every_so_many_layers_are_for_those_who_recompute():
    with pytest.raises(ValueError, match=r"gradient_checkpointing_every=2 has no effect without gradient_checkpointing"):
        config(gradient_checkpointing_every=2)


def test_a_config_is_read_without_its_weights(folder):
    (folder / "model.safetensors").unlink()
    assert read_config(folder).vocab_size == 61


def test_a_model_whose_attention_was_exchanged_is_refused():
    shared = qwen3()
    model = random_causal(shared, config(), seed=0)
    Qwen3ForCausalLM._from_config(shared, attn_implementation="sdpa")  # transformers notes it in the config that both hold
    row = PackedRow([3], torch.device("cpu"))
    with pytest.raises(ValueError, match="attends through 'sdpa' instead of whet's attention: its config was changed"):
        model.hidden(torch.arange(3), row.positions, row)


def test_settings_stand_in_place_of_config_json(folder):
    changed = load_causal(folder, config(config={"max_position_embeddings": 512}), trainable=False)
    assert changed.max_positions == 512 and load_causal(folder, config(), trainable=False).max_positions == 64
    assert changed.hf.config.max_position_embeddings == 512, "an exported model keeps it"
    assert torch.equal(logits(changed), logits(load_causal(folder, config(), trainable=False)))
    scaled = load_causal(folder, config(config={"rope_parameters": {"rope_theta": 100.0}}), trainable=False)
    assert not torch.allclose(logits(scaled), logits(changed))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_position_embedings": 9}, r"model\.config\.max_position_embedings: .* no such key; did you mean max_position_embeddings"),
        ({"hidden_size": 32}, "of other shapes than its config.json asks for"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        load_causal(folder, config(config=changes), trainable=False)


def test_a_model_in_float16_is_the_model(folder):
    half, whole = (load_causal(folder, config(dtype=dtype), trainable=False) for dtype in ("float16", "float32"))
    assert half.dtype == torch.float16
    assert torch.allclose(logits(half).float(), logits(whole), atol=0.02)
