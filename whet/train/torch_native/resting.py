"""A frozen model whose weights lie in the CPU's memory between its passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whet.model.causal import release_unused
from whet.model.decoder import DecoderModel


class RestingWeights:
    """The parameters of a model that does not train, in the CPU's memory while it computes nothing.

    Args:
        model: changed in place; it goes on to compute on the device that it is on.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._device = model.computes_on = model.device
        self._parameters: list[Tensor] = list(model.hf.parameters())
        for parameter in self._parameters:
            parameter.data = _in_host(parameter.data)
        release_unused()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Context in which the weights are on the device. They are not copied back: nobody has changed them."""
        resting = [parameter.data for parameter in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.data = parameter.data.to(self._device, non_blocking=True, copy=True)
            yield
        finally:
            for parameter, kept in zip(self._parameters, resting, strict=True):
                parameter.data = kept


def _in_host(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, from which a GPU can copy by itself."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)
