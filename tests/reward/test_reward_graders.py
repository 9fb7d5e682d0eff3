"""The graders that follow other trainers' rules: what counts, and what a row has to have."""

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.math.arithmetic import parse_formula
from whet.reward.math.values import difference_is_zero
from whet.reward.published.answers import last_answer_tag, token_f1
from whet.reward.published.gpqa import extract_letter
from whet.reward.published.hendrycks import equivalent, last_box, respell
from whet.reward.published.latex_text import plain_text
from whet.reward.published.prime_math import extract_prime
from whet.reward.published.prm800k import decide, normalise_answer, split_tuple
from whet.reward.published.verified import extract_verified

_BUILT = {}


def score(name, text, label="42", metadata=None, **options):
    key = (name, repr(sorted(options.items())))
    if key not in _BUILT:
        _BUILT[key] = build_reward(RewardConfig(name=name, options=options, timeout_s=60.0))
    return asyncio.run(_BUILT[key](make_trajectory(text, label, metadata=metadata or {})))


@pytest.fixture(scope="module", autouse=True)
def close_rewards():
    yield
    for reward in _BUILT.values():
        reward.close()
    _BUILT.clear()


@pytest.mark.parametrize(
    ("name", "text", "label", "total"),
    [
        ("slime_math", r"so \boxed{\frac{2}{3}}", "2/3", 1.0),
        ("slime_math", r"so \boxed{\frac{4}{6}}", "2/3", 0.0),  # not reduced
        ("slime_math", r"so \boxed{(x+2)^2}", "x^2+4x+4", 1.0),
        ("slime_math", r"so \boxed{1{,}000}", "1,000", 1.0),
        ("slime_math", r"so \boxed{50 cm}", "50", 1.0),
        ("slime_math", r"so \fbox{5}", "5", 0.0),
        ("slime_math", r"so \boxed{5}", r"thus \boxed{5}", 1.0),
        ("slime_math", r"so \boxed{5}", "", 0.0),
        ("deepscaler", r"<think>\boxed{1}</think> \boxed{42}", "42", 1.0),
        ("deepscaler", r"\boxed{42}", "42", 0.0),
        ("deepscaler", r"### x ###Response \boxed{42}", "42", 1.0),
        ("geo3k", r"\boxed{42}", "42", 0.9),
        ("geo3k", r"<think>x</think> \boxed{42}", "42", 1.0),
        ("geo3k", r"<think>x</think> \boxed{41}", "42", 0.1),
        ("hendrycks_math", r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        ("hendrycks_math", r"\boxed 5", "5", 1.0),
        ("hendrycks_math", r"\boxed{2/4}", "1/2", 0.0),
        ("math_verify", r"\boxed{0.333333}", r"\frac{1}{3}", 1.0),
        ("math_verify", r"\boxed{1} and \boxed{2}", r"1,2", 1.0),
        ("math_verify", "The answer is 42.", "42", 1.0),
        ("prime_math", "The answer is: 42.0001", "42", 1.0),
        ("prime_math", "So the answer is 50%", "0.5", 1.0),
        ("prime_math", "Answer: 43", "42", 0.0),
        ("prime_math", r"answer: \boxed{6.28}", r"2\pi", 1.0),
        ("prime_math", r"answer: \boxed{(1, 2)}", "(1,2)", 1.0),
        ("prime_math", r"the answer is \boxed{\frac{\sqrt{4}}{4}}", "0.5", 1.0),
        ("slime_dapo", "Answer: 42", "42.7", 1.0),
        ("slime_dapo", "Answer: 42.0", "42", -1.0),
        ("verl_math_dapo", "Answer: x = \\frac12", r"\frac{1}{2}", 1.0),
        ("verl_math_dapo", "no answer", "42", -1.0),
        ("verl_gsm8k", "1 + 1 = 2\n#### 1,234", "1234", 1.0),
        ("verl_gsm8k", "#### $5", "5", 0.0),
        ("f1", "the cat sat", "A cat sat!", 1.0),
        ("f1", "yes", "no", 0.0),
        ("f1", "cat dog", "cat", 2 / 3),
        ("gpqa", "The answer is B, not (A)", "B", 1.0),
        ("gpqa", "<think>answer A</think>I choose D.", "D", 1.0),
        ("search_em", "<answer>The Eiffel tower</answer>", '["eiffel tower", "Tour Eiffel"]', 1.0),
        ("search_em", "<answer>Eiffel</answer>", "Paris", 0.0),
    ],
)
def test_scores(name, text, label, total):
    found = score(name, text, label)
    assert found.total == pytest.approx(total, abs=1e-12)
    assert found.total == 1.0 or found.detail


def test_options_of_the_graders():
    assert score("verl_gsm8k", "it is 42 .", "42", method="flexible").total == 1.0
    assert score("verl_gsm8k", "#### 41", "42", format_score=0.1).total == 0.1
    assert score("geo3k", r"<think>x</think> \boxed{42}", "42", format_weight=0.0).total == 1.0
    assert score("slime_dapo", r"it is \boxed{42}", "42", strict_box=True).total == 1.0
    assert score("verl_math_dapo", r"it is \boxed{42" + " " * 100, "42", strict_box=True).total == -1.0
    assert score("slime_dapo", "none", "[INVALID]", strict_box=True).total == -1.0
    assert score("verl_math_dapo", r"so \boxed{ 42}", "42", box_fallback=True).total == 1.0
    assert score("verl_math_dapo", r"so \boxed{42}. Answer: 41", "42", box_fallback=True).total == -1.0
    assert score("verl_math_dapo", r"so \boxed{42}", "42").total == -1.0
    assert score("search_em", "<answer>in Paris, France</answer>", "paris", substring=True).total == 1.0
    assert score("search_em", "<answer>x</answer>", "paris", format_score=0.2).total == 0.2
    assert score("search_em", "</answer>" * 11 + "<answer>Paris</answer>", "Paris").total == 0.25
    with pytest.raises(ValueError, match="factr"):
        build_reward(RewardConfig(name="overlong", options={"max_tokens": 5, "buffer_tokens": 2, "factr": 1}))
    with pytest.raises(ValueError, match=r"buffer_tokens = 9 is more than max_tokens = 5"):
        build_reward(RewardConfig(name="overlong", options={"max_tokens": 5, "buffer_tokens": 9}))


def test_components_tell_more():
    assert score("f1", "cat dog", "cat").components == {"f1": 2 / 3, "precision": 0.5, "recall": 1.0}
    assert score("slime_dapo", "Answer: 1", "42").components == {"score": -1.0, "accuracy": 0.0}


LABELLED = ["slime_math", "deepscaler", "geo3k", "hendrycks_math", "math_verify", "prime_math", "slime_dapo", "verl_math_dapo"]


@pytest.mark.parametrize("name", [*LABELLED, "verl_gsm8k", "f1", "gpqa", "search_em"])
def test_a_missing_label_names_the_row(name):
    with pytest.raises(LabelError, match=rf"task 'demo/3' .*label.*{name}"):
        score(name, r"</think>\boxed{42}", None)


def test_labels_that_cannot_be_used():
    with pytest.raises(LabelError, match=r"'one half'.*needs a number"):
        score("slime_dapo", "Answer: 1", "one half")
    with pytest.raises(LabelError, match="math_verify cannot use"):
        score("math_verify", r"\boxed{4}", r"\sum_{i}^n i")
    with pytest.raises(LabelError, match="list of texts"):
        score("search_em", "<answer>1</answer>", None, {"target": [1]})
    with pytest.raises(LabelError, match=r"metadata\.choices"):
        score("gpqa", "A", "A", {"choices": 3})


def test_gpqa_reads_the_row():
    choices = {"choices": ["red", "blue", "green"]}
    assert score("gpqa", "it is blue", "B", choices).total == 1.0
    assert score("gpqa", "The answer is B", "blue", choices).total == 1.0
    assert score("gpqa", "The answer is B", "1", choices).total == 1.0  # the index of a choice
    assert score("gpqa", "The answer is A", "1", {"choices": ["1", "2"]}).total == 1.0  # a choice's text comes before an index
    assert score("gpqa", "The answer is C", None, {"correct_letter": "c"}).total == 1.0
    assert score("gpqa", "The answer is C", "B", {"correct_letter": "C"}).total == 1.0
    assert score("gpqa", "It could be Y", "Y", {"valid_letters": ["x", "y"]}).total == 1.0
    assert extract_letter("A or B. So B", "AB") == "B" and extract_letter("none", "AB") is None


def test_random_is_even_and_repeatable():
    reward = build_reward(RewardConfig(name="random", options={"seed": 1}))
    totals = [asyncio.run(reward(make_trajectory("x", task_id=f"t/{i}"))).total for i in range(200)]
    assert totals == [asyncio.run(reward(make_trajectory("other", task_id=f"t/{i}"))).total for i in range(200)]
    assert set(totals) == {0.0, 1.0} and 70 < sum(totals) < 130
    reward.close()


def test_overlong_beside_an_answer():
    config = RewardConfig(
        components={"answer": {"name": "slime_dapo"}, "length": {"name": "overlong", "options": {"max_tokens": 3, "buffer_tokens": 2}}}
    )
    reward = build_reward(config)
    scored = asyncio.run(reward(make_trajectory("Answer: 42")))  # three sampled tokens in two turns
    assert scored.total == 1.0 - 1.0
    assert scored.components == {"answer": 1.0, "answer/score": 1.0, "answer/accuracy": 1.0, "length": -1.0}
    reward.close()


def test_dispatch_by_row():
    rows = {
        "math": (r"\boxed{42}", 1.0),
        " f1 ": ("42", 1.0),
        "boxed_f1": (r"x \boxed{42}", 1.0),
        "boxed_math": (r"\boxed{42}", 0.0),  # the box is gone before the grader looks
        "mine": ("hello", 5.0),
    }
    options = {"rewards": {"mine": {"name": f"{__file__.replace('test_reward_graders', 'reward_samples')}:length"}}}
    for kind, (text, total) in rows.items():
        assert score("dispatch", text, "42", {"rm_type": kind}, **options).total == total
    with pytest.raises(LabelError, match=r"type 'maths' \(metadata.rm_type\); known are math, deepscaler"):
        score("dispatch", "x", "42", {"rm_type": "maths"}, **options)
    with pytest.raises(LabelError, match="names no type"):
        score("dispatch", "x", "42", {})
    assert score("dispatch", "42", "42", {}, default="f1").total == 1.0
    assert score("dispatch", "Answer: 42", "42", {"data_source": "aime_2024"}, table="verl", key="data_source").total == 1.0
    with pytest.raises(ValueError, match="there is no reward 'nothing'"):
        build_reward(RewardConfig(name="dispatch", options={"rewards": {"a": {"name": "nothing"}}}))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("2x+3x", "5*x", True), ("x(x+1)", "x^2+x", True), ("(x+1)(x-1)", "x**2-1", True), ("1/2x", "x/2", True), ("-x^2", "-(x*x)", True),
        ("2^-1", "0.5", True), ("sqrt(8)", "2sqrt(2)", True), ("ln(4)", "2ln2", True), ("ln(4)", "2*ln(2)", True), ("3pi", "pi*3", True),
        ("x_1", "x_2", False), ("xy", "yx", True), ("5!", "120", True), ("x!", "x", False), ("1e3", "1000", True), ("--3", "3", True),
        ("2(3)", "6", True), ("x/0.5", "2x", True), ("oo", "oo", False), ("sqrt(x^2)", "x", False),
    ],
)  # fmt: skip
def test_formulas_are_read_as_mathematics(one, other, equal):
    assert difference_is_zero(parse_formula(one), parse_formula(other)) == equal


