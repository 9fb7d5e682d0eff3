"""Resources that trajectories share, such as a sandbox, a database or a server: opened when first needed, and closed once."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from whet.config import place_of
from whet.env.limits import CLOSE_TIMEOUT_S
from whet.types import Task

T = TypeVar("T")


class ResourceFailed(Exception):
    """A resource could not be opened. The text names it, its prompt, the cause and the place in the user's code."""


class ResourceTimeout(ResourceFailed, TimeoutError):
    """A resource could not be opened: its own code raised a TimeoutError."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that a function asks for: the default of one of its parameters."""

    open: Callable[..., AbstractAsyncContextManager[Any]]
    of_group: bool
    of_trajectory: bool = False

    @property
    def level(self) -> int:
        """0: one for the run; 1: one for each group; 2: one for each trajectory."""
        return 2 if self.of_trajectory else int(self.of_group)

    @property
    def name(self) -> str:
        return getattr(self.open, "__name__", repr(self.open))


def per_run(open: Callable[..., AbstractAsyncContextManager[T]]) -> T:
    """Default of a parameter that gets the resource which `open()` opens, one for the whole run.

    Example:
        def search(query: str, index: Index = per_run(open_index)) -> str: ...

    Raises:
        ValueError: `open` returns no async context manager, or asks for a resource of a group or a trajectory.
    """
    return cast(T, _resource(open, 0))


def per_group(open: Callable[..., AbstractAsyncContextManager[T]]) -> T:
    """Default of a parameter that gets the resource which `open(task)` opens, one for all trajectories of a prompt.

    Raises:
        ValueError: `open` returns no async context manager, or asks for a resource of a trajectory.
    """
    return cast(T, _resource(open, 1))


def per_trajectory(open: Callable[..., AbstractAsyncContextManager[T]]) -> T:
    """Default of a parameter that gets the resource which `open(task)` opens, one for each trajectory: a session that keeps a state.

    Raises:
        ValueError: `open` returns no async context manager.
    """
    return cast(T, _resource(open, 2))


_ONCE_IN = ("a run", "a group", "a trajectory")


def _resource(open: Callable[..., Any], level: int) -> Resource:
    resource = Resource(open, level == 1, level == 2)
    for needed in resources_of(open).values():
        if needed.level > level:
            once, wider = _ONCE_IN[level], _ONCE_IN[needed.level]
            raise ValueError(f"the resource {resource.name} is opened once in {once}, so it cannot ask for a resource of {wider}")
    if inspect.isasyncgenfunction(open) or inspect.iscoroutinefunction(open):
        raise ValueError(f"the resource {resource.name} is no async context manager; decorate it with contextlib.asynccontextmanager")
    return resource


