"""`whet.evaluate` and `whet.generate`: a model that plays and does not learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.api.calls import Named, new_folder, played_tables, rows_in
from whet.api.given import NO_DATA, read_given, refuse_unread
from whet.api.process import CallerThread
from whet.api.run import Run
from whet.build.first_look import look_at_playing
from whet.data.hub import check_model_folder
from whet.here import holding
from whet.settings.rl import RunConfig
from whet.types import Trajectory

if TYPE_CHECKING:
    from typing import Unpack

    from whet.api.keywords import TrainSettings  # pyright: ignore[reportMissingModuleSource]

LEFT_OUT = "leave it out"
UNREAD = {
    **dict.fromkeys(("num_rollouts", "num_epochs", "stop_after_constant_rewards", "train", "algo", "control"), LEFT_OUT),
    **dict.fromkeys(("critic", "reference", "teacher", "checkpoint", "cluster"), LEFT_OUT),
    **dict.fromkeys(("evaluate.interval", "evaluate.before_training"), LEFT_OUT),
    **dict.fromkeys(("data.max_prompt_tokens", "data.long_prompts", "data.shuffle", "data.source"), LEFT_OUT),
    "batch": "the number of replies to each prompt is evaluate__sets__test__samples_per_prompt, in whet.generate samples",
}
"""Settings of training that nothing reads where a model is only played, and what to do instead."""
UNREAD_ALONE = {
    **dict.fromkeys(("run_dir", "evaluate", "observe"), LEFT_OUT),
    "data.train": "give the rows as prompts",
}
"""Those that are not read where no run is made, either."""


def evaluate(
    model: str | Path | Mapping[str, Any],
    data: Any = None,
    reward: Named | Sequence[Named] | None = None,
    *,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Play rows once and score the replies, as `whet evaluate` does. Arguments as for `train`.

    Returns:
        A run without training, in a new folder `runs/evaluate-TIME`: `results` has mean@n, pass@k, lengths and outcomes, and `show` the
        replies.
    """
    refuse_unread("whet.evaluate", "plays the rows once and trains nothing", settings, UNREAD)
    tables = played_tables(model, None, reward, tools, None)
    given = read_given({**tables, "data": {"train": NO_DATA}, "evaluate": {"sets": {"test": {"path": data}}}}, settings)
    folder = Path(given.tree.get("run_dir") or new_folder("evaluate"))
    with holding(given.functions), rows_in(given, folder):
        config = given.config(RunConfig, folder)
        check_model_folder(config.model.path)
        look_at_playing(config, trains=False)
        from whet.runs.commands import evaluate as play

        CallerThread().run(lambda: play(config, f"whet.evaluate(..., run_dir={str(folder)!r})", base=True))
    return Run(max(folder.glob("evaluate_*"), key=lambda path: int(path.name.rpartition("_")[2])), given.functions)


def generate(
    model: str | Path | Mapping[str, Any],
    prompts: Any,
    *,
    samples: int = 1,
    reward: Named | Sequence[Named] | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    **settings: Unpack[TrainSettings],
) -> list[Trajectory]:
    """Replies of a model.

    Args:
        model: folder, or name on the Hugging Face hub.
        prompts: texts, or rows as for `whet.train`.
        samples: replies to each.
        reward: scores them; None: they have no reward.
        tools: functions that the model may call.
        settings: those of `whet.train`, such as `rollout__max_turn_tokens` and `rollout__temperature` (0: the most likely reply).

    Returns:
        A trajectory for each reply, prompt by prompt; `response` is its text.
    """
    refuse_unread("whet.generate", "plays the prompts once and keeps no files", settings, {**UNREAD, **UNREAD_ALONE})
    given = read_given(played_tables(model, None, reward, tools, None), settings)
    given.tree.setdefault("data", {}).setdefault("train", NO_DATA)
    given.tree.setdefault("reward", {"name": "random"})
    config: RunConfig = given.config(RunConfig, Path("runs/generate"))
    with holding(given.functions):
        check_model_folder(config.model.path)
        look_at_playing(config, trains=False)
        from whet.api.player import Player

        player = Player(config, scored=reward is not None)
    try:
        greedy = config.rollout.temperature == 0
        return [trajectory for group in player.play(prompts, samples, greedy=greedy) for trajectory in group.trajectories]
    finally:
        player.close()
