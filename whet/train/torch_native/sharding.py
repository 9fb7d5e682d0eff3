"""A model spread over a mesh, from outside: layers and experts by its own plan, then every parameter sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from whet.model.causal import CausalModel
from whet.model.parallel_plan import apply_plans, layers_of
from whet.model.scalar import ScalarModel
from whet.train.torch_native.mesh import Mesh

T = TypeVar("T")


class Trunk(nn.Module):
    """The root of a sharded model: inside a call of it the weights that no layer has (embedding, last norm, head) are whole.

    So the head may be called as often as there are chunks, and its gradient is exchanged once.

    Args:
        hf: the transformers model.
    """

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def shard_model(model: CausalModel | ScalarModel, mesh: Mesh, *, offload: bool = False, key: str = "train.parallel") -> Trunk:
    """Spread a model over the mesh in place. Gradients are sums over all ranks, never means: weights are global to the step.

    A model in bfloat16 or float16 that trains gets float32 parameters, and computes in its own type what it computed before; gradients
    are reduced in float32.

    Args:
        model: whole on every rank, with the same weights, on the CPU perhaps, and ends up on the mesh's devices; or without contents.
        mesh: the ranks.
        offload: True if what a rank keeps is in the CPU's memory; what it computes with does not.
        key: the setting that the degrees come from, for error messages.

    Raises:
        ValueError: if the model cannot be cut by these degrees.
    """
    hf, policy = model.hf, MixedPrecisionPolicy()
    check_degrees(model, mesh, key)
    if (dtype := model.dtype).itemsize < 4 and any(p.requires_grad for p in hf.parameters()):
        hf.float()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:
        model.computes_on = model.device
    lies = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    experts: list[nn.Module] = []
    if mesh.config.tensor > 1 or mesh.experts is not None:
        spread = mesh.experts["expert"] if mesh.experts is not None else None
        experts = apply_plans(hf, mesh.parameters["tensor"], spread, split_head=isinstance(model, CausalModel), key=key)
    for module in experts:
        assert mesh.experts is not None
        fully_shard(module, mesh=mesh.sharded(mesh.experts), reshard_after_forward=True, mp_policy=policy, offload_policy=lies)
    over = mesh.sharded(mesh.parameters)
    for layer in layers_of(hf):
        fully_shard(layer, mesh=over, reshard_after_forward=True, mp_policy=policy, offload_policy=lies)
    trunk = Trunk(hf)
    fully_shard(trunk, mesh=over, mp_policy=policy, offload_policy=lies)
    for module in trunk.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return trunk


def check_degrees(model: CausalModel | ScalarModel, mesh: Mesh, key: str) -> None:
    """Refuse heads that do not divide, before anything is cut; `key` is the setting that the degrees come from.

    Raises:
        ValueError: with the number of heads and the degree.
    """
    text, tensor = model.config.get_text_config(), mesh.config.tensor
    name = type(model.hf).__name__
    if text.num_attention_heads % tensor or text.num_key_value_heads % tensor:
        raise ValueError(
            f"{key}: {name} has {text.num_attention_heads} heads and {text.num_key_value_heads} of keys and values, which "
            f"{tensor} ranks cannot share; lower tensor to a divisor of both"
        )
