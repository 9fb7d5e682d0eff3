"""Traffic of one rank in an optimizer step, by formula: bytes by kind, from the model's shapes and the
degrees.

A rank of n sends (n - 1) / n of tensors that are gathered, scattered or exchanged, and twice that of
tensors that are reduced on all (ring algorithms; NCCL's documentation of "bus bandwidth" has the same
factors). `benchmarks/parallel_bytes.py` compares real exchanges with this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from whet.model.causal import CausalModel
from whet.model.decoder import DecoderModel
from whet.model.parallel_plan import Cut, cuts_of, layers_of
from whet.model.scalar import ScalarModel
from whet.train.torch_native.config import ParallelConfig
from whet.train.torch_native.mesh_ranks import head_size

REDUCED_BYTES = 4
"""Bytes of a gradient's entry in a reduction: float32."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One kind of exchange."""

    what: str
    sent_bytes: float
    """Bytes sent by one rank in one optimizer step."""
    span: int
    """Number of neighbouring ranks that contain the exchanging group: with more than a node has, it
    goes over the network."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Computation of each rank in an optimizer step."""

    micro_batches: int
    tokens: int
    """Tokens of each micro-batch that are this rank's own."""
    recompute: bool = False
    """True if layers are computed again in the backward pass, with their exchanges."""


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Entries of a rank's parameters once they are put together: cut by the model's plan, and by nothing
    else.
    """

    layers: int
    experts: int
    """Entries of the layers' experts, if these are spread; not included in `layers`."""
    rest: int
    """Embedding, last norm, head: what no layer has."""
    trained: tuple[int, int, int]
    """Trained entries of each of them."""


def groups_of(model: DecoderModel, degrees: ParallelConfig) -> ParameterGroups:
    """Count a model's parameters; it may be without contents.

    Raises:
        ValueError: if the model has no plan for the degrees.
    """
    cuts = cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel))
    in_layers = {p for layer in layers_of(model.hf) for p in layer.parameters()}
    sizes, trained = [0, 0, 0], [0, 0, 0]
    for name, p in model.hf.named_parameters():
        kind = 1 if cuts[name].of_experts else 0 if p in in_layers else 2
        size = own_size(p, cuts[name])
        sizes[kind] += size
        trained[kind] += size * p.requires_grad
    return ParameterGroups(sizes[0], sizes[1], sizes[2], (trained[0], trained[1], trained[2]))


def own_size(param: nn.Parameter, cut: Cut) -> int:
    """Entries of a rank's part by the model's plan: of the largest part, where it does not divide."""
    size = param.shape[cut.dim] if param.dim() else 1
    return param.numel() // size * -(-size // cut.parts)


def flows_of(model: CausalModel | ScalarModel, groups: ParameterGroups, degrees: ParallelConfig, passes: Passes) -> list[Flow]:
    """Every kind of exchange of a step.

    Args:
        model: whole; it may be without contents.
        groups: its `groups_of` the degrees.
        degrees: degrees that it is spread by.
        passes: computation of each rank.
    """
    return [
        flow
        for flows in (_sharding(model, groups, degrees, passes), _tensor(model, degrees, passes), _context(model, degrees, passes),
                      _experts(model, degrees, passes))
        for flow in flows
        if flow.sent_bytes
    ]  # fmt: skip


def share(ranks: int) -> float:
    """Share that one rank sends of tensors that `ranks` ranks gather, scatter or exchange."""
    return (ranks - 1) / ranks


def _sharding(model: DecoderModel, groups: ParameterGroups, degrees: ParallelConfig, passes: Passes) -> Iterator[Flow]:
    """Each layer is put together for the forward pass and again for the backward pass, the rest once;
    gradients are scattered.
    """
    size = model.dtype.itemsize
    block = degrees.shard * degrees.context * degrees.tensor
    over, experts_over = degrees.shard * degrees.context, block // degrees.expert
    gathered = share(over) * (2 * groups.layers + groups.rest) + share(experts_over) * 2 * groups.experts
    yield Flow("parameters put together", gathered * size * passes.micro_batches, block)
    dense, experts = groups.trained[0] + groups.trained[2], groups.trained[1]
    scattered = share(over) * dense + share(experts_over) * experts
    yield Flow("gradients shared out", scattered * REDUCED_BYTES * passes.micro_batches, block)
    kept = dense / over + experts / experts_over
    yield Flow("gradients of replicas", 2 * share(degrees.replicate) * kept * REDUCED_BYTES, block * degrees.replicate)


