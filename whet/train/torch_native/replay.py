"""Routing replay in a backend's passes: which experts a row's tokens go to is told to the routers, or kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, told_routes
from whet.model.causal import CausalModel
from whet.model.routing import RoutedPass, Routers
from whet.observe.metrics import Mean, Metrics
from whet.train.torch_native.config import RoutingReplay
from whet.train.torch_native.layout import MicroBatch


class Replay:
    """Experts of a policy's tokens.

    Args:
        model: the policy.
        mode: `train.routing_replay`; not off.

    Raises:
        ValueError: as `Routers`.
    """

    def __init__(self, model: CausalModel, mode: RoutingReplay) -> None:
        self._routers = Routers(model.hf)
        self.keeps = mode == "old"
        """True if what the passes over old log-probs choose is kept."""
        self._passes: RoutedPass | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the model's routers choose what the rows say."""
        with self._routers.watched() as self._passes:
            yield

    def begin(self, micro: MicroBatch) -> None:
        """Called before each row."""
        assert self._passes is not None, "nobody watches the routers"
        self._passes.begin(micro.row.routes)

    def check(self, batch: TrainBatch) -> None:
        """Check the experts of a batch.

        Raises:
            ValueError: if the model does not have them.
        """
        if batch.routes is not None and batch.num_tokens:
            self._routers.columns(tuple(batch.routes.shape))
            if int(batch.routes.min()) < 0 or int(batch.routes.max()) > self._routers.num_experts:
                raise ValueError(
                    f"an engine told of expert {int(batch.routes.max()) - 1}, and the model has {self._routers.num_experts} a layer: the "
                    "engine runs another model"
                )

    def nothing(self, num_tokens: int) -> Tensor:
        """Of no token the experts are known. [num_tokens, L, K]"""
        return torch.zeros(num_tokens, len(self._routers.layers), self._routers.top_k, dtype=self._routers.dtype)

    def kept(self, micro: MicroBatch) -> Tensor:
        """What the row's routers chose, as `TrainBatch.routes` of its samples. [T, L, K]"""
        assert self._passes is not None, "nobody watches the routers"
        row, found = micro.row, self._passes.routes()
        if row.part is not None:
            found = row.part.whole(found.int(), row.part.places, row.part.num_tokens).to(found.dtype)
        return told_routes(found.index_select(0, row.place), micro.part)

    def metrics(self) -> Metrics:
        """Share of tokens and layers in which the row's routers would have chosen otherwise than they were told."""
        assert self._passes is not None, "nobody watches the routers"
        told, differ = self._passes.num_told, self._passes.num_differ
        if not told:
            return {}
        return {"routing/differs": Mean(sum(map(float, differ.values())), sum(map(int, told.values())))}
