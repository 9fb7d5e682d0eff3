"""`whet doctor`: examine this machine and this installation. The module imports nothing that may be broken."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from whet.check.findings import Finding, Note, fail, ok, skip, warn
from whet.plan.text import bytes_text
from whet.runfolder.machine import accelerators, cpu_model, machine, memory_limit, usable_cores, versions
from whet.types import JSON

LITTLE_DISK = 2 * 2**30
OPTIONAL = {name: f'metrics and replies in {title} (observe.trackers=["{name}"])' for name, title in (
    ("tensorboard", "TensorBoard"), ("wandb", "Weights & Biases"), ("trackio", "trackio"), ("swanlab", "SwanLab"), ("mlflow", "MLflow"),
)}  # fmt: skip
"""Optional packages, each with its purpose."""
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^]]*\])?\s*(>=\s*(?P<least>[\d.]+))?")


def check_python() -> Iterator[Note]:
    """Compare the interpreter with the version that whet requires."""
    try:
        wanted = metadata("whet")["Requires-Python"]
    except PackageNotFoundError:
        yield warn("whet is not installed as a package, so its requirements are not known: pip install -e . in its folder")
        return
    found = f"{platform.python_version()} on {platform.platform()} ({sys.executable})"
    if sys.version_info[:3] < _numbers(wanted.removeprefix(">=")):
        yield fail(f"{found} is too old, whet needs Python {wanted}: make an environment with a newer one")
    else:
        yield ok(f"{found}, whet needs {wanted}")


def check_required() -> Iterator[Note]:
    """Check every required package: installed, new enough, importable."""
    least = requirements()
    installed = versions(tuple(least))
    for name, minimum in least.items():
        spec = f"{name}>={minimum}" if minimum else name
        version = installed[name]
        if version is None:
            yield fail(f"{name} is not installed: pip install '{spec}'")
        elif minimum and _numbers(version) < _numbers(minimum):
            yield fail(f"{name} {version} is too old: pip install --upgrade '{spec}'")
        elif (error := _import_error(name.replace("-", "_"))) is not None:
            yield fail(f"{name} {version} cannot be imported: {error}; pip install --force-reinstall '{spec}'")
    present = [f"{name} {version}" for name, version in versions(("whet", *least)).items() if version is not None]
    yield ok(", ".join(present))


def requirements() -> dict[str, str | None]:
    """Required packages, each with its lowest version."""
    try:
        lines = requires("whet") or []
    except PackageNotFoundError:
        return {}
    matches = [match for line in lines if "extra ==" not in line and (match := _REQUIREMENT.match(line))]
    return {match["name"]: match["least"] for match in matches}


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    leading = re.match(r"[\d.]*", version)
    assert leading is not None
    return tuple(int(part) for part in leading[0].split(".") if part)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything while it is imported
        return f"{type(error).__name__}: {error}"
    return None


def check_processor() -> Iterator[Note]:
    """Report processor, memory and threads."""
    import torch

    cores = usable_cores()
    size, source = memory_limit()
    yield ok(f"{cpu_model()}, {cores} cores may be used, {torch.backends.cpu.get_cpu_capability()}; {bytes_text(size)} ({source})")
    threads = torch.get_num_threads()
    if threads > cores:
        yield warn(f"torch uses {threads} threads on {cores} cores, which is slower: set OMP_NUM_THREADS={cores}, or threads={cores}")
    else:
        yield ok(f"torch uses {threads} threads, OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}")


def check_accelerators() -> Iterator[Note]:
    """Report accelerators, and check that torch's build fits them."""
    import torch

    found = accelerators()
    for device in found:
        yield ok(f"{device['device']}: {device['name']}, {bytes_text(device['memory_bytes'])}")
    if found:
        return
    if not has_nvidia():
        yield ok("none: whet computes on the CPU")
    elif torch.version.cuda is None:
        yield warn(
            f"there is an NVIDIA GPU, but torch {torch.__version__} is a CPU build: pip install --force-reinstall torch, "
            "without the index of CPU builds"
        )
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        yield warn(
            f"there is an NVIDIA GPU, but torch (for CUDA {torch.version.cuda}) does not see it: see whether nvidia-smi lists it, "
            f"whether the driver is new enough, and whether CUDA_VISIBLE_DEVICES ({hidden}) hides it"
        )


def has_nvidia(root: Path = Path("/")) -> bool:
    """True if the machine has an NVIDIA driver and a GPU, even if torch does not see it."""
    gpus = root / "proc/driver/nvidia/gpus"
    return (gpus.is_dir() and any(gpus.iterdir())) or shutil.which("nvidia-smi") is not None


def check_cache() -> Iterator[Note]:
    """Report the cache of the hub's models and data sets, and check that it can be written."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    offline = constants.HF_HUB_OFFLINE
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    how = "offline (HF_HUB_OFFLINE): only what is in it can be used" if offline else "what is not in it is downloaded"
    yield ok(f"{folder}, {bytes_text(free)} free; {how}")
    if not offline and not os.access(there, os.W_OK):
        yield warn(f"{there} cannot be written, so nothing can be downloaded: set HF_HOME to a folder of your own")


def check_disk() -> Iterator[Note]:
    """Check the free space below the current folder."""
    free = shutil.disk_usage(Path.cwd()).free
    if free < LITTLE_DISK:
        yield warn(f"{bytes_text(free)} free in {Path.cwd()}, little for checkpoints and records: set run_dir to another disk")
    else:
        yield ok(f"{bytes_text(free)} free in {Path.cwd()}")


def check_optional() -> Iterator[Note]:
    """Report the packages that only some runs need."""
    for name, version in versions(tuple(OPTIONAL)).items():
        if version is None:
            yield ok(f"{name} is not installed; it is for {OPTIONAL[name]}: pip install 'whet[{name}]'")
        else:
            yield ok(f"{name} {version}, for {OPTIONAL[name]}")


def check_sandbox() -> Iterator[Note]:
    """Try how well this machine isolates the programs of a model."""
    from whet.env.sandbox.base import SandboxRefused
    from whet.env.sandbox.probe import choose

    try:
        choice = choose()
    except SandboxRefused as refused:
        yield warn(f"what a model writes cannot be run safely here. {refused}")
        return
    yield ok(choice.summary())


CHECKS: dict[str, Callable[[], Iterator[Note]]] = {
    "python": check_python,
    "packages": check_required,
    "processor": check_processor,
    "accelerators": check_accelerators,
    "cache": check_cache,
    "disk": check_disk,
    "optional": check_optional,
    "sandbox": check_sandbox,
}
"""Checks by the area of their findings."""


def doctor(show: Callable[[Finding], None]) -> dict[str, JSON]:
    """Examine the machine and the installation.

    Returns:
        `machine`, the facts; `findings`; `failed`, how many of them are failures.
    """
    findings: list[Finding] = []
    for area, check in CHECKS.items():
        for note in _notes(check):
            findings.append(note.of(area))
            show(findings[-1])
    failed = sum(finding.status == "FAIL" for finding in findings)
    facts = {} if _import_error("torch") else machine()
    return {"machine": facts, "findings": [finding.to_dict() for finding in findings], "failed": failed}


def _notes(check: Callable[[], Iterator[Note]]) -> Iterator[Note]:
    try:
        yield from check()
    except ImportError as error:
        yield skip(f"not checked: needs {error.name or error}")
    except OSError as error:
        yield skip(f"not checked: {error}")
