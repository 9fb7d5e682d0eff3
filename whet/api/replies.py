"""Replies of what a run has trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.api.given import NO_DATA
from whet.api.player import Player
from whet.build.trained import is_whole_model, newest_weights
from whet.config import ConfigError, load_config, read_tree
from whet.data.config import ChatConfig
from whet.data.rows import RowConfig
from whet.env.tool_sets import name_of
from whet.here import holding, is_here
from whet.settings.rl import RunConfig
from whet.settings.supervised import command_of


class Replies:
    """The replies of a run's newest weights. The model is loaded at the first reply, and again when the run has newer weights.

    Args:
        run: the run's folder.
        functions: those of this process that the settings name.
    """

    def __init__(self, run: Path, functions: Mapping[str, Any]) -> None:
        self._run, self._functions = run, functions
        self._weights: tuple[Path, int] | None = None
        """Weights of the player, and when they were written."""
        self._player: Player | None = None

    def to(self, prompt: Any, changes: Mapping[str, Any]) -> str:
        """The reply to a prompt. Arguments as for `whet.Run.generate`.

        Raises:
            ValueError: the run has trained no language model, or the settings are wrong.
        """
        config = playing(self._run, changes, self._functions)
        with holding(self._functions):
            player = self._playing(config)
            player.set_rollout(config.rollout)
        rows = [prompt] if isinstance(prompt, str) else [{config.data.prompt_key: prompt}]
        try:
            (group,) = player.play(rows, 1, greedy=config.rollout.temperature == 0)
        finally:
            player.end_resources()
        (trajectory,) = group.trajectories
        if trajectory.error is not None:
            raise ValueError(f"no reply: {trajectory.error.kind} in {trajectory.error.where}: {trajectory.error.message}")
        return trajectory.response

    def _playing(self, config: RunConfig) -> Player:
        weights = newest_weights(self._run)
        found = None if weights is None else (weights, weights.stat().st_mtime_ns)
        if self._player is None or found != self._weights:
            self.close()
            if weights is not None and is_whole_model(weights):
                config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(weights)})})
                weights = None
            self._player, self._weights = Player(config, scored=False, weights=weights), found
        return self._player

    def close(self) -> None:
        """Give the model's memory back."""
        player, self._player = self._player, None
        if player is not None:
            player.close()


PLAYED = ("seed", "model", "train", "rollout", "engine", "env")
"""Tables that decide about a reply; so do the columns of `data`."""


def playing(run: Path, changes: Mapping[str, Any], functions: Mapping[str, Any]) -> RunConfig:
    """The settings that a run's model is played with: the run's own, without its data, its reward and its training.

    Raises:
        ConfigError: a setting is unknown, the run trained a reward model, or its tools were functions of another process.
    """
    file = run / "config.toml"
    tree = read_tree(file)
    command = command_of(tree)
    if command == "rm":
        raise ConfigError([f"{run} trained a reward model, which scores replies and writes none"])
    kept = {key: tree[key] for key in PLAYED if key in tree}
    columns = RowConfig if command == "train" else ChatConfig
    if kept.get("engine", {}).get("name", "embedded") != "embedded":
        del kept["engine"]  # no server is started for a reply
    kept["data"] = {key: value for key, value in tree["data"].items() if key in {**columns.model_fields, **ChatConfig.model_fields}}
    named = [*map(name_of, kept.get("env", {}).get("tools", [])), kept.get("env", {}).get("name", "")]
    gone = [name for name in named if is_here(name) and name.partition(":")[2] not in functions]
    if gone:
        raise ConfigError(
            [f"the run's {', '.join(gone)} was a function of another Python process: whet.generate(run.model_path, prompt, tools=[...])"]
        )
    base = {**kept, "rollout": {**kept.get("rollout", {}), **changes}, "reward": {"name": "random"}, "batch": {"prompts_per_rollout": 1}}
    base["data"]["train"] = NO_DATA
    return load_config(RunConfig, None, (), base=base)
