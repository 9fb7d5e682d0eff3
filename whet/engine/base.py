"""The engine seam: tokens in, tokens out, with the log-prob and the policy version of each."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whet.types import Chunk, Receipt, Request, RunFailed, Scored
from whet.types.columns import Ints

SCORE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 2.0, torch.float16: 0.25}
"""Largest difference in nats between the scores that two processes, on any machines, compute for the
same tokens under the same weights, by dtype. bfloat16 keeps 8 bits: logits of 16 to 32 are 0.125 apart,
and unlikely tokens see several such steps."""


def nats_apart(one: Scored, other: Scored) -> float:
    """Largest difference in nats between two scores of the same tokens, or their members'; NaN if one of them has a NaN."""
    found = [
        abs(a - b)
        for mine in one.members or (one,)
        for theirs in other.members or (other,)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
    ]
    return max(found, key=lambda each: math.inf if math.isnan(each) else each, default=0.0)


@asynccontextmanager
async def closing_reply(stream: AsyncIterator[Chunk]) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Close an engine's reply as the context ends, not when it is collected: the engine takes the request out as its generator ends."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


class EngineRefused(ValueError):
    """The engine will never be able to run this request; the text says why."""


class EngineFailed(RunFailed):
    """The engine gave up a request or call that it had taken: a step raised (the cause), or it was closed."""


class EngineLost(EngineFailed):
    """The engine is gone, or does not answer: nothing is wrong with what it was asked, and another engine may take that up."""


class StaleCache(EngineFailed):
    """A sequence was about to attend to keys and values of older weights; nothing was sampled from it. What was proven of the weights does
    not hold, so nothing is tried again."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an engine."""

    max_tokens: int
    """Longest sequence, prompt and reply together."""
    shares_weights: bool
    """It reads the trainer's own parameters, so an update moves no bytes."""
    deterministic: bool
    """Same requests, same bits."""
    quantization_nats: float = 0.0
    """Distance of its log-probs from the trainer's that its quantized weights explain."""
    takes_adapters: bool = False
    """It holds the base of an adapter (LoRA) that trains, and an update brings the adapter alone."""


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Use of an engine's prefix cache since it was made; zeros where it does not tell."""

    cached: int = 0
    """Tokens of prompts that were there."""
    asked: int = 0
    """Tokens of all prompts."""

    def __add__(self, other: PrefixUse) -> PrefixUse:
        return PrefixUse(self.cached + other.cached, self.asked + other.asked)

    def since(self, before: PrefixUse) -> PrefixUse:
        """Use after `before`; all of it where the engine was restarted."""
        restarted = self.asked < before.asked or self.cached < before.cached
        return self if restarted else PrefixUse(self.cached - before.cached, self.asked - before.asked)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Health of an engine."""

    busy_s: float
    """Seconds spent in steps since it was made."""
    step_s: float
    """Seconds that the current step or score has taken so far; 0: the engine computes none. New weights
    may take longer."""
    prefix: PrefixUse = PrefixUse()


class Engine(Protocol):
    """Runs model calls, many at a time."""

    @property
    def version(self) -> int:
        """The policy version of the weights it holds."""
        ...

    @property
    def paused(self) -> bool:
        """True from `pause` until `resume`."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self, conversation: str) -> None:
        """Announce a conversation. A deterministic engine takes no step while an open one has no request with it."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Continue the request's tokens. An abort, a failover or a version change loses nothing: each piece comes as a chunk.

        Raises:
            EngineRefused: if the request can never run.
            EngineFailed: if the engine breaks or is closed meanwhile.
            StaleCache: if older weights' cache was about to be read.
            ValueError: if a request of that id is running.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; its last chunk carries what was sampled and `Finish.ABORT`. Unknown ids are ignored."""
        ...

    def release(self, conversation: str) -> None:
        """Forget a conversation and what is cached of it."""
        ...

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        """Log-probs of tokens[1:], each given its predecessors, through the cached decode path, and the
        `top_logprobs` most likely tokens at each place.

        Raises:
            StaleCache: if that path would read what older weights cached.
        """
        ...

    async def pause(self) -> None:
        """Take no further step, and return when a running one has ended; requests wait."""
        ...

    async def resume(self) -> None: ...

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        """Take over weights, named as in Hugging Face files, and drop every cache of an older version.

        Raises:
            ValueError: if it holds that version or a newer one already, or the weights are not those of its model.
        """
        ...

    async def flush(self) -> None:
        """Forget everything cached; requests stay, and what they lost is computed again."""
        ...

    async def sleep(self) -> None:
        """Free the memory of its caches, and of its own weights, which `update` brings whole. `update`
        wakes the engine; until then requests wait."""
        ...

    async def busy_s(self) -> float:
        """Seconds that it has spent computing steps since it was made; over several processes, their sum."""
        ...

    async def close(self) -> None: ...
