import getpass
import json
import os
import socket
import subprocess
import sys
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from whet.runfolder.environment import EXACT, differences, environment

ROOT = Path(__file__).resolve().parents[2]


def test_it_says_what_a_run_stands_on():
    found = environment()
    assert found["versions"]["python"] == sys.version.split()[0]
    for name in ("whet", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic"):
        assert found["versions"][name] == version(name)
    assert found["platform"]["system"] == os.uname().sysname and found["platform"]["machine"] == os.uname().machine
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["cpu"]["cores"] >= found["cpu"]["usable_cores"] >= 1
    assert found["cpu"]["model"]
    assert len(found["accelerators"]) == torch.cuda.device_count()
    assert json.loads(json.dumps(found)) == found


def test_every_key_that_is_compared_is_there():
    found = environment()
    for key in EXACT:
        tree = found
        for part in key.split("."):
            assert part in tree, key
            tree = tree[part]


def test_it_names_no_host_no_user_and_no_variable():
    secret = "s3cret-7391"
    code = "import json; from whet.runfolder.environment import environment; print(json.dumps(environment()))"
    variables = {**os.environ, "HF_TOKEN": secret, "USER": "someone-5512", "LOGNAME": "someone-5512", "HOSTNAME": "box-9921"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    for word in (secret, "someone-5512", "box-9921"):
        assert word not in done.stdout
    strings = set(_strings(json.loads(done.stdout)))
    assert socket.gethostname() not in strings and getpass.getuser() not in strings


def _strings(tree):
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _strings(value)
    else:
        yield tree


def test_determinism_and_threads_are_those_of_now():
    was, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads + 1)
        found = environment()
        assert found["deterministic"] is True and found["cpu"]["threads"] == threads + 1
        torch.use_deterministic_algorithms(False)
        assert environment()["deterministic"] is False
    finally:
        torch.use_deterministic_algorithms(was)
        torch.set_num_threads(threads)


def test_accelerators_have_names(monkeypatch):
    card = SimpleNamespace(name="Card X", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert environment()["accelerators"] == [{"name": "Card X", "capability": "9.0", "memory_gib": 80.0}] * 2


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr("whet.runfolder.environment.PACKAGES", ("torch", "no-such-package"))
    assert environment()["versions"]["no-such-package"] is None


def test_the_same_environment_differs_in_nothing():
    found = environment()
    assert differences(found, json.loads(json.dumps(found))) == []


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("versions", "torch"), "2.11.0", "torch 2.11.0 (was {})"),
        (("cpu", "threads"), 99, "cpu threads 99 (was {})"),
        (("cpu", "capability"), "AVX2", "cpu capability AVX2 (was {})"),
        (("platform", "libc"), "glibc 2.17", "platform libc glibc 2.17 (was {})"),
    ],
)
def test_what_matters_to_the_bits_is_a_line(path, value, line):
    old = environment()
    new = deepcopy(old)
    new[path[0]][path[1]] = value
    assert differences(old, new) == [line.format(old[path[0]][path[1]])]


@pytest.mark.parametrize("path", [("versions", "pyarrow"), ("platform", "release"), ("cpu", "cores"), ("cpu", "usable_cores")])
def test_what_does_not_matter_is_none(path):
    old = environment()
    new = deepcopy(old)
    new[path[0]][path[1]] = "other"
    assert differences(old, new) == []


def test_other_accelerators_and_missing_keys_are_lines():
    old = {**environment(), "accelerators": [], "deterministic": False}
    card = {"name": "Card X", "capability": "9.0", "memory_gib": 80.0}
    new = {**old, "accelerators": [card, card], "deterministic": True}
    assert differences(old, new) == [
        "accelerators Card X (80.0 GiB), Card X (80.0 GiB) (was none)",
        "deterministic True (was False)",
    ]
    assert "torch none (was 2" in "\n".join(differences(old, {}))
    assert f"cpu threads {torch.get_num_threads()} (was none)" in differences({}, old)
