"""The table of everything that is shown to go wrong, by the parts of docs/errors.md. To add a case, add its entry to one of them."""

from __future__ import annotations

from tests.errors.error_bench import Case
from tests.errors.error_code import CODE
from tests.errors.error_configuration import CONFIGURATION
from tests.errors.error_control import CONTROL
from tests.errors.error_data import DATA
from tests.errors.error_dependable import DEPENDABLE
from tests.errors.error_hooks import HOOKS
from tests.errors.error_model import MODEL
from tests.errors.error_python import COMMAND_LINE, PYTHON
from tests.errors.error_run import RUN

PARTS: dict[str, tuple[Case, ...]] = {
    "From Python": PYTHON,
    "At the command line": COMMAND_LINE,
    "Configuration": CONFIGURATION,
    "Data": DATA,
    "Model folders": MODEL,
    "Your code": CODE,
    "Rollouts": (*CONTROL, *HOOKS),
    "A run's folder": RUN,
    "A run under way": DEPENDABLE,
}
CASES = tuple(case for cases in PARTS.values() for case in cases)
