"""Hostile answers, for every reward that reads text: bounded time, nothing run, a score of 0 (or the lowest) with its reason."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reward.reward_samples import make_trajectory
from whet.reward import RewardConfig, build_reward
from whet.reward.build import REWARDS
from whet.reward.math.arithmetic import parse_formula
from whet.reward.math.extract import last_boxed
from whet.reward.math.grammar import Refused
from whet.reward.published.latex_text import plain_text
from whet.reward.published.prm800k import decide

WITHOUT_TEXT = {"overlong", "environment", "reasoning_gym", "roles", "random", "model", "remote", "rubric", "dispatch"}
LOWEST = {"slime_dapo": -1.0, "verl_math_dapo": -1.0}
METADATA = {"ifeval": {"instruction_id_list": ["detectable_format:title"], "kwargs": [{}]}}

ANSWERS = {
    "import": "__import__('os').system('touch FILE')",
    "import in words": "import os; os.system('touch FILE')",
    "open": "open('FILE', 'w')",
    "lambda": "(lambda: open('FILE','w'))()",
    "attribute": "x.__class__.__mro__[1].__subclasses__()",
    "latex file": r"\input{FILE} \write18{touch FILE}",
    "f-string": "{open('FILE','w')}",
    "tower": "9^9^9^9^9^9",
    "tower in braces": "9^{9^{9^{9^{9}}}}",
    "tower in brackets": "((((((9^9)^9)^9)^9)^9)^9)^9",
    "factorials": "99!!!!!!",
    "huge factorial": "(10^9)!",
    "huge product": "9999999999^(9999999999)",
    "division by zero": "1/0",
    "megabyte of braces": "{" * 1_000_000 + "}" * 1_000_000,
    "megabyte of boxes": r"\boxed{" * 140_000,
    "megabyte of closed boxes": r"\boxed{x}" * 110_000,
    "megabyte of digits": "9" * 1_000_000,
    "megabyte of commas": "1,222" * 200_000,
    "megabyte of spaces": "answer" + " " * 1_000_000 + "is",
    "megabyte of lines": "\n" * 1_000_000,
    "megabyte of minus": "-" * 1_000_000 + "x",
    "megabyte of fractions": r"\frac" * 200_000,
    "megabyte of quotes": "\"'" * 500_000,
    "megabyte of stars": "*" * 1_000_000,
    "megabyte of tags": "<answer>" * 125_000,
    "megabyte of dollars": "$" * 1_000_000,
    "megabyte of angles": "<" * 1_000_000,
    "deep brackets": "(" * 300 + "x" + ")" * 300,
    "deep fractions": r"\frac{" * 300 + "1" + "}{2}" * 300,
    "deep roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "nul": "\x00" * 50,
    "surrogate": "\ud800",
}
FRAMES = (r"So \boxed{%s}", "Answer: %s", "#### %s", "<answer>%s</answer>", "</think> the final answer is $%s$. I hope so", "%s")


@pytest.fixture(scope="module")
def rewards():
    built = {
        name: build_reward(RewardConfig(name=name, timeout_s=20.0, workers=1)) for name in REWARDS if name not in WITHOUT_TEXT
    }
    yield built
    for reward in built.values():
        reward.close()


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in WITHOUT_TEXT])
@pytest.mark.parametrize("hostile", ANSWERS)
def test_a_hostile_answer_scores_nothing_and_runs_nothing(rewards, name, hostile, tmp_path):
    file = tmp_path / "x"
    answer = ANSWERS[hostile].replace("FILE", str(file))

    async def score_all():
        played = [make_trajectory(frame.replace("%s", answer), "371", metadata=METADATA.get(name, {})) for frame in FRAMES]
        return [await asyncio.wait_for(rewards[name](trajectory), 60.0) for trajectory in played]

    for scored in asyncio.run(score_all()):
        assert scored.total <= LOWEST.get(name, 0.0), scored
        assert scored.detail
    assert not file.exists()


@pytest.mark.parametrize("hostile", ["import", "tower", "deep brackets", "megabyte of braces"])
def test_a_hostile_answer_in_a_dispatched_row(hostile, tmp_path):
    reward = build_reward(RewardConfig(name="dispatch", timeout_s=20.0))
    answer = ANSWERS[hostile].replace("FILE", str(tmp_path / "x"))
    for kind in ("math", "boxed_f1", "dapo", "deepscaler"):
        trajectory = make_trajectory(rf"</think> Answer: \boxed{{{answer}}}", "371", metadata={"rm_type": kind})
        scored = asyncio.run(reward(trajectory))
        assert scored.total <= 0.0 and scored.detail
    reward.close()
    assert not (tmp_path / "x").exists()


def nodes(tree):
    yield tree
    for part in tree[1:]:
        if isinstance(part, list):
            yield from nodes(part)


@given(st.text(alphabet="0123456789xyabpiqrtsln+-*/^()!._ ,'\"[]{}\\=e", max_size=60))
def test_any_text_is_a_tree_of_known_nodes_or_refused(text):
    try:
        tree = parse_formula(text)
    except Refused as reason:
        assert str(reason)
        return
    for node in nodes(tree):
        assert node[0] in ("number", "symbol", "pi", "oo", "sqrt", "ln", "+", "-", "*", "/", "^", "!")
        if node[0] == "number":
            assert set(node[1]) <= set("0123456789.eE+-")
        if node[0] == "symbol":
            assert "__" not in node[1] and node[1].replace("_", "").isalnum()


@given(st.text(alphabet="0123456789xy+-/^(){}[],.$%&\\ fracsqtboxedpi\n", max_size=120))
def test_any_answer_is_decided_without_another_error(text):
    assert isinstance(plain_text(text), str)
    decide(last_boxed(rf"\boxed{{{text}}}") or text, "x+1")
    decide("7", text)


@pytest.mark.parametrize(
    "text",
    [
        *("9^9^9", "2^(3^4)", "x^1001", "((((9^9)^9)^9)^9)", "100!", "5!!", "a.b", "f'(x)", "1 2", ""),
        *("(" * 26 + "1" + ")" * 26, "1" * 41, "x" * 401),
    ],
)
def test_what_the_formula_grammar_refuses(text):
    with pytest.raises(Refused):
        parse_formula(text)
