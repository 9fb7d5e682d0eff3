"""Conversations to warm up on: an assistant calls the calculator, reads its reply, calls again if needed, and
answers.

The demonstrators are sloppy, on purpose and openly: for half of the templates most of them write a wrong
operator (see `problems.Template.sloppy`). They copy the numbers rightly and trust the calculator, so the form
is right and the answer is wrong. That leaves reinforcement learning something real to correct: what the
warmed-up policy does only now and then is what is rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from whet.env.calculator import calculator
from whet.quickstart.problems import TEMPLATES, Problem
from whet.types import Message, ToolCall


def demonstration(problem: Problem, rng: random.Random, mistake_rate: float) -> tuple[Message, ...]:
    """One conversation about a problem.

    Args:
        problem: the problem.
        rng: decides whether this demonstrator makes the template's mistake.
        mistake_rate: probability of a sloppy template's mistake.
    """
    template = TEMPLATES[problem.template]
    operators = list(template.operators)
    if template.sloppy is not None and rng.random() < mistake_rate:
        operators[template.sloppy] = template.mistake
    messages = [Message("user", problem.text)]
    value = str(problem.operands[0])
    for operator, operand in zip(operators, problem.operands[1:], strict=True):
        expression = f"{value}{operator}{operand}"
        messages.append(Message("assistant", "", (ToolCall("calculator", {"expression": expression}),)))
        value = calculator(expression)
        messages.append(Message("tool", value, name="calculator"))
    messages.append(Message("assistant", f"The answer is {value}."))
    return tuple(messages)


def demonstrations(problems: Sequence[Problem], seed: int, mistake_rate: float) -> list[tuple[Message, ...]]:
    """A conversation for each problem, the same for the same seed."""
    rng = random.Random(f"{seed}/demonstrations")
    return [demonstration(problem, rng, mistake_rate) for problem in problems]
