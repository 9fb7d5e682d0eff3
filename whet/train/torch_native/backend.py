"""The torch-native backend, on one device or a mesh: rows under a token budget, gradients added up, chunked log-probs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from whet.algo.base import LossFunction, Need
from whet.core.batch import TrainBatch, as_list
from whet.core.nonfinite import NonFinite
from whet.model.causal import CausalModel, release_unused
from whet.model.compiled import CompiledLayers
from whet.model.forest_check import forest_fault
from whet.model.freezing import freeze
from whet.model.lora import FILE as ADAPTER_FILE
from whet.model.lora import Adapter, add_adapter
from whet.model.rotary import check_rotary
from whet.model.scalar import ScalarModel
from whet.model.shards import spread_like
from whet.model.tensor_files import write_tensors
from whet.observe.metrics import Last, Mean, Metrics, Total, flatten, merge_metrics
from whet.train.base import Annotator, Backend, Backward
from whet.train.flops import PassSize, pass_size
from whet.train.torch_native.config import RowsSetting, TrainConfig, check_compiled, rows_per_chunk
from whet.train.torch_native.heads import head_of
from whet.train.torch_native.layout import MicroBatch, Plan, RowInput, lay_out, micro_batches, plan_rows
from whet.train.torch_native.loss_scale import LossScale
from whet.train.torch_native.mesh import mesh_of, share_generator
from whet.train.torch_native.mesh_ranks import MeshRanks
from whet.train.torch_native.optim import Optimizer
from whet.train.torch_native.ranks import Found, OneRank, Ranks, Share
from whet.train.torch_native.replay import RouteReplay
from whet.train.torch_native.resting import RestingWeights
from whet.train.torch_native.saving import (
    BASE,
    BUFFERS,
    OPTIMIZER,
    PLACE,
    WEIGHTS,
    check_base,
    check_buffers,
    in_host_memory,
    load_optimizer,
    read_tensors,
    save_tensors,
)
from whet.train.torch_native.terms import NAMES, TermTable
from whet.types import JSON


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """A model's part of a checkpoint, by the names of its files."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, JSON]


