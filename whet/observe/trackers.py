"""Trackers of a run's metrics: always `metrics.jsonl`, on request packages such as TensorBoard, and a user's own."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from whet.config import Config, Reference, call_factory, resolve_callable
from whet.files import AppendedLines
from whet.observe.prometheus import PrometheusTracker, address_of
from whet.observe.retention import RecordsConfig

if TYPE_CHECKING:
    from whet.observe.replies import ShownReply


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that metrics are sent."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...

    def close(self) -> None:
        """Finish what is being sent. Nothing is logged afterwards."""
        ...


@runtime_checkable
class ReplyTracker(Tracker, Protocol):
    """A tracker that replies of each rollout are sent to, too."""

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        """Record a table of replies after the step's values: `replies` of a rollout, `replies/SET` of an evaluation set."""
        ...


TrackerPackage = Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"]
"""Packages that are trackers (`whet.observe.services`)."""
SERVICES: tuple[str, ...] = get_args(TrackerPackage)
MOVED = {**{name: f'trackers=["{name}"]' for name in ("tensorboard", "wandb")}, "records_every": "records.every={}"}
"""Present form of keys of earlier versions."""


class ObserveConfig(Config):
    """Display and trackers of a run, in addition to `metrics.jsonl`, which is always written."""

    trackers: tuple[TrackerPackage | Reference, ...] = ()
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a
    callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    prometheus: str | None = None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest
    metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    show: NonNegativeInt = 0
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    display: Literal["auto", "rich", "plain", "none"] = "auto"
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    on_rollout: Reference | None = None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every
    rollout after its update and may return further metrics, by name (docs/extending.md)."""
    records: RecordsConfig = Field(default_factory=RecordsConfig)
    """Records of every token."""
    peak_tflops: PositiveFloat | None = None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the
    reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs
    whose sheet whet does not know, there is no `train/mfu`."""

    @model_validator(mode="before")
    @classmethod
    def _has_moved(cls, values: Any) -> Any:
        for old, new in MOVED.items() if isinstance(values, Mapping) else ():
            if old in values:
                key = new.partition("=")[0]
                raise ValueError(f"{old} is now observe.{key}: write observe.{new.format(values[old])}")
        return values


    @field_validator("prometheus")
    @classmethod
    def _is_of_this_machine(cls, address: str | None) -> str | None:
        if address is not None:
            address_of(address)
        return address


class JsonlTracker:
    """One JSON object per line, on disk as soon as it is logged: `{"step": 3, "time": 1712.5, "reward/mean": 0.25}`.

    JSON has no NaN and no infinity: they are written as null, and `"nonfinite"` lists their names. `time` is in
    seconds since the epoch. A last line that a crash tore off is cut when the file is opened.
    """

    RESERVED = ("step", "time", "nonfinite")

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = Path(path), clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = AppendedLines(self.path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            ValueError: a metric is named `step`, `time` or `nonfinite`.
            OSError: it cannot be written; the file is then as it was before.
        """
        taken = [name for name in self.RESERVED if name in values]
        if taken:
            raise ValueError(f"{self.path.name} has {taken} of its own: give your metrics other names")
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step, "time": self._clock()}
        line.update((name, value if math.isfinite(value) else None) for name, value in values.items())
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._lines.append(json.dumps(line, allow_nan=False))

    def tell(self) -> int:
        """The size of the file in bytes, which is where the next line begins."""
        return self.path.stat().st_size

    def truncate(self, offset: int) -> None:
        """Forget every line from `offset` (an earlier `tell()`) on.

        Raises:
            ValueError: no line begins at that offset, so this is not the file it was taken from.
        """
        content = self.path.read_bytes()
        if not 0 <= offset <= len(content) or content[:offset][-1:] not in (b"", b"\n"):
            raise ValueError(
                f"{self.path} cannot be cut at byte {offset}: no line of its {len(content)} bytes begins there, "
                "so the file was changed since its offset was noted; restore it, or start a new run folder"
            )
        os.truncate(self.path, offset)

    def close(self) -> None:
        self._lines.close()


def build_trackers(config: ObserveConfig, run_dir: Path, run_config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run; the first is the JsonlTracker of its `metrics.jsonl`.

    `run_config` is the run's resolved configuration as plain values.

    Raises:
        ValueError: a package is missing, a reference does not resolve, or what it makes is no tracker.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    for reference in config.trackers:
        if reference in SERVICES:
            from whet.observe.services import build_service

            trackers.append(build_service(reference, run_dir, run_config))
            continue
        factory = resolve_callable(reference, kind="tracker", given=["run_dir", "config"])
        tracker = call_factory(factory, reference, run_dir, dict(run_config), kind="tracker")
        if not isinstance(tracker, Tracker):
            made = f"{reference!r} made an object of type {type(tracker).__name__}"
            raise ValueError(f"observe.trackers: {made}, which has no log() and close()")
        trackers.append(tracker)
    exposed = [] if config.prometheus is None else [PrometheusTracker(config.prometheus)]
    return [JsonlTracker(run_dir / "metrics.jsonl"), *trackers, *exposed]
