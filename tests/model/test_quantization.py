"""Quantized weights: the numbers against plain loops, the formats of published checkpoints, folders that transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config, Qwen3MoeConfig

from whet.model.quantization import format_of, in_format, own_format
from whet.model.quantization_folder import checkpoint_format, named_format, quantize_folder

LAYER = "model.layers.0.mlp.up_proj"
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


def compressed(kind, **weights):
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}}
    return {**COMPRESSED, "format": kind, "config_groups": groups}


def static_inputs():
    """As checkpoints of FP8 whose scales of activations were measured."""
    config = compressed("float-quantized", strategy="tensor")
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    return config


def matrix(rows, columns, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows)
    found = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) * 3
    found[0] = 0
    return found.to(dtype)


def of(config, weight, layer=LAYER):
    return dict(format_of(config).files(f"{layer}.weight", weight))


@pytest.mark.parametrize(
    ("config", "block", "scale"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv"),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, (64, 32), "weight_scale_inv"),
        ({"quant_method": "fp8"}, (999, 999), "weight_scale"),
        (compressed("float-quantized"), (1, 999), "weight_scale"),
        (compressed("float-quantized", strategy="tensor"), (999, 999), "weight_scale"),
        (compressed("float-quantized", strategy="block", block_structure=[128, 128]), (128, 128), "weight_scale"),
    ],
)
def test_fp8_times_its_scale_is_the_weight_up_to_its_rounding_in_every_block(config, block, scale):
    weight = matrix(200, 330)
    found = of(config, weight)
    assert found.keys() == {f"{LAYER}.weight", f"{LAYER}.{scale}"}
    values, scales = found[f"{LAYER}.weight"], found[f"{LAYER}.{scale}"]
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape and scales.dtype == torch.float32
    for top in range(0, 200, block[0]):
        for left in range(0, 330, block[1]):
            part = weight[top : top + block[0], left : left + block[1]].double()
            factor = scales.double().reshape(-1)[0] if not scales.dim() else scales[top // block[0], left // block[1]].double()
            greatest = float(part.abs().max())
            assert float(factor) == pytest.approx(greatest / 448 if greatest else 1.0, rel=1e-6)
            back = values[top : top + block[0], left : left + block[1]].double() * factor
            bound = (part.abs() / 16).clamp_min(float(factor) * 2**-10) * 1.001  # three bits of mantissa, and steps of 2^-9 at the least
            assert bool(((back - part).abs() <= bound).all())


@pytest.mark.parametrize(("num_bits", "size"), [(4, 32), (4, 128), (4, None), (8, 32)])
def test_packed_integers_are_the_weight_up_to_half_a_step(num_bits, size):
    weight = matrix(6, 256)
    strategy = "channel" if size is None else "group"
    found = of(compressed("pack-quantized", type="int", num_bits=num_bits, strategy=strategy, group_size=size), weight)
    packed, scales, shape = (found[f"{LAYER}.weight_{name}"] for name in ("packed", "scale", "shape"))
    assert shape.tolist() == [6, 256] and packed.dtype == torch.int32 and scales.dtype == torch.bfloat16
    per_word, greatest = 32 // num_bits, 2 ** (num_bits - 1) - 1
    used = set()
    for row in range(6):
        for column in range(256):
            word = int(packed[row, column // per_word]) & 0xFFFFFFFF
            value = ((word >> (num_bits * (column % per_word))) & (2**num_bits - 1)) - (greatest + 1)
            used.add(value)
            step = float(scales[row, column // (size or 256)])
            # The step is a rounding to bfloat16, so that the greatest entry may be cut by a 256th of itself.
            assert abs(value * step - float(weight[row, column])) <= step * (0.5 + greatest / 256) * 1.001
    assert max(used) == greatest and min(used) <= -greatest


def test_integers_of_eight_bits_are_a_byte_each():
    weight = matrix(6, 64, torch.float32)
    found = of(compressed("int-quantized", type="int", strategy="channel"), weight)
    values, scales = found[f"{LAYER}.weight"], found[f"{LAYER}.weight_scale"]
    assert values.dtype == torch.int8 and scales.shape == (6, 1)
    assert torch.allclose(values.float() * scales, weight, atol=float(weight.abs().max()) / 254 * 1.01)


QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.1.mlp.gate"],
}
KIMI_INT4 = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32) | {
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
}


@pytest.mark.parametrize(
    ("config", "left", "taken"),
    [
        (QWEN3_FP8, ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"], [LAYER, "model.layers.1.mlp.experts.7.down_proj"]),
        (KIMI_INT4, [LAYER, "model.layers.3.self_attn.o_proj", "model.layers.3.mlp.gate"], ["model.layers.3.mlp.experts.0.up_proj"]),
        ({**QWEN3_FP8, "modules_to_not_convert": ["model.layers.0"]}, [LAYER], ["model.layers.10.mlp.up_proj"]),
        ({**QWEN3_FP8, "modules_to_not_convert": None}, ["lm_head", "model.layers.2.mlp.shared_expert_gate"], [LAYER]),
    ],
)
def test_embeddings_heads_routers_and_what_a_checkpoint_names_are_left_as_they_are(config, left, taken):
    weight = torch.ones(64, 64)
    for layer in left:
        assert of(config, weight, layer)[f"{layer}.weight"] is weight
    for layer in taken:
        assert len(of(config, weight, layer)) > 1
    bias = torch.ones(64)
    assert format_of(config).files(f"{LAYER}.bias", bias) == [(f"{LAYER}.bias", bias)]


@pytest.mark.parametrize("actorder", [None, "weight", "static"])
def test_the_order_of_calibration_changes_no_format(actorder):
    how = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    found, plain = (of(compressed("pack-quantized", **how, **more), matrix(6, 64)) for more in ({"actorder": actorder}, {}))
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq', and whet writes fp8 and compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        (compressed("pack-quantized", type="int", num_bits=4, strategy="group", symmetric=False), "symmetrically"),
        (compressed("pack-quantized", type="int", num_bits=4, strategy="group", actorder="group"), "in the order of columns"),
        (compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group"), "does not write format nvfp4-pack-quantized"),
        (compressed("pack-quantized", type="int", num_bits=3, strategy="group"), "does not write .* 3 bits"),
        ({**COMPRESSED, "format": "float-quantized", "config_groups": {}}, "has 0 config_groups"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme is 'static': its scales were measured"),
        (static_inputs(), "input_activations are not dynamic"),
        ({**compressed("float-quantized"), "kv_cache_scheme": {"num_bits": 8, "dynamic": False}}, "kv_cache_scheme is not dynamic"),
    ],
)
def test_a_format_that_cannot_be_written_is_refused_by_its_name(config, words):
    with pytest.raises(ValueError, match=words):
        format_of(config)


def test_groups_of_int4_divide_every_row_or_it_is_refused():
    assert own_format("int4", [256, 384]).config["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert own_format("int4", [256, 96]).config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    with pytest.raises(ValueError, match="some of 20 entries; take fp8"):
        own_format("int4", [256, 20])
    with pytest.raises(ValueError, match="'fp9' is no format"):
        own_format("fp9", [256])
    with pytest.raises(ValueError, match=r"up_proj: rows of 48 entries are not divided"):
        of(compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32), torch.ones(4, 48))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=128, head_dim=64, tie_word_embeddings=True, **sizes))
    model.bfloat16().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_transformers_reads_a_folder_in_fp8_as_its_values_times_their_scales(folder, tmp_path):
    quantize_folder(folder, tmp_path / "fp8", named_format("fp8", folder), torch.bfloat16, 2**16)
    assert (tmp_path / "fp8/chat_template.jinja").is_file()
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    reading = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": "bfloat16"}
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", **reading)
    plain = load_file(folder / "model.safetensors")
    for name, weight in dict(found.named_parameters()).items():
        parts = dict(own_format("fp8", [256]).files(name, plain[name]))
        expected = plain[name]
        if len(parts) == 2:
            scales = parts[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected = (parts[name].float() * scales[: len(expected), : expected.shape[1]]).bfloat16()
            assert not torch.equal(expected, plain[name])
        assert torch.equal(weight.detach(), expected), name


def test_a_checkpoint_tells_its_format_and_which_tensors_have_it(folder, tmp_path):
    quantize_folder(folder, tmp_path / "int4", named_format("int4", folder), torch.bfloat16, 2**28)
    file = tmp_path / "int4/model.safetensors"
    tensors, plain = load_file(file), load_file(folder / "model.safetensors")
    kept = "model.layers.1.mlp.down_proj"
    others = {name: each for name, each in tensors.items() if not name.startswith(kept)}
    save_file(others | {f"{kept}.weight": plain[f"{kept}.weight"]}, file)
    found = dict(in_format(plain.items(), checkpoint_format(tmp_path / "int4")))
    assert found.keys() == load_file(file).keys() and f"{kept}.weight" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(file).items())


def mixture(folder, **changes):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, **changes}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes)).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "key"), [("fp8", "modules_to_not_convert"), ("int4", "ignore")])
def test_the_configuration_names_routers_which_servers_would_quantize(tmp_path, name, key):
    ignored = named_format(name, mixture(tmp_path)).config[key]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= set(ignored)
    assert not any("experts" in each or "proj" in each for each in ignored)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, r"joins? .*k_proj .* blocks of 128 must divide its 64 rows; take int4"),
        ({"moe_intermediate_size": 64}, r"experts\.\d\.gate_proj .* must divide its 64 rows"),
    ],
)
def test_blocks_that_do_not_divide_what_servers_join_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        named_format("fp8", mixture(tmp_path, **changes))
    named_format("int4", tmp_path)


def test_experts_that_files_hold_together_are_refused(tmp_path):
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 256, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj holds several experts"):
        named_format("int4", tmp_path)


def test_weights_that_the_checkpoint_does_not_have_are_refused_and_layers_that_it_keeps_may_have_any_size():
    config = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32)
    parts = ("packed", "scale", "shape")
    names = frozenset({"model.layers.0.odd.weight", *(f"{LAYER}.weight_{part}" for part in parts)})
    found = format_of(config, names)
    odd = torch.ones(4, 48)
    assert found.files("model.layers.0.odd.weight", odd) == [("model.layers.0.odd.weight", odd)]
    assert {name for name, _ in found.files(f"{LAYER}.weight", torch.ones(4, 64))} == names - {"model.layers.0.odd.weight"}
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight: take one of the model that trains"):
        found.files("model.layers.1.mlp.up_proj.weight", torch.ones(4, 64))


def test_folders_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="has no quantization_config: it is no quantized checkpoint"):
        checkpoint_format(folder)
    quantize_folder(folder, tmp_path / "fp8", named_format("fp8", folder), torch.bfloat16, 2**28)
    with pytest.raises(ValueError, match="quantized already, and training needs its weights as they were before"):
        quantize_folder(tmp_path / "fp8", tmp_path / "twice", named_format("fp8", folder), torch.bfloat16, 2**28)
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config\.quant_method is 'awq'"):
        checkpoint_format(tmp_path / "fp8")
