"""Environments that `make test-agents` makes: one for each file of requirements in this folder, with its name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 120


def python_of(name: str) -> str:
    """The Python of an environment."""
    found = Path(os.environ.get("WHET_TEST_AGENTS", "nowhere"), name, "bin/python")
    if not found.exists():
        pytest.fail(f"WHET_TEST_AGENTS names the folder of the environments, and there is no {name} in it: make test-agents makes them")
    return str(found)


def run_program(name: str, program: str, *arguments: str) -> Any:
    """What a program in an environment prints as its last line, which is JSON."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI", "ANTHROPIC"))}
    command = [python_of(name), "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
