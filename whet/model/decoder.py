"""Interface of trainer and engine to any transformers decoder: hidden states of a row, its tensors, a
check that whet runs it correctly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from whet.model.attention import ATTENTION, Attend, PackedRow
from whet.model.contents import Contents
from whet.model.rotary import rotary_limit

PROBE = ((3, 10, 17, 24, 31), (38, 45, 52))
"""Two sequences that share a row when a model is checked."""
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest distance from the model's own outputs, relative to their norm."""


class Merging(Protocol):
    """An adapter, as far as a model knows it."""

    def merged(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors with the adapter added, under the names that they have without one."""
        ...

    def without(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors without the adapter, under the names that they have without one."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Trained tensors, by their names in the adapter's files."""
        ...


class DecoderModel(ABC):
    """A transformers model behind whet's attention; what it makes of the hidden states is a subclass's business.

    Args:
        hf: the model; its attention implementation must be `whet`.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.adapter: Merging | None = None
        """Adapter on its layers, which trains in their place."""
        self.computes_on: torch.device | None = None
        """Device that computes, if parameters are kept elsewhere between passes or have no contents
        yet."""
        self.contents: Contents | None = None
        """Source of its tensors' contents, as long as they have none."""
        self.config = cast(PreTrainedConfig, hf.config)
        self.decoder = cast(nn.Module, hf.base_model)
        text = self._text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.rotary_limit = rotary_limit(text)
        """Tokens of a sequence beyond which its company would change its numbers; None: no such length."""
        known: int | None = getattr(text, "max_position_embeddings", None)
        self.max_positions = min((each for each in (known, self.rotary_limit) if each is not None), default=None)

    @property
    def device(self) -> torch.device:
        return self.computes_on or next(self.hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.hf.parameters()).dtype

    def fill(self, device: torch.device) -> None:
        """Read from files what tensors have no contents, if any: what this process keeps of each, to a device.

        Raises:
            ValueError: as `Contents.fill`.
        """
        if self.contents is not None:
            self.contents.fill(device, self.computes_on or device)
            self.contents = None

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of a row.

        Args:
            tokens: [T] int64.
            positions: [T] int64, each token's place in its own sequence.
            attend: the attention between tokens.

        Returns:
            [T, H].

        Raises:
            ValueError: if another attention was put in place of whet's since the model was made.
        """
        if self._text._attn_implementation != ATTENTION:
            raise ValueError(
                f"{type(self.hf).__name__} attends through {self._text._attn_implementation!r} instead of whet's attention: its config was "
                "changed, perhaps by another model that was made from the same config object; give that one a copy"
            )
        out = self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
        return out.last_hidden_state[0]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once, by its name in Hugging Face files."""
        return iter(self.hf.named_parameters())

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that its outputs depend on: parameters, tied ones under each of their names, and buffers."""
        yield from self.hf.named_parameters(remove_duplicate=False)
        yield from self.hf.named_buffers()

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that belong into a folder of the model, such as the routing bias of DeepSeek-V3."""
        saved = self.hf.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.hf.named_buffers() if name in saved)

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`named_weights` of the same model without an adapter: one that it has is added to the weights, in new tensors."""
        return self.named_weights() if self.adapter is None else self.adapter.merged(self.named_weights())

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`named_weights` of the same model without an adapter: one that it has is left out."""
        return self.named_weights() if self.adapter is None else self.adapter.without(self.named_weights())

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """`named_state` of the same model without an adapter."""
        return self.named_state() if self.adapter is None else self.adapter.merged(self.named_state())

    @abstractmethod
    def outputs(self, tokens: Tensor, hidden: Tensor, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Outputs for a sequence, by name, which `check` compares with `own`.

        Args:
            tokens: the sequence. [T]
            hidden: its hidden states through whet's attention. [T, H]
            own: what `own_outputs` gave for it.
        """

    @abstractmethod
    def own_outputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        """The same from transformers' own forward pass of the tokens [T]."""

    @torch.no_grad()
    def check(self) -> None:
        """Compare two sequences in one row with the model's own forward of each.

        Raises:
            ValueError: naming the model, if whet would run it wrongly.
        """
        name = type(self.hf).__name__
        num_layers: int = self.config.get_text_config().num_hidden_layers
        if not self.hf._supports_attention_backend:
            raise ValueError(f"{name} does not use transformers' attention interface, so whet cannot run it")
        pieces = [torch.tensor(piece, device=self.device) % self.vocab_size for piece in PROBE]
        lengths = [len(piece) for piece in pieces]
        row = PackedRow(lengths, self.device)
        layers: list[int] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            layers.append(layer)
            return row(layer, q, k, v, scale)

        try:
            hidden = self.hidden(torch.cat(pieces), row.positions, attend).split(lengths)
        except ValueError:  # refused by name already
            raise
        except Exception as error:  # whatever a model's own code makes of a mask or a cache that whet does not give it
            raise ValueError(f"{name} cannot run through whet's attention: {type(error).__name__}: {error}") from error
        if sorted(layers) != list(range(num_layers)):
            raise ValueError(f"{name}: only {len(layers)} of its {num_layers} layers attend; whet does not support the others yet")
        self.hf.set_attn_implementation("eager")
        try:
            theirs = [self.own_outputs(piece) for piece in pieces]
        finally:
            self.hf.set_attn_implementation(ATTENTION)
        mine = [self.outputs(*each) for each in zip(pieces, hidden, theirs, strict=True)]
        tolerance = PROBE_TOLERANCE[hidden[0].dtype]
        for what in mine[0]:
            self._compare(what, tolerance, *(torch.cat([found[what].float() for found in each]) for each in (mine, theirs)))

    def _compare(self, what: str, tolerance: float, mine: Tensor, theirs: Tensor) -> None:
        distance, norm = float((mine - theirs).norm()), float(theirs.norm())
        if not distance <= tolerance * norm:
            raise ValueError(
                f"{type(self.hf).__name__} gives other {what} through whet's attention than through its own (distance {distance:.2g}; "
                f"norm {norm:.2g}): it has a feature that whet does not support yet"
            )
