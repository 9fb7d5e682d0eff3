"""A step of a mixture of experts with routing replay, as one process and as ranks take it."""

from __future__ import annotations

from functools import cache

import torch

from tests.parallel.tiny_models import backend_of, model_of, step_of
from whet.algo.base import Need
from whet.model.shards import whole
from whet.train.torch_native.config import ParallelConfig

EXPERTS, LAYERS, TOP_K = 4, 2, 2


def replayed(degrees: ParallelConfig | None, replay: str, rows: str = "chains") -> dict:
    """What a pass finds with experts that an engine told (`rollout`), or with those of a pass before it (`old`)."""
    backend = backend_of(model_of("moe"), degrees, routing_replay=replay, rows=rows)
    algorithm, batch = step_of("grpo")
    if replay == "rollout":
        draw = torch.Generator().manual_seed(0)
        orders = torch.rand(batch.num_tokens, LAYERS, EXPERTS, generator=draw).argsort(-1)
        batch = batch.with_(routes=(orders[..., :TOP_K] + 1).to(torch.uint8))
    annotated = backend.annotate(batch, Need.OLD_LOGPROBS)
    found = backend.forward_backward(annotated if replay == "old" else batch, algorithm.loss)
    grads = {name: whole(p.grad).clone() for name, p in backend.model.hf.named_parameters()}
    differs = found.metrics["routing/differs"].value
    out = {"loss": found.loss, "logprobs": found.logprobs, "old": annotated.old_logprobs, "grads": grads, "differs": differs}
    return out | ({"routes": annotated.routes} if replay == "old" else {})


@cache
def alone(replay: str, rows: str = "chains") -> dict:
    """What one process finds."""
    return replayed(None, replay, rows)
