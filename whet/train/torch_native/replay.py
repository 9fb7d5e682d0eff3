"""Routing replay in a backend's passes: routers are given the experts of a row's tokens, or their choice is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, predecessor_routes
from whet.model.causal import CausalModel
from whet.model.routing import RouterPass, Routers
from whet.observe.metrics import Mean, Metrics
from whet.train.torch_native.config import RoutingReplay
from whet.train.torch_native.layout import MicroBatch


class RouteReplay:
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
        """True if the choice of the passes over old log-probs is kept."""
        self._passes: RouterPass | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the model's routers choose what the rows say."""
        with self._routers.watched() as self._passes:
            yield

    def begin(self, micro: MicroBatch) -> None:
        """Called before each row."""
        assert self._passes is not None, "nobody watches the routers"
        self._passes.begin(micro.row.routes)

    def shaped(self, batch: TrainBatch) -> TrainBatch:
        """The batch with its experts as [T, L, K], where an engine reported them in one row for each token."""
        routes, top_k = batch.routes, self._routers.top_k
        if routes is None or routes.shape[2] == top_k or routes[:1].numel() % top_k:
            return batch
        return batch.with_(routes=routes.reshape(batch.num_tokens, -1, top_k))

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
        """Unknown experts of all tokens. [num_tokens, L, K]"""
        return torch.zeros(num_tokens, len(self._routers.layers), self._routers.top_k, dtype=self._routers.dtype)

    def kept(self, micro: MicroBatch) -> Tensor:
        """Experts that the row's routers chose, as `TrainBatch.routes` of its samples. [T, L, K]"""
        assert self._passes is not None, "nobody watches the routers"
        row, found = micro.row, self._passes.routes()
        if row.part is not None:
            found = row.part.whole(found.int(), row.part.places, row.part.num_tokens).to(found.dtype)
        return predecessor_routes(found.index_select(0, row.place), micro.part)

    def metrics(self) -> Metrics:
        """Share of tokens and layers in which the row's routers would have chosen other experts than they were given."""
        assert self._passes is not None, "nobody watches the routers"
        given, differ = self._passes.num_given, self._passes.num_differ
        if not given:
            return {}
        return {"routing/differs": Mean(sum(map(float, differ.values())), sum(map(int, given.values())))}
