"""What a command trains is said in one table, and nothing else asks which kind of settings it has."""

import ast
from pathlib import Path
from typing import get_args

from whet.build.programs import PROGRAMS, StepUnit
from whet.check.data import ROWS
from whet.runs.job import MODELS, RUNS
from whet.settings.supervised import RUN_CONFIGS, kind_of

ROOT = Path(__file__).resolve().parents[1] / "whet"
MAY_ASK = {"check/context.py", "build/first_look.py"}
"""Beside the settings themselves: the first says for all checks that a check of one kind of run is asked for no other; the second looks at
files before torch is loaded, which the table needs."""


def test_every_command_that_trains_has_a_program():
    assert PROGRAMS.keys() == RUN_CONFIGS.keys()
    assert [kind_of(settings.model_construct()) for settings in RUN_CONFIGS.values()] == list(RUN_CONFIGS)


def test_every_unit_and_every_kind_of_rows_is_known():
    assert RUNS.keys() == MODELS.keys() == set(get_args(StepUnit)) == {program.unit for program in PROGRAMS.values()}
    assert ROWS.keys() == {program.rows.name for program in PROGRAMS.values() if program.rows is not None}


def asked(path: Path) -> list[int]:
    """Lines that ask whether something is settings of one kind of run."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and len(node.args) == 2]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass") and "RunConfig" in ast.unparse(call.args[1])
    ]


def test_nothing_else_asks_for_the_kind_of_settings():
    files = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    asking = {name: lines for name, path in files.items() if not name.startswith("settings/") and (lines := asked(path))}
    assert asking.keys() == MAY_ASK, f"have the table of whet/build/programs.py say it: {asking}"
