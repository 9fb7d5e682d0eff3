"""Files of this machine that a command of the settings cannot run without."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PYTHON = re.compile(r"python[\d.]*t?")
ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *filter(None, sys.path)]))"
ASK_S = 60.0


def needed_by(command: Sequence[str], environment: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A command with the full path of its program, and what it must read to run: the program, the installation of its interpreter with
    the folders that Python imports from, folders of libraries, and the files that its arguments and variables name by full paths.

    Args:
        command: a program and its arguments.
        environment: the program's variables; PATH says where it is looked for.

    Raises:
        ValueError: there is no such program, or its interpreter does not answer.
    """
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise ValueError(f"there is no program {command[0]!r}")
    program = os.path.abspath(program)
    named = (one for one in (*command[1:], *environment.values()) if one.startswith("/") and os.path.isfile(one))
    libraries = (one for one in environment.get("LD_LIBRARY_PATH", "").split(":") if one.startswith("/"))
    found = [*_of_program(program, environment), *named, *libraries]
    both = (path for one in found for path in (os.path.normpath(one), os.path.realpath(one)))
    return (program, *command[1:]), tuple(dict.fromkeys(path for path in both if path != "/" and os.path.exists(path)))


def _of_program(program: str, environment: Mapping[str, str]) -> list[str]:
    found = [program]
    interpreter = _interpreter(program, environment)
    if interpreter is not None:
        found.append(interpreter)
    for one in tuple(found):
        if PYTHON.fullmatch(os.path.basename(one)):
            found += _of_python(one, environment)
    for one in {os.path.dirname(path) for path in found if os.path.basename(os.path.dirname(path)) == "bin"}:
        if os.path.isdir(f"{one}/../lib/node_modules"):
            found.append(os.path.dirname(one))
    return found


def _interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    """The interpreter that a script's first line names; None: it is no script."""
    with open(program, "rb") as file:
        first = file.read(256).split(b"\n", 1)[0].decode(errors="replace")
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or not words:
        return None
    if os.path.basename(words[0]) == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(names[0], path=environment.get("PATH")) if names else None
    return words[0]


def _of_python(python: str, environment: Mapping[str, str]) -> list[str]:
    """Folders of an interpreter and of all that it imports from."""
    try:
        asked = subprocess.run([python, "-I", "-c", ASK], env=dict(environment), capture_output=True, timeout=ASK_S, check=True, cwd="/")
        return [path for path in json.loads(asked.stdout) if Path(path).is_absolute()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(f"the interpreter {python} does not say where it imports from: {error}") from error
