"""A teacher that other servers hold: the log-probs of a batch's tokens, asked for over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Sequence

import torch

from whet.algo.base import Need
from whet.core.batch import TrainBatch
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.kinds import kind_at
from whet.engine.servers.start import await_answer
from whet.engine.servers.wire import Wire
from whet.types.columns import Ints

AT_A_TIME = 32
"""Samples that a server scores at a time."""
ATTEMPTS = 4
"""Attempts of a sample, each at the next server."""
RETRY_S = 1.0
"""Before a sample's second attempt; twice as long before each further one."""
START_S = 60.0
"""For a server to answer when the run begins."""


def check_length(name: str, wire: Wire, longest: int | None) -> None:
    """Refuse samples that are longer than a server scores, which would end a run in its middle.

    Raises:
        ValueError: if they may be.
    """
    most = wire.served.max_tokens - 1  # servers need room for a token that follows; -1: they tell nothing
    if longest is not None and 0 < most < longest:
        raise ValueError(
            f"teacher.urls: rollout.max_tokens is {longest}, but {name} scores samples of {most} tokens at most: lower the one, or start "
            f"the server for {longest + 1} (vLLM: --max-model-len, SGLang: --context-length)"
        )


class RemoteTeacher:
    """An `Annotator` for `Need.TEACHER_LOGPROBS` whose model is at servers of vLLM, SGLang or `whet serve`.

    Each sample is scored whole, at temperature 1, by one of them. The controller alone calls it.

    Args:
        urls: their addresses; all serve the same model.
        timeout_s: seconds that the score of a sample may take.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self.notes: list[str] = []
        self.flops = 0
        self._urls, self._timeout_s = list(urls), timeout_s
        self._wires: list[Wire] = []
        self._ids = itertools.count(1)

    def connect(self, longest: int | None = None) -> None:
        """Look whether the servers are there.

        Args:
            longest: tokens that a sample may have (`rollout.max_tokens`); None: unknown.

        Raises:
            EngineFailed: if one does not answer, or is none of the kinds that whet knows.
            ValueError: if samples may be too long for one.
        """
        for url in self._urls:
            name = f"teacher at {url}"
            await_answer(name, url, "teacher.urls", START_S, threading.Event())
            key = os.environ.get(KEY)
            kind, _ = kind_at(name, url, key)
            self._wires.append(kind.connect_fixed(HttpServer(name, url, key), key))
            check_length(name, self._wires[-1], longest)

    def annotate(self, batch: TrainBatch | None, need: Need) -> TrainBatch:
        """As `Annotator.annotate`.

        Raises:
            EngineFailed: if a sample could not be scored, or a trained token's log-prob is not finite; it names the sample.
        """
        if need is not Need.TEACHER_LOGPROBS:
            raise ValueError(f"a teacher at servers does not compute {need}")
        assert batch is not None, "the controller has the batch"
        if bool((batch.temperature != 1).any()):
            alone = "servers have log-probs of a prompt at temperature 1 alone"
            raise ValueError(f"{alone}: set rollout.temperature=1, or leave out teacher.urls")
        rows = [Ints(row.tolist()) for row in batch.tokens.split(batch.lengths.tolist())]
        found = asyncio.run(self._score_all(rows))
        logprobs = torch.cat([torch.tensor([0.0, *each], dtype=torch.float32) for each in found])
        if bool((bad := batch.loss_mask & ~torch.isfinite(logprobs)).any()):
            sample, where = int(batch.sample_of_token[bad][0]), ", ".join(self._urls)
            raise EngineFailed(f"sample {sample}: the teacher at {where} answered log-probs of trained tokens that are not finite")
        return batch.with_(teacher_logprobs=torch.where(batch.loss_mask, logprobs, 0.0))

    async def _score_all(self, rows: Sequence[Ints]) -> list[Sequence[float]]:
        """Log-probs of each row's tokens but the first."""
        servers = [HttpServer(f"teacher at {url}", url, os.environ.get(KEY)) for url in self._urls]
        wires = [wire.through(server) for wire, server in zip(self._wires, servers, strict=True)]
        places = [asyncio.Semaphore(AT_A_TIME) for _ in wires]
        try:
            async with asyncio.TaskGroup() as group:
                scoring = [group.create_task(self._score(i, row, wires, places)) for i, row in enumerate(rows)]
            return [task.result() for task in scoring]
        except* EngineFailed as errors:
            raise errors.exceptions[0] from None
        finally:
            for server in servers:
                await server.close()

    async def _score(self, i: int, row: Ints, wires: Sequence[Wire], places: Sequence[asyncio.Semaphore]) -> Sequence[float]:
        if len(row) < 2:
            return []
        failure: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))
            at = (i + attempt) % len(wires)
            try:
                async with places[at], asyncio.timeout(self._timeout_s):
                    return (await wires[at].score(row, 0, f"whet-teacher-{os.getpid()}-{next(self._ids)}")).logprobs
            except TimeoutError:
                failure = EngineFailed(f"teacher at {self._urls[at]} did not answer within {self._timeout_s:g} s (teacher.timeout_s)")
            except EngineRefused as error:
                raise EngineFailed(f"sample {i} of {len(row)} tokens: {error}") from error
            except EngineFailed as error:
                failure = error
        raise EngineFailed(f"sample {i} of {len(row)} tokens was not scored in {ATTEMPTS} attempts: {failure}")
