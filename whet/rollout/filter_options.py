"""Options of filters, and the functions that settings name. Without torch: a mistake is answered before it is loaded."""

from __future__ import annotations

from pydantic import Field, ValidationError

from whet.config import Config, ConfigError, Hook
from whet.config.errors import problems_of
from whet.rollout.control import ControlConfig, FilterConfig


class ScoreOptions(Config):
    """The number that is compared."""

    component: str | None = None
    """Part of the reward that is looked at in place of the total, such as `acc`."""


class PassOptions(ScoreOptions):
    """Definition of a right answer."""

    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """The least score of a right answer."""


class LengthOptions(Config):
    """Bounds on the lengths of a group's trajectories."""

    min_tokens: int = Field(default=0, ge=0)
    """Tokens sampled in a group's shortest valid trajectory, at least."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in a group's longest valid trajectory, at most; none: any number."""


OPTIONS: dict[str, type[Config]] = {"zero_std": ScoreOptions, "all_right": PassOptions, "all_wrong": PassOptions, "length": LengthOptions}
"""Options of each of whet's filters, by its name."""


def check_selection(control: ControlConfig) -> None:
    """Refuse filters and an order that cannot be built.

    Raises:
        ValueError: as `options_of`.
    """
    order_of(control)
    for config in control.filters:
        options_of(config)


def options_of(config: FilterConfig) -> Config | Hook:
    """Options of one of whet's filters, or else the user's function with its options.

    Raises:
        ValueError: for an unknown name, options that a filter does not take, or a reference that does not resolve.
    """
    if config.name in OPTIONS:
        options = OPTIONS[config.name]
        try:
            return options.model_validate(config.options)
        except ValidationError as error:
            problems = problems_of(error, options, config.options)
            raise ConfigError([f"control.filters: {config.name}: options.{problem}" for problem in problems]) from None
    if ":" not in config.name:
        raise ValueError(
            f"control.filters: there is no filter {config.name!r}; choose {', '.join(OPTIONS)}, or name a function (module:function)"
        )
    return Hook.of("control.filters", config.name, ["group"], config.options)


def order_of(control: ControlConfig) -> Hook | None:
    """The user's function that orders groups; None: there is none. Errors as `options_of`."""
    return None if control.order is None else Hook.of("control.order", control.order, ["groups"])
