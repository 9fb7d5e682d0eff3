"""whet's processes say nothing that nobody asked for."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize("module", ["whet.runs.job", "whet.runs.rank"])
def test_nothing_is_said_while_it_is_imported(module):
    """Also where packages are installed that transformers loads along."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
