"""Log-probs and entropies where each rank of a group has the logits of one stretch of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from whet.core.logprobs import Nucleus
from whet.train.torch_native.collectives import max_over, sum_over


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """Which stretch this rank has. It measures logits as `core.logprobs.WholeVocabulary` does, and all ranks get the same numbers."""

    group: ProcessGroup
    start: int
    size: int
    """Tokens of the whole vocabulary."""

    def logprobs_and_entropy(
        self, logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_grad: bool = True, nucleus: Nucleus | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `core.logprobs.logprobs_and_entropy`, of this rank's logits [C, V / ranks]."""
        heated = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
        shifted = heated - max_over(heated.amax(-1), self.group)[:, None]
        norm = sum_over(shifted.exp().sum(-1), self.group)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = norm.log() - sum_over((shifted.exp() * shifted).sum(-1), self.group) / norm
        if nucleus is not None:
            shifted = self._kept(heated, targets, nucleus)
            shifted = shifted - max_over(shifted.amax(-1), self.group)[:, None]
            norm = sum_over(shifted.exp().sum(-1), self.group)
        return self._at(shifted, targets) - norm.log(), entropy

    def squared_probs(self, logits: Tensor, temperature: Tensor, nucleus: Nucleus | None) -> Tensor:
        """Sum over the vocabulary of softmax(logits / temperature)^2, without gradient. [C]"""
        heated = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
        if nucleus is not None:
            heated = self._kept(heated, None, nucleus)
        shifted = heated - max_over(heated.amax(-1), self.group)[:, None]
        sums = sum_over(torch.stack([shifted.exp().sum(-1), (2 * shifted).exp().sum(-1)]), self.group)
        return sums[1] / sums[0].square()

    def ranks(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As `core.logprobs.ranks`, of this rank's logits [C, V / ranks]."""
        above = logits > self._at(logits, targets)[:, None]
        return 1.0 + sum_over(above.sum(-1).float(), self.group)

    def _kept(self, heated: Tensor, targets: Tensor | None, nucleus: Nucleus) -> Tensor:
        """This rank's logits, -inf where a token could not be drawn."""
        excluded = nucleus.excluded(self.size)
        if targets is not None:
            excluded.scatter_(1, targets[:, None], False)
        return heated.masked_fill(excluded[:, self.start : self.start + heated.shape[-1]], -torch.inf)

    def _at(self, shifted: Tensor, targets: Tensor) -> Tensor:
        """The entries of the targets, whichever rank has them."""
        here = (targets >= self.start) & (targets < self.start + shifted.shape[-1])
        place = (targets - self.start).clamp(0, shifted.shape[-1] - 1)
        found = shifted.gather(-1, place[:, None]).squeeze(-1)
        return sum_over(torch.where(here, found, torch.zeros_like(found)), self.group)
