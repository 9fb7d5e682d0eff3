"""Trackers of a run's metrics: always `metrics.jsonl`, on request TensorBoard, wandb and a user's own
tracker."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field, PositiveFloat, model_validator

from whet.config import Config, Reference, call_factory, resolve_callable
from whet.files import AppendedLines
from whet.observe.retention import RecordsConfig


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that metrics are sent."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...

    def close(self) -> None:
        """Finish what is being sent. Nothing is logged afterwards."""
        ...


class WandbConfig(Config):
    """A Weights & Biases run. The account and the run's name come from wandb's own environment (`WANDB_API_KEY`, `wandb login`,
    `WANDB_NAME`). It writes below the run's folder and sends nothing, unless `WANDB_MODE=online`; `wandb sync` uploads it later."""

    project: str = "whet"


class ObserveConfig(Config):
    """Display and trackers of a run, in addition to `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files below the run's folder."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    trackers: tuple[Reference, ...] = ()
    """Your own: each names a callable `(run_dir: Path, config: dict) -> Tracker`."""
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
    def _has_a_table_of_records(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "records_every" in values:
            raise ValueError(f"records_every is now observe.records.every: write observe.records.every={values['records_every']}")
        return values


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


class TensorBoardTracker:
    """Scalars in TensorBoard event files. Needs the `tensorboard` package."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "observe.tensorboard", error) from error
        self._make_writer = lambda step: SummaryWriter(str(folder), purge_step=step)
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per value.

        The first step logged takes the place of what an earlier process wrote from that step on: after a resume, a
        curve does not run twice.
        """
        if self._writer is None:
            self._writer = self._make_writer(step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Needs the `wandb` package."""

    def __init__(
        self,
        project: str,
        folder: Path,
        config: Mapping[str, Any],
    ) -> None:
        """Start the wandb run, offline unless `WANDB_MODE` says otherwise. It shows `config`; its files go below `folder`."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("wandb", "observe.wandb", error) from error
        self._run = wandb.init(project=project, mode=os.environ.get("WANDB_MODE", "offline"), dir=str(folder), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def build_trackers(config: ObserveConfig, run_dir: Path, run_config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run; the first is the JsonlTracker of its `metrics.jsonl`.

    `run_config` is the run's resolved configuration as plain values.

    Raises:
        ValueError: a package is missing, a reference does not resolve, or what it makes is no tracker.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    if config.wandb is not None:
        trackers.append(WandbTracker(config.wandb.project, run_dir, run_config))
    for reference in config.trackers:
        factory = resolve_callable(reference, kind="tracker", given=["run_dir", "config"])
        tracker = call_factory(factory, reference, run_dir, dict(run_config), kind="tracker")
        if not isinstance(tracker, Tracker):
            made = f"{reference!r} made an object of type {type(tracker).__name__}"
            raise ValueError(f"observe.trackers: {made}, which has no log() and close()")
        trackers.append(tracker)
    return [JsonlTracker(run_dir / "metrics.jsonl"), *trackers]


def _missing(package: str, key: str, error: ImportError) -> ValueError:
    return ValueError(f"{key} needs the {package} package ({error}): pip install 'whet[{package}]', or turn it off")
