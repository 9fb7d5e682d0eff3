"""What the machine is, by the files that say so."""

import os
import platform

import torch

import whet.runfolder.machine as module
from whet.runfolder.machine import cpu_model, machine, memory_limit, usable_cores, versions

GIB = 2**30
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tree(root, listing, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(listing)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_memory_is_the_machines(tmp_path):
    assert memory_limit(tmp_path) == (PHYSICAL, "physical memory")
    assert memory_limit(tree(tmp_path, "0::/a\n", {"a/memory.max": "max\n"})) == (PHYSICAL, "physical memory")


def test_the_lowest_limit_of_a_group_and_those_above_counts(tmp_path):
    limits = {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n", "memory.max": f"{2 * GIB}\n"}
    assert memory_limit(tree(tmp_path, "0::/a/b\n", limits)) == (GIB, "the control group's memory limit")


def test_the_first_version_of_control_groups_counts_too(tmp_path):
    listing = "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n"
    found = tree(tmp_path, listing, {"memory/a/memory.limit_in_bytes": f"{GIB}\n", "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"})
    assert memory_limit(found) == (GIB, "the control group's memory limit")


def test_a_limit_above_the_machines_memory_is_none(tmp_path):
    assert memory_limit(tree(tmp_path, "0::/\n", {"memory.max": f"{2 * PHYSICAL}\n"})) == (PHYSICAL, "physical memory")


def test_cores_are_limited_by_the_groups_share(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores(tmp_path) == 8
    assert usable_cores(tree(tmp_path, "0::/a\n", {"a/cpu.max": "150000 100000\n", "cpu.max": "max 100000\n"})) == 2


def test_the_processor_is_named(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "none")


def test_versions_are_the_installed_ones_and_absent_packages_have_none():
    assert versions(("torch", "no-such-package-at-all")) == {"torch": torch.__version__, "no-such-package-at-all": None}


def test_the_facts_are_plain_values(monkeypatch):
    import json

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    facts = json.loads(json.dumps(machine()))
    assert facts["python"] == platform.python_version()
    assert facts["threads"]["OMP_NUM_THREADS"] == "7" and facts["threads"]["torch"] == torch.get_num_threads()
    assert facts["memory_bytes"] == memory_limit()[0] and facts["cpu"]["cores"] == usable_cores()
    assert len(facts["accelerators"]) == torch.cuda.device_count() + torch.backends.mps.is_available()
