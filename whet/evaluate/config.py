"""The settings of evaluation sets, and of `whet score`."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config
from whet.data.rows import RowConfig
from whet.env.build import EnvConfig
from whet.reward import RewardChoice, RewardConfig
from whet.rollout.sampling import RolloutOverrides


class EvaluationSetConfig(Config):
    """One evaluation set. What is left out is as in training, except that sampling is greedy."""

    path: str | list[str] = Field(min_length=1)
    """Data files, as in data.train; `test.jsonl@[100:200]` takes a slice of the rows."""
    rows: RowConfig | None = None
    """Column names that differ from those in [data]."""
    limit: int | None = Field(default=None, gt=0)
    """Evaluate only this many tasks, the first ones; unset: all."""
    samples_per_prompt: int = Field(default=1, gt=0)
    """Trajectories of each prompt: n of mean@n and pass@k."""
    rollout: RolloutOverrides = Field(default_factory=RolloutOverrides)
    """Sampling and limits that differ from training's."""
    env: EnvConfig | None = None
    """Environment settings that differ from training's; with a `name` here nothing is taken over from
    training's."""
    reward: RewardChoice | None = None
    """Reward, if it differs; training's processes score it, too."""
    pass_reward: float = 1.0
    """A trajectory whose reward, with those of its tokens, is at least this passes, for pass@k."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationSetConfig:
        if self.samples_per_prompt > 1 and self.rollout.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but greedy samples of a prompt are all the same; set rollout.temperature"
            )
        return self


class EvaluateConfig(Config):
    """When to evaluate, and on what."""

    interval: int | None = Field(default=None, gt=0)
    """Rollouts between two evaluations; unset: evaluate only at the end."""
    before_training: bool = False
    """Also before the first rollout."""
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """The sets, by name."""


class ScoreConfig(Config):
    """Settings that `whet score` accepts as overrides."""

    reward: RewardConfig
    """Reward that scores the replies; reward=NAME is short for reward.name=NAME."""
    concurrency: int = Field(default=64, ge=1)
    """Replies that are being scored at once."""


def short_overrides(overrides: list[str]) -> list[str]:
    """Overrides with `reward=NAME` written as `reward.name=NAME`, so that further settings of the
    reward can be added."""
    return [f"reward.name={text.removeprefix('reward=')}" if text.startswith("reward=") and "{" not in text else text for text in overrides]
