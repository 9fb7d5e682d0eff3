"""Sampling and limits that differ in an evaluation set."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from whet.config import Config, validated
from whet.rollout.sampling import RolloutConfig


class RolloutOverrides(Config):
    """Like `rollout`; what is left out is as in training, except that sampling is greedy."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of likely tokens that has this probability."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from the k likeliest tokens; 0: no limit."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Leave out tokens less likely than this fraction of the likeliest."""
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=10)
    """Make tokens of the context and the reply less likely, by this factor on their logits."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Penalty subtracted from the logit of each token that occurred in the turn."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Penalty subtracted from a token's logit for each time that the token occurred in the turn."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Least number of tokens of a turn, unless a limit cuts it."""
    json_schema: str | None = None
    """JSON schema, as text, that every turn keeps to."""
    regex: str | None = None
    """Regular expression that every turn matches as a whole."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None)
    """Texts that end a turn."""
    max_turns: int | None = Field(default=None, gt=0)
    """Model calls of a trajectory, at most."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a trajectory, at most: prompt, replies and the environment's answers."""
    max_turn_tokens: int | None = Field(default=None, gt=0)
    """Tokens sampled in one turn, at most."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that a trajectory may take."""

    def over(self, base: RolloutConfig) -> RolloutConfig:
        """`base` with what is set here."""
        changes = {key: value for key, value in self.model_dump().items() if value is not None}
        return validated(RolloutConfig, {**base.model_dump(), **changes}, "rollout of an evaluation set")
