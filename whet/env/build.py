"""From the `[env]` table to a factory of environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field, model_validator

from whet.config import Config, ConfigError, call_factory, resolve, resolve_callable
from whet.env.base import Env, EnvFactory, SingleTurn
from whet.env.resources import Resource, resources_of
from whet.env.sandbox.config import SandboxConfig
from whet.env.threads import DaemonThreads
from whet.env.tool_env import MIN_REPLY_CHARS, CutSide, ReplyLimit, ToolEnv
from whet.env.tool_sets import AnyTool, ToolEntry, build_tools, choices, name_of
from whet.env.tools import THREADS

MAX_TOOL_THREADS = 128
"""Calls of plain functions as tools that run at a time, over all trajectories; further ones wait, and their time begins when they start.
Functions that are `async` take no thread."""


class EnvConfig(Config):
    """The environment that answers the model's turns."""

    name: str = "single_turn"
    """A built-in (docs/environments.md) or an import reference to a class or function that makes an environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment: of an import reference, or of a built-in that has options."""
    tools: list[ToolEntry] = Field(default_factory=list[ToolEntry])
    """For tools: built-in names (docs/mcp.md) and import references to typed functions with a docstring. A table has the `name` of a
    factory of tools, and its keyword arguments."""
    tool_timeout_s: float | None = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that one tool call may take; a call over it makes the trajectory a timeout. none: any time."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Tool calls of one turn that are run; further ones are answered with an error."""
    max_reply_chars: int = Field(default=8192, ge=MIN_REPLY_CHARS)
    """Longer replies lose a part: those of tools, of a simulated user, and of other players in a game."""
    reply_cut: CutSide = "middle"
    """Part that they lose: the head, the middle or the tail."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The place of the tools python, shell and files, of programs, and of servers that are to run in it (docs/sandbox.md)."""
    parser: str = "auto"
    """Format of the model's tool calls. auto: as its chat template tells; hermes, qwen_xml, llama3, deepseek_v3, deepseek_v31, dsml, glm,
    kimi, harmony, tags, none (docs/tool_formats.md), or an import reference to a function."""

    @property
    def answers(self) -> bool:
        """True if the environment may answer a reply."""
        return self.name != "single_turn"

    @model_validator(mode="after")
    def _fits_together(self) -> EnvConfig:
        if self.name not in ENVS and self.name not in REFERENCES and ":" not in self.name:
            raise ValueError(f"there is no environment {self.name!r}; choose {_choices({**ENVS, **REFERENCES})}")
        if self.tools and self.name not in ("tools", "simulated_user"):
            raise ValueError(f'env.tools belongs to env.name = "tools" or "simulated_user", not to {self.name!r}, which takes env.options')
        if self.name == "tools" and not self.tools:
            raise ValueError(f'env.name = "tools" needs env.tools: a list of {choices()}')
        if self.options and self.name in ENVS:
            raise ValueError(f"env.options belongs to an import reference; {self.name!r} takes none")
        for tool in self.tools:
            name_of(tool)
        return self


def _build_single_turn(config: EnvConfig) -> EnvFactory:
    return EnvFactory(SingleTurn)


def tools_of(config: EnvConfig, threads: DaemonThreads = THREADS) -> list[AnyTool]:
    """The tools that settings name, without open resources.

    Args:
        config: settings of the environment.
        threads: threads for functions that are not async.

    Raises:
        ValueError: one of them is not there, or does not take its options.
    """
    return [tool for entry in config.tools for tool in build_tools(entry, threads, {"sandboxes": config.sandbox})]


def _build_tools(config: EnvConfig) -> EnvFactory:
    tools = tools_of(config, DaemonThreads(MAX_TOOL_THREADS))

    def make(**opened: Any) -> ToolEnv:
        bound = [tool.bound({name: opened[f"{tool.name}.{name}"] for name in tool.needs}) if opened else tool for tool in tools]
        return _tool_env(config, bound)

    make()  # two tools of one name show here, not in the first rollout
    needs = {f"{tool.name}.{name}": resource for tool in tools for name, resource in tool.needs.items()}
    # A fresh resource of a group or a trajectory has nothing of what earlier calls did to the old one.
    return EnvFactory(make, needs, resumes=not any(resource.level for resource in needs.values()))


