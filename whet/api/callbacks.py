"""Callbacks of a run: what the caller sees, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.api.process import CallerThread
from whet.config import ConfigError
from whet.config.hook import Hook
from whet.config.reference import check_call
from whet.observe.watch import Seen, Watch

METHODS = {"on_step": "metrics", "on_evaluation": "values"}
"""Methods of a callback, and the second argument of each."""


def watch_of(callbacks: Any, caller: CallerThread) -> Watch | None:
    """The watch that calls callbacks on the caller's thread; None: there are no callbacks.

    Args:
        callbacks: objects with `on_step(step, metrics)` or `on_evaluation(step, values)`, or a single one. A method that returns True
            ends the run as if it had come to its end.
        caller: the thread.

    Raises:
        ConfigError: one has neither method, or a method that cannot be called that way.
    """
    listed: Sequence[Any] = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for each in listed:
        if isinstance(each, type):
            raise ConfigError([f"callbacks: {each.__name__} is a class: give an object of it, {each.__name__}()"])
        if not any(callable(getattr(each, name, None)) for name in METHODS):
            raise ConfigError([f"callbacks: a {type(each).__name__} has neither on_step(step, metrics) nor on_evaluation(step, values)"])
        for name, second in METHODS.items():
            if callable(method := getattr(each, name, None)):
                check_call(method, f"{name} of {type(each).__name__}", kind="callback", given=("step", second), options=())
    if not listed:
        return None
    on_step, on_evaluation = (_seen(listed, name, caller) for name in METHODS)
    return Watch(on_step, on_evaluation)


def _seen(callbacks: Sequence[Any], name: str, caller: CallerThread) -> Seen:
    methods: list[Callable[..., Any]] = [getattr(each, name) for each in callbacks if callable(getattr(each, name, None))]
    hooks = [Hook("callbacks", f"{name} of {_owner(method)}", method) for method in methods]

    def seen(step: int, values: Mapping[str, float]) -> bool:
        answers = [caller.call(lambda hook=hook: hook(step, dict(values))) for hook in hooks]
        return any(answer is True for answer in answers)

    return seen


def _owner(method: Callable[..., Any]) -> str:
    return type(getattr(method, "__self__", method)).__name__
