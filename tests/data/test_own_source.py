"""data.source: tasks of a source that the user wrote, and what it may not answer."""

from __future__ import annotations

import textwrap
import threading

import pytest

from whet.config import ConfigError, HookFailed
from whet.data.own import OwnSource, own_source
from whet.settings.rl import DataConfig
from whet.types import Task

CODE = """
import random

from whet.types import Task


class Sums:
    '''Sums of two numbers below `limit`, another one every time.'''

    def __init__(self, seed, limit=10):
        self.seed, self.limit, self.taken = seed, limit, 0

    @property
    def epoch(self):
        return self.taken // len(self)

    def __len__(self):
        return self.limit**2

    def next(self, n):
        self.taken += n
        return [self.find(str(i)) for i in range(self.taken - n, self.taken)]

    def find(self, task_id):
        noise = random.Random(f"{self.seed}/{task_id}")
        a, b = noise.randrange(self.limit), noise.randrange(self.limit)
        return Task(task_id, f"What is {a} + {b}?", str(a + b))

    def state(self):
        return {"taken": self.taken}

    def restore(self, state):
        self.taken = state["taken"]


class Empty(Sums):
    def __len__(self):
        return 0


def not_one(seed):
    return [1, 2]


def breaks(seed):
    return {}["x"]
"""


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "own_source.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def test_it_gives_tasks_with_a_cursor(code):
    source = own_source(f"{code}:Sums", {"limit": 3}, 5, 60)
    first = source.next(12)
    assert [task.id for task in first] == [str(i) for i in range(12)] and source.epoch == 1 and len(source) == 9
    state = source.state()
    more = source.next(2)
    again = own_source(f"{code}:Sums", {"limit": 3}, 5, 60)
    again.restore(state)
    assert again.next(2) == more and again.find("3") == first[3]
    assert own_source(f"{code}:Sums", {"limit": 100}, 6, 60).next(4) != own_source(f"{code}:Sums", {"limit": 100}, 5, 60).next(4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("not_one", {}, "made a list, which has no epoch, next, find, state, restore"),
        ("breaks", {}, "it cannot be made: KeyError: 'x'"),
        ("Empty", {}, "has no tasks: its len() is 0"),
        ("Sums", {"size": 3}, "cannot be called as f(seed, size=...)"),
        ("Summs", {}, "did you mean Sums"),
    ],
)
def test_what_is_no_source_is_refused_by_key(code, name, options, words):
    with pytest.raises(ValueError, match=r"^data\.source") as fault:
        own_source(f"{code}:{name}", options, 0, 60)
    assert words in str(fault.value)


class Fake:
    """Answers as it is told."""

    epoch = 0

    def __init__(self, **answers):
        self.answers = answers

    def __len__(self):
        return 3

    def __getattr__(self, name):
        def answer(*given):
            found = self.answers[name]
            if isinstance(found, Exception):
                raise found
            return found

        return answer


@pytest.mark.parametrize(
    ("answers", "ask", "words"),
    [
        ({"next": []}, lambda s: s.next(1), "next(1) returned 0 tasks; a source does not end"),
        ({"next": None}, lambda s: s.next(1), "next(1) returned NoneType; return a list of whet.types.Task"),
        ({"next": ["x"]}, lambda s: s.next(1), "return a list of whet.types.Task"),
        ({"next": OSError("gone")}, lambda s: s.next(1), "raised OSError: gone (at "),
        ({"find": Task("b", "p")}, lambda s: s.find("a"), "find('a') returned Task(id='b'"),
        ({"find": None}, lambda s: s.find("a"), "return the task that next() gave under this id"),
        ({"state": {"x": {1}}}, lambda s: s.state(), "has a state that is not JSON"),
        ({"restore": ValueError("another file")}, lambda s: s.restore({}), "raised ValueError: another file"),
    ],
)
def test_a_wrong_answer_names_the_key(answers, ask, words):
    with pytest.raises(HookFailed, match=r"^data\.source = 'my_code:Fake' ") as fault:
        ask(OwnSource("my_code:Fake", lambda: Fake(**answers), 60))
    assert words in str(fault.value)


def test_a_call_that_hangs_is_named_with_its_place_and_not_made_again(code):
    made, never = Fake(), threading.Event()

    def hangs(n):
        never.wait()

    made.next = hangs
    source = OwnSource("my_code:Fake", lambda: made, 0.5)
    for ask in (lambda: source.next(1), source.state):
        with pytest.raises(HookFailed) as fault:
            ask()
        told = str(fault.value)
        assert told.startswith("data.source = 'my_code:Fake' hangs: next(1) has not returned for 0.5 s (at ")
        assert "test_own_source.py" in told and "in hangs" in told and "raise data.source_timeout_s" in told
    never.set()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "neither is set"),
        ({"train": "x.jsonl", "source": "a:b"}, "both are set"),
        ({"train": "x.jsonl", "source_options": {"x": 1}}, "source_options={x = 1} has no effect without source"),
        ({"source": "a:b", "shuffle": False}, "shuffle=false has no effect with source='a:b'"),
        ({"source": "a:b", "max_prompt_tokens": 5}, "max_prompt_tokens=5 has no effect with source='a:b'"),
    ],
)
def test_files_or_a_source(settings, words):
    with pytest.raises(ValueError, match="validation error") as fault:
        DataConfig.model_validate(settings)
    assert words in str(fault.value)


def test_configuration_errors_come_as_such(code):
    with pytest.raises(ConfigError, match=r"data\.source 'no_such_module_y:f': no module named"):
        own_source("no_such_module_y:f", {}, 0, 60)
