"""`whet.Run`: what a run left in its folder, for Python."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.build.run_dirs import END
from whet.files import parse_object
from whet.types import JSON

if TYPE_CHECKING:
    from whet.api.replies import Replies

RESULTS = "results.json"
"""File of a run of evaluate."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run."""

    metric: str
    step: int
    value: float
    checkpoint: Path | None
    """Checkpoint of those weights; None: it was not kept (`checkpoint.best` keeps it)."""


class Run:
    """A run's folder. It may be of a run that the command line made, and of one that is not finished.

    Args:
        folder: the run's `run_dir`.
        functions: objects of this process that its settings name (`whet.here`); the call that made the run gives them.

    Raises:
        ValueError: there is no run.
    """

    def __init__(self, folder: str | Path, functions: Mapping[str, Any] | None = None) -> None:
        self.folder, self._functions = Path(folder), dict(functions or {})
        self._replies: Replies | None = None
        if not (self.folder / "config.toml").is_file():
            raise ValueError(f"{self.folder} is no run's folder: it has no config.toml")

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        best = self.best
        what = f", {best.metric} {best.value:.4g} at step {best.step}" if best is not None else ""
        return f"Run({str(self.folder)!r}, {self.status}, {len(self.rows)} lines of metrics{what})"

    @property
    def status(self) -> str:
        """finished, stopped, failed, or "running": one that still works, or that was killed."""
        try:
            return str(json.loads((self.folder / END).read_text())["status"])
        except FileNotFoundError:
            return "running"

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the last start, as tables."""
        return tomllib.loads((self.folder / "config.toml").read_text())

    @property
    def rows(self) -> list[dict[str, JSON]]:
        """The lines of `metrics.jsonl`."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [row for line in lines if (row := parse_object(line)) is not None]

    @property
    def metrics(self) -> Any:
        """`rows` as a pandas data frame, a column for each metric; without pandas the rows themselves."""
        try:
            import pandas
        except ModuleNotFoundError:
            return self.rows
        return pandas.DataFrame(self.rows)

    @property
    def results(self) -> dict[str, JSON]:
        """The newest value of each evaluation metric (`eval/<set>/<metric>`)."""
        if self._evaluates:
            return json.loads((self.folder / RESULTS).read_text())
        return {name: value for row in self.rows for name, value in row.items() if name.startswith("eval/")}

    @property
    def model_path(self) -> Path:
        """Folder of the trained model in Hugging Face format.

        Raises:
            ValueError: the run has not come to its end, or evaluated alone.
        """
        model = self.folder / "model"
        if not model.is_dir() and self._evaluates:
            raise ValueError(f"{self.folder} is of an evaluation, which writes no model: take the one that was evaluated")
        if not model.is_dir():
            raise ValueError(f"{self.folder} has no model yet: the run is {self.status}; the same call goes on with it")
        return model

    @property
    def best(self) -> Best | None:
        """The best evaluation, by `checkpoint.best` if it is set, else by the mean reward of the first set, its accuracy, or its loss, of
        which the least is best; None: nothing was evaluated."""
        kept = self.settings.get("checkpoint", {})
        names = [name for row in self.rows for name in row if name.startswith("eval/")]
        ranked = [name for ending in ("/reward/total", "/accuracy", "/loss", "") for name in names if name.endswith(ending)]
        metric = kept.get("best") or next(iter(ranked), None)
        found = [(float(row[metric]), int(row["step"])) for row in self.rows if metric is not None and row.get(metric) is not None]
        if metric is None or not found:
            return None
        least = kept.get("best_mode") == "min" if kept.get("best") else metric.endswith("/loss")
        value, step = (min if least else max)(found, key=lambda each: each[0])
        saved = sorted((self.folder / "checkpoints").glob(f"rollout_{step:06d}*/manifest.json"))
        return Best(metric, step, value, saved[-1].parent if saved else None)

    def records(
        self,
        rollout: int | str | None = None,
        task: str | None = None,
        outcome: str | None = None,
        *,
        sort: str | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of trajectories with all their tokens, as docs/records.md has them. Arguments as the options of `whet records`.

        Raises:
            ValueError: there are no records, or the query cannot be understood.
        """
        from whet.observe.record_query import RecordQuery
        from whet.observe.records.query import choose, read_chosen, records_folder

        folder = records_folder(self._recorded)
        query = RecordQuery(None if rollout is None else str(rollout), task, outcome, sort=sort)
        tables = read_chosen(folder, choose(folder, query).slice(0, limit))
        return [row for table in tables for row in table.to_pylist(maps_as_pydicts="strict")]

    def generate(self, prompt: Any, **settings: Any) -> str:
        """The reply of the trained model, or of the newest checkpoint, to a prompt: text, or a list of OpenAI messages. The model is loaded
        once, and kept until `close`.

        Args:
            prompt: played as the run's own are, with its tools.
            settings: those of `[rollout]` to replace, such as `temperature=0` and `max_turn_tokens=64`.
        """
        from whet.api.replies import Replies

        if self._replies is None:
            self._replies = Replies(self.folder, self._functions)
        return self._replies.to(prompt, settings)

    def close(self) -> None:
        """Give back the memory of the model that `generate` keeps; the next `generate` loads it again."""
        if self._replies is not None:
            self._replies.close()

    def show(
        self,
        rollout: int | None = None,
        task: str | None = None,
        *,
        best: bool = False,
        worst: bool = False,
        tool: bool = False,
        num: int | None = None,
        tokens: bool = False,
    ) -> None:
        """Show conversations: the best, the worst and a typical one of the newest rollout, or what is asked for; options as of `whet show`.
        `whet.show` displays every token of one in a notebook.

        Raises:
            ValueError: there are no records, or none of what was asked for.
        """
        from whet.observe.notebook import in_notebook
        from whet.runs.show import ShowQuery, show_run

        query = ShowQuery(rollout, task, best, worst, tool=tool, num=num, tokens=tokens)
        show_run(self._recorded, query, print, colour=in_notebook() or sys.stdout.isatty())

    @property
    def _evaluates(self) -> bool:
        """True if the run is one of evaluate."""
        return (self.folder / RESULTS).is_file()

    @property
    def _recorded(self) -> Path:
        """The folder whose records are shown: of a run that evaluated alone, its first set's."""
        sets = sorted((self.folder / "evaluations").glob("*"))
        return sets[0] if sets and not (self.folder / "rollouts").is_dir() else self.folder

    def plot(self, metrics: Mapping[str, str] | None = None) -> Any:
        """Curves over the steps: reward, length, entropy and KL, and evaluations, as far as the run has them.

        Args:
            metrics: title by metric, to draw others. None: those.

        Returns:
            The figure of matplotlib.

        Raises:
            ValueError: matplotlib is not installed, or the run has none of the metrics yet.
        """
        from whet.api.plot import plot

        return plot(self.rows, metrics, str(self.folder))

    def push_to_hub(self, name: str, *, private: bool = True, token: str | None = None) -> str:
        """Upload the model with a card that says data, settings and figures.

        Args:
            name: `owner/name` on the hub; it is made if it is not there.
            private: True: only its owner sees it.
            token: of the hub; None: the one of `hf auth login`, or of HF_TOKEN.

        Returns:
            The address of the upload.
        """
        from whet.api.hub import push

        return push(self, name, private=private, token=token)
