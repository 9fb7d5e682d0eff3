"""Gymnasium environments whose observations can be read, and others with the same `reset` and `step`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.config import resolve
from whet.env.adapters.games import GameEnv, IllegalAction, Moved
from whet.types import Task


def gymnasium_env(
    id: str, kwargs: Mapping[str, Any] | None = None, actions: Sequence[str] = (), pattern: str = "", make: str = "gymnasium:make"
) -> GameEnv:
    """An environment by its registered id.

    Args:
        id: such as `FrozenLake-v1`, or `module:Name-v0` for one that a module registers.
        kwargs: arguments of `make`; with `render_mode = "ansi"` an observation is what is rendered.
        actions: names of discrete actions, in their order; without them the action is the last whole number of the reply.
        pattern: regular expression whose last match in the reply is the action: its first group, if it has one.
        make: function `(id, **kwargs)` that makes the environment.

    Raises:
        ValueError: there is no such function, or the pattern is no regular expression.
    """
    try:
        found = re.compile(pattern, re.DOTALL) if pattern else None
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    maker = resolve(make, kind="environment")
    return GameEnv(GymnasiumGame(lambda: maker(id, **dict(kwargs or {})), actions, found))


class GymnasiumGame:
    """A game in Gymnasium's terms. `terminated` and `truncated` stay apart: a game that was cut by a limit bootstraps from the value."""

    def __init__(self, make: Callable[[], Any], actions: Sequence[str], pattern: re.Pattern[str] | None) -> None:
        self._make, self._actions, self._pattern = make, list(actions), pattern
        self._env: Any = None

    def begin(self, seed: int, task: Task) -> str:
        self._env = self._make()
        options = task.metadata.get("options")
        observation, _ = self._env.reset(seed=seed, **({"options": options} if options is not None else {}))
        return self._text(observation)

    def act(self, reply: str) -> Moved:
        observation, reward, terminated, truncated, info = self._env.step(self._action(reply))
        done = bool(terminated or truncated)
        notes = {"info": report} if (report := _as_json(info)) else {}
        return Moved("" if done else self._text(observation), float(reward), done, bool(truncated and not terminated), notes=notes)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _text(self, observation: object) -> str:
        if getattr(self._env, "render_mode", None) == "ansi":  # gem-like environments have no such attribute
            observation = self._env.render()
        if isinstance(observation, str):
            return observation
        try:
            return json.dumps(observation, ensure_ascii=False)
        except TypeError:
            kind = type(observation).__name__
            advice = 'give env.options.kwargs = { render_mode = "ansi" } if it can render text, or wrap it so that it returns text'
            raise TypeError(f"the environment's observation is a {kind}, which a model cannot read; {advice}") from None

    def _action(self, reply: str) -> object:
        text = reply.strip()
        if self._pattern is not None:
            matches = list(self._pattern.finditer(reply))
            if not matches:
                raise IllegalAction(f"the reply has no action of the form {self._pattern.pattern}")
            text = (matches[-1].group(1) if self._pattern.groups else matches[-1].group()).strip()
        space = getattr(self._env, "action_space", None)  # gem-like environments have none, and take text
        size = getattr(space, "n", None)
        if size is None:
            return text
        return self._discrete(text, int(size), int(getattr(space, "start", 0)))

    def _discrete(self, text: str, size: int, start: int) -> int:
        if self._actions:
            found = [(text.lower().rfind(name.lower()), index) for index, name in enumerate(self._actions)]
            place, index = max(found)
            if place < 0:
                raise IllegalAction(f"the reply names no action; they are {', '.join(self._actions)}")
            return start + index
        numbers = re.findall(r"-?\d{1,9}", text)
        if not numbers or not start <= int(numbers[-1]) < start + size:
            raise IllegalAction(f"the action must be a whole number from {start} to {start + size - 1}")
        return int(numbers[-1])


def _as_json(info: object) -> Any:
    """A report of an environment, where JSON has its values; else None."""
    try:
        return json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError):
        return None
