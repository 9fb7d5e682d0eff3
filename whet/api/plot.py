"""Curves of a run, with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from whet.types import JSON

CURVES = {
    "reward/total": "reward",
    "response/tokens/mean": "tokens of a reply",
    "policy/entropy": "entropy (nats)",
    "policy/kl_ref": "KL to the reference (nats)",
    "sft/loss": "loss",
    "dpo/loss": "loss",
    "rm/loss": "loss",
    "dpo/accuracy": "accuracy on pairs",
    "rm/accuracy": "accuracy on pairs",
    "optim/grad_norm": "gradient norm",
}
"""Titles of the curves that are drawn, by metric."""
WINDOW = 10
"""Steps of the mean that is drawn over a curve of many steps."""


def plot(rows: Sequence[Mapping[str, JSON]], metrics: Mapping[str, str] | None, title: str) -> Any:
    """A figure with a panel for each metric that the rows have; an evaluation is drawn into the panel of the reward.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"plot needs the package {error.name}: pip install 'whet[plot]'") from error
    wanted = {name: label for name, label in (metrics or CURVES).items() if _points(rows, name)}
    if not wanted:
        asked = f" of {', '.join(metrics)}" if metrics else ""
        raise ValueError(f"{title}: there is nothing{asked} to draw yet")
    columns = min(len(wanted), 2)
    lines = -(-len(wanted) // columns)

    class Curves(Figure):
        """A figure that a notebook draws."""

        def _repr_png_(self) -> bytes:
            drawn = io.BytesIO()
            self.savefig(drawn, format="png")
            return drawn.getvalue()

    figure = Curves(figsize=(5 * columns, 3 * lines), layout="constrained")
    figure.suptitle(title)
    for place, (name, label) in enumerate(wanted.items(), start=1):
        axes = figure.add_subplot(lines, columns, place)
        _curve(axes, _points(rows, name), label)
        for evaluated in _evaluations(rows) if name == "reward/total" else ():
            axes.plot(*zip(*_points(rows, evaluated), strict=True), "o--", label=evaluated)
            axes.legend()
        axes.set_title(label)
        axes.set_xlabel("step")
    return figure


def _curve(axes: Any, points: Sequence[tuple[int, float]], label: str) -> None:
    steps, values = zip(*points, strict=True)
    many = len(points) >= 2 * WINDOW
    axes.plot(steps, values, "-" if many else ".-", alpha=0.4 if many else 1.0, label=label)
    if many:
        means = [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]
        axes.plot(steps, means, label=f"mean of {WINDOW}")


def _points(rows: Sequence[Mapping[str, JSON]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _evaluations(rows: Sequence[Mapping[str, JSON]]) -> list[str]:
    """The mean reward of each evaluation set."""
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith("eval/") and name.endswith("/reward/total")))
