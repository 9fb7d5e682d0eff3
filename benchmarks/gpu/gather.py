"""Downloads the wheels that a GPU machine without a network may lack: `python benchmarks/gpu/gather.py wheels`.

They are whet's dependencies and its tests', in the versions of constraints.txt, with theirs: all but torch and transformers, which that
machine has, and what is only theirs. Everything has to fit into the limit; what is pure Python fits any machine, the rest is for Linux on
x86-64.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu.packages import KEPT, wanted  # noqa: E402

LIMIT_MIB = 64
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LEFT_OUT = (*KEPT, "hf-xet", "regex", "pyyaml", "tqdm", "sympy", "networkx", "fsspec", "setuptools")
"""What comes with torch and transformers."""


def names(python: str) -> list[str]:
    """The packages to carry, by what is installed here."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    out, waiting = set[str](), [*wanted()]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        known = f"{name}[{','.join(sorted(requirement.extras))}]"
        if name in LEFT_OUT or known in out:
            continue
        out.add(known)
        for each in map(Requirement, requires(name) or []):
            if each.marker is None or any(each.marker.evaluate({**environment, "extra": extra}) for extra in ("", *requirement.extras)):
                waiting.append(each)
    return sorted({name.partition("[")[0] for name in out})


def pins() -> dict[str, str]:
    """Versions by names, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = (re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def main() -> None:
    parser = argparse.ArgumentParser(description="download wheels for a GPU machine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    args = parser.parse_args()
    versions = pins()
    wheels = [f"{name}=={versions[name]}" for name in names(args.python)]
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    options = ["--python-version", args.python, "--only-binary", ":all:", "--no-deps", *platforms, "--dest", str(args.folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, *wheels], check=True)
    size = sum(path.stat().st_size for path in args.folder.glob("*.whl")) / 2**20
    print(f"{len(wheels)} wheels, {size:.1f} MiB of at most {LIMIT_MIB}, in {args.folder}: {', '.join(wheels)}")
    if size > LIMIT_MIB:
        raise SystemExit(f"{args.folder} has {size:.1f} MiB, more than the {LIMIT_MIB} that can be carried")


if __name__ == "__main__":
    main()