class TorchBackend:
    """A `Backend` on one device, or on the ranks of a mesh.

    Args:
        model: trained in place. What kind it is decides what the loss sees, and what can be annotated (`heads`).
        config: budget and optimizer.
        total_steps: optimizer steps of the run, for the schedule. None: a frozen model without an optimizer.
        key: the setting that `config.parallel` comes from, for error messages.
        rests: True if the weights of a frozen model lie in the CPU's memory between passes.

    With `config.parallel` every process of the job makes one, of the same model, whole or without contents, which is sharded in place.

    Raises:
        ValueError: if forests are asked for and the model cannot run them on its device, the model or the job does not fit the degrees, or
            layers are to be compiled and cannot be.
    """

    def __init__(
        self,
        model: CausalModel | ScalarModel,
        config: TrainConfig,
        total_steps: int | None,
        key: str = "train.parallel",
        *,
        rests: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.dtype = model.dtype
        """Type of computation, and of the weights in `named_weights`."""
        self.device = model.device
        self.adapter: Adapter | None = None
        """The adapter that trains; None: the whole model trains."""
        degrees = config.degrees
        mesh = mesh_of(degrees, model.device.type, key) if degrees is not None else None
        if total_steps is not None and config.lora is not None:
            if mesh is not None:
                share_generator()
            self.adapter = add_adapter(model, config.lora)
        if total_steps is not None and config.freeze:
            freeze(model.hf, config.freeze)
        self._size, self.flops = pass_size(model), 0
        self._ranks: Ranks = OneRank()
        if degrees is not None and mesh is not None:
            if config.compile:
                check_compiled(degrees, key)
            self._ranks = MeshRanks(model, mesh, self._size, offload=config.offload, key=key)
        self._compiled = CompiledLayers(model.hf, model.device) if config.compile else None
        self.notes: list[str] = []
        self._rows: RowsSetting = self._possible_rows()
        self.optimizer: Optimizer | None = None
        if total_steps is not None:
            trained = [(name, p) for name, p in model.hf.named_parameters() if p.requires_grad]
            lies_here = config.offload and config.degrees is None  # a mesh's parameters lie there themselves
            self.optimizer = Optimizer(trained, config.optim, total_steps, offload=lies_here)
        self._scale = LossScale() if total_steps is not None and self.dtype == torch.float16 else None
        self._since_step: list[Callable[[], Backward]] = []
        """Backward passes whose gradients are added up, where an overflow may ask for them again."""
        self._replay: RouteReplay | None = None
        if config.routing_replay != "off" and total_steps is not None and isinstance(model, CausalModel):
            self._replay = RouteReplay(model, config.routing_replay)
        self._head = head_of(model, rows_per_chunk(config, model.vocab_size), self._ranks)
        self._resting = RestingWeights(model) if rests and mesh is None and model.device.type != "cpu" else None

    def _possible_rows(self) -> RowsSetting:
        """The kind of rows that the settings, the ranks and the device allow."""
        if self.config.rows == "chains":
            return "chains"
        context = self._ranks.context
        if context is not None and context.attention == "gather":
            fault: str | None = "ranks that gather keys and values for their queries attend in chains"
        else:
            fault = self._ranks.forward(lambda: forest_fault(self.model))
            self._ranks.rest()
        if fault is None:
            return self.config.rows
        if self.config.rows == "forest":
            raise ValueError(f"train.rows is forest, but {fault}; use train.rows=chains")
        self.notes.append(f"train.rows: chains, since {fault}")
        return "chains"

    def annotate(self, batch: TrainBatch | None, need: Need) -> TrainBatch:
        return self._annotate(batch, need, self._size, self._replay)

    def _annotate(self, batch: TrainBatch | None, need: Need, size: PassSize, replay: RouteReplay | None) -> TrainBatch:
        if need not in self._head.computes:
            raise ValueError(f"this backend cannot compute {need}")
        batch = batch if self._ranks.first else None
        flops, names = 0, self._head.computes[need]
        keeps = replay is not None and replay.keeps and need is Need.OLD_LOGPROBS
        share = self._share(None if batch is None else self._head.annotated(batch), None if keeps else replay)
        columns = torch.zeros(len(names), share.batch.num_tokens, dtype=torch.float32)
        kept = replay.nothing(share.batch.num_tokens) if replay is not None and keeps else None
        with torch.no_grad(), self._passes(replay):
            for micro in self._micro_batches(share, replay):
                _put(columns, share.batch, micro, torch.stack(self._head.columns(micro, need)))
                if replay is not None and kept is not None:
                    _put(kept[None], share.batch, micro, replay.kept(micro)[None])
                flops += size.forward(*_needed(micro))
        self.flops += self._ranks.total(flops)
        self._ranks.rest()
        columns = self._ranks.gather(share, columns, batch)
        found = dict(zip(names, columns.unbind(), strict=True))
        if kept is not None:
            found["routes"] = self._ranks.gather(share, kept[None], batch)[0]
        return (share.batch if batch is None else batch).with_(**found)

    def forward_backward(
        self, batch: TrainBatch | None, loss: LossFunction, *, entropy_grad: bool = False, per_token: bool = False
    ) -> Backward:
        if self._scale is not None:
            self._since_step.append(partial(self._forward_backward, batch, loss, entropy_grad=entropy_grad))
        return self._forward_backward(batch, loss, entropy_grad=entropy_grad, per_token=per_token)

    def _forward_backward(
        self, batch: TrainBatch | None, loss: LossFunction, *, entropy_grad: bool, per_token: bool = False
    ) -> Backward:
        assert self.optimizer is not None, "a frozen model has no gradients"
        batch = batch if self._ranks.first else None
        scale = 1.0 if self._scale is None else self._scale.value
        share = self._share(batch, self._replay)
        terms = TermTable() if per_token else None
        columns = torch.zeros(1 if terms is None else 1 + len(NAMES), share.batch.num_tokens, dtype=torch.float32)
        metrics: Metrics = {}
        total, num_tokens, flops = 0.0, 0, 0
        with self._passes(self._replay):
            for i, micro in enumerate(self._micro_batches(share, self._replay)):
                part, num_computed = micro.part, micro.row.num_tokens
                assert part.weights is not None, "weights are assigned before the batch is cut"
                self._ranks.begin(last=i == len(share.rows) - 1)
                found = loss(part, out := self._head.outputs(micro, entropy_grad=entropy_grad, ranked=per_token))
                value = (part.weights * found.terms).sum()
                number = float(value.detach())
                bad = None if math.isfinite(number) else f"{number} ({_where(part, found.terms, [share.places[k] for k in micro.samples])})"
                if (fault := self._ranks.agree(bad)) is not None:
                    self._drop_gradients()
                    raise NonFinite(f"the loss of a micro-batch is {fault}")
                (value if scale == 1.0 else value * scale).backward()
                if terms is not None:
                    _put(columns[1:], share.batch, micro, terms.rows_of(part, out, found))
                if not micro.counts:
                    continue
                total += number
                num_tokens += num_computed
                flops += self._size.forward(*_needed(micro)) + self._size.backward(*_needed(micro))
                shared = Mean(part.num_tokens - num_computed, part.num_tokens)
                routed = {} if self._replay is None else self._replay.metrics()
                metrics = merge_metrics(metrics, {**found.metrics, **routed, "train/shared": shared})
                _put(columns[:1], share.batch, micro, out.logprobs)
        columns = self._ranks.gather(share, columns, batch)
        together = self._ranks.add(Found(total, num_tokens, flops, metrics))
        self.flops += together.flops
        if self._compiled is not None:
            together.metrics["time/compile_s"] = Total(self._compiled.take_seconds())
        mask = (share.batch if batch is None else batch).loss_mask
        tokens = None if terms is None else terms.tokens(columns[1:], mask)
        return Backward(together.loss, columns[0], together.metrics, together.num_tokens, tokens)

    def optim_step(self) -> Metrics:
        assert self.optimizer is not None, "a frozen model has no optimizer"
        if self._scale is None:
            return self.optimizer.step()
        repeats = 0
        while True:
            scale = self._scale.value
            try:
                metrics = self.optimizer.step(scale)
                break
            except NonFinite as error:
                if not self._scale.lower():
                    self._drop_gradients()
                    remedy = "the loss is not scaled any more: if float16 is too narrow for them, set model.dtype to bfloat16 or float32"
                    raise NonFinite(f"{error}; {remedy}") from error
            repeats += 1
            for again in self._since_step:
                again()
        if float(flatten(metrics)["optim/grad_norm"]) > 0:  # zeros fit under any scale, and say nothing of this one
            self._scale.succeed()
        self._since_step.clear()
        return {**metrics, "optim/loss_scale": Last(scale), "optim/repeated_steps": Total(repeats)}

    def _drop_gradients(self) -> None:
        """Forget the passes since the last step."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self._since_step.clear()

    def named_weights(self, kind: Literal["merged", "adapter", "base"] = "merged") -> Iterable[tuple[str, Tensor]]:
        if kind != "adapter":
            return self._ranks.given(self.model.merged_weights() if kind == "merged" else self.model.base_weights(), self.dtype)
        if self.adapter is None:
            raise ValueError("this policy is trained whole: it has no adapter to publish")
        return self._ranks.given(iter(self.adapter.tensors().items()), self.dtype)

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        return self._ranks.given(self.model.merged_state(), self.dtype)

    def release_memory(self) -> None:
        release_unused()

    def base(self) -> Annotator | None:
        return None if self.adapter is None else _Base(self, self.adapter)

    def export(self, folder: Path, base: str = "") -> None:
        """Write Hugging Face safetensors and config; of an adapter, peft's files, which name `base` as their base model."""
        if self.adapter is None:
            self._ranks.export(self.model, folder, self._saved(), self.dtype)
            return
        tensors = {name: t.detach().contiguous() for name, t in self.named_weights("adapter")}
        if self._ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(tensors, folder / ADAPTER_FILE)
            self.adapter.describe(folder, base)

    def export_merged(self, folder: Path) -> None:
        """Write the whole model with the adapter added to its weights."""
        self._ranks.export(self.model, folder, self._saved(), self.dtype)

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a model's folder."""
        yield from self.named_weights()
        yield from self._ranks.given(self.model.saved_buffers(), self.dtype)

    def save(self, folder: Path) -> None:
        self._write(folder, self._kept())

    def stage(self, folder: Path) -> Callable[[], None]:
        kept = self._kept()
        held = {file: {name: in_host_memory(tensor) for name, tensor in tensors.items()} for file, tensors in kept.tensors.items()}
        return lambda: self._write(folder, replace(kept, tensors=held))

    def _kept(self) -> CheckpointContent:
        """Content of a checkpoint."""
        tensors, texts = {WEIGHTS: self._trained()}, dict[str, JSON]()
        if self.adapter is None and self._ranks.first and (buffers := dict(self.model.saved_buffers())):
            tensors[BUFFERS] = buffers
        if self.adapter is not None:
            texts[BASE] = {"digest": self.adapter.base_digest(), "scale": self.adapter.scale}
        if self.optimizer is not None:
            tensors[OPTIMIZER] = self.optimizer.tensors()
            scaled = {} if self._scale is None else {"loss_scale": self._scale.state()}
            texts[PLACE] = {"name": self.optimizer.config.name, "steps": self.optimizer.steps, **scaled}
        return CheckpointContent(tensors, texts)

    def _write(self, folder: Path, kept: CheckpointContent) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file, tensors in kept.tensors.items():
            save_tensors(tensors, folder / file, self._ranks.writers)
        if self._ranks.first:
            for name, text in kept.texts.items():
                (folder / name).write_text(json.dumps(text))

    def load(self, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        if weights:
            if self.adapter is not None:
                check_base(folder / BASE, self.adapter)
            check_buffers(folder / BUFFERS, self.model.saved_buffers())
            self._take(read_tensors(folder / WEIGHTS, self._trained()).items(), str(folder / WEIGHTS))
        if optimizer and self.optimizer is not None:
            scale = load_optimizer(self.optimizer, folder)
            self._since_step.clear()
            if self._scale is not None:
                self._scale.load(scale)

    def _trained(self) -> dict[str, Tensor]:
        """Trained tensors for a checkpoint: every weight, or the adapter."""
        return dict(self.model.named_weights()) if self.adapter is None else self.adapter.tensors()

    def copy_weights(self, source: Backend) -> None:
        self._take(self._ranks.taken(source.named_weights(), self._trained()), "what was to be copied")

    def _take(self, weights: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Take over weights one after another, so that no more than one of them is held whole."""
        own, odd, taken = self._trained(), set[str](), set[str]()
        with torch.no_grad():
            for name, found in weights:
                if name not in own:
                    odd.add(name)
                    continue
                tensor = own[name]
                if found.shape != tensor.shape or found.dtype != tensor.dtype:
                    described, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (found, tensor))
                    raise ValueError(f"{source} is of another model: {name} is {described}, not {wanted}")
                tensor.copy_(spread_like(found, tensor))
                taken.add(name)
        if odd := odd | (own.keys() - taken):
            raise ValueError(f"{source} is of another model: {len(odd)} names differ, among them {', '.join(sorted(odd)[:3])}")
        if self.optimizer is not None:
            self.optimizer.refresh_masters()

    @contextmanager
    def _passes(self, replay: RouteReplay | None) -> Iterator[None]:
        """Inside, the model computes as it does for training."""
        with ExitStack() as inside:
            if replay is not None:
                inside.enter_context(replay.watched())
            if self._compiled is not None:
                inside.enter_context(self._compiled.on())
            if self._resting is not None:
                inside.enter_context(self._resting.awake())
            yield

    def _share(self, batch: TrainBatch | None, replay: RouteReplay | None) -> Share:
        """This rank's part of the batch that rank 0 has; without its experts where nothing replays them."""
        if batch is not None:
            batch = batch.with_(routes=None) if replay is None else replay.shaped(batch)
        return self._ranks.share(batch, self._plan)

    def _plan(self, batch: TrainBatch) -> Plan:
        if self._replay is not None:
            self._replay.check(batch)
        check_rotary(as_list(batch.lengths), self.model.rotary_limit, type(self.model.hf).__name__)
        return plan_rows(batch, self._rows, self.config.max_tokens_per_device * self._ranks.row_ranks)

    def _micro_batches(self, share: Share, replay: RouteReplay | None) -> Iterator[MicroBatch]:
        """Each row of this rank, laid out."""
        device, context = self.model.device, self._ranks.context

        def lay(part: TrainBatch) -> RowInput:
            return lay_out(part, share.kind, device, self.dtype, context)

        for micro in micro_batches(share.batch, share.rows, lay, device, projects=self._head.projects):
            if replay is not None:
                replay.begin(micro)
            yield micro


class _Base:
    """A model whose adapter is off while it annotates."""

    def __init__(self, backend: TorchBackend, adapter: Adapter) -> None:
        self._backend, self._adapter = backend, adapter
        self.notes: list[str] = []  # what there is to know of it, the backend itself says
        self._size = backend._size.without_adapter

    @property
    def flops(self) -> int:
        return self._backend.flops

    def annotate(self, batch: TrainBatch | None, need: Need) -> TrainBatch:
        with self._adapter.off():
            return self._backend._annotate(batch, need, self._size, None)


def _needed(micro: MicroBatch) -> tuple[int, int, int]:
    """Tokens, pairs and lines of a micro-batch: none, where it does not count."""
    row = micro.row
    return (row.num_tokens, row.num_pairs, len(micro.lines) if micro.lines is not None else 0) if micro.counts else (0, 0, 0)


def _put(columns: Tensor, batch: TrainBatch, micro: MicroBatch, values: Tensor) -> None:
    """Put the values of a micro-batch that counts, [t] or [K, t, ...], to their places in the columns of the batch. [K, T, ...]"""
    if not micro.counts:
        return
    starts = batch.starts.tolist()
    lengths = batch.lengths[micro.samples].tolist()
    pieces = values.detach().to("cpu", columns.dtype).split(lengths, dim=min(values.dim() - 1, 1))
    for i, length, piece in zip(micro.samples, lengths, pieces, strict=True):
        columns[:, starts[i] : starts[i] + length] = piece


def _where(part: TrainBatch, terms: Tensor, samples: list[int]) -> str:
    """Which tokens are to blame, by the numbers that their samples have in the whole batch."""
    bad = (~torch.isfinite(terms)).nonzero().squeeze(-1)
    if not len(bad):
        return "every term is finite, their weighted sum is not"
    blamed = [samples[i] for i in part.sample_of_token[bad].unique().tolist()]
    return f"{len(bad)} tokens of the step's samples {blamed[:5]}"
