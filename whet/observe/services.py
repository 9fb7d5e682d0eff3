"""Trackers that are other packages': TensorBoard, Weights & Biases, trackio, SwanLab and MLflow.

None of them sends anything to another machine unless its own environment variables say so.
"""

from __future__ import annotations

import html
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from whet.observe.replies import COLUMNS, ShownReply
from whet.observe.transcript import shortened

PROJECT = "whet"
"""Project or experiment of a run where the package's environment variable names none."""


def _texts(rows: Sequence[ShownReply]) -> list[list[str | float | None]]:
    return [[shortened(cell) if isinstance(cell, str) else cell for cell in row.cells] for row in rows]


class TensorBoardTracker:
    """Event files in `tensorboard/` of the run's folder. Replies are text."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = lambda step: SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)
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

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        """Add a table in Markdown, in which what a model wrote is plain text."""
        lines = [COLUMNS, ["---"] * len(COLUMNS), *_texts(rows)]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cell(value: str | float | None) -> str:
    """A cell of a table in Markdown."""
    text = "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
    return re.sub(r"[|*_`\[\]\\]", lambda found: f"&#{ord(found[0])};", html.escape(text)).replace("\n", "<br>")


class WandbTracker:
    """A run of Weights & Biases in `wandb/` of the run's folder: offline unless `WANDB_MODE=online`; `wandb sync` uploads it later."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._wandb = import_module("wandb")
        mode, project = os.environ.get("WANDB_MODE", "offline"), os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = self._wandb.init(project=project, mode=mode, dir=str(run_dir), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        self._run.log({name: self._wandb.Table(columns=list(COLUMNS), data=_texts(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run in trackio's own database on this machine (`TRACKIO_DIR`), where `trackio show` finds it."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._trackio = import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = self._trackio.init(project=project, name=run_dir.name, config=dict(config), **quiet)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        self._run.log({name: self._trackio.Table(columns=list(COLUMNS), data=_texts(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLabTracker:
    """A run of SwanLab in `swanlab/` of the run's folder: offline unless `SWANLAB_MODE=online`; `swanlab sync` uploads it later."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._swanlab = import_module("swanlab")
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        mode, project = os.environ.get("SWANLAB_MODE", "offline"), os.environ.get("SWANLAB_PROJECT", PROJECT)
        self._run = self._swanlab.init(project=project, name=run_dir.name, mode=mode, log_dir=str(folder), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(COLUMNS), [["" if cell is None else str(cell) for cell in line] for line in _texts(rows)])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of MLflow: in `mlflow.db` and `mlflow/` of the run's folder, or where `MLFLOW_TRACKING_URI` says. Replies are artifacts
    in the form of MLflow's own tables. MLflow's names have no `@`: `mean@1` is `mean_1` there."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        folder, named = run_dir.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        self._client = mlflow.MlflowClient(tracking_uri=named or f"sqlite:///{folder / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(experiment)
        artifacts = None if named else (folder / "mlflow").as_uri()
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment, artifact_location=artifacts)
        self._run = self._client.create_run(place, run_name=run_dir.name).info.run_id
        self._client.log_dict(self._run, dict(config), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def replies(self, step: int, name: str, rows: Sequence[ShownReply]) -> None:
        self._client.log_dict(self._run, {"columns": list(COLUMNS), "data": _texts(rows)}, f"{name}/{step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)


SERVICES: dict[str, Callable[[Path, Mapping[str, Any]], Any]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanLabTracker,
    "mlflow": MlflowTracker,
}


def build_service(name: str, run_dir: Path, config: Mapping[str, Any]) -> Any:
    """The tracker of a package.

    Raises:
        ValueError: the package is missing, or cannot begin a run.
    """
    try:
        return SERVICES[name](run_dir, config)
    except ImportError as error:
        raise ValueError(f"observe.trackers: {name} needs the {name} package ({error}): {install(name)}, or leave {name} out") from error
    except Exception as error:  # what the package raises where it has no account, no network or no database
        raise ValueError(f"observe.trackers: {name} cannot begin a run: {type(error).__name__}: {error}; or leave {name} out") from error


def install(name: str) -> str:
    """The command that installs a tracker's package."""
    return f"pip install 'whet[{name}]'"
