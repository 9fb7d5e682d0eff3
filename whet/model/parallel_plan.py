"""The one place that touches transformers' parallel plans: a model's own rules for its layers and experts, applied in place.

A weight becomes a DTensor of which each rank keeps its part; a layer's forward exchanges what it has to.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

DISPATCHED = "ep_dispatch_experts"
"""transformers' name of the rule for a module whose experts are spread over ranks."""


def apply_plans(
    hf: PreTrainedModel, tensor: DeviceMesh, expert: DeviceMesh | None, *, split_head: bool, key: str = "train.parallel"
) -> list[nn.Module]:
    """Cut a model's layers over the ranks of `tensor`, and its experts over those of `expert`.

    Args:
        hf: whole on every rank, with the same weights.
        tensor: the ranks that compute the same tokens; of one rank: no layer is cut.
        expert: the ranks that experts are spread over. None: no expert is.
        split_head: whether each rank of `tensor` is to give logits of its own stretch of the vocabulary.
        key: the setting that asks for it, for error messages.

    Returns:
        The modules of experts that are spread.

    Raises:
        ValueError: if transformers is too old, the model has no such plan, or its sizes do not divide.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ValueError(f"{key}: cutting layers or experts needs transformers 5.23 or newer; upgrade it, or do without") from error
    name, num_experts = type(hf).__name__, expert.size() if expert is not None else 1
    chosen = DistributedConfig(tp_size=tensor.size(), ep_size=num_experts, fsdp_size=max(num_experts // tensor.size(), 1))
    chosen.fsdp_size = 1  # how parameters are sharded is not its business: that rule would ask the model for a plan
    if split_head and tensor.size() > 1:
        chosen.tp_plan = {"lm_head": "colwise"}
    tied = _untie(hf)
    try:
        tensor_plan, expert_plan, _ = hf._resolve_parallel_plans(chosen)
    except ValueError as error:
        raise ValueError(f"{key}: {name} has no plan for it: {error}") from error
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


def _untie(hf: PreTrainedModel) -> bool:
    """Give a tied head a parameter of its own, over the same memory, since plans name each one's rule. Whether it was tied."""
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding) or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach(), requires_grad=embedding.weight.requires_grad)
    return True


def layers_of(hf: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order."""
    return [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]


def active_parameters(hf: PreTrainedModel) -> int:
    """Entries of the matrices that a token goes through: of a mixture's experts those that it is sent to, and not the embedding."""
    text = hf.config.get_text_config()
    embedding = hf.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    output = hf.get_output_embeddings()
    head = output.weight if isinstance(output, nn.Linear) else None
    total = embedding.weight.numel() if head is not None else 0
    for p in hf.parameters():
        if p.dim() == 3:  # the experts of a layer, one after another
            total += p.numel() * text.num_experts_per_tok // p.shape[0]
        elif p.dim() == 2 and p is not embedding.weight and p is not head:
            total += p.numel()
    return total
