"""Worked examples: `whet view --lesson`. Their conversations are made up; their numbers are computed when the page starts."""

from __future__ import annotations

from pathlib import Path

from whet.view.lessons.play import Example, write_example
from whet.view.lessons.poem import POEM
from whet.view.lessons.research import RESEARCH
from whet.view.lessons.sums import ONE_PLUS_ONE, TWO_PROMPTS

LESSONS: dict[str, dict[str, Example]] = {
    "one-plus-one": ONE_PLUS_ONE,
    "two-prompts": TWO_PROMPTS,
    "research": RESEARCH,
    "poem": POEM,
}


def write_lessons(folder: Path, name: str) -> list[Path]:
    """Compute a lesson, or all of them, into a folder. Returns the folders of its runs.

    Raises:
        ValueError: there is no such lesson.
    """
    if name != "all" and name not in LESSONS:
        raise ValueError(f"there is no lesson {name!r}; there are {', '.join(LESSONS)}, and all")
    out: list[Path] = []
    for lesson, examples in LESSONS.items():
        if name in ("all", lesson):
            for each, example in examples.items():
                out.append(folder / each)
                write_example(out[-1], example)
    return out
