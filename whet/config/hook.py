"""Functions of a user's own that a run calls. What goes wrong in one names the key, the function and the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.config.errors import ConfigError
from whet.config.place import place_of
from whet.config.reference import call_factory, check_call, resolve


class HookFailed(ValueError):
    """A function that the settings name raised, or returned what it may not. It ends the run, which is saved first."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function that the settings name."""

    key: str
    """The setting that names it."""
    reference: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of every call."""

    @classmethod
    def of(cls, key: str, reference: str, given: Sequence[str], options: Mapping[str, Any] | None = None, *, awaited: bool = False) -> Hook:
        """The hook that a reference names, if it takes the arguments `given`, by place, and the `options`: a function, or a class without
        arguments, of which one object is made and called.

        Args:
            awaited: True if it is a coroutine function, called with `wait_for`.

        Raises:
            ConfigError: there is no such function, it cannot be called that way, or the object cannot be made.
        """
        function = resolve(reference, kind=key)
        if inspect.isclass(function):
            check_call(function, reference, kind=key, given=(), options=())
            function = call_factory(function, reference, kind=key)
        check_call(function, reference, kind=key, given=given, options=options or {})
        if is_async(function) != awaited:
            found, wanted = ("a plain function", "`async def`") if awaited else ("an async function", "plain `def`")
            raise ConfigError([f"{key} {reference!r} is {found}; write it with {wanted}"])
        return cls(key, reference, function, dict(options or {}))

    def __call__(self, *given: Any) -> Any:
        """The function's return value.

        Raises:
            HookFailed: it raised. An error that whet itself found meanwhile is raised unchanged.
        """
        try:
            return self.function(*given, **self.options)
        except Exception as error:  # a user's function may raise anything
            if is_own_error(error):
                raise
            raise self._failed(error) from error

    async def wait_for(self, *given: Any) -> Any:
        """The result of the function if it is a coroutine function. Raises as a call."""
        try:
            return await self.function(*given, **self.options)
        except Exception as error:  # a user's function may raise anything
            if is_own_error(error):
                raise
            raise self._failed(error) from error

    def at(self, function: Callable[..., Any]) -> Hook:
        """Another function of the same thing, such as a method of its object; it is called without options."""
        return Hook(self.key, self.reference, function)

    def refused(self, why: str) -> HookFailed:
        """The error for something that it returned: `why` goes on after the function's name."""
        return HookFailed(f"{self.key} = {self.reference!r} {why}")

    def _failed(self, error: Exception) -> HookFailed:
        return self.refused(f"raised {type(error).__name__}: {error}{place_of(error)}")


def is_own_error(error: Exception) -> bool:
    """True for whet's own exceptions, which need no further explanation."""
    return type(error).__module__.startswith("whet.")


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call returns something to await: a coroutine function, or an object whose `__call__` is
    one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
