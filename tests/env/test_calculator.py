"""The calculator against fractions, and against what a model might feed it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from whet.env.calculator import MAX_DEPTH, MAX_LENGTH, calculator

NUMBERS = st.integers(0, 999).map(lambda n: (str(n), Fraction(n))) | st.tuples(
    st.integers(0, 99), st.integers(0, 99)
).map(lambda n: (f"{n[0]}.{n[1]:02d}", Fraction(n[0] * 100 + n[1], 100)))
"""Each as its text and its value."""


def joined(parts):
    """Text and value of a sum or product, computed beside each other, with parentheses wherever a part was one."""
    (left, a), operator, (right, b), space = parts
    if operator == "/" and b == 0:
        return left, a
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[operator]
    return f"({left}{space}{operator}{space}{right})", value


EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.sampled_from(["", " "])).map(joined)
    | inner.map(lambda part: (f"-{part[0]}", -part[1])),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_it_computes_what_fractions_do(expression):
    text, value = expression
    assume(len(text) <= MAX_LENGTH)
    assume(text.count("(") + text.count("-") < MAX_DEPTH)
    answer = Fraction(calculator(text))
    assert answer == round(value * 10**6) / Fraction(10**6)
    if value.denominator == 1:
        assert calculator(text) == str(value)


@given(st.integers(0, 99), st.integers(1, 99), st.integers(1, 99))
def test_precedence_and_associativity(a, b, c):
    assert Fraction(calculator(f"{a}-{b}-{c}")) == a - b - c
    assert Fraction(calculator(f"{a}+{b}*{c}")) == a + b * c
    assert Fraction(calculator(f"{a}*{b}-{c}*{a}")) == a * b - c * a
    assert calculator(f"{a}/{b}/{c}") == calculator(f"{a}/({b}*{c})")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1/3", "0.333333"),
        ("2/3", "0.666667"),
        ("-2/3", "-0.666667"),
        ("1.50", "1.5"),
        ("100", "100"),
        ("-1/10000000", "0"),
        ("0.5/1000000", "0"),
        ("1.5/1000000", "0.000002"),
        ("12345678901234567890123456789012345.5", "12345678901234567890123456789012345.5"),
        (" 2 * ( 3 + 4 ) ", "14"),
        ("--3", "3"),
    ],
)
def test_answers_are_written_plainly(text, answer):
    assert calculator(text) == answer


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1", "ends too early"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("2**3", r"unexpected '\*'"),
        ("1 2", "unexpected '2'"),
        ("(1 2)", "not closed"),
        (")", r"unexpected '\)'"),
        ("9" * 100 + "*" + "9" * 99, "more than 60 digits"),
        ("9" * 199, "more than 60 digits"),
        ("9" * 61, "more than 60 digits"),
        ("*".join(["99999999"] * 20), "more than 60 digits"),
        ("(" * 60 + "1" + ")" * 60, f"more than {MAX_DEPTH} deep"),
        ("-" * 150 + "1", f"more than {MAX_DEPTH} deep"),
        ("1+" * 200, f"400 characters, more than {MAX_LENGTH}"),
        ("1e9", "cannot read 'e9'"),
        ("1,000", "cannot read ',000'"),
        ("٣+1", "cannot read"),
        ("__import__('os').system('id')", "cannot read .__import__"),
        ("x", "cannot read 'x'"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text, what):
    with pytest.raises(ValueError, match=what):
        calculator(text)


@given(st.text("0123456789+-*/(). e", max_size=MAX_LENGTH))
def test_it_answers_or_refuses(text):
    try:
        answer = calculator(text)
    except ValueError as error:
        assert str(error)
    else:
        assert len(answer) <= 70
        Fraction(answer)
