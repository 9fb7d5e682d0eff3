"""Control of the engine behind the server: pausing, flushing, new weights, and what the versions are called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from whet.engine.base import Engine
from whet.serve.calls import Calls

PauseMode = Literal["abort", "retract", "in_place"]
LoadWeights = Callable[[Path], Iterable[tuple[str, Tensor]]]
"""The weights in a model folder, checked. Raises ValueError if they cannot be used."""


class WeightsRefused(ValueError):
    """New weights were not taken over; the text says why, and the old ones are still served."""


class Control:
    """One change at a time.

    Args:
        engine: samples the requests.
        calls: the running calls.
        load: reads a model folder.
        label: name of the engine's present version.
    """

    def __init__(self, engine: Engine, calls: Calls, load: LoadWeights, label: str) -> None:
        self._engine, self._calls, self._load = engine, calls, load
        self._labels = {engine.version: label}
        self._changing = asyncio.Lock()
        self.paused = False
        """By a client, until it says otherwise."""

    def label(self, version: int) -> str:
        """Name of a policy version in answers."""
        return self._labels[version]

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing until `resume`; what comes meanwhile waits. `abort` ends what is running, the other modes keep it."""
        async with self._changing:
            self.paused = True
            await self._engine.pause()
            if mode == "abort":
                await self._calls.abort_all("generation was paused")

    async def resume(self) -> None:
        async with self._changing:
            self.paused = False
            await self._engine.resume()

    async def flush(self) -> None:
        """Forget everything cached; what is running computes it again."""
        async with self._changing:
            await self._engine.flush()

    async def update(self, folder: Path, label: str | None, *, abort_running: bool, keep_paused: bool) -> str:
        """Serve the weights of a model folder from the next token on. What is running goes on with them unless it is aborted.

        Returns:
            What the new version is called: `label`, else its number.

        Raises:
            WeightsRefused: they cannot be read, are not the model's, or are not what the engine now holds.
        """
        try:
            there = folder.is_dir()
        except (OSError, ValueError) as error:  # a name that no file can have
            raise WeightsRefused(f"model_path: {str(folder)[:200]!r} is no folder's name: {error}") from None
        if not there:
            raise WeightsRefused(f"model_path: there is no folder {str(folder)[:200]!r} on the server's machine")
        source = str(folder)
        return await self.take_over(lambda: self._load(folder), label, source, abort_running=abort_running, keep_paused=keep_paused)

    async def take_over(
        self,
        load: Callable[[], Iterable[tuple[str, Tensor]]],
        label: str | None,
        source: str,
        *,
        abort_running: bool = False,
        keep_paused: bool = False,
    ) -> str:
        """Serve weights from the next token on, as `update`.

        Args:
            load: gives the weights, on a thread. Raises ValueError if they cannot be used.
            label: what the new version is called; None: its number.
            source: where they come from, in words.
            abort_running: end what is running.
            keep_paused: sample nothing afterwards.

        Raises:
            WeightsRefused: as `update`.
        """
        async with self._changing, self._still(keep_paused):
            if abort_running:
                await self._calls.abort_all("the weights were updated")
            version = self._engine.version + 1
            self._labels[version] = str(version) if label is None else label
            try:
                weights = await asyncio.to_thread(load)
                receipt = await self._engine.update(weights, version)
            except (ValueError, OSError) as error:
                raise WeightsRefused(str(error)) from error
            arrived, resident = receipt.wire or {}, receipt.resident or {}
            wrong = [name for name, digest in arrived.items() if resident.get(name, digest) != digest]
            if wrong or receipt.num_stale_tokens:
                raise WeightsRefused(
                    f"the engine does not hold what {source} has ({len(wrong)} tensors differ, {receipt.num_stale_tokens} tokens are "
                    "cached from older weights); do not use it, start it anew"
                )
            return self._labels[version]

    def rename(self, label: str) -> None:
        """Call the engine's present version something else."""
        self._labels[self._engine.version] = label

    @asynccontextmanager
    async def _still(self, keep_paused: bool) -> AsyncIterator[None]:
        """No step meanwhile: reading a model changes settings of the whole process."""
        await self._engine.pause()
        try:
            yield
        finally:
            self.paused = self.paused or keep_paused
            if not self.paused:
                await self._engine.resume()
