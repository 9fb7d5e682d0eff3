"""Weights that are quantized on their way: a stream of a model's tensors as a stream of the tensors of quantized files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from torch import Tensor

from whet.model.digest import digests_of
from whet.model.naming import Naming
from whet.model.quantization import Quantization, in_format
from whet.transport.base import Stream


class QuantizingStream(Stream):
    """A stream that quantizes each tensor, by the names that files have, and takes the digests of what comes of it.

    Args:
        weights: the trainer's.
        naming: names of its tensors in files.
        quantization: the format.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], naming: Naming, quantization: Quantization) -> None:
        super().__init__(self._in_format(weights, naming, quantization))
        self.digests: dict[str, str] = {}
        self.quantize_s = 0.0
        """Seconds of quantizing and digests."""

    def _in_format(
        self, weights: Iterable[tuple[str, Tensor]], naming: Naming, quantization: Quantization
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            began = time.perf_counter()
            found = list(in_format(naming.to_files(name, tensor.detach()), quantization))
            self.digests |= digests_of(found)
            self.quantize_s += time.perf_counter() - began
            yield from found
