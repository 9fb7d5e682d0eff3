"""The command that checks a GPU outlives whatever its sections do, tells it, and leaves every result that there was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu.gather import names, pins  # noqa: E402
from gpu.packages import KEPT, Requirement, resolve, wanted, wheels_in  # noqa: E402
from gpu.plan import SECTIONS, TOTAL_S  # noqa: E402
from gpu.suite_device import FILES, SMALL  # noqa: E402

MACHINE = {
    "torch": "class cuda:\n    is_available = staticmethod(lambda: False)\n\ndevice = str\n",
    "machine": "def machine():\n    return {'cpu': 'pretended'}\n",
}
"""Stand-ins for what every section imports: their processes start at once."""
CASES = "from gpu.record import Case, NotRun\n"
STUBS = {
    "good": CASES + "def cases(sizes, device): return [Case('one', lambda: {'sizes': sizes, 'device': device})]\n",
    "partly": CASES
    + "def never(): raise NotRun('no such thing here')\n"
    + "def cases(sizes, device): return [Case('bad', lambda: 1 / 0), Case('none', never), Case('fine', lambda: {'x': 1})]\n",
    "hangs": CASES
    + "import subprocess, sys, time\n"
    + "def forever():\n"
    + "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    + "    open('{folder}/grandchild', 'w').write(str(child.pid))\n"
    + "    time.sleep(600)\n"
    + "def cases(sizes, device): return [Case('before', lambda: {'x': 2}), Case('forever', forever), Case('after', lambda: {})]\n",
    "killed": CASES + "import os\ndef cases(sizes, device): return [Case('dies', lambda: os.kill(os.getpid(), 9))]\n",
    "crashes": CASES + "import os\ndef cases(sizes, device): return [Case('dies', lambda: os._exit(3))]\n",
    "late": "import atexit, os\natexit.register(lambda: os._exit(7))\n" + CASES + "def cases(sizes, device): return []\n",
    "prints": CASES
    + "import os\n"
    + "def noise(): os.write(1, bytes(range(256)) * 40); os.write(2, b'\\xff{not json'); return {'x': 3}\n"
    + "def cases(sizes, device): return [Case('noise', noise)]\n",
    "garbage": CASES
    + "import os, sys\n"
    + "def spoil(): open(sys.argv[sys.argv.index('--out') + 1], 'wb').write(b'\\x00\\xffgarbage'); os._exit(0)\n"
    + "def cases(sizes, device): return [Case('spoil', spoil)]\n",
    "odd": CASES
    + "import os, sys\n"
    + "def spoil(): open(sys.argv[sys.argv.index('--out') + 1], 'w').write('[1, 2]'); os._exit(0)\n"
    + "def cases(sizes, device): return [Case('spoil', spoil)]\n",
    "lacks": "import no_such_package.part\n",
    "broken": "def cases(sizes, device): raise RuntimeError('cannot prepare')\n",
    "unasked": CASES + "def cases(sizes, device): return []\n",
}
PARENT = """
import sys
for name in ("torch", "transformers", "numpy", "whet"):
    sys.modules[name] = None  # an import fails
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
import check_gpu
from gpu.plan import Section
check_gpu.LEAST_S = {least}
sections = [Section(name, f"stub_{{name}}", {hangs_s} if name == "hangs" else 60.0, name) for name in {names!r}]
folder = Path({folder!r})
raise SystemExit(check_gpu.check(folder / "out", sections, None, {only!r}, "auto", folder / "site", {total}))
"""


def start(folder: Path, names: list[str], **options) -> subprocess.Popen:
    """The check of these stubs. Its options: `only`, `total` and `least` seconds, and those that `hangs` has."""
    (folder / "site").mkdir()
    for name, text in MACHINE.items():
        (folder / "site" / f"{name}.py").write_text(text)
    for name in names:
        (folder / "site" / f"stub_{name}.py").write_text(STUBS[name].replace("{folder}", str(folder)))
    given = {"only": None, "total": 120.0, "least": 0.5, "hangs_s": 6.0} | options
    script = PARENT.format(benchmarks=str(BENCHMARKS), names=names, folder=str(folder), **given)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(folder: Path, *args, **options) -> tuple[int, str, dict]:
    parent = start(folder, *args, **options)
    printed, _ = parent.communicate(timeout=120)
    return parent.returncode, printed, json.loads((folder / "out" / "gpu.json").read_text())


def runs(pid: int) -> bool:
    """Whether a process does; one that ended and that nobody asked about does not."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX" if Path("/proc/self").exists() else os.kill(pid, 0) is None
    except OSError:
        return False


def test_the_files_of_tests_on_a_device_exist():
    assert set(SMALL) <= set(FILES)
    assert [file for file in FILES if not (ROOT / file).is_file()] == []