def _tensor(model: DecoderModel, degrees: ParallelConfig, passes: Passes) -> Iterator[Flow]:
    """Hidden states are added up behind the attention, the feed-forward part and the embedding; on the way
    back before every matrix whose outputs are cut: queries, keys, values, gate and up of a gated part, and
    the head.
    """
    if degrees.tensor == 1:
        return
    text = model.config.get_text_config()
    num = text.num_hidden_layers
    dense = num - _moe_layers(model)
    forward = num + dense + (_moe_layers(model) if degrees.expert == 1 else 0)
    back = 3 * num + 2 * dense + (_moe_layers(model) if degrees.expert == 1 else 0) + 1
    again = num if passes.recompute else 0  # the sum that a layer ends with is not needed again
    if model.adapter is not None:
        again *= 2  # it is: the adapter's product comes after it
        back -= 3  # nothing before the first layer's queries, keys and values trains
    states = passes.tokens * text.hidden_size * model.dtype.itemsize
    sent = 2 * share(degrees.tensor) * (forward + again + 1 + back) * states
    if model.adapter is not None:
        sent += 2 * share(degrees.tensor) * _adapter_sums(model, degrees, passes) * model.dtype.itemsize
    if degrees.expert > 1:  # each rank sends its slice of the tokens on, and all get all results
        sent += share(degrees.tensor) * _moe_layers(model) * 2 * states
    yield Flow("hidden states of tensor ranks", sent * passes.micro_batches, degrees.tensor)


def _adapter_sums(model: DecoderModel, degrees: ParallelConfig, passes: Passes) -> int:
    """Entries of the products with A that are added up: forward where A is cut, and as gradients where B is."""
    cuts = cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel))
    entries = 0
    for name, p in model.hf.named_parameters():
        if ".lora_A." in name and cuts[name].parts > 1:
            entries += p.shape[0] * (2 if passes.recompute else 1)
        elif ".lora_B." in name and cuts[name].parts > 1:
            entries += p.shape[1]
    return passes.tokens * entries


def _context(model: CausalModel | ScalarModel, degrees: ParallelConfig, passes: Passes) -> Iterator[Flow]:
    """Ulysses: queries, keys, values and outputs are exchanged; else keys and values are gathered, and their
    gradients scattered.
    """
    if degrees.context == 1:
        return
    text, ranks = model.config.get_text_config(), degrees.context
    heads, kv = text.num_attention_heads // degrees.tensor, text.num_key_value_heads // degrees.tensor
    ways = 3 if passes.recompute else 2
    token = head_size(model) * model.dtype.itemsize
    if degrees.context_attention == "gather" or (degrees.context_attention == "auto" and heads % ranks):
        entries = 2 * kv * ranks
    else:
        copied = kv if kv % ranks == 0 else ranks if ranks % kv == 0 else heads
        entries = 2 * heads + 2 * copied
    sent = share(ranks) * ways * text.num_hidden_layers * passes.tokens * entries * token
    yield Flow("tokens of context ranks", sent * passes.micro_batches, ranks * degrees.tensor)


def _experts(model: DecoderModel, degrees: ParallelConfig, passes: Passes) -> Iterator[Flow]:
    """Each token goes to its experts and back, forward and backward; as if the router sent as many to every
    rank.
    """
    if degrees.expert == 1:
        return
    text = model.config.get_text_config()
    ways = 6 if passes.recompute else 4
    token = text.num_experts_per_tok * text.hidden_size * model.dtype.itemsize / degrees.tensor
    sent = share(degrees.expert) * ways * _moe_layers(model) * passes.tokens * token
    yield Flow("tokens of experts", sent * passes.micro_batches, degrees.expert)


def _moe_layers(model: DecoderModel) -> int:
    """Layers with experts."""
    return sum(any(p.dim() == 3 for p in layer.parameters()) for layer in layers_of(model.hf))


def seconds_of(flows: list[Flow], per_node: int, inside: float, between: float) -> float:
    """Seconds of the exchanges one after another, without overlap with computation.

    Args:
        flows: exchanges of a step.
        per_node: ranks of a node.
        inside: bytes per second that a rank sends to one of its node.
        between: bytes per second that it sends to one of another node.
    """
    return sum(flow.sent_bytes / (inside if flow.span <= per_node else between) for flow in flows)
