"""Short answers in words, compared as SQuAD does (Rajpurkar et al., arXiv 1606.05250): the rewards `f1` and `search_em`."""

from __future__ import annotations

import json
import re
import string
from collections import Counter

from whet.config import Config
from whet.reward.base import bad_row, label_of
from whet.types import Rewards, Task

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole."""
MAX_TAGS = 10
"""More answer tags than that quarter the score of `search_em`: a reply may not be padded with them."""


class F1Options(Config):
    """The reward `f1` has no options."""


class SearchOptions(Config):
    """Options of the reward `search_em`."""

    substring: bool = False
    """It is enough that a right answer occurs in the reply's answer; tags are not counted then."""
    format_score: float = 0.0
    """Score of a reply that has an answer, but a wrong one."""


def normalise_words(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(answer: str, label: str) -> tuple[float, float, float]:
    """F1, precision and recall of the answer's words; all 0 where `yes`, `no` or `noanswer` is on one side only."""
    answer, label = normalise_words(answer), normalise_words(label)
    if answer != label and (answer in _WHOLE or label in _WHOLE):
        return 0.0, 0.0, 0.0
    answers, labels = answer.split(), label.split()
    same = sum((Counter(answers) & Counter(labels)).values())
    if same == 0:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(answers), same / len(labels)
    return 2 * precision * recall / (precision + recall), precision, recall


def score_f1(task: Task, response: str, options: F1Options) -> Rewards:
    """The F1 of the reply's words against the label's (the SQuAD score, with HotpotQA's rule for yes and no).

    The rule of slime's `f1`. The whole reply is the answer. Its precision and recall are components.
    """
    f1, precision, recall = token_f1(response, label_of(task, "f1"))
    return Rewards(f1, {"f1": f1, "precision": precision, "recall": recall}, "" if f1 == 1.0 else "the reply's words are not the label's")


def last_answer_tag(response: str) -> str | None:
    """Content of the last `<answer>...</answer>`; None without one. An opening tag within an answer is
    part of it."""
    found, place = None, 0
    while (start := response.find("<answer>", place)) >= 0:
        end = response.find("</answer>", start)
        if end < 0:
            break
        found, place = response[start + len("<answer>") : end].strip(), end + len("</answer>")
    return found


def score_search(task: Task, response: str, options: SearchOptions) -> Rewards:
    """1 if the last `<answer>` is one of the right answers, once both are normalised as in SQuAD, else 0.

    The rule of Search-R1 (arXiv 2503.09516) as verl has it: more than 10 opening or closing tags leave a quarter of the score. The right
    answers: `metadata.target` (text or a list), else the label (a JSON list of texts or `{"target": ...}`, or the answer itself).
    """
    targets = [normalise_words(target) for target in _targets(task)]
    answer = last_answer_tag(response)
    if answer is None:
        return Rewards(0.0, detail="the reply has no <answer>...</answer>")
    answer = normalise_words(answer)
    right = any(target in answer for target in targets) if options.substring else answer in targets
    if not right:
        return Rewards(options.format_score, detail=f"the answer {answer[:200]!r} is none of the right answers {targets[:5]!r}")
    if not options.substring and max(response.count("<answer>"), response.count("</answer>")) > MAX_TAGS:
        return Rewards(0.25, detail=f"the reply has more than {MAX_TAGS} answer tags")
    return Rewards(1.0)


def _targets(task: Task) -> list[str]:
    targets = task.metadata.get("target")
    if targets is None:
        targets = label_of(task, "search_em")
        if targets[:1] in ("[", "{"):
            try:
                targets = json.loads(targets)
            except json.JSONDecodeError:
                targets = [targets]
        if isinstance(targets, dict):
            targets = targets.get("target")
    targets = [targets] if isinstance(targets, str) else targets
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise bad_row(task, f"has the right answers {targets!r}; the reward search_em needs a text or a list of texts")
    return targets
