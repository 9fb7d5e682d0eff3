import asyncio
import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.math.extract import extract_answer
from whet.reward.math.grammar import Refused, check_formula
from whet.reward.math.math import decide
from whet.reward.math.normalise import normalise
from whet.reward.math.number import parse_number


@pytest.fixture(scope="module")
def math_reward():
    reward = build_reward(RewardConfig(name="math", timeout_s=30))
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\fbox{7}", "7"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("boxed", r"\boxed 5", "5"),
        ("boxed", r"\boxed{5} then \boxed{6", None),
        ("boxed", "#### 5", None),
        ("hash", "so\n#### 1\n#### 1,234\nDone", "1,234"),
        ("hash", "#### ", None),
        ("last_number", "it costs -$1,234.50 in all", "-$1,234.50"),
        ("last_number", "10-5", None),  # a range or a difference
        ("last_number", "It takes 3–5 days", None),
        ("last_number", "somewhere between 3 and 5", None),
        ("last_number", "3 to 5", None),
        ("last_number", "The result is \N{MINUS SIGN}5.", "\N{MINUS SIGN}5"),
        ("last_number", "They are:\n- 4\n- 5", "5"),
        ("last_number", "x = - 5", "- 5"),
        ("last_number", "so 10 - 5 = 5", "5"),
        ("last_number", "It is 1.5 million.", "1.5 million"),
        ("last_number", "It is 5 km.", "5 km"),
        ("last_number", "It is 5 apples.", "5"),
        ("last_number", "It is 3x", "3x"),
        ("last_number", "at 3:30 p.m.", "3:30 p.m."),
        ("last_number", "7 3/4 cups", "7 3/4"),
        ("last_number", r"we get \frac{x}{2}", None),
        ("last_number", r"we get \sqrt{5}", None),
        ("last_number", r"we get \sqrt5", None),
        ("last_number", "we get x^2", None),
        ("last_number", "we get x^{2}", None),
        ("last_number", "we get a_2", None),
        ("last_number", "we get 2 + 3", None),
        ("last_number", "we get 5!", None),
        ("last_number", "the point (3, 5)", None),
        ("last_number", "1. First\n2. Second", None),
        ("last_number", "1. It is 7.\n2. Done", "7"),
        ("last_number", "12 says GPT4 of H2O", "12"),
        ("last_number", "so $5$", "5"),
        ("last_number", "so **5**", "5"),
        ("last_number", "about 3/4 of them", "3/4"),
        ("last_number", r"so \frac{3}{4} it is", r"\frac{3}{4}"),
        ("last_number", "12, 5%.", "5%"),
        ("last_number", "none", None),
        ("auto", r"#### 3 but \boxed{4}, not 5", "4"),
        ("auto", "The answer is 3.\n#### 4\n", "4"),
        ("auto", "The answer is $x^2 + 1$. I used 7 steps.", "x^2 + 1"),
        ("auto", "1 + 2. **Answer:** x+1", "x+1"),
        ("auto", "The answer is 3.5. Bye 9", "3.5"),
        ("auto", "we get 3 and 4", "4"),
        ("auto", r"1 and \boxed{5", None),
        ("whole", "  a b ", "a b"),
    ],
)
def test_answers_are_found_where_the_strategy_looks(extract, text, answer):
    assert extract_answer(text, extract) == answer


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("1,234", "1234"),
        ("1000", r"1{,}000"),
        ("1000", r"\$1,000.00"),
        ("1000", "1e3"),
        ("0.00015", r"1.5 \times 10^{-4}"),
        ("0.5", r"\frac{1}{2}"),
        ("0.5", r"\dfrac12"),
        ("1/2", "2/4"),
        (r"\frac{1}{2}", ".5"),
        ("-5", "- 5.0"),
        ("-5", "\N{MINUS SIGN}5"),
        ("12", "12."),
        ("31/4", r"7\frac{3}{4}"),
        ("31/4", "7 3/4"),
        ("-31/4", "-7 3/4"),
        ("50", r"50\%"),
        ("0.5", "50%"),
        ("50%", "50 percent"),
        ("50", r"50^\circ"),
        ("50", r"50\text{ cm}"),
        ("50", "50 apples"),
        ("3000000", "3 million dollars"),
        ("-1/2", r"\frac{-1}{2}"),
        ("yes", r"\text{Yes}"),
        ("42", "$42$"),
    ],
)
def test_numbers_and_words_are_decided_exactly_without_a_worker(label, answer):
    assert decide(normalise(label), normalise(answer)) is True


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("1/3", "0.333333"),
        ("1/3", "0.33333333333333333333"),
        ("0.1", "0.10000000000000001"),
        ("9007199254740993", "9007199254740992"),
        ("5", "-5"),
        ("5 hours", "5 minutes"),
        ("5%", "500"),
        ("3", "3 million"),
        ("yes", "sye"),
        ("east", "seat"),
        ("4", "no idea"),
    ],
)
def test_near_misses_are_different(label, answer):
    assert decide(normalise(label), normalise(answer)) is False


