"""Digests of parameters in the layout of a server, against a server's loading written the plain way."""

from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from whet.engine.layout import NOTHING, Heads, expected

SIZES = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4},
}


def weights_of(kind: str, *, tied: bool = False) -> tuple[dict[str, torch.Tensor], Heads]:
    torch.manual_seed(0)
    made = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    model = made[1](made[0](**SIZES, tie_word_embeddings=tied))
    for parameter in model.parameters():  # norms and biases begin with ones and zeros
        torch.nn.init.normal_(parameter)
    return dict(model.named_parameters()), Heads.of(model.config)


def held(weights: dict[str, torch.Tensor], size: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Parameters of `size` processes: heads one by one, rows one by one."""
    out = {}
    for rank in range(size):
        for name, full in weights.items():
            tensor, key = full.detach().to(dtype), f"dp0:pp0:pcp0:tp{rank}:{name}"
            if "q_proj" in name:
                heads = {each: weights[name.replace("q_proj", each)].detach().to(dtype).split(4) for each in ("q_proj", "k_proj", "v_proj")}
                mine = [head for place, head in enumerate(heads["q_proj"]) if place // (8 // size) == rank]
                kv = [place for place in range(2) if place // (2 // size) == rank] if size <= 2 else [rank // (size // 2)]
                rows = [*mine, *(heads["k_proj"][place] for place in kv), *(heads["v_proj"][place] for place in kv)]
                out[key.replace("q_proj", "qkv_proj")] = torch.cat(rows)
            elif "gate_proj" in name:
                up = weights[name.replace("gate_proj", "up_proj")].detach().to(dtype)
                rows = [*tensor.split(48 // size)[rank : rank + 1], *up.split(48 // size)[rank : rank + 1]]
                out[key.replace("gate_proj", "gate_up_proj")] = torch.cat(rows)
            elif "embed_tokens" in name or "lm_head" in name:
                padded = torch.zeros(128, 32, dtype=dtype)
                padded[:100] = tensor
                out[key] = padded[rank * (128 // size) : (rank + 1) * (128 // size)]
            elif "o_proj.weight" in name or "down_proj" in name:
                width = tensor.shape[1] // size
                out[key] = tensor[:, rank * width : (rank + 1) * width]
            elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
                out[key] = tensor
    return out


def digests_of(parameters: dict[str, torch.Tensor]) -> dict[str, set[str]]:
    return {key: {hashlib.sha256(each.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()} for key, each in parameters.items()}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_process_holds_its_slice(kind, size):
    weights, heads = weights_of(kind)
    found = digests_of(held(weights, size))
    assert expected(weights.items(), heads, found) == found and len(found) > 14 * size


def test_a_server_may_compute_in_another_type():
    weights, heads = weights_of("qwen3", tied=True)
    assert not any("lm_head" in name for name in weights)
    for dtype in (torch.bfloat16, torch.float16):
        found = digests_of(held(weights, 2, dtype))
        mine = expected(weights.items(), heads, found)
        assert mine.keys() == found.keys() and all(found[key] <= mine[key] for key in found)


@pytest.mark.parametrize(
    "planted",
    [
        lambda held: held["dp0:pp0:pcp0:tp1:model.layers.1.self_attn.qkv_proj.weight"].__setitem__((17, 3), 9.0),
        lambda held: held["dp0:pp0:pcp0:tp0:model.embed_tokens.weight"][5].zero_(),
        lambda held: held["dp0:pp0:pcp0:tp0:model.layers.0.mlp.gate_up_proj.weight"].copy_(
            held["dp0:pp0:pcp0:tp0:model.layers.0.mlp.gate_up_proj.weight"].roll(24, 0)
        ),
        lambda held: held["dp0:pp0:pcp0:tp1:model.norm.weight"].mul_(1.0001),
    ],
)
def test_a_stale_or_swapped_parameter_is_noticed(planted):
    weights, heads = weights_of("qwen3")
    parameters = {key: tensor.clone() for key, tensor in held(weights, 2).items()}
    planted(parameters)
    found = digests_of(parameters)
    mine = expected(weights.items(), heads, found)
    assert len([key for key in found if not found[key] <= mine[key]]) == 1


def test_what_is_packed_or_unknown_is_no_proof():
    weights, heads = weights_of("qwen3")
    key = "dp0:pp0:pcp0:tp0:model.layers.0.mlp."
    found = {f"{key}gate_up_proj.weight": {NOTHING}, f"{key}experts.w13_weight": {"ab"}, "strange": {"ab"}}
    assert expected(weights.items(), heads, found) == {}
