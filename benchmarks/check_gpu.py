"""Checks whet on one GPU in at most nine minutes; without a GPU, in a small form, on the CPU.

    make gpu                                              # results go to benchmarks/results/gpu
    make gpu PYTHON=python3 WHEELS=wheels OUT=/some/where # with the machine's own Python, and packages that it lacks
    python benchmarks/check_gpu.py --only decode --only sync

Each section (`gpu/plan.py`) runs in a process with a deadline of its own and writes SECTION.json after every measurement, and SECTION.log;
gpu.json comes last and has all of them, and what was not run, with reasons. This process never imports torch. It ends with 0 if
nothing failed; what was not run is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.plan import SECTIONS, TOTAL_S, Section

HERE = Path(__file__).resolve().parent
LEAST_S = 8.0
"""A section that has less time than this is not begun."""
TAIL = 4000
"""Characters of a log that the merged file keeps of a section that did not end well."""
PACKAGES_S = 60.0
"""Deadline of looking for packages, and of installing those that are missing."""


def main() -> int:
    parser = argparse.ArgumentParser(description="check whet on one GPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, for packages that this Python lacks")
    parser.add_argument("--only", action="append", choices=[section.name for section in SECTIONS], help="this section; may be repeated")
    parser.add_argument("--sizes", choices=("auto", "small", "full"), default="auto", help="auto: full on a GPU, small on a CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whet-gpu-") as folder:
        return check(args.out, SECTIONS, args.wheels, args.only, args.sizes, Path(folder))


def check(
    out: Path,
    sections: Sequence[Section],
    wheels: Path | None,
    only: Sequence[str] | None,
    sizes: str,
    installed: Path,
    total_s: float = TOTAL_S,
) -> int:
    """Run the sections one after another. 0: nothing failed.

    Args:
        out: folder of the results; what an earlier check left there is removed.
        sections: all that there are.
        wheels: folder of wheels.
        only: names of those that are wanted; None: all.
        sizes: auto, small or full.
        installed: an empty folder, for packages from `wheels`.
        total_s: deadline of the whole.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section's process is ended, too
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for old in (path for section in sections for path in (out / f"{section.name}.json", out / f"{section.name}.log")):
        old.unlink(missing_ok=True)
    own = [str(installed), str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(own), "PYTHONUNBUFFERED": "1"}
    merged: dict[str, Any] = {
        "command": " ".join(["python benchmarks/check_gpu.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(out, wheels, installed, environment),
        "sections": {},
    }
    _tell_packages(merged["packages"])
    try:
        for section in sections:
            left = total_s - (time.monotonic() - began)
            if only and section.name not in only:
                found: dict[str, Any] = {"status": "not run", "reason": "it was not asked for (--only)"}
            elif left < LEAST_S:
                found = {"status": "not run", "reason": f"the {total_s:.0f} seconds of the whole check were over"}
            else:
                found = run_section(section, out, sizes, min(section.limit_s, left), environment)
            merged["sections"][section.name] = found
            _tell(section, found)
            _write(out, merged, began)
    finally:
        for section in sections:
            merged["sections"].setdefault(section.name, {"status": "not run", "reason": "the check was ended before it"})
        _write(out, merged, began)
    print(f"{merged['seconds']:.0f} s; everything is in {out / 'gpu.json'}")
    _tell_not_run(merged["not_run"])
    return 1 if merged["failed"] else 0


def run_section(section: Section, out: Path, sizes: str, limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a section in a process of its own, end it at its deadline, and return what it found."""
    file, log = out / f"{section.name}.json", out / f"{section.name}.log"
    options = ["--name", section.name, "--out", str(file), "--seconds", str(limit_s), "--sizes", sizes]
    began = time.monotonic()
    code = _run([sys.executable, "-m", "gpu.section", section.module, *options], log, limit_s, environment)
    found = _read(file)
    found["wall_s"] = round(time.monotonic() - began, 1)
    if code is None:
        found |= {"status": "timed out", "reason": f"its {limit_s:.0f} seconds were over; the log has the stacks of its threads"}
    elif code < 0:
        found |= {"status": "killed", "reason": f"signal {signal.Signals(-code).name} ended it"}
    elif found.get("status") not in ("ok", "failed"):
        found |= {"status": "crashed", "reason": found.get("reason") or f"it ended with {code}, and left no whole result"}
    elif code and found["status"] == "ok":
        found |= {"status": "crashed", "reason": f"its cases are done, but it ended with {code}"}
    if found["status"] != "ok":
        found["log_tail"] = _tail(log)
    return found


def _run(command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """A process and whatever it starts, to its end or its deadline. None: it was ended at that."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=HERE.parent,
            start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left (macOS calls it the latter)
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(file: Path) -> dict[str, Any]:
    """A section's result file, or why there is none."""
    if not file.exists():
        return {"reason": "it left no result"}
    text = file.read_text(errors="replace")
    try:
        found = json.loads(text)
    except ValueError as error:
        return {"reason": f"its result is no JSON: {error}: {text[:80]!r}"}
    if not isinstance(found, dict) or not isinstance(found.get("cases"), dict):
        return {"reason": f"its result is none of a section: {text[:80]!r}"}
    if not all(isinstance(case, dict) and "status" in case for case in found["cases"].values()):
        return {"reason": f"its result has a case without a status: {text[:80]!r}"}
    return found


def packages(out: Path, wheels: Path | None, installed: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Look for the packages that whet and its tests need, and install what is missing from wheels, beside those of this Python."""
    file, log = out / "packages.json", out / "packages.log"
    file.unlink(missing_ok=True)
    if wheels is not None and not wheels.is_dir():
        return {"status": "failed", "reason": f"--wheels: {wheels} is no folder"}
    options = ["--wheels", str(wheels.resolve())] if wheels is not None else []
    code = _run([sys.executable, "-m", "gpu.packages", "--out", str(file), *options], log, PACKAGES_S, environment)
    if code != 0 or not file.exists():
        return {"status": "failed", "reason": f"looking for packages ended with {code}", "log_tail": _tail(log)}
    found: dict[str, Any] = json.loads(file.read_text())
    if found["install"]:
        assert wheels is not None
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", str(wheels.resolve())]
        code = _run([*pip, "--target", str(installed), *found["install"]], log, PACKAGES_S, environment)
        if code != 0:
            return found | {"status": "failed", "reason": f"pip ended with {code}", "log_tail": _tail(log)}
    return found | {"status": "failed" if found["missing"] else "ok"}


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL:]


def not_run(merged: Mapping[str, Any]) -> list[dict[str, str]]:
    """Everything that was not run, with its reason."""
    out: list[dict[str, str]] = []
    for name, section in merged["sections"].items():
        if section["status"] == "not run":
            out.append({"section": name, "case": "all", "reason": section["reason"]})
        for case, found in section.get("cases", {}).items():
            if found["status"] in ("not run", "not reached"):
                reason = found.get("reason") or f"not reached: {section.get('reason', 'the section ended before it')}"
                out.append({"section": name, "case": case, "reason": reason})
        out += [{"section": name, "case": case, "reason": reason} for case, reason in section.get("left_out", {}).items()]
    return out


def _write(out: Path, merged: dict[str, Any], began: float) -> None:
    sections = merged["sections"]
    bad = [name for name, found in sections.items() if found["status"] not in ("ok", "not run")]
    merged["failed"] = (["packages"] if merged["packages"]["status"] != "ok" else []) + bad
    merged["not_run"], merged["seconds"] = not_run(merged), round(time.monotonic() - began, 1)
    (out / "gpu.json").write_text(json.dumps(merged, indent=1) + "\n")


def _tell_packages(found: Mapping[str, Any]) -> None:
    for each in found.get("missing", []):
        print(f"missing: {each['name']} ({each['wanted']}), which {each['by']} needs")
    if found.get("install"):
        print(f"installed from wheels, for this check alone: {', '.join(found['install'])}")
    if "reason" in found:
        print(f"packages: {found['reason']}\n{found.get('log_tail', '')}")


def _tell(section: Section, found: Mapping[str, Any]) -> None:
    print(f"\n== {section.name}: {found['status']} ({found.get('wall_s', 0)} s): {section.title}", flush=True)
    if found["status"] != "ok":
        print(f"   {found.get('reason', 'cases failed')}")
    quiet = section.name.endswith("-tests")
    counts: dict[str, int] = {}
    for name, case in found.get("cases", {}).items():
        counts[case["status"]] = counts.get(case["status"], 0) + 1
        if case["status"] == "failed" or (case["status"] == "ok" and not quiet):  # what was not run is listed at the end
            print(f"   {name}: {case['status']} {json.dumps(case['numbers']) if 'numbers' in case else case.get('reason', '')}")
    print(f"   {', '.join(f'{num} {status}' for status, num in counts.items())}", flush=True)


def _tell_not_run(rows: Sequence[Mapping[str, str]]) -> None:
    print(f"\nnot run: {len(rows)}")
    for row in rows:
        print(f"   {row['section']}: {row['case']}: {row['reason']}")


if __name__ == "__main__":
    sys.exit(main())
