"""Models without contents: what is told of a folder by its headers is what loading it would tell."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from whet.model import folders, headers
from whet.model.causal import load_causal, random_causal
from whet.model.config import ModelConfig
from whet.model.contents import Contents
from whet.model.headers import read_header, weight_files, weight_headers
from whet.model.meta import meta_causal, read_meta
from whet.model.recompute import recomputes

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SHAPES = {
    "tied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "untied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "renamed experts": lambda: MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "latent": lambda: DeepseekV3Config(**{**SIZES, **LATENT, **ROUTED, "moe_intermediate_size": 16}),
}


def settings(**changes):
    return ModelConfig(**{"path": "tiny", "device": "cpu", **changes})


def saved(shape, folder):
    """The shape's random model, in the form that the hub's files have: separate experts, for example."""
    random_causal(SHAPES[shape](), settings(), seed=0).hf.save_pretrained(folder)
    return folder


def report_of(folder, **changes):
    model = read_meta(folder, settings(**changes))
    return model, Contents(model.hf, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_folder_fits_and_gives_the_loaded_models_shapes(shape, dtype, tmp_path):
    folder = saved(shape, tmp_path)
    model, report = report_of(folder, dtype=dtype)
    assert (report.missing, report.misfits, report.unused) == ((), (), ())
    loaded = dict(load_causal(folder, settings(dtype=dtype), trainable=True).named_weights())
    mine = dict(model.named_weights())
    assert mine.keys() == loaded.keys()
    assert all((mine[name].shape, mine[name].dtype) == (loaded[name].shape, loaded[name].dtype) for name in loaded)
    assert all(p.is_meta and p.requires_grad for p in mine.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_that_is_taken_away_is_missed(shape, tmp_path):
    folder = saved(shape, tmp_path)
    whole = load_file(folder / "model.safetensors")
    for name in whole:
        save_file({key: value for key, value in whole.items() if key != name}, folder / "model.safetensors", {"format": "pt"})
        _, report = report_of(folder)
        assert report.missing or report.misfits, name
        assert not report.unused, name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_of_another_shape_is_told(shape, tmp_path):
    folder = saved(shape, tmp_path)
    whole = load_file(folder / "model.safetensors")
    for name, tensor in whole.items():
        longer = torch.cat([tensor, tensor[:1]]).contiguous()
        save_file({**whole, name: longer}, folder / "model.safetensors", {"format": "pt"})
        _, report = report_of(folder)
        assert report.misfits, name


def test_a_misfit_is_told_with_both_shapes(tmp_path):
    folder = saved("untied", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 28}))
    _, report = report_of(folder)
    assert "model.layers.0.mlp.down_proj.weight: (32, 24), not (32, 28) (model.safetensors)" in report.misfits
    assert len(report.misfits) == 6 and not report.missing
    with pytest.raises(ValueError, match=r"down_proj.weight: \(32, 24\), not \(32, 28\)"):
        load_causal(folder, settings(), trainable=False)


def test_a_weight_without_a_place_is_told_with_its_file(tmp_path):
    folder = saved("tied", tmp_path)
    whole = load_file(folder / "model.safetensors")
    save_file({**whole, "model.extra_head.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    _, report = report_of(folder)
    assert report.unused == ("model.extra_head.weight (model.safetensors)",) and not report.missing and not report.misfits
    with pytest.raises(ValueError, match=r"have 1 tensors that .* no place for, among them model\.extra_head\.weight \(model\.safe"):
        load_causal(folder, settings(), trainable=False)


def test_quantized_weights_are_refused(tmp_path):
    folder = saved("tied", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="holds quantized weights"):
        report_of(folder)


def test_shards_are_read_by_their_index_and_a_lost_one_is_named(tmp_path):
    model = random_causal(SHAPES["untied"](), settings(), seed=0)
    model.hf.save_pretrained(tmp_path, max_shard_size="8KB")
    files = weight_files(tmp_path)
    assert len(files) > 1
    assert weight_headers(tmp_path).keys() == {name for name, _ in model.named_weights()}
    files[1].unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of the {len(files)} files .* {files[1].name}"):
        weight_headers(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no readable weight_map"):
        weight_headers(tmp_path)


def test_headers_have_names_shapes_and_types_and_no_contents(tmp_path):
    kinds = {"a": ((2, 3), torch.bfloat16), "b": ((), torch.int64), "c": ((4,), torch.uint8)}
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {name: (t.shape, t.dtype) for name, t in tensors.items()}
    assert all(t.is_meta for t in found.values())


def test_damaged_and_absent_files_are_told(tmp_path):
    folder = saved("tied", tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(ValueError, match="is cut short or damaged"):
        weight_headers(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no weights \(model\.safetensors\); copy"):
        weight_headers(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"in torch's own format \(pytorch_model.bin\), a pickle, which is not read: write"):
        load_causal(folder, settings(), trainable=False)


UNUSABLE = r"config\.json cannot be used"
UNLOADABLE = "cannot be loaded as a causal language model"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "wide"}, UNUSABLE),
        ({"layer_types": ["full_attention"]}, UNUSABLE),
        ({"model_type": "no"}, UNUSABLE),
        ({"hidden_act": "no_such"}, UNLOADABLE),
        ({"pad_token_id": 1000}, UNLOADABLE),
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_a_value_error_for_headers_and_for_loading(change, words, tmp_path):
    folder = saved("tied", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    for read in (lambda: read_meta(folder, settings()), lambda: load_causal(folder, settings(), trainable=False)):
        with pytest.raises(ValueError, match=words):
            read()


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        read_meta(tmp_path, settings())


def test_recomputed_layers_are_recomputed_without_contents_too():
    plain, again = (meta_causal(SHAPES["tied"](), settings(gradient_checkpointing=on)) for on in (False, True))
    assert not recomputes(plain.hf) and recomputes(again.hf)
    assert not plain.hf.training and not again.hf.training


@pytest.mark.parametrize("read", [headers.weight_files, folders.indexed_files], ids=["headers", "folders"])
@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": []}}',
        '{"weight_map": {"a": 1, "b": null}}',
        '{"weight_map": ["a"]}',
        "[" * 100_000,
        '{"weight_map": {"a": "../other/model.safetensors"}}',
        '{"weight_map": {"a": "/other/model.safetensors"}}',
        '{"weight_map": {"a": "model.safetensors\\u0000"}}',
    ],
)
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(tmp_path, read, text):
    folder = tmp_path / "model"
    for each in (folder, tmp_path / "other"):
        each.mkdir()
        save_file({"a": torch.zeros(1)}, each / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "elsewhere.safetensors")
    (folder / headers.INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"no readable weight_map|is not in its folder"):
        read(folder)
