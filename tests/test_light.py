"""What reads settings and speaks of their errors does it without the heavy libraries."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "ray", "pyarrow", "numpy", "sympy"}
LIGHT = ["whet", "whet.cli", "whet.config", "whet.core.choices", "whet.serve.settings", "whet.evaluate.config", "whet.train.config"]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    script = f"import sys, {module}; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
