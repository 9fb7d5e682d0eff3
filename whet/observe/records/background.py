"""Writing of records on a thread next to the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue

from whet.observe.records.numbers import RolloutNumbers
from whet.observe.records.writer import NOTHING, RecordWriter
from whet.types import Group, Sample

QUEUED = 2
"""Rollouts that wait to be written before the run waits for them."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    rollout_id: int
    groups: Sequence[Group]
    samples: Sequence[Sample]
    numbers: RolloutNumbers


class RecordThread:
    """Hands rollouts to a writer on a thread of its own. What could not be written is raised by the next call.

    Args:
        writer: used on the thread alone from now on.
    """

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._queue: Queue[_Rollout | None] = Queue(QUEUED)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def due(self, rollout_id: int) -> bool:
        """True if this rollout is to be recorded."""
        return self._writer.due(rollout_id)

    def write(
        self, rollout_id: int, groups: Sequence[Group], samples: Sequence[Sample], numbers: RolloutNumbers = NOTHING
    ) -> None:
        """Have a rollout recorded. Waits while others wait. Nothing of what is given may be written to any more.

        Raises:
            OSError, ValueError: an earlier rollout could not be recorded.
        """
        self._raise()
        if not self.due(rollout_id):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="records", daemon=True)
            self._thread.start()
        self._queue.put(_Rollout(rollout_id, groups, samples, numbers))

    def flush(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError, ValueError: something could not be recorded.
        """
        self._queue.join()
        self._raise()

    def close(self) -> None:
        """`flush`, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while (rollout := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._writer.write(rollout.rollout_id, rollout.groups, rollout.samples, rollout.numbers)
            except BaseException as error:  # the next call raises it
                error.add_note(f"while the records of rollout {rollout.rollout_id} were written")
                self._error = error
            finally:
                del rollout
                self._queue.task_done()
        self._queue.task_done()
