"""Settings of `whet sft`, `whet dpo` and `whet rm`, which learn from data as they are; at the end, which
settings each command reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, model_validator

from whet.algo.preference_config import DpoConfig, RewardModelConfig
from whet.cluster.config import ENGINE_KEYS
from whet.config import Config, refuse_unread
from whet.core.choices import ReducerName
from whet.data.config import ChatConfig, PreferenceConfig, SupervisedConfig
from whet.settings.rl import BaseRunConfig, RunConfig


class HeldOutConfig(Config):
    """Data that do not train, and when they are looked at."""

    path: str | list[str] | None = Field(default=None, min_length=1)
    """File, folder or hub data set, with the columns of `[data]`; unset: nothing is held out."""
    interval: int | None = Field(default=50, gt=0)
    """Steps between two evaluations; another one follows at the end. none: only at the end."""
    before_training: bool = True
    """Also before the first step."""


class SupervisedRunConfig(BaseRunConfig):
    """A supervised run (`whet sft`)."""

    data: SupervisedConfig
    """Conversations."""
    num_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the conversations."""
    samples_per_step: int = Field(default=32, gt=0)
    """Conversations that one optimizer step learns from."""
    reducer: ReducerName = "token_mean"
    """token_mean: every trained token counts the same; sample_mean: every conversation does."""
    evaluate: HeldOutConfig = Field(default_factory=HeldOutConfig)
    """Held-out conversations; their loss is `eval/sft/loss`."""

    @model_validator(mode="after")
    def _no_rollouts(self) -> SupervisedRunConfig:
        refuse_settings(self)
        return self


class PairRunConfig(BaseRunConfig):
    """Settings of every run on preference pairs."""

    data: PreferenceConfig
    """Preference pairs."""
    num_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the pairs."""
    pairs_per_step: int = Field(default=32, gt=0)
    """Pairs that one optimizer step learns from."""
    evaluate: HeldOutConfig = Field(default_factory=HeldOutConfig)
    """Held-out pairs."""

    @model_validator(mode="after")
    def _no_rollouts(self) -> PairRunConfig:
        refuse_settings(self)
        return self


StepRunConfig = SupervisedRunConfig | PairRunConfig
"""A run that learns from data as they are."""


class DpoRunConfig(PairRunConfig):
    """Direct preference optimization (`whet dpo`)."""

    dpo: DpoConfig = Field(default_factory=DpoConfig)
    """The loss."""

    @model_validator(mode="after")
    def _margins_count(self) -> DpoRunConfig:
        if self.dpo.loss == "ipo" and self.data.margin_key is not None:
            raise ValueError(
                f"data.margin_key is {self.data.margin_key!r}, but dpo.loss is ipo, whose loss has no margin; use dpo.loss=sigmoid, or "
                "leave data.margin_key out"
            )
        return self


class RewardModelRunConfig(PairRunConfig):
    """Training of a reward model (`whet rm`). `model.path` is a language model, which gets a new score head,
    or a reward model.
    """

    rm: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """The loss."""


def refuse_settings(config: BaseRunConfig) -> None:
    """Reject settings that have no effect here: functions that would never be called, and settings of
    an engine (a supervised run has none).

    Raises:
        ValueError: with the name of the setting.
    """
    refuse_unread(config.train, ["routing_replay"], "(train) in a run without rollouts, which has one pass", "use `whet train`")
    refuse_unread(config.cluster, ENGINE_KEYS, "(cluster) in a run without rollouts, which has no engine", "use `whet train`")
    why = "(observe) in a run without rollouts, which has no replies"
    refuse_unread(config.observe, ["show"], why, "use `whet train`, or leave it out")
    hook = config.observe.on_rollout
    if hook is not None:
        raise ValueError(f"observe.on_rollout={hook!r} has no effect in a run without rollouts; use observe.trackers, or leave it out")


def chat_of(config: BaseRunConfig) -> ChatConfig:
    """The chat settings of a run: template and special tokens of its messages."""
    assert isinstance(config, RunConfig | StepRunConfig), "every kind of run has data"
    return config.data


Columns = TypeVar("Columns", SupervisedConfig, PreferenceConfig)


def held_out_rows(data: Columns, evaluate: HeldOutConfig) -> Columns | None:
    """The held-out files, with the columns of training, in their order; nothing is left out for its length."""
    if evaluate.path is None:
        return None
    return data.model_copy(update={"path": evaluate.path, "shuffle": False, "max_tokens": None})


RUN_CONFIGS: dict[str, type[BaseRunConfig]] = {
    "train": RunConfig,
    "sft": SupervisedRunConfig,
    "dpo": DpoRunConfig,
    "rm": RewardModelRunConfig,
}
"""Settings by the command that trains with them."""


def kind_of(config: BaseRunConfig) -> str:
    """The command that the settings belong to."""
    return next(command for command, settings in RUN_CONFIGS.items() if settings is type(config))


def command_of(tree: Mapping[str, Any]) -> str:
    """The command that a file's settings are for: the one that knows most of its keys; on a tie the
    first of `RUN_CONFIGS`."""
    data = tree.get("data")
    data_keys = data.keys() if isinstance(data, Mapping) else frozenset[str]()

    def known(command: str) -> int:
        fields = RUN_CONFIGS[command].model_fields
        table = fields["data"].annotation
        assert isinstance(table, type) and issubclass(table, Config), "every kind of run has data"
        return len(fields.keys() & tree.keys()) + len(table.model_fields.keys() & data_keys)

    return max(RUN_CONFIGS, key=known)