def test_a_section_that_goes_wrong_is_told_and_the_others_run(tmp_path):
    code, printed, found = ended(tmp_path, list(STUBS), only=[name for name in STUBS if name != "unasked"])
    sections = found["sections"]
    assert code == 1 and list(sections) == list(STUBS)
    assert {name: section["status"] for name, section in sections.items()} == {
        "good": "ok", "partly": "failed", "hangs": "timed out", "killed": "killed", "crashes": "crashed", "late": "crashed",
        "prints": "ok", "garbage": "crashed", "odd": "crashed", "lacks": "failed", "broken": "failed", "unasked": "not run",
    }  # fmt: skip
    assert found["failed"] == [name for name, section in sections.items() if section["status"] not in ("ok", "not run")]
    assert sections["good"]["cases"]["one"]["numbers"] == {"sizes": "small", "device": "cpu"}
    assert sections["good"]["machine"] == {"cpu": "pretended"}
    partly = sections["partly"]["cases"]
    assert [case["status"] for case in partly.values()] == ["failed", "not run", "ok"]
    assert "ZeroDivisionError" in partly["bad"]["traceback"] and partly["none"]["reason"] == "no such thing here"
    assert sections["hangs"]["cases"]["before"]["numbers"] == {"x": 2}
    assert [case["status"] for case in sections["hangs"]["cases"].values()] == ["ok", "not reached", "not reached"]
    assert "in forever" in sections["hangs"]["log_tail"], "the stacks of its threads are not told"
    assert "SIGKILL" in sections["killed"]["reason"] and "ended with 3" in sections["crashes"]["reason"]
    assert "ended with 7" in sections["late"]["reason"]
    assert sections["prints"]["cases"]["noise"]["numbers"] == {"x": 3}
    assert "no JSON" in sections["garbage"]["reason"] and "none of a section" in sections["odd"]["reason"]
    assert "the package no_such_package is missing" in sections["lacks"]["reason"]
    assert "cannot prepare" in sections["broken"]["reason"] and "RuntimeError" in sections["broken"]["traceback"]
    assert {(row["section"], row["case"]) for row in found["not_run"]} >= {
        ("partly", "none"), ("hangs", "forever"), ("hangs", "after"), ("killed", "dies"), ("unasked", "all"),
    }  # fmt: skip
    for row in found["not_run"]:
        assert row["reason"] and f"{row['section']}: {row['case']}: {row['reason']}" in printed
    assert not runs(int((tmp_path / "grandchild").read_text())), "a process that a section started lives on"


def test_the_whole_has_a_deadline_and_what_it_cut_off_is_told(tmp_path):
    code, _, found = ended(tmp_path, ["hangs", "good"], total=60.0, least=56.5, hangs_s=4.0)
    assert code == 1 and found["sections"]["good"] == {"status": "not run", "reason": "the 60 seconds of the whole check were over"}
    assert {"section": "good", "case": "all", "reason": "the 60 seconds of the whole check were over"} in found["not_run"]


def test_a_command_that_is_ended_ends_its_section_and_writes_what_there_is(tmp_path):
    parent = start(tmp_path, ["good", "hangs", "partly"], hangs_s=60.0)
    end = time.monotonic() + 60
    while not (tmp_path / "grandchild").exists() and time.monotonic() < end:
        time.sleep(0.02)
    parent.terminate()
    parent.communicate(timeout=60)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["sections"]["good"]["status"] == "ok"
    assert not runs(int((tmp_path / "grandchild").read_text()))


def test_the_sections_fit_into_nine_minutes():
    assert sum(section.limit_s for section in SECTIONS) <= TOTAL_S - 10 and TOTAL_S <= 540
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


def wheel(folder: Path, name: str, number: str, *requires: str, tag: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-{number}-{tag}.whl", "w") as file:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {text}" for text in requires)]
        file.writestr(f"{name}-{number}.dist-info/METADATA", "\n".join(lines) + "\n\nText.\n")


def test_packages_that_are_missing_are_named_and_wheels_fill_only_the_gaps(tmp_path):
    needs = ("whet-test-b==1.5", "whet-test-c>=1; extra == 'more'", "numpy>=1", "whet-test-e; python_version < '3'")
    wheel(tmp_path, "whet_test_a", "2.0", *needs)
    wheel(tmp_path, "whet_test_a", "1.0", "whet-test-nothing")
    wheel(tmp_path, "whet_test_b", "1.5")
    wheel(tmp_path, "whet_test_b", "1.6")
    wheel(tmp_path, "whet_test_d", "1.0", tag="cp27-cp27m-win32")
    wheel(tmp_path, "numpy", "99.0")
    texts = ["whet-test-a[more]>=1.5", "numpy>=1", "torch>=99", "pytest", "whet-test-d"]
    found = resolve([Requirement(text) for text in texts], wheels_in(tmp_path))
    assert found.install == {"whet-test-a": "2.0", "whet-test-b": "1.5"}
    assert {row["name"]: row["by"] for row in found.missing} == {"torch": "whet", "whet-test-d": "whet", "whet-test-c": "whet-test-a"}
    assert {"numpy", "pytest"} <= set(found.present)


def test_what_is_carried_is_pinned_and_leaves_the_machines_torch_alone():
    carried, versions = names("3.12"), pins()
    assert not set(carried) & {*KEPT, "triton"} and all(name in versions for name in carried)
    assert {"pydantic", "pydantic-core", "annotated-types", "math-verify", "pytest", "hypothesis"} <= set(carried)
    assert {requirement.name for requirement in wanted()} >= {"torch", "transformers", "pyarrow", "pytest"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_section_has_its_module(section):
    assert (BENCHMARKS / (section.module.replace(".", "/") + ".py")).exists()
