"""Folders of the package that have the name of a call, and are called like it: `whet.train(...)` next to `whet.train.base`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

CALLS = {"whet.train": "whet.api.calls", "whet.evaluate": "whet.api.evaluation"}
"""Modules of the calls, by the folders that have their names."""


class CalledModule(ModuleType):
    """A module that is also a function of `CALLS`, whose module is loaded with the first call."""

    def __call__(self, *given: Any, **settings: Any) -> Any:
        return _function(self)(*given, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))


def _function(module: ModuleType) -> Any:
    return getattr(import_module(CALLS[module.__name__]), module.__name__.rpartition(".")[2])


def make_called(name: str) -> None:
    """Have the module of that name be called."""
    sys.modules[name].__class__ = CalledModule
