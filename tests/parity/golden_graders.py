"""Cases of other trainers' graders, run through whet's: one adapter for each file of cases.

An adapter takes one case and raises AssertionError where whet's answer differs. `DIFFERENT` says where it differs on purpose.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.published.answers import normalise_words, token_f1
from whet.reward.published.boxed_math import BoxedReward
from whet.reward.published.dapo import boxed_answer, final_answer, respell_final
from whet.reward.published.gpqa import extract_letter
from whet.reward.published.gsm8k import extract_number
from whet.reward.published.hendrycks import last_box
from whet.reward.published.prm800k import Decision, decide_normalised, normalise_answer, respell_answer
from whet.types import Finish, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

Case = Mapping[str, Any]

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Different:
    """Cases that whet answers otherwise on purpose."""

    file: str
    applies: Callable[[Case], bool]
    check: Callable[[Case], None]
    """Asserts whet's own answer."""
    why: str


@cache
def _reward(name: str, options: str) -> Any:
    reward = build_reward(RewardConfig(name=name, options=json.loads(options), timeout_s=TIMEOUT_S))
    atexit.register(reward.close)
    return reward


def trajectory(response: str, label: str | None, metadata: Mapping[str, Any] | None = None, num_tokens: int = 1) -> Trajectory:
    task = Task("case", (Message("user", "?"),), label, metadata or {})
    tokens, logprobs, versions = (1,) * num_tokens, (0.0,) * num_tokens, (0,) * num_tokens
    turn = Turn((0,), (Origin.PROMPT,), tokens, logprobs, versions, Message("assistant", response), Finish.STOP)
    return Trajectory("case#0", task, (turn,), Outcome.COMPLETED)


def score(name: str, played: Trajectory, **options: Any) -> Rewards | LabelError:
    """What the reward says, or that the row cannot be used."""
    try:
        return asyncio.run(_reward(name, json.dumps(options, sort_keys=True))(played))
    except LabelError as error:
        return error


def text_of(label: Any) -> str | None:
    """A label as whet's data sources read it."""
    return None if label is None else str(label)


def check_total(name: str, case: Case, expected: Any, **options: Any) -> None:
    inputs = case["inputs"]
    response = inputs["response"] if "response" in inputs else inputs["solution"]
    label = text_of(inputs["label"] if "label" in inputs else inputs["ground_truth"])
    check_score(score(name, trajectory(response or "", label, inputs.get("metadata")), **options), expected)


def check_score(found: Rewards | LabelError, expected: Any) -> None:
    if isinstance(expected, Mapping) and "error" in expected:
        assert isinstance(found, LabelError), f"expected a LabelError (the other raises {expected['error']}), found {found}"
        return
    assert isinstance(found, Rewards), f"expected {expected}, found the error {found}"
    total = expected["score"] if isinstance(expected, Mapping) else expected
    assert abs(found.total - float(total)) < 1e-9, f"expected {total}, found {found}"
    if isinstance(expected, Mapping):
        assert found.components["accuracy"] == float(expected["acc"]), f"expected acc {expected['acc']}, found {found}"
    assert found.total == 1.0 or found.detail or float(total) > 0, f"a score of {found.total} without a reason"


def check_equal(found: Any, expected: Any, what: str) -> None:
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


def slime_math(case: Case) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    if "response" in inputs:
        check_equal(last_box(inputs["response"]), outputs["extracted"], "the box")
        check_total("slime_math", case, outputs["reward"])
        return
    given, truth = inputs["given"], inputs["truth"]
    for side, text in (("given", given), ("truth", truth)):
        check_equal(respell_answer(text), outputs[f"mathd_norm_{side}"], f"mathd's spelling of {side}")
        check_equal(normalise_answer(text), outputs[f"sympy_norm_{side}"], f"the normal form of {side}")
    check_equal(respell_answer(given) == respell_answer(truth), outputs["mathd"], "mathd")
    check_equal(_computed(decide_normalised(normalise_answer(given), normalise_answer(truth))), outputs["sympy"], "sympy")


def _computed(decision: Decision) -> bool:
    """The decision with its differences computed in a worker, as `BoxedReward` does."""
    from whet.reward.published.boxed_math import Comparison

    pool = _reward("slime_math", "{}")._pool
    reward = BoxedReward("slime_math", lambda task, response: Comparison(response, "", decision), pool)
    return asyncio.run(reward(trajectory("", None))).total == 1.0


def slime_deepscaler(case: Case) -> None:
    check_total("deepscaler", case, case["outputs"]["reward"])


def slime_dapo(case: Case) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    expected = _dapo_reward(outputs)
    if case["params"].get("strict_box_verify", case["params"].get("strict_box")):
        check_total("slime_dapo", case, expected, strict_box=True)
        if isinstance(expected, Mapping) and "pred" in expected:
            check_equal(boxed_answer(inputs["response"]), expected["pred"], "the box")
        return
    check_total("slime_dapo", case, expected)
    if "normalized" in outputs:
        said = re.split(r"(?i)answer\s*:", inputs["response"])[-1]
        check_equal(respell_final(said, turn_ends=True), outputs["normalized"], "the spelling")
    if "pred" in expected:
        check_equal(respell_final(final_answer(inputs["response"]), turn_ends=True), expected["pred"], "the answer")


def _dapo_reward(outputs: Mapping[str, Any]) -> Any:
    """The recorded reward, under the name that the file gives it."""
    return outputs["reward"] if "reward" in outputs else outputs["score"] if isinstance(outputs["score"], Mapping) else outputs


