"""The doctor: facts, and problems with a remedy each."""

import json
import shutil
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from whet.check import doctor as module
from whet.check.doctor import CHECKS, doctor, has_nvidia, requirements

Usage = namedtuple("Usage", "total used free")


def notes(area):
    return [(note.status, note.text) for note in CHECKS[area]()]


def test_a_sound_installation_has_every_area_and_no_failure():
    shown = []
    found = doctor(shown.append)
    assert found["failed"] == 0 and list(dict.fromkeys(finding.area for finding in shown)) == list(CHECKS)
    assert json.loads(json.dumps(found))["machine"]["versions"]["torch"] == torch.__version__


def test_the_requirements_are_the_packages_own_without_those_of_extras(monkeypatch):
    import tomllib
    from pathlib import Path

    assert "torch" in requirements(), "the installed package's are found"
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"]
    extras = [f'{line}; extra == "{name}"' for name, lines in project["optional-dependencies"].items() for line in lines]
    assert extras
    monkeypatch.setattr("whet.check.doctor.requires", lambda name: [*asked, *extras])
    assert requirements() == {line.partition(">=")[0].partition("[")[0]: line.partition(">=")[2] for line in asked}


def test_an_old_python_fails(monkeypatch):
    assert notes("python")[0][0] == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 14, "final", 0))
    status, text = notes("python")[0]
    assert status == "FAIL" and "too old, whet needs Python >=3.11" in text


def test_a_source_tree_that_is_not_installed_is_told(monkeypatch):
    def absent(_):
        raise PackageNotFoundError

    monkeypatch.setattr(module, "metadata", absent)
    assert notes("python")[0][0] == "warn" and "pip install -e ." in notes("python")[0][1]
    monkeypatch.setattr(module, "requires", absent)
    assert requirements() == {}


def test_absent_old_and_broken_packages_fail_with_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "broken_one.py").write_text("raise OSError('libgone.so: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = {"torch": "99.1", "no-such-package": "1.0", "broken-one": None}
    real = module.versions
    monkeypatch.setattr(module, "requirements", lambda: wanted)
    monkeypatch.setattr(module, "versions", lambda names: {**real(names), "broken-one": "0.1"})
    found = notes("packages")
    assert [status for status, _ in found] == ["FAIL", "FAIL", "FAIL", "ok"]
    assert found[0][1] == f"torch {torch.__version__} is too old: pip install --upgrade 'torch>=99.1'"
    assert found[1][1] == "no-such-package is not installed: pip install 'no-such-package>=1.0'"
    assert "broken-one 0.1 cannot be imported: OSError: libgone.so" in found[2][1] and "--force-reinstall 'broken-one'" in found[2][1]


@pytest.mark.parametrize(("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("5.17", (5, 17)), ("3.0.0rc1", (3, 0, 0)), ("nightly", ())])
def test_versions_are_compared_by_their_numbers(version, numbers):
    assert module._numbers(version) == numbers


def test_more_threads_than_cores_are_told(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: torch.get_num_threads())
    assert [status for status, _ in notes("processor")] == ["ok", "ok"]
    monkeypatch.setattr(module, "usable_cores", lambda: 0)
    status, text = notes("processor")[1]
    assert status == "warn" and "set OMP_NUM_THREADS=0" in text


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "accelerators", list)
    monkeypatch.setattr(module, "has_nvidia", lambda: False)
    assert notes("accelerators") == [("ok", "none: whet computes on the CPU")]
    monkeypatch.setattr(module, "has_nvidia", lambda: True)
    for cuda, words in ((None, "is a CPU build: pip install --force-reinstall torch"), ("13.0", "(for CUDA 13.0) does not see it")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        status, text = notes("accelerators")[0]
        assert status == "warn" and words in text
    monkeypatch.setattr(module, "accelerators", lambda: [{"device": "cuda:0", "name": "Big GPU", "memory_bytes": 80 * 2**30}])
    assert notes("accelerators") == [("ok", "cuda:0: Big GPU, 80.0 GiB")]


def test_a_gpu_is_seen_by_its_driver_or_its_tool(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not has_nvidia(tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus").mkdir(parents=True)
    assert not has_nvidia(tmp_path), "a driver without a GPU"
    (tmp_path / "proc/driver/nvidia/gpus/0000:01").mkdir()
    assert has_nvidia(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert has_nvidia(tmp_path / "elsewhere")


def test_the_cache_is_told_with_its_switch_and_whether_it_can_grow(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"{tmp_path / 'hub'}, " in notes("cache")[0][1] and "offline" in notes("cache")[0][1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "what is not in it is downloaded" in notes("cache")[0][1] and len(notes("cache")) == 1
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    assert notes("cache")[1][0] == "warn" and "set HF_HOME" in notes("cache")[1][1]


def test_a_full_disk_is_told(monkeypatch):
    for free, status in ((module.LITTLE_DISK, "ok"), (module.LITTLE_DISK - 1, "warn")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        assert notes("disk")[0][0] == status


def test_optional_packages_say_what_for_and_how(monkeypatch):
    monkeypatch.setattr(module, "versions", lambda names: {"tensorboard": "2.20", "wandb": None})
    (_, there), (_, absent) = notes("optional")
    assert there.startswith("tensorboard 2.20, for metrics") and "pip install 'whet[wandb]'" in absent and "observe.trackers" in absent


def test_what_needs_a_broken_package_is_not_checked(monkeypatch):
    real = module.importlib.import_module

    def no_torch(name, *rest):
        if name == "torch":
            raise ImportError("libtorch.so", name="torch")
        return real(name, *rest)

    monkeypatch.setattr(module.importlib, "import_module", no_torch)
    monkeypatch.setitem(sys.modules, "torch", None)
    shown = []
    found = doctor(shown.append)
    assert found["failed"] == 1 and found["machine"] == {}
    assert [finding.area for finding in shown if finding.status == "skip"] == ["processor", "accelerators"]
    assert "torch" in next(finding.text for finding in shown if finding.status == "FAIL")
