"""`benchmarks/engine_smoke.py`, as somebody with a server runs it; `whet serve` in SGLang's place."""

import json
import os
import subprocess
import sys

import pytest

from tests.serve.test_serve_shutdown import ROOT, command

pytestmark = pytest.mark.long


def test_a_server_is_tried_by_a_folder_and_by_a_broadcast(models):
    with command(models[0]) as (_, address):
        line = [sys.executable, str(ROOT / "benchmarks/engine_smoke.py"), f"http://{address}", str(models[0]), "--device", "cpu"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for transport in ("disk", "broadcast"):
        assert list(found[transport]) == ["first weights", "other weights", "first weights again"]
        assert max(found[transport][name]["probe_nats"] for name in ("other weights", "first weights again")) < 1e-4