@given(st.fractions(max_denominator=10**6), st.integers(1, 50))
def test_every_fraction_is_read_exactly(value, factor):
    sign = "-" if value < 0 else ""
    over, under = abs(value.numerator) * factor, value.denominator * factor
    for text in (f"{sign}{over}/{under}", f"{sign}\\frac{{{over}}}{{{under}}}", f"\\frac{{{sign}{over}}}{{{under}}}"):
        number = parse_number(text)
        assert number is not None and number.value == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_decimal_with_separators_is_read_exactly(units, places):
    value = Fraction(units, 10**places)
    whole, rest = divmod(abs(units), 10**places)
    text = f"{'-' if units < 0 else ''}{whole:,}" + (f".{rest:0{places}d}" if places else "")
    number = parse_number(text)
    assert number is not None and number.value == value


@pytest.mark.parametrize(
    ("label", "answer", "score"),
    [
        ("x^2+2x+1", "(x+1)^2", 1),
        ("x^2+2x+1", "(x+2)^2", 0),
        (r"\sqrt{12}", r"2\sqrt{3}", 1),
        (r"\sqrt{12}", "2sqrt(3)", 1),
        (r"\frac{\pi}{2}", "pi/2", 1),
        (r"\frac{n(n+1)}{2}", "n(n+1)/2", 1),
        ("b+a", "a+b", 1),
        ("5", "x=5", 1),
        ("x=5", "5", 1),
        ("5", "x=6", 0),
        ("1, 2", "2,1", 1),
        ("(1, 2)", "(2,1)", 0),
        ("[1,2)", r"\left[1,2\right)", 1),
        ("[1,2)", "(1,2)", 0),
        (r"(-\infty,2]", r"(-\infty, 2]", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1),
        ("3", r"\log_2 8", 1),
        ("1024", "2^{10}", 1),
        ("120", "5!", 1),
        ("10", r"\binom{5}{2}", 1),
        ("A", r"\text{A}", 1),
        ("A", "B", 0),
        ("5", "5 or 6", 0),
        (r"\sqrt{2}", "1.414214", 0),
        (r"\sqrt{2}", "1.4142", 0),
    ],
)
def test_formulas_are_compared_symbolically(math_reward, label, answer, score):
    rewards = asyncio.run(math_reward(make_trajectory(rf"So \boxed{{{answer}}}.", label)))
    assert rewards.total == score
    assert rewards.components == {"math": float(score)}
    assert bool(rewards.detail) == (score == 0)


