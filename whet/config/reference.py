"""Import references: how a configuration names a user's own function or class."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from whet.config.errors import ConfigError, nearest
from whet.config.place import users_frame
from whet.here import is_here

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_IMPORT_FAILS = "its module fails to import"
_FORM = "write module:name (for example my_rewards:score) or path/to/file.py:name"


def split_reference(reference: str) -> tuple[str, str]:
    """Module and name of an import reference. Raises ValueError if it is none."""
    module, colon, name = reference.rpartition(":")
    is_file = module.endswith(".py")
    if not colon or not _MODULE.fullmatch(name) or not (is_file or _MODULE.fullmatch(module)):
        raise ValueError(f"{reference!r} is not an import reference: {_FORM}")
    return module, name


def _check_form(reference: str) -> str:
    split_reference(reference)
    return reference


Reference = Annotated[str, AfterValidator(_check_form)]
"""A configuration field that names an object to import. Only its form is checked until `resolve`."""


def resolve(reference: str, *, kind: str = "function") -> Any:
    """The object that `module:name` or `path/to/file.py:name` names; the name may be dotted.

    Modules are looked for where Python does, and then in the current directory. `kind` is the word for it in errors.

    Raises:
        ConfigError: the form is wrong, the module does not exist or fails to import, or it has no such name.
    """
    try:
        module_name, name = split_reference(reference)
    except ValueError as error:
        raise ConfigError([f"{kind} {error}"]) from None
    where = f"{kind} {reference!r}"
    found: Any = _load_file(module_name, where) if module_name.endswith(".py") else _import(module_name, where)
    holder = module_name
    for part in name.split("."):
        if not hasattr(found, part):
            if is_here(reference):
                raise ConfigError([f"{where} is a function of the Python process that started the run: go on from there; {_FORM}"])
            near = nearest(part, (known for known in dir(found) if not known.startswith("_")))
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError([f"{where}: {holder} has no {part!r}{hint}"])
        found, holder = getattr(found, part), f"{holder}:{part}" if holder == module_name else f"{holder}.{part}"
    return found


def resolve_callable(
    reference: str, *, kind: str, given: Sequence[str] = (), options: Iterable[str] = ()
) -> Callable[..., Any]:
    """The function or class that a reference names, if it takes the arguments `given`, by place, and the `options`.

    Raises:
        ConfigError: as `resolve`; or it is not callable, or takes other arguments.
    """
    found = resolve(reference, kind=kind)
    check_call(found, reference, kind=kind, given=given, options=options)
    return found


def check_call(found: Any, reference: str, *, kind: str, given: Sequence[str], options: Iterable[str]) -> None:
    """See that what a reference names can be called with the arguments `given`, by place, and the `options`.

    Raises:
        ConfigError: it is not callable, or takes other arguments.
    """
    if not callable(found):
        raise ConfigError([f"{kind} {reference!r} is a {type(found).__name__}, not a function or class"])
    options = list(options)
    try:
        inspect.signature(found).bind(*given, **dict.fromkeys(options))
    except TypeError as error:
        call = ", ".join([*given, *(f"{name}=..." for name in options)])
        hint = "; trajectory.response is the reply, trajectory.task.label the label of its row" if kind == "reward" else ""
        raise ConfigError([f"{kind} {reference!r} cannot be called as f({call}): {error}{hint}"]) from None


def call_factory(factory: Callable[..., Any], reference: str, /, *given: Any, kind: str, **options: Any) -> Any:
    """The object that a user's factory makes.

    Raises:
        ConfigError: with its place, if it raises anything.
    """
    try:
        return factory(*given, **options)
    except Exception as error:  # a user's code may raise anything
        raise _failed(f"{kind} {reference!r}", "it cannot be made", error) from error


def _import(module_name: str, where: str) -> ModuleType:
    _search_also(Path.cwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(where, _IMPORT_FAILS, error) from error
        hint = f"no module named {error.name!r}, neither installed nor in {Path.cwd()}"
        raise ConfigError([f"{where}: {hint}; {_FORM}"]) from None
    except Exception as error:  # a user's module may raise anything while it is imported
        raise _failed(where, _IMPORT_FAILS, error) from error


def _load_file(path_text: str, where: str) -> ModuleType:
    """A file as a module, once per process: its name is made from its path, so equal stems do not collide."""
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise ConfigError([f"{where}: there is no file {path}"])
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _search_also(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name, so it is registered before it runs.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything while it is imported
        del sys.modules[module_name]
        raise _failed(where, _IMPORT_FAILS, error) from error
    return module


def _search_also(folder: Path) -> None:
    """Lets imports find modules of a folder, after everything else, so that it shadows nothing installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _failed(where: str, what: str, error: Exception) -> ConfigError:
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        stack = traceback.extract_tb(error.__traceback__)
        frame = users_frame(stack) or stack[-1]
        place = f"{frame.filename}:{frame.lineno}"
    return ConfigError([f"{where}: {what}: {type(error).__name__}: {error} ({place})"])
