"""Answers that a grammar lets through and that would take too long: each is a wrong answer, in bounded work, and never a time-out.

A policy must not be able to mask itself out of a bad score, and a deterministic run must not stop for what a model wrote.
"""

import asyncio
import json
import time

import pytest

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.math.symbolic import MAX_STEPS
from whet.reward.pool import WorkerPool

pytestmark = pytest.mark.long

LIMIT_S = 15.0
"""For any one of them, on a machine that other work shares; they take a second or two at most."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
BOMBS = {
    "tower": "9^9^9^9",
    "braced tower": "9^{9^{9^{9}}}",
    "bracketed tower": "(((9^9)^9)^9)^9",
    "tower of letters": "x^{x^{x^{x}}}",
    "power of a sum": "(a+b+c+d+e)^{40}",
    "three letters": "(x+y+z)^{30}",
    "large power": "x^{999}-1",
    "powers of ten": "10^{999}" * 40,
    "small and large": r"10^{-999}+10^{999}\sqrt{2}",
    "exponential": r"\exp(" * 10 + "9" + ")" * 10,
    "exponentials of powers": r"e^{x^9}" * 30,
    "products of exponentials": r"e^{x}" * 60,
    "factorials": "999!" * 60,
    "nested factorials": "99!!!!",
    "factorial of a letter": "n!" * 80,
    "binomials": r"\binom{999}{500}" * 20,
    "huge binomials": r"\binom{99999}{50000}" * 15,
    "letters in binomials": r"\binom{n}{k}" * 25,
    "fractions": "+".join(rf"\frac{{1}}{{x+{k}}}" for k in range(1, 26)),
    "fractions of letters": "+".join(rf"\frac{{{chr(97 + k)}}}{{{chr(98 + k)}+1}}" for k in range(20)),
    "nested fractions": r"\frac{1}{1+" * 11 + "x" + "}" * 11,
    "whole fractions": "+".join(rf"\frac{{1}}{{{10**12 + k}}}" for k in range(1, 16)),
    "roots": "+".join(rf"\sqrt{{{p}}}" for p in PRIMES),
    "roots of letters": "+".join(rf"\sqrt{{x+{p}}}" for p in PRIMES),
    "nested roots": r"\sqrt{2+" * 11 + "x" + "}" * 11,
    "roots of roots": r"\sqrt[7]{3+" * 10 + r"\sqrt{2}" + "}" * 10,
    "roots of factorials": r"\sqrt{999!}" * 30,
    "logarithms": r"\ln(" * 11 + "x" + ")" * 11,
    "sines": "".join(rf"\sin({p}x)" for p in range(2, 40)),
    "sums of sines": "+".join(rf"\sin^{{9}}({p}x)" for p in range(2, 25)),
    "tangents": r"\tan(" * 11 + "x" + ")" * 11,
    "sines of cosines": r"\sin(\cos(\sin(\cos(x+y))))^{9}" * 8,
    "hyperbolic": r"\cosh(" * 10 + "9" + ")" * 10,
    "sine of a power": r"\sin(10^{999})" * 20,
    "unions": r"\cup".join(f"({k},{k + 2})" for k in range(45)),
    "intersections": r"\cap".join(f"(x+{k},{k + 2})" for k in range(30)),
    "unions of letters": r"\cup".join(f"({chr(97 + k % 26)},{k})" for k in range(40)),
    "bars": "|" + "|x|-1" * 60 + "|",
    "nested bars": "|1-" * 40 + "x" + "|" * 40,
    "floors": r"\lfloor x \rfloor" * 20,
    "chain of relations": "1<x<2" * 60,
    "chain of equations": "=".join(f"x^{{{k}}}" for k in range(1, 40)),
    "long list": ",".join(str(k) for k in range(100)),
    "list of formulas": ",".join(rf"\sqrt{{{k}x}}" for k in range(1, 34)),
    "list of powers": ",".join(f"(x+{k})^{{99}}" for k in range(28)),
    "matrix": r"\begin{pmatrix}" + r"\\".join("&".join("x" * 8) for _ in range(8)) + r"\end{pmatrix}",
    "power of a matrix": r"\begin{pmatrix}1&x\\y&2\end{pmatrix}^{99}",
    "plus and minus": r"\pm 1" * 60,
    "digits": "x+" + "7" * 40 + "." + "3" * 40,
    "decimals": "+".join(f"{k}.{'7' * 20}" for k in range(16)),
    "deep": "(" * 12 + "x" + ")" * 12,
    "alternating": "-+" * 190 + "x",
    "signs": "-" * 399 + "1",
    "letters": "abc def " * 40,
    "subscripts": "x_{1}" * 75,
    "percents": r"5\%" * 90,
    "units": "5 cm " * 70,
    "thousands": "1,234," * 60,
    "words": "and or " * 50,
    "dots": "1." * 190,
    "spaces": "1" + " " * 390 + "2",
    "units of units": "5 " + "m/" * 190,
    "quantities": "5 feet 3 inches " * 24,
    "chinese": "一百" * 150,
    "dates": "May 1, " * 50,
    "colons": "1:" * 190 + "1",
    "overlines": r"0.\overline{3}" * 25,
    "equation in many letters": "abcdefgh=" + "+".join("zyxwvuts"),
    "inverse functions": r"\arcsin(" * 10 + "2" + ")" * 10,
    "complex": "(1+i)^{999}" * 30,
}
FRAMES = {
    "slime_dapo": "Answer: {}",
    "verl_math_dapo": "Answer: {}",
    "verl_gsm8k": "#### {}",
    "f1": "{}",
    "exact": "{}",
    "search_em": "<answer>{}</answer>",
    "gpqa": "The answer is {}",
    "deepscaler": r"</think> \boxed{{{}}}",
    "geo3k": r"<think>x</think> \boxed{{{}}}",
    "prime_math": r"The answer is \boxed{{{}}}",
}
GRADERS = ["math", "math_verify", "slime_math", "hendrycks_math", *FRAMES]
LOWEST = {"slime_dapo": -1.0, "verl_math_dapo": -1.0, "geo3k": 0.1}
LABELS = ("371", "x^2+2x+1")
COMPUTING = ("math", "prime_math", "slime_math")
QUICK = ("tower", "braced tower", "sines", "three letters", "unions", "roots", "binomials", "nested bars", "words")
"""For math-verify, whose steps are the slowest; the others are marked slow."""


@pytest.fixture(scope="module")
def rewards():
    built = {name: build_reward(RewardConfig(name=name, timeout_s=60.0)) for name in GRADERS}
    yield built
    for reward in built.values():
        reward.close()


@pytest.mark.parametrize(
    ("name", "bombs"),
    [
        *((name, QUICK if name == "math_verify" else tuple(BOMBS)) for name in GRADERS),
        pytest.param("math_verify", tuple(BOMBS), marks=pytest.mark.slow, id="math_verify-all"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bomb_is_a_wrong_answer(rewards, name, bombs):
    slow = []

    async def play(bomb, label):
        started = time.monotonic()
        scored = await rewards[name](make_trajectory(FRAMES.get(name, r"So \boxed{{{}}}.").format(BOMBS[bomb]), label))
        took = time.monotonic() - started
        assert scored.total <= LOWEST.get(name, 0.4) and scored.detail, (bomb, scored)
        if took > LIMIT_S:
            slow.append((bomb, round(took, 1)))

    for bomb in bombs:
        for label in LABELS if name in COMPUTING else LABELS[:1]:
            asyncio.run(play(bomb, label))
    assert not slow


def test_what_is_too_much_for_math_verify_says_so_and_takes_the_same_steps_each_time():
    reward = build_reward(RewardConfig(name="math_verify", timeout_s=60.0))
    try:
        for _ in range(2):
            scored = asyncio.run(reward(make_trajectory(rf"\boxed{{{BOMBS['sines']}}}", "371")))
            assert scored.total == 0.0 and "too much" in scored.detail
            assert asyncio.run(reward(make_trajectory(r"\boxed{(x+1)^2}", LABELS[1]))).total == 1.0
        with pytest.raises(LabelError, match="takes too much to compare"):
            asyncio.run(reward(make_trajectory(r"\boxed{1}", BOMBS["sines"])))
    finally:
        reward.close()
    assert MAX_STEPS >= 100_000


def test_a_label_beyond_the_bounds_is_a_label_error():
    reward = build_reward(RewardConfig(name="math", timeout_s=60.0))
    try:
        with pytest.raises(LabelError, match="too large"):
            asyncio.run(reward(make_trajectory(r"\boxed{1}", r"\exp(\exp(\exp(99)))")))
    finally:
        reward.close()


@pytest.mark.parametrize("name", ["math", "math_verify", "prime_math", "slime_math"])
def test_a_comparison_that_gets_no_time_is_a_wrong_answer_not_a_timeout(name, monkeypatch):
    """The last resort, should a machine stand still: the answer is the model's, so it earns nothing and masks nothing."""
    reward = build_reward(RewardConfig(name=name, timeout_s=1e-6))
    text = FRAMES.get(name, r"\boxed{{{}}}").format("x+" + r"\sqrt{2}" * 20)
    try:
        scored = asyncio.run(reward(make_trajectory(text, r"x\sqrt{3}")))
    finally:
        reward.close()
    assert scored.total == 0.0 and "in time" in json.dumps(scored.detail)


def test_workers_order_their_sets_alike():
    """What depends on the order of a set is the same in each process, so a comparison takes the same steps in each."""
    pool = WorkerPool(1, 20.0)
    try:
        assert asyncio.run(pool.call("os:getenv", {"key": "PYTHONHASHSEED"}, "the seed")) == "0"
    finally:
        pool.close()