def test_gsm8k_labels_and_replies(math_reward):
    label = "She sold 1,000 + 234 = <<1000+234=1234>>1,234 clips.\n#### 1,234"
    assert asyncio.run(math_reward(make_trajectory("Adding up:\n#### 1234", label))).total == 1.0
    assert asyncio.run(math_reward(make_trajectory("It is $1,234.00.", label))).total == 1.0
    assert asyncio.run(math_reward(make_trajectory("#### 1,235", label))).total == 0.0
    assert asyncio.run(math_reward(make_trajectory(r"\boxed{5}", r"Thus \boxed{5}"))).total == 1.0


HOSTILE = {
    "code": (r"\boxed{__import__('os').system('touch FILE')}", "characters"),
    "code without quotes": (r"\boxed{__import__(chr(111)).system}", "subscript"),
    "attribute": (r"\boxed{x.__class__.__bases__}", "subscript"),
    "tower": (r"\boxed{9^9^9^9}", "tower"),
    "braced tower": (r"\boxed{9^{9^{9^9}}}", "tower"),
    "python tower": (r"\boxed{9**9**9**9}", "tower"),
    "nested powers": (r"\boxed{((9^{999})^{999})^{999}}", "more than 1000"),
    "power of fraction": (r"\boxed{\frac{9^{999}}{1}^{999}}", "more than 1000"),
    "power of bars": (r"\boxed{|9^{999}|^{999}}", "more than 1000"),
    "product exponent": (r"\boxed{9^{99*99*99*99}}", "more than 1000"),
    "sum exponent": (r"\boxed{9^{999+999}}", "more than 1000"),
    "long exponent": (r"\boxed{9^{99999}}", "exponent of 5 digits"),
    "exponential exponent": (r"\boxed{9^{\exp(999)}}", r"\exp in an exponent"),
    "expansion": (r"\boxed{(a+b+c+d+e+f)^{90}}", "terms"),
    "product of expansions": (r"\boxed{(a+b+c+d)^{9}(a+b+c-d)^{9}(a+b-c-d)^{9}}", "terms"),
    "factorial": (r"\boxed{99999999!}", "factorial"),
    "iterated factorial": (r"\boxed{9!!!}", "factorial"),
    "factorial of group": (r"\boxed{(9)!}", "factorial"),
    "factorial exponent": (r"\boxed{9^{999!}}", "factorials"),
    "binomial": (r"\boxed{\binom{9999999}{5000000}}", "binom"),
    "sum": (r"\boxed{\sum_{i=1}^{999999999} i}", r"\sum"),
    "integral": (r"\boxed{\int_0^1 x dx}", r"\int"),
    "operator": (r"\boxed{\operatorname{diff}(x)}", r"\operatorname"),
    "nesting": (r"\boxed{" + "(" * 60 + "1" + ")" * 60 + "}", "deeper than 12"),
    "unbalanced": (r"\boxed{(1+(2}", "brackets"),
    "digits": (r"\boxed{x+" + "9" * 60 + "}", "digits"),
    "long": (r"\boxed{" + "x+" * 300 + "1}", "characters long"),
    "very long": (r"\boxed{" + "1" * 40_000 + "}", "characters long"),
    "prose": (r"\boxed{I think that it is x+1}", "word"),
    "environment": (r"\boxed{\begin{verbatim}1\end{verbatim}}", "environment"),
    "megabyte of braces": (r"\boxed" + "{" * 10**6, "no answer"),
    "megabyte of balanced braces": (r"\boxed" + "{" * 10**6 + "}" * 10**6, "no answer"),
    "megabyte of boxes": (r"\boxed{" * 150_000, "no answer"),
    "megabyte of digits": ("1" * 10**6, "characters long"),
    "megabyte of signs": ("-$" * 500_000, "no answer"),
    "megabyte of separators": (",." * 500_000, "no answer"),
    "empty": (r"\boxed{}", "no answer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_score_zero_with_a_reason_and_reach_no_worker(name, tmp_path):
    text, reason = HOSTILE[name]
    reward = build_reward(RewardConfig(name="math"))
    rewards = asyncio.run(reward(make_trajectory(text.replace("FILE", str(tmp_path / "x")), "x+2")))
    assert rewards.total == 0.0 and reason in rewards.detail, rewards.detail
    assert reward._pool.pids == []
    assert not (tmp_path / "x").exists()
    reward.close()


@given(st.text(alphabet="0123456789xyab+-*/^_(){}[]|=<>,.!%&$\\ \n#fracsqtbinomboxed", max_size=80))
def test_any_text_is_decided_or_refused_without_another_error(text):
    answer = normalise(extract_answer(rf"\boxed{{{text}}}", "auto") or "")
    decide("x+1", answer)
    try:
        check_formula(answer)
    except Refused as reason:
        assert str(reason)
    else:
        assert re.fullmatch(r"[\x20-\x7e]+", answer) and "__" not in answer


@pytest.mark.parametrize(
    "formula", ["x^{10}+x^9+x^8+x^7", "(x+1)^{99}", "e^{x^2}", "2^{n+1}", "x^{1/2}", r"\sin^2 x", "x_1+x_{12}", "n!"]
)
def test_ordinary_formulas_pass_the_whitelist(formula):
    check_formula(formula)


@pytest.mark.parametrize("label", [None, "  ", r"\sum_{i=1}^n i", "9^{9^9}", "(x+1"])
def test_an_unusable_label_names_its_task_whatever_the_answer(math_reward, label):
    for text in (r"\boxed{4}", rf"\boxed{{{label}}}"):
        with pytest.raises(LabelError, match=r"task 'gsm/7' \(train\.jsonl:8\).*label") as error:
            asyncio.run(math_reward(make_trajectory(text, label, "gsm/7", origin="train.jsonl:8")))
        assert isinstance(error.value, ValueError)


def test_a_label_that_only_the_parser_can_refuse_names_its_task(math_reward):
    with pytest.raises(LabelError, match=r"task 'demo/3'.*a relation has an empty side"):
        asyncio.run(math_reward(make_trajectory(r"\boxed{x}", "1+*=")))


def test_extract_option_and_its_errors():
    reward = build_reward(RewardConfig(name="math", options={"extract": "hash"}))
    assert asyncio.run(reward(make_trajectory(r"\boxed{42} #### 41"))).total == 0.0
    assert "extract = hash" in asyncio.run(reward(make_trajectory(r"\boxed{42}"))).detail
    reward.close()
    with pytest.raises(ValueError, match="extract"):
        build_reward(RewardConfig(name="math", options={"extract": "json"}))
    with pytest.raises(ValueError, match="tolerance"):
        build_reward(RewardConfig(name="math", options={"tolerance": 0.1}))


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({}, " Paris\n", 1.0),
        ({}, "paris", 0.0),
        ({"casefold": True}, "PARIS", 1.0),
        ({"extract": "boxed"}, r"It is \boxed{Paris}.", 1.0),
        ({"extract": "boxed"}, "Paris", 0.0),
    ],
)
def test_exact(options, text, score):
    reward = build_reward(RewardConfig(name="exact", options=options))
    rewards = asyncio.run(reward(make_trajectory(text, "Paris")))
    assert (rewards.total, rewards.components) == (score, {"exact": score})
    assert bool(rewards.detail) == (score == 0.0)
    reward.close()


def test_exact_collapses_whitespace_and_needs_a_label():
    reward = build_reward(RewardConfig(name="exact", options={"collapse_whitespace": True}))
    assert asyncio.run(reward(make_trajectory("New  \n York", "New York"))).total == 1.0
    with pytest.raises(LabelError, match="task 'demo/3' has no label"):
        asyncio.run(reward(make_trajectory("New York", None)))
    reward.close()


def test_details_are_plain_text(math_reward):
    rewards = asyncio.run(math_reward(make_trajectory(r"\boxed{41}")))
    assert json.loads(json.dumps(rewards.detail)) == "the answer '41' is not the label '42'"
