"""The trainer seam: annotate tokens, accumulate gradients, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from whet.algo.base import LossFunction, Need
from whet.calls.methods import local
from whet.core.batch import TrainBatch
from whet.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Numbers of a pass for each token, as the loss had them. Each [T] float32, on the CPU; NaN in tokens that do not train, and in
    all tokens where the loss gives no detail."""

    logprobs: Tensor
    """Log-probs under the weights that the pass used."""
    entropy: Tensor
    """Entropy of the distribution that the token was drawn from, in nats."""
    ranks: Tensor
    """Place of the token in the vocabulary, the likeliest being 1."""
    old_logprobs: Tensor
    """The log-probs that the ratio is over."""
    ratio: Tensor
    """pi / pi_old as the loss sees it."""
    clip: Tensor
    """`core.choices.Clip` of the token."""
    correction: Tensor
    """Importance weight that the loss was multiplied by."""
    losses: Tensor
    """Share of the loss: weight x term. Their sum is the loss."""


@dataclass(frozen=True, slots=True)
class Backward:
    """Result of a forward and backward pass over a batch."""

    loss: float
    logprobs: Tensor
    """Log-probs of the trained tokens under the weights that the pass used; 0 elsewhere. [T] float32,
    on the CPU"""
    metrics: Metrics
    num_tokens: int
    """Tokens that went through the model: those of the samples with a trained token, shared ones as often as they were computed."""
    tokens: TokenTerms | None = None
    """Numbers of each token. None where nobody asked."""


class Annotator(Protocol):
    """A model that says something about the tokens of a batch."""

    notes: list[str]
    """Remarks on the model for the user who starts a run."""

    @property
    def flops(self) -> int:
        """Floating-point operations that the passes needed so far (`train/flops.py`), those of all ranks together."""
        ...

    def annotate(self, batch: TrainBatch | None, need: Need) -> TrainBatch:
        """Fill the column of that name under the present weights, without gradient; with the values come the scores that they are of.

        Args:
            batch: that of rank 0, which sends each rank its samples. Others' is not read; they get their samples back.
            need: the column.

        Raises:
            ValueError: if a model of this kind does not compute it: values come from a scalar head, log-probs from a language model.
        """
        ...


class Backend(Annotator, Protocol):
    """A model that trains. Every method is collective: all ranks call it, in the same order.

    Rank 0 has the batches. It sends each rank its samples, and results for tokens are whole on rank 0 alone.
    """

    dtype: torch.dtype
    """Type of computation, and of the weights in `named_weights`."""
    device: torch.device
    """Device that this process computes on."""

    def forward_backward(
        self, batch: TrainBatch | None, loss: LossFunction, *, entropy_grad: bool = False, per_token: bool = False
    ) -> Backward:
        """Add the gradient of sum(weights * terms). Micro-batches and layout are the backend's own business.

        Args:
            batch: that of rank 0; others' is not read.
            loss: called with parts of the batch, on the ranks that have them.
            entropy_grad: True if the loss has a gradient through the entropy.
            per_token: True if the result is to have the numbers of each token.

        Raises:
            NonFinite: if the loss is not a number.
        """
        ...

    def optim_step(self) -> Metrics:
        """Clip, step, zero the gradients; reports `optim/grad_norm` and `optim/lr`.

        Raises:
            NonFinite: if the gradient norm is not finite.
        """
        ...

    def named_weights(self, kind: Literal["merged", "adapter", "base"] = "merged") -> Iterable[tuple[str, Tensor]]:
        """The weights as a stream, named as in Hugging Face files; an adapter (LoRA) is added to them, alone as in peft's files, or left
        out."""
        ...

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """Everything that the merged model's outputs depend on: tied parameters under each of their names, and buffers."""
        ...

    def release_memory(self) -> None:
        """Give memory of the device that no tensor uses back to it, for other processes."""
        ...

    @local
    def base(self) -> Annotator | None:
        """The model without its adapter, as a reference; None: it has none, and trains whole."""
        ...

    def export(self, folder: Path, base: str = "") -> None:
        """Write Hugging Face safetensors and config; of an adapter, peft's files, which name `base` as their base model."""
        ...

    def export_merged(self, folder: Path) -> None:
        """Write the whole model with its adapter added to its weights."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on: weights, and where the model learns its optimizer and schedule.

        Raises:
            OSError: if it cannot be written, by any rank.
        """
        ...

    def stage(self, folder: Path) -> Callable[[], None]:
        """Copy what `save` would write into host memory. What is returned writes it, on any thread, while the model goes on learning; of
        several that were staged, all ranks write in the same order.

        Raises:
            OSError: as `save`, when it is written.
        """
        ...

    def load(self, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        """Go on from what `save` wrote: its weights, its optimizer (masters and place in the schedule included), or both.

        Raises:
            ValueError: if it is of another model.
        """
        ...


class Mirror(Backend, Protocol):
    """A frozen model that may become a copy of one that learns."""

    def copy_weights(self, source: Backend) -> None:
        """Become a copy of the merged weights of a like model.

        Raises:
            ValueError: if it is another model.
        """
        ...