def resources_of(function: Callable[..., Any]) -> dict[str, Resource]:
    """Resources that a function or class asks for, by parameter."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: default for name, default in defaults.items() if isinstance(default, Resource)}


@dataclass(slots=True)
class _Holder:
    """The task that opens, holds and closes one resource: a context manager may refuse to be left by another task."""

    resource: Resource
    opened: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


def print_warning(text: str) -> None:
    """Show a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Resources:
    """The open resources of a run, those of one group in it, or those of one trajectory of a group.

    Args:
        warn: called with a line about each resource that could not be closed.
        owner: resources of the run that the group belongs to, or of the group that the trajectory belongs to; None: these are the run's.
        task: the prompt of the group or the trajectory.
    """

    def __init__(self, warn: Callable[[str], None] = print_warning, owner: Resources | None = None, task: Task | None = None) -> None:
        self._warn, self._owner, self._task = warn, owner, task
        self._level: int = 0 if owner is None else owner._level + 1
        self._holders: dict[Resource, _Holder] = {}
        self._open: list[_Holder] = []
        """Holders in the order in which their resources were opened."""
        self._inner: list[Resources] = []
        """Groups of the run, or trajectories of the group, that hold something."""
        self._closing: asyncio.Task[None] | None = None

    def of_group(self, task: Task) -> Resources:
        """Resources of a group, which are closed with these at the latest."""
        assert self._level == 0, "a group belongs to a run"
        return Resources(self._warn, self, task)

    def of_trajectory(self) -> Resources:
        """Resources of a trajectory of this group, which are closed with these at the latest."""
        assert self._level == 1, "a trajectory belongs to a group"
        return Resources(self._warn, self, self._task)

    async def open(self, needs: Mapping[str, Resource]) -> dict[str, Any]:
        """The value of each resource by its name in `needs`. Those that are not open yet are opened now; one that failed before is tried
        again.

        Raises:
            ResourceFailed: one cannot be opened.
        """
        return {name: await self._value(resource) for name, resource in needs.items()}

    async def _value(self, resource: Resource) -> Any:
        assert resource.level <= self._level, f"{resource.name} is a resource of {_ONCE_IN[resource.level]}"
        if self._owner is not None and resource.level < self._level:
            return await self._owner._value(resource)
        holder = self._holders.get(resource)
        if holder is None or (holder.opened.done() and holder.opened.exception() is not None):
            holder = self._holders[resource] = _Holder(resource)
            holder.task = asyncio.create_task(self._hold(holder), name=f"resource {resource.name}")
            self._enter()
        return await asyncio.shield(holder.opened)  # its siblings wait for it, too

    def _enter(self) -> None:
        if self._owner is not None and self not in self._owner._inner:
            self._owner._inner.append(self)
            self._owner._enter()

    def _leave(self) -> None:
        if self._owner is not None and self in self._owner._inner:
            self._owner._inner.remove(self)

    async def _hold(self, holder: _Holder) -> None:
        resource, given = holder.resource, () if self._task is None else (self._task,)
        try:
            needed = await self.open(resources_of(resource.open))
            async with resource.open(*given, **needed) as value:
                self._open.append(holder)
                holder.opened.set_result(value)
                await holder.leave.wait()
        except Exception as error:  # a user's code
            if holder.opened.done():
                self._warn(self._text(resource, "closed", error))
                return
            if not isinstance(error, ResourceFailed):  # else it is of another resource, which this one needs
                kind = ResourceTimeout if isinstance(error, TimeoutError) else ResourceFailed
                failed = kind(self._text(resource, "opened", error))
                failed.__cause__ = error
                error = failed
            holder.opened.set_exception(error)
            holder.opened.exception()  # every trajectory that waits for it may have been cancelled
        finally:
            holder.opened.cancel()

    def _text(self, resource: Resource, what: str, error: Exception) -> str:
        user = "the run" if self._task is None else f"the prompt {self._task.origin or self._task.id}"
        return f"the resource {resource.name} of {user} could not be {what}: {type(error).__name__}: {error}{place_of(error)}"

    async def aclose(self) -> None:
        """Close everything that is open, the last opened first, and break off what is being opened. A failure is a warning.

        May be called again. A caller that is cancelled leaves before the end, and the closing goes on.
        """
        if not self._holders and not self._inner:
            self._leave()
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="closing resources")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(inner.aclose() for inner in list(self._inner)))
        unopened = [holder.task for holder in self._holders.values() if holder.task is not None and not holder.opened.done()]
        for task in unopened:
            task.cancel()
        await asyncio.gather(*unopened, return_exceptions=True)
        for holder in reversed(self._open):
            assert holder.task is not None
            holder.leave.set()
            await asyncio.wait({holder.task}, timeout=CLOSE_TIMEOUT_S)
            if holder.task.cancel():
                self._warn(self._text(holder.resource, "closed", TimeoutError(f"it took longer than {CLOSE_TIMEOUT_S:g} s")))
                await asyncio.wait({holder.task}, timeout=CLOSE_TIMEOUT_S)
        self._leave()
