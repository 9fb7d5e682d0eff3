"""A trajectory in a notebook: the same view as on the page, in a frame of its own."""

from __future__ import annotations

import html
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from whet.view.export import PAGE, export_page
from whet.view.folders import EVALUATIONS, ViewedRun, find_runs
from whet.view.index import RunIndex
from whet.view.pieces import pieces_of
from whet.view.trajectories import rollout_pack, trajectory_pack


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """A trajectory as a page; a notebook displays it."""

    page: str
    """The whole page as HTML, that of an export."""
    trajectory: str
    rollout: int

    def _repr_html_(self) -> str:
        frame = (PAGE / "frame.html").read_text(encoding="utf-8")
        return frame.replace("@page@", html.escape(self.page, quote=True))

    def __repr__(self) -> str:
        return f"TrajectoryView({self.trajectory!r} of rollout {self.rollout}; a notebook displays it)"


def show(run: str | PathLike[str], trajectory: str, rollout: int | None = None, language: str = "en") -> TrajectoryView:
    """A trajectory of a run, for a notebook.

    Example:
        whet.show("runs/my_run", "train/7#0/3")

    Args:
        run: a `whet.Run`, a run's folder, or that of an evaluation set in it.
        trajectory: id of the trajectory.
        rollout: the rollout that it was played in. None: the newest one that has it.
        language: en or zh.

    Raises:
        ValueError: there is no such run or trajectory.
    """
    found = _run_of(Path(run))
    index = RunIndex(found)
    newest = _newest(index, trajectory) if rollout is None else rollout
    if newest is None:
        raise ValueError(f"no trajectory {trajectory!r} is in the records of {found.folder}; `whet records {found.folder}` lists them")
    pack = trajectory_pack(found, index, pieces_of(found), newest, trajectory, None)
    return TrajectoryView(export_page(pack, rollout_pack(found, newest), language), trajectory, newest)


def _run_of(folder: Path) -> ViewedRun:
    """The run of a folder; of an evaluation set's with the settings of its run."""
    if folder.resolve().parent.name != EVALUATIONS:
        return find_runs([folder])[0]
    found = find_runs([folder.resolve().parent.parent])
    return next((each for each in found if each.folder.resolve() == folder.resolve()), None) or find_runs([folder])[0]


def _newest(index: RunIndex, trajectory: str) -> int | None:
    """The newest rollout that has a trajectory."""
    table = index.whole()
    names = zip(table["rollout_id"].to_pylist(), table["trajectory"].to_pylist(), strict=True)
    return max((int(rollout) for rollout, name in names if name == trajectory), default=None)