def slime_f1(case: Case) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    check_total("f1", case, outputs["reward"])
    found = token_f1(inputs["response"] or "", inputs["label"])
    expected = outputs["f1_precision_recall"]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12, f"expected {expected}, found {found}"
    if outputs["normalized"] is not None:
        check_equal(normalise_words(inputs["response"]), outputs["normalized"], "the normal form")


def slime_gpqa(case: Case) -> None:
    check_total("gpqa", case, case["outputs"]["reward"])
    metadata = case["inputs"]["metadata"] or {}
    if "extracted" in case["outputs"]:
        letters = metadata.get("valid_letters") or "ABCDEFGHIJ"
        check_equal(extract_letter(case["inputs"]["response"] or "", list(letters)), case["outputs"]["extracted"], "the letter")


def slime_ifbench(case: Case) -> None:
    check_total("ifeval", case, case["outputs"]["reward"])


def slime_dispatch(case: Case) -> None:
    inputs, kind = case["inputs"], case["params"]["rm_type"]
    options = {"default": kind} if kind.strip() else {}
    check_total("dispatch", {"inputs": {**inputs, "metadata": inputs.get("metadata") or {}}}, case["outputs"]["reward"], **options)


def verl_reward_score(case: Case) -> None:
    inputs, outputs, params = case["inputs"], case["outputs"], case["params"]
    function = case["source"].partition(": ")[2].partition(" ")[0].removeprefix("verl.utils.reward_score.").partition(".")[0]
    if function == "gsm8k":
        method = params.get("method", "strict")
        check_total("verl_gsm8k", case, outputs["score"], method=method)
        if "extracted" in outputs:
            check_equal(extract_number(inputs["solution"], method), outputs["extracted"], "the number")
    elif function == "search_r1_like_qa_em":
        target = inputs["ground_truth"]["target"]
        for option, key in ((False, "em"), (True, "subem")):
            if key in outputs:
                found = score("search_em", trajectory(inputs["solution"], None, {"target": target}), substring=option)
                check_score(found, outputs[key])
    elif function == "math_dapo":
        if params.get("strict_box_verify"):
            check_total("verl_math_dapo", case, outputs["score"], strict_box=True)
            check_equal(boxed_answer(inputs["solution"]), outputs["score"]["pred"], "the box")
            return
        check_total("verl_math_dapo", case, outputs["score"])
        check_equal(respell_final(final_answer(inputs["solution"]), turn_ends=False), outputs["score"]["pred"], "the answer")
    else:
        name = {"math_reward": "hendrycks_math", "math_verify": "math_verify", "geo3k": "geo3k", "prime_math": "prime_math"}[function]
        check_total(name, case, outputs["score"])


def dapo_overlong(case: Case) -> None:
    """The penalty for over-long replies, among verl's miscellaneous cases."""
    inputs, params = case["inputs"], case["params"]
    options = {
        "max_tokens": params["max_resp_len"],
        "buffer_tokens": params["overlong_buffer_len"],
        "factor": params["penalty_factor"],
    }
    rows = zip(inputs["scores"], inputs["response_lengths"], case["outputs"]["reward_at_last_token"], strict=True)
    for place, (base, length, expected) in enumerate(rows):
        found = score("overlong", trajectory("x", None, num_tokens=length), **options)
        assert isinstance(found, Rewards)
        check_equal(round(base + found.total, 6), round(expected, 6), f"row {place}")
        if "overlong_reward" in case["outputs"]:
            check_equal(round(found.total, 6), round(case["outputs"]["overlong_reward"][place], 6), f"penalty of row {place}")


def _no_instructions(case: Case) -> bool:
    return not (case["inputs"].get("metadata") or {}).get("instruction_id_list")


def _is_label_error(case: Case) -> None:
    metadata = case["inputs"].get("metadata") or {}
    found = score("ifeval", trajectory(case["inputs"]["response"] or "", None, metadata))
    assert isinstance(found, LabelError) and "instruction_id_list" in str(found), f"expected a LabelError, found {found}"


def _no_label(case: Case) -> bool:
    metadata = case["inputs"].get("metadata") or {}
    known = ("correct_letter", "correct_answer", "answer_text")
    return case["inputs"].get("label") is None and not any(metadata.get(key) for key in known)


def _unlabelled(case: Case) -> None:
    found = score("gpqa", trajectory(case["inputs"]["response"] or "", None, case["inputs"].get("metadata")))
    assert isinstance(found, LabelError) and "label" in str(found), f"expected a LabelError, found {found}"


DIFFERENT: list[Different] = [
    Different(
        "slime_rm_ifbench",
        _no_instructions,
        _is_label_error,
        "A row without instructions cannot be scored. The other gives 0; whet promises that a reward that cannot be computed is an error "
        "that names the row, never a 0 to be trained on.",
    ),
    Different("slime_rm_gpqa", _no_label, _unlabelled, "A row without a right answer cannot be scored: an error here, a 0 there."),
]


def _adapter(file: str, check: Callable[[Case], None]) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        for different in DIFFERENT:
            if different.file == file and different.applies(case):
                different.check(case)
                return
        check(case)

    return run


ADAPTERS: dict[str, Callable[[Case], None]] = {
    file: _adapter(file, check)
    for file, check in {
        "slime_rm_math": slime_math,
        "slime_rm_deepscaler": slime_deepscaler,
        "slime_rm_dapo": slime_dapo,
        "slime_rm_f1": slime_f1,
        "slime_rm_gpqa": slime_gpqa,
        "slime_rm_ifbench": slime_ifbench,
        "slime_rm_dispatch": slime_dispatch,
        "verl_reward_score": verl_reward_score,
    }.items()
}
"""By the file's name without `.json`."""
