"""Seconds and tokens by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from whet.observe.metrics import Mean, Metrics, Total

RESERVED = ("step", "other")
"""Phase names that would hide `time/step_s` and `time/other_s`."""


class Phases:
    """Wall-clock seconds and tokens by phase, step by step.

    Spans nest and nested names are paths (`rollout/engine`), a part of their parent's time. One Phases belongs to one
    line of control: spans of concurrent tasks would count the same second twice.
    """

    def __init__(
        self, on_enter: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`on_enter` is called with every phase that begins (a display shows it); `clock` gives
        seconds."""
        self._on_enter, self._clock = on_enter, clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._step_began = clock()

    @property
    def present(self) -> str:
        """The path of the phase that is open; empty: none is."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`, inside the phase that is open. Counted also when the body raises."""
        if not name or "/" in name or (name in RESERVED and not self._open):
            raise ValueError(f"a phase cannot be named {name!r}: not empty, no '/', and not one of {RESERVED}")
        path = f"{self._open[-1]}/{name}" if self._open else name
        self._open.append(path)
        if self._on_enter is not None:
            self._on_enter(path)
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            closed = self._open.pop()
            assert closed == path, f"phase {path!r} ended while {closed!r} was open inside it"
            self._seconds[path] = self._seconds.get(path, 0.0) + seconds

    def add_tokens(self, name: str, num_tokens: int) -> None:
        """Count tokens that phase `name` (its whole path) worked through, for its tokens per second."""
        self._tokens[name] = self._tokens.get(name, 0) + num_tokens

    def take(self) -> Metrics:
        """Metrics of the step that ends here; it began at the end of the one before.

        `time/<phase>_s` for every phase, `time/step_s` for the whole step, `time/other_s` for the part
        of it in no phase, and `tokens_per_second/<phase>` for phases with tokens. Merged over steps
        they are again exact.

        Raises ValueError if a phase is still open, or tokens were counted for a phase that was not
        timed.
        """
        if self._open:
            raise ValueError(f"a step cannot end inside phase {self._open[-1]!r}: take() belongs after its span")
        _check_timed(self._tokens, self._seconds)
        now = self._clock()
        whole = now - self._step_began
        metrics: Metrics = {f"time/{name}_s": Total(seconds) for name, seconds in self._seconds.items()}
        metrics["time/step_s"] = Total(whole)
        metrics["time/other_s"] = Total(_remainder(whole, self._seconds))
        for name, num_tokens in self._tokens.items():
            metrics[f"tokens_per_second/{name}"] = Mean(num_tokens, self._seconds[name])
        self._step_began, self._seconds, self._tokens = now, {}, {}
        return metrics


def _remainder(whole: float, seconds: Mapping[str, float]) -> float:
    """Seconds that no top-level phase covers. Rounding could leave them a hair below zero."""
    return max(0.0, whole - sum(s for name, s in seconds.items() if "/" not in name))


def _check_timed(tokens: Mapping[str, int], seconds: Mapping[str, float]) -> None:
    untimed = sorted(tokens.keys() - seconds.keys())
    if untimed:
        raise ValueError(f"tokens were counted for {untimed}, but the phases timed are {sorted(seconds)}")
