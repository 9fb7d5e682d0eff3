"""Gymnasium and textarena by fakes of their interfaces: actions are read, terminated and truncated stay apart, siblings play one game."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.rollout.scripted import run
from whet.config import ConfigError
from whet.data.parsers import Parsed
from whet.env.adapters.games import seed_of, with_text
from whet.env.build import EnvConfig, build_env_factory
from whet.types import Message, Task

TASK = Task("numbered/3#0", (Message("user", "Play."),))


class Corridor:
    """Five fields; the right end wins, and the fourth step is the last one."""

    render_mode: Any = None
    action_space = SimpleNamespace(n=2, start=0)
    seeds: list[Any] = []  # noqa: RUF012

    def __init__(self, words=False, arrays=False):
        self.words, self.arrays, self.closed = words, arrays, False
        if words:
            self.action_space = SimpleNamespace(max_length=9)

    def reset(self, *, seed=None, options=None):
        self.seeds.append((seed, options))
        self.place, self.num = 2, 0
        return self.seen(), {}

    def step(self, action):
        self.num += 1
        self.place += {0: -1, 1: 1, "go left": -1, "go right": 1}[action]
        return self.seen(), float(self.place == 4), self.place == 4, self.num == 4, {"place": self.place, "secret": object()}

    def seen(self):
        return {1} if self.arrays else f"You are on field {self.place}."

    def close(self):
        self.closed = True


@pytest.fixture
def games(monkeypatch):
    """The module of a maker of games, and the games that it made."""
    module: Any = ModuleType("corridors")
    module.made = []

    def make(id, **kwargs):
        module.made.append(Corridor(**kwargs))
        return module.made[-1]

    module.make = make
    monkeypatch.setitem(sys.modules, "corridors", module)
    monkeypatch.setattr(Corridor, "seeds", [])
    return module


async def play(replies, name="gymnasium", task=TASK, **options):
    env = build_env_factory(EnvConfig(name=name, options=options))()
    try:
        first = await env.start(task)
        return first, [await env.step(Parsed(Message("assistant", reply))) for reply in replies]
    finally:
        await env.close()


def test_a_game_ends_the_prompt_and_answers_each_action(games):
    first, steps = run(play(["0", "I take 1", "2", "1", "1"], id="Corridor-v0", make="corridors:make"))
    assert first.prompt == (Message("user", "Play.\n\nYou are on field 2."),)
    texts = [message.content for step in steps for message in step.messages]
    error = "Error: the action must be a whole number from 0 to 1"
    assert texts == ["You are on field 1.", "You are on field 2.", error, "You are on field 3."]
    assert steps[2].counts == {"illegal_actions": 1} and steps[2].reward is None, "the game did not move"
    assert (steps[-1].done, steps[-1].truncated, steps[-1].reward) == (True, False, 1.0), "the goal at the last step is no cut"
    assert games.made[0].closed and Corridor.seeds == [(seed_of(TASK), None)]


def test_a_limit_of_the_game_truncates(games):
    _, steps = run(play(["0", "1", "0", "1"], id="Corridor-v0", make="corridors:make"))
    assert (steps[-1].done, steps[-1].truncated, steps[-1].reward) == (True, True, 0.0)


def test_actions_have_names_and_patterns(games):
    _, (step, _) = run(play(["not right but LEFT", "left or right"], id="x", make="corridors:make", actions=["left", "right"]))
    assert step.messages[0].content == "You are on field 1."
    options = {"id": "x", "make": "corridors:make", "kwargs": {"words": True}, "pattern": "<do>(.*?)</do>"}
    _, (wrong, step) = run(play(["go left", "<do>go left</do> or <do> go right</do>"], **options))
    assert wrong.messages[0].content.startswith("Error: the reply has no action of the form") and step.messages[0].content.endswith("3.")


def test_a_row_has_a_seed_and_options_and_siblings_have_the_same(games):
    for task in (TASK, TASK, Task("numbered/3#1", TASK.prompt), Task("x", TASK.prompt, None, {"seed": 7, "options": {"size": 2}})):
        run(play([], task=task, id="x", make="corridors:make"))
    (a, b, c, d) = Corridor.seeds
    assert a == b != c and d == (7, {"size": 2})


def test_what_a_model_cannot_read_is_refused(games):
    with pytest.raises(TypeError, match=r"observation is a set, which a model cannot read; give env.options.kwargs"):
        run(play([], id="x", make="corridors:make", kwargs={"arrays": True}))
    with pytest.raises(ConfigError, match="no regular expression"):
        build_env_factory(EnvConfig(name="gymnasium", options={"id": "x", "make": "corridors:make", "pattern": "("}))()


def test_an_observation_is_rendered_where_the_environment_renders_text(games, monkeypatch):
    monkeypatch.setattr(Corridor, "render_mode", "ansi")
    monkeypatch.setattr(Corridor, "render", lambda self: f"..{self.place}..", raising=False)
    first, _ = run(play([], id="x", make="corridors:make"))
    assert first.prompt[0].content.endswith("..2..")


def test_a_text_joins_the_last_message_of_the_user():
    system = Message("system", "s")
    assert with_text(Task("t", (system,)), "x").prompt == (system, Message("user", "x"))
    assert with_text(Task("t", (Message("user", ""),)), "x").prompt == (Message("user", "x"),)
    assert with_text(Task("t", "a"), "x").prompt == "a\n\nx" and with_text(Task("t", "a"), "").prompt == "a"


class Guessing:
    """textarena's shape: an observation repeats the game, and the rewards come with the end."""

    def reset(self, num_players, seed=None):
        assert num_players == 1
        self.told = f"Guess (seed {seed > 0})."

    def get_observation(self):
        return 0, self.told

    def step(self, action):
        self.told += f"\n[{action}] no"
        return action == "7", {}

    def close(self):
        return {0: 0.5}, {0: {"reason": "found"}}


def test_textarena_gives_its_reward_at_the_end(monkeypatch):
    module: Any = ModuleType("textarena")
    module.make = lambda id, **kwargs: Guessing()
    monkeypatch.setitem(sys.modules, "textarena", module)
    first, (step, last) = run(play(["3", "7"], "textarena", id="Guess-v0"))
    assert first.prompt[0].content == "Play.\n\nGuess (seed True)."
    assert (step.messages[0].content, step.reward) == ("\n[3] no", None)
    assert (last.done, last.truncated, last.reward, last.notes[0].attachments) == (True, False, 0.5, {"reason": "found"})


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match="needs the package textarena: pip install textarena"):
        build_env_factory(EnvConfig(name="textarena", options={"id": "x"}))()
