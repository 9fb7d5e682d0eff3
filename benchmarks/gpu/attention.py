"""The kernel that torch's attention takes for the calls that whet makes, with cuDNN and without, and what a call costs whose shape is new.

A model of one layer decodes, prefills and trains; its largest call of torch's attention is noted and made again, with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from gpu.clock import forget, once, peak_gib, profiled, seconds
from gpu.models import SHAPES, batch_of_lengths, made
from gpu.record import Case, NotRun
from whet.algo.sft import sft_loss
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """What the model does."""

    kind: str
    """decode, prefill or train."""
    num: int
    """Sequences."""
    tokens: int
    """Of each."""
    size: str = "0.6B"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.num} x {self.tokens} tokens, {self.size}"


SIZES = {
    "small": (Work("decode", 2, 80, "tiny"), Work("prefill", 2, 80, "tiny"), Work("train", 2, 80, "tiny")),
    "full": (
        Work("decode", 16, 500), Work("decode", 128, 500), Work("decode", 128, 500, "8B"), Work("prefill", 4, 500),
        Work("prefill", 1, 4000), Work("prefill", 1, 4000, "8B"), Work("train", 8, 500), Work("train", 1, 4000), Work("train", 1, 16_000),
    ),
}  # fmt: skip
NEW = 3
"""Lengths not met before that are timed."""


Call = tuple[tuple[Tensor, ...], dict[str, Any]]
"""Queries, keys and values, and the options."""


class Largest(TorchFunctionMode):
    """Notes the largest call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None
        self._size = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            size = args[0].shape[:-1].numel() * args[1].shape[-2]
            if size > self._size:
                tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in args[:3])
                self.call, self._size = (tensors, dict(kwargs or {})), size
        return func(*args, **(kwargs or {}))


def cases(sizes: str, device: torch.device) -> list[Case]:
    works = [Case(work.name, lambda work=work: measured(work, device)) for work in SIZES[sizes]]
    return works if device.type == "cuda" else [*works, Case("the same with cuDNN", no_cudnn)]


def no_cudnn() -> Mapping[str, Any]:
    raise NotRun("needs CUDA")


def measured(work: Work, device: torch.device) -> Mapping[str, Any]:
    """Without cuDNN and, on CUDA, with it."""
    calls = [largest(replace(work, tokens=work.tokens - 17 * less), device) for less in range(NEW + 1)]
    kinds = {"cudnn_off": False} | ({"cudnn_on": True} if device.type == "cuda" else {})
    return {kind: timed(calls, device, cudnn=cudnn) for kind, cudnn in kinds.items()}


def timed(calls: Sequence[Call], device: torch.device, *, cudnn: bool) -> Mapping[str, Any]:
    """Kernel, seconds of the first call and of later ones, and of the first of a length that is new."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    (tensors, options), *others = calls
    forget(device)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        call = again(tensors, options)
        found: dict[str, Any] = {"shapes": [tuple(x.shape) for x in tensors], "kernel": kernel(tensors, options)}
        found |= {"first_s": round(once(call, device), 6), "seconds": round(seconds(call, device), 6), "peak_gib": peak_gib(device)}
        took = [(once(other, device), once(other, device)) for other in (again(*each) for each in others)]
        found |= {"new_shape_s": round(median(a for a, _ in took), 6), "same_shape_s": round(median(b for _, b in took), 6)}
        return found | {"profile": profiled(call, device, 2)}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def largest(work: Work, device: torch.device) -> Call:
    """The largest call of torch's attention in this work."""
    model = made(work.size, device, trainable=work.kind == "train", num_hidden_layers=1, vocab_size=SHAPES["tiny"]["vocab_size"])
    seen = Largest()
    if work.kind == "train":
        backend = TorchBackend(model, TrainConfig(max_tokens_per_device=work.num * work.tokens, rows="chains"), total_steps=2)
        with seen:
            backend.forward_backward(batch_of_lengths([work.tokens] * work.num, model.vocab_size), sft_loss)
    else:
        room = 2 * work.num * (work.tokens + 32)  # rows for decoding have up to twice a sequence's length
        sizes = EmbeddedConfig(cache_tokens=room, block_size=16, max_running=work.num, max_batch_tokens=room, compiled=False)
        core = EngineCore(model, sizes)
        for i in range(work.num):
            prompt = tuple((7 * i + 3 * j) % 500 for j in range(work.tokens))
            core.add(Request(str(i), prompt, SamplingParams(8, 1.0, seed=i)))
        if work.kind == "prefill":
            with seen:
                core.step()
        else:
            core.step()
            with seen:
                core.step()
    if seen.call is None:
        raise NotRun("whet made no call of torch's scaled_dot_product_attention")
    return seen.call


def again(tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> Callable[[], object]:
    """The call, with its backward pass where it had one."""

    def call() -> None:
        out = F.scaled_dot_product_attention(*tensors, **options)
        if out.requires_grad:
            torch.autograd.grad(out.sum(), tensors)

    return call


def kernel(tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> str:
    """The kind of kernel that torch chooses for a call."""
    q, k, v = tensors
    given = {"attn_mask": options.get("attn_mask"), "dropout_p": 0.0, "is_causal": options.get("is_causal", False)}
    more = {"scale": options.get("scale"), "enable_gqa": options.get("enable_gqa", False)}
    return SDPBackend(torch._fused_sdp_choice(q, k, v, *given.values(), **more)).name