def sums(inner):
    return st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})")


@given(st.recursive(st.integers(0, 9).map(str), sums))
def test_a_tree_has_the_value_of_its_text(text):
    def value(tree):
        if tree[0] == "number":
            return Fraction(tree[1])
        left, right = value(tree[1]), value(tree[2])
        return {"+": left + right, "-": left - right, "*": left * right}[tree[0]]

    if len(text) <= 60:
        assert value(parse_formula(text)) == eval(text)  # numbers and three operators, made by the test itself


def test_spellings():
    assert respell(r"\left( \frac12 , .5 \right)") == r"(\frac{1}{2},0.5)"
    assert equivalent(r"k = 3", "3") and equivalent(r"50\text{ cm}", "50") and not equivalent("0.50", "0.5")
    assert equivalent(r"\sqrt", r"\sqrt") and not equivalent(r"\frac", "1")
    assert last_box(r"\boxed{a{b}c} then \boxed{d") is None and last_box(r"\boxed{a{b}c}") == "a{b}c"
    assert plain_text(r"7\frac{3}{4}\pi") == "7 3/4pi" and plain_text(r"\sqrt[3]{8}") == "sqrt(8)" and plain_text(r"\frac12") == "1/2"
    assert plain_text(r"\text{yes} \mathrm{A}") == "yes A"
    assert split_tuple("(1,000,2)") == ["1000", "2"] and split_tuple("1,2") == ["1,2"] and split_tuple("") == []
    assert last_answer_tag("<answer>a</answer><answer> b </answer><answer>c") == "b"
    assert token_f1("", "") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "[1;2]"),
        (r"\begin{bmatrix} a & b \\ c & d \end{bmatrix}", "[ab;cd]"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[1+2;3+4]"),  # the rule for mixed numbers comes after
        (r"\begin{array}{cc}x&y\end{array}", "[xy]"),
        ("[1, 2]", "[1,2]"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"\{1,\ 2\}", "1,2"),
        (r"\left\{1,~2\right\}", "1,\u00a02"),
        (r"\mathbf{A}, \mathbb{R}", "\N{MATHEMATICAL BOLD CAPITAL A},\N{DOUBLE-STRUCK CAPITAL R}"),
        (r"1 \Rightarrow 2", "1⇒2"),
        (r"5\mbox{ cm}", "5"),
    ],
)
def test_the_normal_form_of_lists_and_signs_is_that_of_pylatexenc(answer, normal):
    assert normalise_answer(answer) == normal


def test_strict_rules_of_prm800k():
    assert decide("10^3", "1000").equal is False and decide("10^3", "1000").differences == ()
    assert decide("(1,2)", "[1,2)").reason == "the brackets differ"
    assert len(decide("(x+1, 2x)", "(1+x, x+x)").differences) == 2
    assert "letters" in decide("abc", "cba").reason


def test_where_answers_stand():
    assert extract_verified(r"\boxed{1}. And much later, after all of this, \boxed{2}") == "1,2"
    assert extract_verified(r"\boxed{1} was my first guess, and it took me quite a long while until I saw that it is \boxed{2}") == "2"
    assert extract_verified(r"\boxed{3") is None and extract_verified("no number") is None
    assert extract_prime("So the answer is x = 5. Good") == "5"
    assert extract_prime(r"Thus \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert extract_prime("42 is the answer") == "42"
