"""Layers as torch compiles them: one region for each, which the first row of a kind compiles and all layers that are alike share."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from whet.model.attention import ATTENTION, whet_attention
from whet.model.parallel_plan import layers_of


class CompiledLayers:
    """A model's layers, compiled while they are `on`; the engine that shares them runs them as they are.

    Attention is called from between compiled parts: who sees whom changes from row to row, and its kernels are torch's own.

    Args:
        hf: its layers are compiled where they first run, with shapes that may change. Of a sharded model what puts a layer together stays
            outside: it hangs on the layer's call, and the layer's `forward` is compiled.
        device: on which it computes.
    """

    def __init__(self, hf: PreTrainedModel, device: torch.device) -> None:
        require_compiler(device)
        self._seconds = 0.0
        AttentionInterface.register(ATTENTION, cast(Any, torch.compiler.disable(whet_attention)))
        self._layers = [(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers_of(hf)]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the layers are compiled ones, their backward passes included."""
        from torch._dynamo.callback import callback_handler

        began: list[float] = []

        def start(_: object) -> None:
            began.append(time.perf_counter())

        def end(_: object) -> None:
            self._seconds += time.perf_counter() - began.pop()

        self._set(True)
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)
            self._set(False)

    def take_seconds(self) -> float:
        """Spent on compiling since it was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _set(self, on: bool) -> None:
        for layer, compiled in self._layers:
            if on:
                layer.forward = compiled
            else:
                del layer.forward


def require_compiler(device: torch.device) -> None:
    """Check that torch can compile for the device.

    Raises:
        ValueError: if it has no compiler for it.
    """
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("train.compile needs triton on CUDA, which is not installed: pip install triton, or leave train.compile out")
    command = shlex.split(os.environ.get("CXX", "g++"))[0]
    if device.type == "cpu" and shutil.which(command) is None:
        advice = "install one, name it in CXX, or leave train.compile out"
        raise ValueError(f"train.compile needs a C++ compiler, and there is no {command}: {advice}")
