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
from whet.here import holding, is_here
from whet.settings.rl import RunConfig
from whet.settings.supervised import command_of


def reply_of(run: Path, prompt: Any, changes: Mapping[str, Any], functions: Mapping[str, Any]) -> str:
    """The reply of a run's newest weights to a prompt. Arguments as for `whet.Run.generate`; `functions` are those of this process that the
    settings name.

    Raises:
        ValueError: the run has trained no language model, or the settings are wrong.
    """
    config = playing(run, changes, functions)
    weights = newest_weights(run)
    if weights is not None and is_whole_model(weights):
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(weights)})})
        weights = None
    with holding(functions):
        player = Player(config, scored=False, weights=weights)
    try:
        rows = [prompt] if isinstance(prompt, str) else [{config.data.prompt_key: prompt}]
        (group,) = player.play(rows, 1, greedy=config.rollout.temperature == 0)
    finally:
        player.close()
    (trajectory,) = group.trajectories
    if trajectory.error is not None:
        raise ValueError(f"no reply: {trajectory.error.kind} in {trajectory.error.where}: {trajectory.error.message}")
    return trajectory.response


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
    kept["data"] = {key: value for key, value in tree["data"].items() if key in {**columns.model_fields, **ChatConfig.model_fields}}
    named = [*kept.get("env", {}).get("tools", []), kept.get("env", {}).get("name", "")]
    gone = [name for name in named if is_here(name) and name.partition(":")[2] not in functions]
    if gone:
        raise ConfigError(
            [f"the run's {', '.join(gone)} was a function of another Python process: whet.generate(run.model_path, prompt, tools=[...])"]
        )
    base = {**kept, "rollout": {**kept.get("rollout", {}), **changes}, "reward": {"name": "random"}, "batch": {"prompts_per_rollout": 1}}
    base["data"]["train"] = NO_DATA
    return load_config(RunConfig, None, (), base=base)
