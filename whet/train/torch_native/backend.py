"""The torch-native backend on one device: rows under a token budget, gradients added up, chunked log-probs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from whet.algo.base import LossFunction, Need
from whet.config import Config
from whet.core.batch import TrainBatch
from whet.model.causal import CausalModel
from whet.model.forest_check import forest_fault
from whet.model.lora import FILE as ADAPTER_FILE
from whet.model.lora import Adapter, LoraConfig, add_adapter
from whet.model.scalar import ScalarModel
from whet.observe.metrics import Mean, Metrics, merge_metrics
from whet.train.base import Annotator, Backward, NonFinite
from whet.train.tensor_files import system_errors, write_tensors
from whet.train.torch_native.heads import head_of
from whet.train.torch_native.layout import MicroBatch, Rows, micro_batches
from whet.train.torch_native.optim import OptimConfig, Optimizer

LOGITS_BYTES = 256 * 2**20
"""Size of one chunk of logits that log-probs are computed from."""


class TrainConfig(Config):
    """How the policy is trained."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """AdamW and its schedule."""
    max_tokens_per_device: int = Field(default=16_384, gt=0)
    """Tokens of a row (a micro-batch); those that samples share count once where they are computed once. A longer sample sits alone."""
    rows: Rows = "auto"
    """forest: what samples begin with alike is computed once, forward and backward; chains: every sample whole; auto: forests where they
    save a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` tells what share was saved."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    logprob_chunk_tokens: int | None = Field(default=None, gt=0)
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""


def rows_per_chunk(config: TrainConfig, vocab_size: int) -> int:
    """Rows of logits that log-probs are computed from at a time."""
    return config.logprob_chunk_tokens or max(LOGITS_BYTES // (4 * vocab_size), 64)


class TorchBackend:
    """A `Backend` on one device.

    Args:
        model: trained in place. What kind it is decides what the loss sees, and what can be annotated (`heads`).
        config: budget and optimizer.
        total_steps: optimizer steps of the run, for the schedule. None: a frozen model without an optimizer.

    Raises:
        ValueError: if forests are asked for and the model cannot run them on its device.
    """

    def __init__(self, model: CausalModel | ScalarModel, config: TrainConfig, total_steps: int | None) -> None:
        self.model = model
        self.config = config
        self._rows: Rows = config.rows
        self.notes: list[str] = []
        if config.rows != "chains" and (fault := forest_fault(model)):
            if config.rows == "forest":
                raise ValueError(f"train.rows is forest, but {fault}; use train.rows=chains")
            self._rows = "chains"
            self.notes.append(f"train.rows: chains, since {fault}")
        self.optimizer: Optimizer | None = None
        self.adapter: Adapter | None = None
        """What trains, where not the whole model does."""
        if total_steps is not None:
            if config.lora is not None:
                self.adapter = add_adapter(model, config.lora)
            trained = [(name, p) for name, p in model.hf.named_parameters() if p.requires_grad]
            self.optimizer = Optimizer(trained, config.optim, total_steps)
        self._head = head_of(model, rows_per_chunk(config, model.vocab_size))

    def annotate(self, batch: TrainBatch, need: Need) -> TrainBatch:
        if need not in self._head.computes:
            raise ValueError(f"this backend cannot compute {need}")
        columns = {name: torch.zeros(batch.num_tokens, dtype=torch.float32) for name in self._head.computes[need]}
        with torch.no_grad():
            for micro in self._micro_batches(self._head.annotated(batch)):
                for column, values in zip(columns.values(), self._head.columns(micro, need), strict=True):
                    _scatter(column, batch, micro.samples, values)
        return batch.with_(**columns)

    def forward_backward(self, batch: TrainBatch, loss: LossFunction, *, entropy_grad: bool = False) -> Backward:
        assert batch.weights is not None, "weights are assigned before the batch is cut"
        assert self.optimizer is not None, "a frozen model has no gradients"
        logprobs = torch.zeros(batch.num_tokens, dtype=torch.float32)
        metrics: Metrics = {}
        total, num_tokens = 0.0, 0
        for micro in self._micro_batches(batch):
            samples, part, num_computed = micro.samples, micro.part, len(micro.row.tokens)
            assert part.weights is not None
            found = loss(part, out := self._head.outputs(micro, entropy_grad=entropy_grad))
            value = (part.weights * found.terms).sum()
            number = float(value.detach())
            if not math.isfinite(number):
                self.optimizer.zero_grad()
                raise NonFinite(f"the loss of a micro-batch is {number} ({_where(part, found.terms, samples)})")
            value.backward()
            total += number
            num_tokens += num_computed
            shared = Mean(part.num_tokens - num_computed, part.num_tokens)
            metrics = merge_metrics(metrics, {**found.metrics, "train/shared": shared})
            _scatter(logprobs, batch, samples, out.logprobs)
        return Backward(total, logprobs, metrics, num_tokens)

    def optim_step(self) -> Metrics:
        assert self.optimizer is not None, "a frozen model has no optimizer"
        return self.optimizer.step()

    def named_weights(self, kind: Literal["merged", "adapter"] = "merged") -> Iterable[tuple[str, Tensor]]:
        if kind == "merged":
            return self.model.merged_weights()
        if self.adapter is None:
            raise ValueError("this policy is trained whole: it has no adapter to publish")
        return self.adapter.tensors().items()

    def base(self) -> Annotator:
        """The model without its adapter, as a reference."""
        assert self.adapter is not None, "a model that is trained whole keeps no base"
        return _Base(self, self.adapter)

    def export(self, folder: Path, base: str = "") -> None:
        """Write Hugging Face safetensors and config; of an adapter, peft's files, which name `base` as their base model."""
        if self.adapter is None:
            with system_errors(folder):
                self.model.hf.save_pretrained(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors({name: t.detach().contiguous() for name, t in self.adapter.tensors().items()}, folder / ADAPTER_FILE)
        self.adapter.describe(folder, base)

    def export_merged(self, folder: Path) -> None:
        """Write the whole model with the adapter added to its weights."""
        weights = {name: tensor.detach().contiguous() for name, tensor in self.model.merged_weights()}
        with system_errors(folder):
            self.model.hf.save_pretrained(folder, state_dict=weights)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().contiguous() for name, w in self._trained().items()}
        write_tensors(weights, folder / "weights.safetensors")
        if self.adapter is not None:
            (folder / "base.json").write_text(json.dumps({"digest": self.adapter.base_digest()}))
        if self.optimizer is not None:
            write_tensors({k: v.contiguous() for k, v in self.optimizer.tensors().items()}, folder / "optimizer.safetensors")
            (folder / "optimizer.json").write_text(json.dumps({"steps": self.optimizer.steps}))

    def load(self, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        if weights:
            path = folder / "weights.safetensors"
            if self.adapter is not None:
                _check_base(folder / "base.json", self.adapter.base_digest())
            self._take(load_file(path), str(path))
        if optimizer and self.optimizer is not None:
            steps = json.loads((folder / "optimizer.json").read_text())["steps"]
            self.optimizer.load_tensors(load_file(folder / "optimizer.safetensors"), steps)

    def _trained(self) -> dict[str, Tensor]:
        """What a checkpoint holds: every weight, or the adapter."""
        return dict(self.model.named_weights()) if self.adapter is None else self.adapter.tensors()

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._take(dict(weights), "what was to be copied")

    def _take(self, weights: Mapping[str, Tensor], source: str) -> None:
        own = self._trained()
        if weights.keys() != own.keys():
            odd = sorted(weights.keys() ^ own.keys())
            raise ValueError(f"{source} is of another model: {len(odd)} names differ, among them {', '.join(odd[:3])}")
        with torch.no_grad():
            for name, tensor in own.items():
                found = weights[name]
                if found.shape != tensor.shape or found.dtype != tensor.dtype:
                    described, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (found, tensor))
                    raise ValueError(f"{source} is of another model: {name} is {described}, not {wanted}")
                tensor.copy_(found)
        if self.optimizer is not None:
            self.optimizer.refresh_masters()

    def _micro_batches(self, batch: TrainBatch) -> Iterator[MicroBatch]:
        return micro_batches(batch, self._rows, self.config.max_tokens_per_device, self.model.device, self.model.dtype)


class _Base:
    """A model whose adapter is off while it annotates."""

    def __init__(self, backend: TorchBackend, adapter: Adapter) -> None:
        self._backend, self._adapter = backend, adapter
        self.notes: list[str] = []  # what there is to know of it, the backend itself says

    def annotate(self, batch: TrainBatch, need: Need) -> TrainBatch:
        with self._adapter.off():
            return self._backend.annotate(batch, need)


def _check_base(path: Path, digest: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path.parent} is the checkpoint of a model that was trained whole, not of an adapter: leave train.lora out")
    if json.loads(path.read_text())["digest"] != digest:
        raise ValueError(f"{path.parent} has an adapter of another base model than model.path: name the one that it began with")


def _scatter(column: Tensor, batch: TrainBatch, samples: list[int], values: Tensor) -> None:
    """Put the values of some samples back to their places in the whole batch."""
    starts = batch.starts.tolist()
    pieces = values.detach().to("cpu", column.dtype).split(batch.lengths[samples].tolist())
    for i, piece in zip(samples, pieces, strict=True):
        column[starts[i] : starts[i] + len(piece)] = piece


def _where(part: TrainBatch, terms: Tensor, samples: list[int]) -> str:
    """Which tokens are to blame, by the numbers that their samples have in the whole batch."""
    bad = (~torch.isfinite(terms)).nonzero().squeeze(-1)
    if not len(bad):
        return "every term is finite, their weighted sum is not"
    blamed = [samples[i] for i in part.sample_of_token[bad].unique().tolist()]
    return f"{len(bad)} tokens of the step's samples {blamed[:5]}"
