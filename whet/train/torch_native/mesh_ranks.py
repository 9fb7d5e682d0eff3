"""Ranks of a mesh: rows shared out by their cost, what each found put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from whet.core.batch import TrainBatch, as_list, stretches
from whet.core.logprobs import WHOLE, Vocabulary
from whet.model.causal import CausalModel
from whet.model.decoder import DecoderModel
from whet.model.scalar import ScalarModel
from whet.model.shards import whole
from whet.model.tensor_files import save_model
from whet.observe.metrics import Metrics, merge_metrics
from whet.train.balance import balanced_parts
from whet.train.flops import PassSize
from whet.train.sending import broadcast_object, receive_object, send_object
from whet.train.torch_native.config import ContextAttention, ParallelConfig
from whet.train.torch_native.context_row import Context
from whet.train.torch_native.layout import Plan, RowKind, RowTurn
from whet.train.torch_native.mesh import Mesh
from whet.train.torch_native.packing import split_rows
from whet.train.torch_native.ranks import Found, Share
from whet.train.torch_native.sharding import shard_model
from whet.train.torch_native.vocabulary import SplitVocabulary

T = TypeVar("T")


class MeshRanks:
    """The ranks of a mesh, and a model that is spread over them.

    Args:
        model: whole on every rank, or on every rank without contents; it is sharded in place, and what files have of it is read then.
        mesh: the ranks.
        size: size of the model's passes.
        offload: True if what a rank keeps of the parameters is in the CPU's memory.
        key: the setting that the mesh's degrees come from, for error messages.

    Raises:
        ValueError: if the model cannot be cut by the mesh's degrees, its files are damaged, or whet cannot run it.
    """

    def __init__(
        self, model: CausalModel | ScalarModel, mesh: Mesh, size: PassSize, *, offload: bool = False, key: str = "train.parallel"
    ) -> None:
        self._cost = size.of_sequence
        self.mesh = mesh
        self.context = context_of(model, mesh, key)
        self.vocabulary = vocabulary_of(model, mesh)
        self.row_ranks = mesh.config.context
        self.writers: ProcessGroup | None = mesh.writers
        self.first = dist.get_rank() == 0
        self._heads = mesh.share_heads
        self._is_head = dist.get_rank() in self._heads
        self._within = mesh.share_groups
        self._trunk = shard_model(model, mesh, offload=offload, key=key)
        if model.contents is not None:
            self._fill(model, offload=offload)

    def _fill(self, model: CausalModel | ScalarModel, *, offload: bool) -> None:
        """Each rank reads its parts of the model, which all check together."""
        device, fault = model.device, None
        try:
            model.fill(torch.device("cpu") if offload else device)
        except ValueError as error:
            fault = str(error)
        if (fault := self.agree(fault)) is not None:
            raise ValueError(fault)
        model.computes_on = device if offload else None
        self.forward(model.check)
        self.rest()

    def forward(self, compute: Callable[[], T]) -> T:
        return cast(T, self._trunk(compute))

    def rest(self) -> None:
        for module in self._trunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def share(self, batch: TrainBatch | None, plan: Callable[[TrainBatch], Plan]) -> Share:
        found: Plan | None = None
        fault: str | None = None
        if self.first:
            assert batch is not None, "rank 0 has the batch"
            try:
                found = plan(batch)
            except ValueError as error:
                fault = str(error)
        if (fault := self.agree(fault)) is not None:
            raise ValueError(fault)
        share: Share | None = None
        if batch is not None and found is not None:
            parts = share_rows(batch, found, self._cost, self.mesh.config.num_data)
            for rank, rows in reversed(list(zip(self._heads, parts, strict=True))):  # its own last: it keeps no other meanwhile
                share = cut_share(batch, rows, found.kind)
                if rank:
                    send_object(share, rank)
        elif self._is_head:
            share = receive_object(0)
        for group in self._within:
            share = broadcast_object(share, group)
        assert share is not None
        return share

    def begin(self, *, last: bool) -> None:
        if self.mesh.config.replicate > 1:  # replicas add up their gradients once a step
            cast(FSDPModule, self._trunk).set_requires_all_reduce(last)

    def agree(self, fault: str | None) -> str | None:
        flag = torch.tensor([fault is not None], dtype=torch.int32)
        dist.all_reduce(flag)
        if not int(flag):
            return None
        faults: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        return next(found for found in faults if found is not None)

    def gather(self, share: Share, columns: Tensor, batch: TrainBatch | None) -> Tensor:
        own = columns[:, : int(share.batch.lengths[: share.num_own].sum())]
        if not self.first:
            if self._is_head:
                send_object((share.places[: share.num_own], own), 0)
            return columns
        assert batch is not None, "rank 0 has the batch"
        whole = torch.zeros(len(columns), batch.num_tokens, *columns.shape[2:], dtype=columns.dtype)
        for rank in self._heads:
            places, found = receive_object(rank) if rank else (share.places[: share.num_own], own)
            whole[:, stretches(batch.lengths, torch.tensor(places, dtype=torch.int64))] = found
        return whole

    def total(self, number: int) -> int:
        together = torch.tensor(number)
        dist.all_reduce(together, group=self.mesh.data_group)
        return int(together)

    def add(self, found: Found) -> Found:
        all_found: list[Found] = [found] * self.mesh.config.num_data
        dist.all_gather_object(all_found, replace(found, metrics=_as_numbers(found.metrics)), group=self.mesh.data_group)
        return Found(
            sum(each.loss for each in all_found),
            sum(each.num_tokens for each in all_found),
            sum(each.flops for each in all_found),
            reduce(merge_metrics, (each.metrics for each in all_found), {}),
        )

    @torch.no_grad()
    def given(self, named: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            yield name, whole(tensor).to(dtype) if isinstance(tensor, DTensor) else tensor

    def taken(self, weights: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor.to(own[name].dtype) if name in own else tensor) for name, tensor in weights)

    def export(self, model: DecoderModel, folder: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        state: dict[str, Tensor] = {}
        for name, tensor in weights:  # all ranks put each together, one keeps them
            if self.first:
                state[name] = tensor.cpu()
        if self.first:
            save_model(model.hf, folder, state)
            path = folder / "config.json"  # transformers writes the parameters' dtype
            path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
        dist.barrier()


def _as_numbers(metrics: Metrics) -> Metrics:
    """Metrics that hold no tensors."""
    return {
        name: replace(metric, **{field.name: float(getattr(metric, field.name)) for field in fields(metric)})
        for name, metric in metrics.items()
    }


def head_size(model: CausalModel | ScalarModel) -> int:
    """Entries of a query."""
    text = model.config.get_text_config()
    return text.head_dim if "head_dim" in text.to_dict() else text.hidden_size // text.num_attention_heads


def context_of(model: CausalModel | ScalarModel, mesh: Mesh, key: str) -> Context | None:
    """The ranks that share rows with this one. Raises as `attention_of`."""
    degrees = mesh.config
    if degrees.context == 1:
        return None
    kind = attention_of(model, degrees, key)
    return Context(mesh.rows.get_group("context"), mesh.rows.get_local_rank("context"), degrees.context, kind)


def attention_of(model: CausalModel | ScalarModel, degrees: ParallelConfig, key: str = "train.parallel") -> ContextAttention:
    """Attention of ranks that share rows; `key` is the setting that the degrees come from.

    Raises:
        ValueError: if the heads do not divide for Ulysses where it is asked for.
    """
    heads = model.config.get_text_config().num_attention_heads // degrees.tensor
    kind = degrees.context_attention
    if kind == "auto":
        kind = "gather" if heads % degrees.context else "ulysses"
    if kind == "ulysses" and heads % degrees.context:
        raise ValueError(
            f"{key}: context is {degrees.context}, but each rank has {heads} heads, which Ulysses cannot share out; use "
            "context_attention=gather, or another degree"
        )
    return kind


def vocabulary_of(model: CausalModel | ScalarModel, mesh: Mesh) -> Vocabulary:
    """Which logits a rank has: those of its stretch, as DTensor cuts it."""
    if mesh.config.tensor == 1 or isinstance(model, ScalarModel):
        return WHOLE
    size = -(-model.vocab_size // mesh.config.tensor)
    return SplitVocabulary(mesh.rows.get_group("tensor"), size * mesh.rows.get_local_rank("tensor"), model.vocab_size)


def cut_share(batch: TrainBatch, rows: Sequence[RowTurn], kind: RowKind) -> Share:
    """The part of a batch that a rank with these rows gets."""
    own = [i for row in rows if row.counts for i in row.samples]
    places = list(dict.fromkeys([*own, *(i for row in rows for i in row.samples)]))
    number = {place: i for i, place in enumerate(places)}
    renumbered = [RowTurn([number[i] for i in row.samples], row.counts) for row in rows]
    return Share(batch.select(places), places, len(own), renumbered, kind)


def share_rows(batch: TrainBatch, plan: Plan, cost: Callable[[int], float], num_ranks: int) -> list[list[RowTurn]]:
    """The rows of each rank: as many for all, of about equal cost, the dearest first.

    Rows are cut until their number divides; where there are fewer units than ranks, those that are left compute a row that does not count.

    Args:
        batch: whole.
        plan: its rows.
        cost: cost of a sequence with this number of tokens.
        num_ranks: ranks with rows of their own.
    """
    if not plan.rows:
        return [[] for _ in range(num_ranks)]
    lengths: list[int] = as_list(batch.lengths)
    rows = _divisible(batch, plan, lengths, num_ranks)
    turns = [RowTurn(row) for row in rows]
    shortest = min((row for row in rows), key=lambda row: sum(lengths[i] for i in row))
    turns += [RowTurn(shortest, counts=False)] * (-len(turns) % num_ranks)
    costs = [sum(cost(lengths[i]) for i in turn.samples) for turn in turns]
    return [
        [turns[k] for k in sorted(part, key=lambda k: (-costs[k], k))] for part in balanced_parts(costs, num_ranks, equal_size=True)
    ]


def _divisible(batch: TrainBatch, plan: Plan, lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The plan's rows, cut between units until their number is a multiple of the ranks, or every row
    holds one unit."""
    unit_of: list[int] = list(range(batch.num_samples)) if batch.unit is None else as_list(batch.unit)
    units: list[list[int]] = []
    rows: list[list[int]] = []
    for row in plan.rows:
        members: dict[int, list[int]] = {}
        for i in row:
            members.setdefault(unit_of[i], []).append(i)
        rows.append(list(range(len(units), len(units) + len(members))))
        units += members.values()
    wanted = min(-(-len(rows) // num_ranks) * num_ranks, len(units))
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    return [[i for k in row for i in units[k]] for row in split_rows(rows, sizes, wanted)]
