"""The environment `game`: several roles of the policy talk to each other, and each has a score of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from whet.config import call_factory, resolve_callable
from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.dialogue import Dialogue, Dialogues
from whet.env.rollout import TrajectoryRun
from whet.env.tool_env import ReplyLimit
from whet.types import JSON, Message, Outcome, Task


class RolePlayer:
    """One role's part in a game: what it hears, and what it says. Nobody else sees its view."""

    def __init__(self, role: str, talks: Dialogues, trains: bool, limit: ReplyLimit) -> None:
        self.role = role
        self._talks, self._trains, self._limit = talks, trains, limit
        self._heard: list[Message] = []
        self._talk: Dialogue | None = None
        self.last: Parsed | None = None
        """Its last words, with tool calls parsed."""

    def hear(self, text: str, role: str = "user") -> None:
        """Let it hear a text before it speaks again. What it hears of one role at a time is one message.

        Args:
            text: the words; longer ones than `env.max_reply_chars` lose a part.
            role: `system` for its instructions, first of all; else `user`.
        """
        text = self._limit.shortened(text)
        if self._heard and self._heard[-1].role == role:
            text = f"{self._heard.pop().content}\n{text}"
        self._heard.append(Message(role, text))

    async def speak(self) -> str | None:
        """Its next words, which the policy samples; None where the run's limits leave no room.

        Raises:
            ValueError: it has heard nothing since it spoke.
        """
        if not self._heard:
            raise ValueError(f"the player {self.role!r} has heard nothing since it spoke: call hear first")
        heard, self._heard = self._heard, []
        if self._talk is None:
            self._talk = self._talks.begin(heard, role=self.role, trains=self._trains)
        else:
            self._talk.add(*heard)
        self.last = await self._talk.reply()
        return None if self.last is None else self.last.message.content

    def forget(self) -> None:
        """Begin with an empty view: what it hears next is the beginning of a further training sample of its role."""
        self._talk, self._heard = None, []


@runtime_checkable
class Game(Protocol):
    """The rules of a game, whose `roles` have different names. One object is made for each trajectory."""

    roles: Sequence[str]

    async def play(self, task: Task, players: Mapping[str, RolePlayer]) -> Mapping[str, float]:
        """Play to the end, and return each role's score."""
        ...


class RoleGameEnv:
    """The environment `game`.

    Args:
        game: import reference to a class with `roles` and `async def play(self, task, players)`, which returns a score for each role.
        options: keyword arguments of the class.
        untrained: roles that the policy plays, and that do not train: an opponent, a judge.
        limit: the length of the texts that a player hears.

    Raises:
        ValueError: the game cannot be made, has no roles, or has not those that are named.
    """

    tools: Sequence[Mapping[str, JSON]] = ()

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        untrained: Sequence[str] = (),
        *,
        limit: ReplyLimit | None = None,
    ) -> None:
        given = dict(options or {})
        made = call_factory(resolve_callable(game, kind="game", options=given), game, kind="game", **given)
        if not isinstance(made, Game):
            raise ValueError(f"the game {game!r} made a {type(made).__name__}; a game has roles and an async method play")
        self._game, self._name, self._roles = made, game, tuple(made.roles)
        if not self._roles or len(set(self._roles)) != len(self._roles) or not all(self._roles):
            raise ValueError(f"the game {game!r} needs roles with different names, not {list(self._roles)}")
        self._untrained = frozenset(untrained)
        if unknown := self._untrained - set(self._roles):
            raise ValueError(f"the game {game!r} has no role {min(unknown)!r} (env.options.untrained); it has {', '.join(self._roles)}")
        if self._untrained == set(self._roles):
            raise ValueError(f"env.options.untrained names all roles of the game {game!r}: none would train")
        self._limit = limit or ReplyLimit()

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        raise AssertionError("a game takes no turns: it plays by itself")

    async def close(self) -> None:
        pass

    async def play(self, run: TrajectoryRun) -> Outcome:
        """Play the game. Each role's score is the reward of its last turn."""
        async with Dialogues(run) as talks:
            players = {role: RolePlayer(role, talks, role not in self._untrained, self._limit) for role in self._roles}
            scores = self._checked(await self._game.play(run.task, players))
        last = {turn.role: i for i, turn in enumerate(run.turns) if turn.tokens}
        if not last:
            raise ValueError(f"the game {self._name!r} ended before a role that trains had said anything")
        talks.score({role: scores[role] for role in last})
        return Outcome.TRUNCATED if talks.cut else Outcome.COMPLETED

    def _checked(self, scores: object) -> dict[str, float]:
        if not isinstance(scores, Mapping):
            raise ValueError(f"the game {self._name!r} returned {scores!r}; return a score for each role: {{{self._roles[0]!r}: 1.0, ...}}")
        found = cast(Mapping[Any, Any], scores)
        for role in self._roles:
            score = found.get(role)
            if role in self._untrained and score is None:
                continue
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise ValueError(f"the game {self._name!r} gave the role {role!r} the score {score!r}; it must be a finite number")
        if unknown := [role for role in found if role not in self._roles]:
            raise ValueError(f"the game {self._name!r} gave a score to {unknown[0]!r}, but its roles are {', '.join(self._roles)}")
        return {role: float(score) for role, score in found.items() if score is not None}