def _tool_env(config: EnvConfig, tools: Sequence[AnyTool]) -> ToolEnv:
    return ToolEnv(tools, config.tool_timeout_s, config.max_calls_per_turn, config.max_reply_chars, config.reply_cut)


def _build_research(config: EnvConfig) -> EnvFactory:
    factory = resolve_callable(REFERENCES["research"], kind="environment", given=["tool_env", "threads"], options=config.options)
    parts = partial(_tool_env, config), DaemonThreads(MAX_TOOL_THREADS)
    return call_factory(factory, config.name, *parts, kind="environment", **config.options)


TOOL_ENVS = ("tools", "research")
"""Environments that answer as the chat template has it: with messages of tools, and nothing else."""

ENVS: dict[str, Callable[[EnvConfig], EnvFactory]] = {"single_turn": _build_single_turn, "tools": _build_tools}

REFERENCES: dict[str, str] = {
    "game": "whet.env.game:RoleGameEnv",
    "gymnasium": "whet.env.adapters.gymnasium:gymnasium_env",
    "openenv": "whet.env.adapters.openenv:OpenEnv",
    "program": "whet.record.program:ProgramEnv",
    "research": "whet.env.research:research",
    "simulated_user": "whet.env.simulated_user:SimulatedUserEnv",
    "textarena": "whet.env.adapters.textarena:textarena_env",
    "trl": "whet.env.adapters.trl:TrlEnv",
    "verifiers": "whet.record.verifiers:VerifiersEnv",
}
"""Built-in environments with options, by reference: each is made as one of the user's own would be."""

NEEDS: dict[str, str] = {"program": "whet.record.program:program_needs"}
"""For some of them a function, by reference, that makes of the options and of `env.sandbox` further resources which they need."""


def build_env_factory(config: EnvConfig) -> EnvFactory:
    """A factory of fresh environments, one for each trajectory.

    Raises:
        ValueError: a reference does not resolve, or does not take the options it is given. The factory
            raises it, too, if the referenced code raises or makes no environment.
    """
    if config.name in ENVS:
        return ENVS[config.name](config)
    if config.name == "research":
        return _build_research(config)
    factory = resolve_callable(REFERENCES.get(config.name, config.name), kind="environment", options=config.options)
    needs = {name: resource for name, resource in resources_of(factory).items() if name not in config.options}
    if config.name in NEEDS:
        needs |= resolve(NEEDS[config.name], kind="resources")(config.options, config.sandbox)
    make = partial(_make_checked, factory, config)
    if config.name in ("game", "simulated_user"):
        make = partial(make, limit=ReplyLimit(config.max_reply_chars, config.reply_cut))
    if config.name == "simulated_user":
        return _with_assistant(config, make, needs)
    return EnvFactory(make, needs)


def _with_assistant(config: EnvConfig, make: Callable[..., Env], needs: Mapping[str, Resource]) -> EnvFactory:
    """The factory of a simulated user's conversations, whose assistant has the tools of the settings."""
    inner = _build_tools(config) if config.tools else EnvFactory(SingleTurn)

    def joined(**opened: Any) -> Env:
        own = {name: value for name, value in opened.items() if name in needs}
        return make(assistant=inner(**{name: value for name, value in opened.items() if name not in needs}), **own)

    joined()  # what is wrong with its options shows here, not in the first rollout
    return EnvFactory(joined, {**needs, **inner.needs})


def _make_checked(factory: Callable[..., object], config: EnvConfig, /, **opened: Any) -> Env:
    env = call_factory(factory, config.name, kind="environment", **config.options, **opened)
    if not isinstance(env, Env):
        parts = ("tools", "start", "step", "close")
        missing = [part for part in parts if not hasattr(env, part)]
        raise ConfigError([f"environment {config.name!r} made a {type(env).__name__}, which has no {', '.join(missing)}"])
    return env


def _choices(table: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in table) + ' or an import reference "module:name"'
