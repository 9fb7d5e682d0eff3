"""Experts that a server tells with the end of a reply, as arrays in base64."""

from __future__ import annotations

import io
from base64 import b64decode
from typing import Any

import numpy as np

from whet.engine.base import EngineFailed, EngineRefused
from whet.types import Request
from whet.types.routes import DTYPES, SMALL, Routes, entry_bytes


def first_row(request: Request) -> int:
    """First token whose experts are asked for: a server tells those of tokens themselves, a chunk those of their predecessors."""
    return max(request.routes_from - 1, 0)


def check_routed(request: Request, kind: str) -> None:
    """Refuse what a server's experts cannot be had with.

    Raises:
        EngineRefused: if the reply may end at a stop text, which the server does not look for.
    """
    if request.sampling.routes and request.sampling.stop:
        raise EngineRefused(
            f"request {request.id}: {kind} tells experts at the end of its own reply, and whet cuts this one at a stop text: leave "
            "rollout.stop out, or use another train.routing_replay than rollout"
        )


def vllm_rows(encoded: str) -> Any:
    """vLLM's experts: base64 of a .npy file. [tokens, layers, top_k]"""
    return np.load(io.BytesIO(b64decode(encoded)), allow_pickle=False)


def sglang_rows(encoded: str, num_rows: int) -> Any:
    """SGLang's experts: base64 of int32 numbers. It does not tell how many layers these are of; the trainer knows.
    [tokens, layers x top_k, 1]"""
    return np.frombuffer(b64decode(encoded), "<i4").reshape(num_rows, -1, 1)


def routes_of(request: Request, rows: Any, num_sampled: int) -> Routes:
    """The experts of a whole attempt, as in `Chunk`.

    Args:
        request: the attempt's.
        rows: experts of its tokens but the last, from `first_row` on. [tokens, layers, top_k]
        num_sampled: tokens that it sampled.

    Raises:
        EngineFailed: if they are of fewer or of more tokens.
    """
    wanted = len(request.tokens) + num_sampled - 1 - first_row(request)
    if rows.ndim != 3 or len(rows) != wanted or (rows.size and int(rows.min()) < 0):
        raise EngineFailed(
            f"request {request.id}: the experts that came have the shape {rows.shape}, and those of {wanted} tokens were asked for "
            "(tokens, layers, experts of a token); nothing of it is used"
        )
    itemsize = entry_bytes(SMALL if not rows.size or int(rows.max()) < SMALL else SMALL + 1)
    entries = (rows.astype(np.int32) + 1).astype(DTYPES[itemsize])
    _, layers, top_k = entries.shape
    unknown = bytes(layers * top_k * itemsize) if request.routes_from == 0 else b""
    return Routes(unknown + entries.tobytes(), layers, top_k, itemsize)
