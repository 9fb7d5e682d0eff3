"""Parallel plans of transformers: a model's own rules for its layers and experts, applied in place. No
other module uses them.

A weight becomes a DTensor of which each rank keeps its part; a layer's forward does the necessary
exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

DISPATCHED = "ep_dispatch_experts"
"""transformers' name of the rule for a module whose experts are spread over ranks."""


BASE = "base_layer"
"""peft's name of what it put an adapter on, inside of the layer that took its place."""
CUT_WITH_BASE = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Which part of an adapter is cut as its base is."""
OF_OUTPUTS = "mla_kv_a_proj"
"""transformers' name of a rule that cuts nothing, and concerns what a layer gives."""
GROUPED = "grouped_gemm"
"""Rule of a parameter that stacks the experts of a layer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Effect of a plan on a parameter."""

    parts: int
    """Ranks that have a part of it each; 1: all have it whole."""
    dim: int
    """Dimension that is cut."""
    of_experts: bool = False
    """True if the parts are whole experts, on the mesh that experts are spread over."""


def apply_plans(
    hf: PreTrainedModel, tensor: DeviceMesh, expert: DeviceMesh | None, *, split_head: bool, key: str = "train.parallel"
) -> list[nn.Module]:
    """Cut a model's layers over the ranks of `tensor`, and its experts over those of `expert`.

    Args:
        hf: whole on every rank, with the same weights.
        tensor: the ranks that compute the same tokens; of one rank: no layer is cut.
        expert: the ranks that experts are spread over. None: no expert is.
        split_head: True if each rank of `tensor` is to give logits of its own stretch of the vocabulary.
        key: the setting that asks for it, for error messages.

    Returns:
        The modules of experts that are spread.

    Raises:
        ValueError: if transformers is too old, the model has no such plan, or its sizes do not divide.
    """
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise _too_old(key) from error
    name, tied = type(hf).__name__, _untie(hf)
    tensor_plan, expert_plan = _plans(hf, tensor.size(), expert.size() if expert is not None else 1, split_head=split_head, key=key)
    try:
        if tensor.size() > 1:
            apply_tensor_parallelism(hf, tensor, tensor_plan)
        if expert is not None:
            apply_expert_parallelism(hf, expert, tensor, expert_plan, ep_implementation="all_to_all")
    except ValueError as error:
        raise ValueError(f"{key}: {name} cannot be cut so: {error}") from error
    if tied:
        head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
        assert isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding)
        head.weight = embedding.weight
    return [hf.get_submodule(path) for path, rule in expert_plan.items() if rule == DISPATCHED]


def _plans(
    hf: PreTrainedModel, tensor: int, expert: int, *, split_head: bool, key: str
) -> tuple[dict[str, str], dict[str, str]]:
    """The rule of each module or parameter that `tensor` ranks cut, and of each that `expert` ranks
    cut.

    Raises:
        ValueError: if transformers is too old, or the model has no such plan.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        raise _too_old(key) from error
    try:
        chosen = DistributedConfig(tp_size=tensor, ep_size=expert, fsdp_size=max(expert // tensor, 1))
    except TypeError as error:  # a version that has no size for experts
        raise _too_old(key) from error
    chosen.fsdp_size = 1  # how parameters are sharded is not its business: that rule would ask the model for a plan
    if split_head and tensor > 1:
        chosen.tp_plan = {"lm_head": "colwise"}
    try:
        tensor_plan, expert_plan, _ = hf._resolve_parallel_plans(chosen)
    except ValueError as error:
        raise ValueError(f"{key}: {type(hf).__name__} has no plan for it: {error}") from error
    return _with_adapters(hf, tensor_plan, key), expert_plan


def _with_adapters(hf: PreTrainedModel, plan: dict[str, str], key: str) -> dict[str, str]:
    """A plan whose rules for layers with an adapter B A are rules for their parts.

    Where the base's rows are cut, so are B's, and A is whole on every rank; where its columns are cut, so are A's, whose products are
    added up over ranks before B, which is whole, multiplies them.

    Raises:
        ValueError: if it is not known how an adapter's layer is to be cut by its rule.
    """
    out = dict(plan)
    for path, module in hf.named_modules():
        if not path.endswith(f".{BASE}"):
            continue
        owner = path.removesuffix(f".{BASE}")
        rule = out.pop(owner, None)
        if rule == OF_OUTPUTS:
            out[owner] = rule
        elif rule is not None:
            side = next((part for kind, part in CUT_WITH_BASE.items() if kind in rule), None)
            if side is None:
                raise ValueError(f"{key}: {owner} is cut by the rule {rule}, and its adapter cannot be; use shard with train.lora")
            cut = [path, *(f"{path}.{name}" for name, _ in module.named_parameters())]
            for part, linear in hf.get_submodule(f"{owner}.{side}").named_children():
                cut += [f"{owner}.{side}.{part}", *(f"{owner}.{side}.{part}.{name}" for name, _ in linear.named_parameters())]
            out |= dict.fromkeys(cut, rule)
    return out


def _too_old(key: str) -> ValueError:
    return ValueError(f"{key}: cutting layers or experts needs transformers 5.23 or newer; upgrade it, or do without")


def cuts_of(hf: PreTrainedModel, tensor: int, expert: int, *, split_head: bool, key: str = "train.parallel") -> dict[str, Cut]:
    """Effect of `apply_plans` on each parameter, by name, without applying it; the model may be without
    contents.

    Raises:
        ValueError: as `apply_plans`.
    """
    tensor_plan, expert_plan = _plans(hf, tensor, expert, split_head=split_head, key=key) if max(tensor, expert) > 1 else ({}, {})
    embedding = hf.get_input_embeddings().weight
    cuts: dict[str, Cut] = {}
    for name, p in hf.named_parameters():
        owner, _, kind = name.rpartition(".")
        rule = tensor_plan.get(name, tensor_plan.get(owner, ""))
        if expert_plan.get(name, "") == GROUPED:
            if p.shape[0] % expert:
                raise ValueError(f"{key}: {type(hf).__name__} has {p.shape[0]} experts, which {expert} ranks of expert cannot share evenly")
            cuts[name] = Cut(expert, 0, of_experts=True)
        elif (tensor > 1 and p is embedding) or "colwise" in rule or ("rowwise" in rule and kind != "bias"):
            cuts[name] = Cut(tensor, p.dim() - 1 if "rowwise" in rule and p is not embedding else max(p.dim() - 2, 0))
        else:
            cuts[name] = Cut(1, 0)
    return cuts


def _untie(hf: PreTrainedModel) -> bool:
    """Give a tied head its own parameter, over the same memory, since plans name each one's rule.
    Returns True if it was tied."""
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding) or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach(), requires_grad=embedding.weight.requires_grad)
    return True


def layers_of(hf: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order."""
    return [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]
