"""The reward of the example: exact match of the answer, as Search-R1 normalises it."""

from __future__ import annotations

import re
import string

from whet.types import Trajectory

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation, English articles and doubled spaces (SQuAD's normalisation, which Search-R1 uses)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(trajectory: Trajectory) -> float:
    """1 if the last answer is the label.."""
    text = "".join(turn.message.content for turn in trajectory.turns)
    answers = ANSWER.findall(text)
    right = bool(answers) and normalized(answers[-1]) == normalized(str(trajectory.task.label))
    return float(right)


def searched(trajectory: Trajectory) -> float:
    """1 if it has searched."""
    return float(any(turn.notes for turn in trajectory.turns))
