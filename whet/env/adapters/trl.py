"""Environment classes written for TRL's `environment_factory`: a `reset`, public methods that are tools, maybe a `get_reward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.config import call_factory, resolve_callable
from whet.data.parsers import Parsed
from whet.env.adapters.games import with_text
from whet.env.base import Step
from whet.env.threads import DaemonThreads
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.types import JSON, Task

NO_TOOLS = ("reset", "get_reward")


class TrlEnv:
    """An environment of TRL's. The model's turn without a call ends it; `get_reward` is the reward of the last turn.

    A method's ValueError is answered to the model, any other exception is an error of the environment: TRL answers both.

    Args:
        factory: reference to the class, or to a function that makes an object of one; or a table of such, by the row's `environment`.
        tool_timeout_s: seconds of one call.
        max_reply_chars: longer answers lose their middle.
    """

    def __init__(self, factory: str | Mapping[str, str], tool_timeout_s: float | None = 30.0, max_reply_chars: int = 8192) -> None:
        named = {"": factory} if isinstance(factory, str) else dict(factory)
        self._factories = {name: (ref, resolve_callable(ref, kind="environment")) for name, ref in named.items()}
        self._limits = tool_timeout_s, max_reply_chars
        self._env: Any = None
        self._tools: ToolEnv | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        return () if self._tools is None else self._tools.tools

    async def start(self, task: Task) -> Task:
        name = "" if "" in self._factories else str(task.metadata.get("environment"))
        if name not in self._factories:
            raise ValueError(f"the row's environment is {name!r}; env.options.factory has {', '.join(self._factories)}")
        reference, factory = self._factories[name]
        self._env = call_factory(factory, reference, kind="environment")
        threads = DaemonThreads(1)  # calls of one turn follow one another: the object has a state
        methods = tool_methods(self._env)
        if methods:
            self._tools = ToolEnv([Tool(method, threads) for method in methods], self._limits[0], max_reply_chars=self._limits[1])
        first = await _call(lambda: self._env.reset(**row_of(task, self._env.reset)), self._env.reset, threads)
        if first is not None and not isinstance(first, str):
            raise TypeError(f"reset of {reference} returned a {type(first).__name__}; it must return text or None")
        return with_text(task, first or "")

    async def step(self, reply: Parsed) -> Step:
        if self._tools is not None:
            step = await self._tools.step(reply)
            if not step.done:
                return step
        return Step(done=True, reward=await self.appraise())

    async def appraise(self) -> float | None:
        """The value of `get_reward`, for a trajectory that was cut, too."""
        judge = getattr(self._env, "get_reward", None)  # optional in TRL
        return None if judge is None else float(await _call(judge, judge, DaemonThreads(1)))

    async def close(self) -> None:
        pass


def tool_methods(env: object) -> list[Callable[..., Any]]:
    """The methods of an environment that are tools: those that TRL takes for such."""
    members = inspect.getmembers(type(env), predicate=inspect.isfunction)
    return [getattr(env, name) for name, _ in members if name not in NO_TOOLS and not name.startswith("_")]


def row_of(task: Task, reset: Callable[..., Any]) -> dict[str, Any]:
    """The columns of a task's row that `reset` takes: all of them where it has `**kwargs`, as TRL demands."""
    prompt = task.prompt if isinstance(task.prompt, str) else [message.to_dict() for message in task.prompt]
    row: dict[str, Any] = {"prompt": prompt, "label": task.label, **task.metadata}
    row.pop("environment", None)
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return row
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in row.items() if name in names}


async def _call(call: Callable[[], Any], function: Callable[..., Any], threads: DaemonThreads) -> Any:
    if inspect.iscoroutinefunction(function):
        return await call()
    return await threads.run(call, None)
