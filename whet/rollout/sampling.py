"""Sampling from the policy, and the settings of it that training supports."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, Optional

from pydantic import Field, create_model, model_validator

from whet.config import Config, Reference, validated
from whet.env.limits import Limits
from whet.types import Grammar, SamplingParams

LENGTH = 4096
"""Default of `rollout.max_tokens`."""


class RolloutConfig(Config):
    """Sampling from the policy, and limits of a trajectory."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Temperature of every turn; 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability. In training the ids of
    those tokens are recorded with every sampled token, and all log-probs are renormalised over them;
    with `top_k` there are never more than that number."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0: from all. Recorded in training as for `top_p`."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this fraction of the most likely one; other than 0 in evaluation only."""
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10)
    """Make tokens of the context and the reply less likely, by this factor on their logits; other than 1 in evaluation
    only."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Penalty subtracted from the logit of each token that occurred in the turn; other than 0 in
    evaluation only."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Penalty subtracted from a token's logit for each time that the token occurred in the turn; other
    than 0 in evaluation only."""
    min_tokens: int = Field(default=0, ge=0)
    """Least number of tokens of a turn, unless a limit cuts it; other than 0 in evaluation only."""
    json_schema: str | None = None
    """JSON schema, as text, that every turn keeps to (needs `whet[grammar]`); other than none in evaluation only."""
    regex: str | None = None
    """Regular expression that every turn matches as a whole (needs `whet[grammar]`); other than none in
    evaluation only."""
    max_turns: int = Field(default=8, ge=1)
    """Model calls of a trajectory, at most. A plain question takes one."""
    max_tokens: int = Field(default=LENGTH, ge=2)
    """Tokens of a whole trajectory, at most: prompt, replies and the environment's answers. The default is less for a
    model with fewer positions, or a cache with less room."""
    max_turn_tokens: int = Field(default=1024, ge=1)
    """Tokens sampled in one turn, at most."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a turn besides the tokenizer's own; they stay in the turn."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a turn, such as `</search>`; they stay in the turn, to the end of the token that completes one."""
    timeout_s: float | None = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that a trajectory may take, from its start to its reward. It is started when the engine has a place for it, so
    waiting for one does not count. none: any time."""

    play: Reference | None = None
    """Import reference to an async function that plays each trajectory in place of taking turns with the environment
    (docs/extending.md)."""

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        """For the engine. `stop_token_ids` are the tokenizer's (`Renderer.stop_token_ids`)."""
        return SamplingParams(
            max_tokens=self.max_turn_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            grammar=self._grammar(),
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *self.stop_token_ids))),
            stop=tuple(self.stop),
        )

    def _grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar("json_schema", self.json_schema)
        return None if self.regex is None else Grammar("regex", self.regex)

    @model_validator(mode="after")
    def _one_form(self) -> RolloutConfig:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex cannot both say what a turn is; set one of them")
        if self._grammar() is not None and self.min_tokens:
            raise ValueError(f"min_tokens cannot be {self.min_tokens} where json_schema or regex says what a turn is; set it to 0")
        return self

    def within(self, longest: int | None) -> RolloutConfig:
        """The same limits for an engine that runs `longest` tokens at most (None: any): the default `max_tokens` becomes less."""
        too_long = longest is not None and self.max_tokens == LENGTH > longest
        return self.model_copy(update={"max_tokens": longest}) if too_long else self

    @property
    def fixed_max_tokens(self) -> int | None:
        """`max_tokens`, if it holds as it is; None: the default, which becomes less where the model ends before it."""
        return None if self.max_tokens == LENGTH else self.max_tokens

    def limits(self) -> Limits:
        return Limits(self.max_turns, self.max_tokens, self.max_turn_tokens)


def check_fits(rollout: RolloutConfig, longest: int) -> None:
    """Refuse trajectories that are longer than the engine can run.

    Raises:
        ValueError: if they may have more than `longest` tokens.
    """
    if rollout.max_tokens > longest:
        raise ValueError(
            f"rollout.max_tokens is {rollout.max_tokens}, but the engine runs sequences of {longest} tokens at most (the model's "
            "positions, or engine.embedded.cache_tokens if that is set): lower the one or raise the other; for a model that is good for "
            "more than its config.json says, set model.config.max_position_embeddings"
        )


def _unset(model: type[Config], *left_out: str) -> type[Config]:
    """A model with the fields of another one, all of them None unless they are set."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in left_out:
            unset = copy(field)
            unset.default, unset.default_factory = None, None
            fields[name] = (Optional[field.annotation], unset)  # noqa: UP045
    return create_model("Unset", __base__=Config, **fields)


class RolloutOverrides(_unset(RolloutConfig, "stop_token_ids", "play")):
    """Like `rollout`; what is left out is as in training, except that sampling is greedy."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""

    def over(self, base: RolloutConfig) -> RolloutConfig:
        """`base` with what is set here."""
        changes = {key: value for key, value in self.model_dump().items() if value is not None}
        return validated(RolloutConfig, {**base.model_dump(), **changes}, "rollout of an evaluation set")


UNREPLAYED = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "json_schema", "regex")
"""Keys whose every value but the default makes the engine draw from a distribution that the trainer does not compute."""


def check_trainable(config: RolloutConfig) -> None:
    """Refuse what training cannot replay: it needs the log-prob of a token under the distribution that it was sampled
    from.

    Raises:
        ValueError: naming the key, why, and what to set.
    """
    if config.temperature == 0:
        raise ValueError(
            "rollout.temperature=0 cannot be trained on: greedy samples of a task are all the same, and their log-probs "
            "are 0; set it above 0 (1.0 samples from the policy itself), and temperature=0 for evaluation alone"
        )
    for key in UNREPLAYED:
        value, whole = getattr(config, key), RolloutConfig.model_fields[key].default
        if value != whole:
            whole = "none" if whole is None else whole
            raise ValueError(
                f"rollout.{key}={value} cannot be trained on: tokens would be drawn from another distribution than the policy, which "
                f"the trainer does not compute; set rollout.{key}={whole}, and {key}={value} for evaluation alone"
            )
