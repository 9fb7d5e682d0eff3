"""The reward of the example: the rubric of a task, judged by rules, and what the environment knows of the work.

The same criteria are there for a judge model: `reward.name = "rubric"` reads them from the rows.
"""

from __future__ import annotations

import re

from whet.env.research import Findings, findings
from whet.reward.judge import Grade
from whet.reward.rubric import read_criteria, score_rubric
from whet.types import Rewards, Task, Trajectory

QUARTER = re.compile(r"\b(?:first quarter|q1|first three months|january to march)\b", re.IGNORECASE)
YEAR = re.compile(r"\b(?:full|whole|entire)[ -]year\b|\bannual\b|\bfy ?2025\b", re.IGNORECASE)
FIGURE = re.compile(r"\b(?:million|billion)\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")


def rubric(trajectory: Trajectory) -> Rewards:
    """The sum of the weights of the criteria that the report meets, mapped strictly. Without a report no criterion is met."""
    criteria, work = read_criteria(trajectory.task, "criteria"), findings(trajectory)
    grades = [grade(str(criterion.name), work, trajectory.task) for criterion in criteria]
    return score_rubric(criteria, grades, "strict")


def grade(name: str, work: Findings, task: Task) -> Grade:
    """The grade of the criterion of this name."""
    filing = str(task.metadata["filing"])
    sentences = SENTENCE_END.split(re.sub(r"\[[^\[\]]*\]", " ", work.report or ""))
    if name == "first_quarter":
        spelled = "|".join(map(re.escape, task.metadata["revenue"]))
        revenue = re.compile(rf"(?<![\w.,-])(?:{spelled})(?![\w-]|[.,]\d)", re.IGNORECASE)
        found = [sentence for sentence in sentences if revenue.search(sentence)]
        return _graded(bool(found), any(QUARTER.search(sentence) and not YEAR.search(sentence) for sentence in found))
    if name == "official":
        return "fully" if filing in work.cited else "partly" if filing in work.not_opened else "not"
    assert name == "full_year", name
    return "fully" if any(YEAR.search(sentence) and FIGURE.search(sentence) for sentence in sentences) else "not"


def _graded(*met: bool) -> Grade:
    return "fully" if all(met) else "partly" if any(met) else "not"


def unread(trajectory: Trajectory) -> float:
    """1 if the report cites what was not opened."""
    return float(bool(findings(trajectory).not_opened))


def opened_filing(trajectory: Trajectory) -> float:
    """1 if the filing was opened, whatever the report says."""
    return float(trajectory.task.metadata["filing"] in findings(trajectory).opened)
