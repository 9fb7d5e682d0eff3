"""Work on a separate thread, in order, which ends with the process."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """The thread. Unlike that of an executor, a process that ends does not wait for it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Do it once all that was given before is done. What it raises is the future's."""
        future: Future[T] = Future()
        self._given.put((work, future))
        return future

    def stack(self) -> traceback.StackSummary:
        """Stack of the thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return traceback.extract_stack(frame)

    def _work(self) -> None:
        while True:
            _settle(*self._given.get())


def _settle(work: Callable[[], T], future: Future[T]) -> None:
    """Do it. What it holds, tensors say, is let go of with it."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def collect_less() -> None:
    """Have Python look for unreachable cycles less often: the objects of a rollout are millions, and they stay until it is trained on."""
    gc.set_threshold(50_000, 20, 100)
