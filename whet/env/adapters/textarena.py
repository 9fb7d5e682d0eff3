"""Single-player games of textarena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.config import ConfigError
from whet.env.adapters.games import GameEnv, Moved
from whet.types import Task


def textarena_env(id: str, kwargs: Mapping[str, Any] | None = None) -> GameEnv:
    """A game by its id, such as `Wordle-v0-train`.

    Raises:
        ConfigError: textarena is not installed.
    """
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(["env.name = 'textarena' needs the package textarena: pip install textarena"]) from error
    return GameEnv(TextArenaGame(textarena, id, dict(kwargs or {})))


class TextArenaGame:
    """A game of one player. The reward that it gives at its end is that of the last turn."""

    def __init__(self, textarena: Any, id: str, kwargs: Mapping[str, Any]) -> None:
        self._textarena, self._id, self._kwargs = textarena, id, kwargs
        self._env: Any = None
        self._shown = ""

    def begin(self, seed: int, task: Task) -> str:
        self._env = self._textarena.make(self._id, **self._kwargs)
        self._env.reset(num_players=1, seed=seed)
        return self._observation()

    def act(self, reply: str) -> Moved:
        done, _ = self._env.step(action=reply)
        if not done:
            return Moved(self._observation())
        rewards, info = self._env.close()
        report = info.get(0, {}) if isinstance(info, Mapping) else {}
        notes = {"reason": str(report["reason"])} if report.get("reason") else {}
        # A limit on turns is a rule of these games, which name it to the player: its end is one of the game.
        return Moved("", float((rewards or {}).get(0, 0.0)), done=True, notes=notes)

    def close(self) -> None:
        self._env = None

    def _observation(self) -> str:
        _, observed = self._env.get_observation()
        if not isinstance(observed, str):
            return "\n".join(str(entry[1]) for entry in observed)
        before, self._shown = self._shown, observed  # most wrappers repeat the whole game in each observation
        return observed.removeprefix(before)
