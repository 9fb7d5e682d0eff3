"""The routers of a mixture of experts: a pass reports which experts tokens go to, or is given them (routing replay).

A router's choice alone is replaced. The weights of the chosen experts are computed from its own logits, as the architecture does it, and
have their gradient. R3 (arXiv 2510.11370) replays the engine's choice so, R2 (arXiv 2507.18071) that of an earlier pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.types.routes import entry_bytes

Gates = Callable[[Any, Tensor, Tensor], Tensor]
"""Weights of chosen experts [T, K], of a router's module, its logits [T, E] and the experts [T, K]."""


def _softmax(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


def _normed_softmax(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


def _sigmoid(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


GATES: dict[str, Gates] = {
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _normed_softmax,
    "Glm4MoeTopkRouter": _sigmoid,
    "DeepseekV3TopkRouter": _sigmoid,
    "Dots1TopkRouter": _sigmoid,
}
"""Weights of chosen experts, by the router's class in transformers. Each returns (logits, weights, experts)."""


@dataclass(slots=True)
class RouterPass:
    """Passes whose routers are watched, one after another."""

    routers: Routers
    given: Tensor | None = None
    """Experts that the present pass is given, as in `types.routes`: numbers plus 1, 0 where the router chooses. [T, L, K] None: it
    chooses all."""
    columns: list[int] = field(default_factory=list[int])
    """Which layer of `given` each router has."""
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Experts that each router would have chosen by itself, as in `types.routes`. [T, K]"""
    num_given: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Tokens whose experts each router was given."""
    num_differ: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Those of them that it would have sent to others."""

    def begin(self, given: Tensor | None) -> None:
        """A pass, and after it its backward pass: the experts of its tokens.

        Raises:
            ValueError: if they are of another model.
        """
        self.columns = [] if given is None else self.routers.columns(tuple(given.shape))
        self.given = given
        for found in (self.chosen, self.num_given, self.num_differ):
            found.clear()

    def routes(self) -> Tensor:
        """Experts that all routers would have chosen, as in `types.routes`. [T, L, K] uint8 or int16"""
        return torch.stack([self.chosen[i] for i in range(len(self.routers.layers))], 1)


class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        hf: the model, whole or spread; it is not changed.
        key: the setting that asks for them, for error messages.

    Raises:
        ValueError: naming the architecture, if it has none, or others than those of `GATES`.
    """

    def __init__(self, hf: PreTrainedModel, key: str = "train.routing_replay") -> None:
        name, known = type(hf).__name__, ", ".join(sorted(GATES))
        blocks = [(path, block) for path, block in hf.named_modules() if hasattr(block, "experts")]
        if not blocks:
            raise ValueError(f"{key}: {name} has no experts, so there is no routing to replay; leave it out")
        gates = [getattr(block, "gate", None) for _, block in blocks]
        odd = [path for (path, _), gate in zip(blocks, gates, strict=True) if type(gate).__name__ not in GATES]
        if odd:
            raise ValueError(f"{key}: whet does not know how {name} routes ({odd[0]}); it replays {known}. Leave it out")
        self._gates: list[Any] = gates
        self.layers = [_layer_of(path) for path, _ in blocks]
        """Numbers of the layers that have a router."""
        self.num_layers: int = hf.config.get_text_config().num_hidden_layers
        self.top_k: int = self._gates[0].top_k
        self.num_experts: int = self._gates[0].num_experts
        self.dtype = torch.uint8 if entry_bytes(self.num_experts) == 1 else torch.int16
        """Type of an entry of `types.routes`."""

    def columns(self, shape: tuple[int, ...]) -> list[int]:
        """Which layer of routes [T, layers, top_k] each router has: some engines tell of layers without a router, too.

        Raises:
            ValueError: if they are of another model.
        """
        layers, top_k = shape[1:]
        if top_k != self.top_k or layers not in (len(self.layers), self.num_layers):
            raise ValueError(
                f"the experts that came are of {layers} layers and {top_k} a token, but the model has {len(self.layers)} layers with "
                f"experts among {self.num_layers}, and {self.top_k} a token: the engine runs another model"
            )
        return list(range(len(self.layers))) if layers == len(self.layers) else self.layers

    @contextmanager
    def watched(self, given: Tensor | None = None) -> Iterator[RouterPass]:
        """Inside, passes of the model choose the experts that they are given; in a backward pass that computes layers again, too.

        Args:
            given: as in `RouterPass`, of the first pass.
        """
        found = RouterPass(self)
        found.begin(given)
        hooks = [gate.register_forward_hook(self._hook(i, found)) for i, gate in enumerate(self._gates)]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, i: int, found: RouterPass) -> Callable[[nn.Module, Any, Any], Any]:
        gates = GATES[type(self._gates[i]).__name__]

        def replay(router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, own = output
            found.chosen[i] = (own.detach() + 1).to(self.dtype)
            if found.given is None:
                return output
            wanted = found.given[:, found.columns[i]].long() - 1
            known = (wanted >= 0).all(-1)
            found.num_given[i] = known.sum()
            found.num_differ[i] = (known & (wanted.sort(-1).values != own.sort(-1).values).any(-1)).sum()
            chosen = torch.where(known[:, None], wanted, own)
            return logits, gates(router, logits, chosen).to(weights.dtype), chosen

        return replay


def _layer_of(path: str) -> int:
    """Number of the layer that a module belongs to: the first number in its path."""
    return next(int(part) for part in path.split(".") if part.isdigit())
