"""Writes requirements.txt: the pins of constraints.txt with the sha256 of every wheel that development may take: `python .ci/hashes.py`.

torch is left out: its builds (CPU, CUDA) come from different indexes under one version, and whoever installs chooses the index.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = re.compile(r"-(?:py3|py2\.py3|cp31[1-4]-cp31[1-4]|cp3\d-abi3|cp31\d-abi3)-")
PLATFORMS = re.compile(r"-any\.whl$|manylinux\w*_(?:x86_64|aarch64)|macosx|win_amd64|win_arm64")
HEAD = """# The pins of constraints.txt with the sha256 of their files, written by `python .ci/hashes.py`. `make setup` installs from here.
# torch is not here: its builds come from different indexes under one version.
"""


def files_of(name: str) -> list[tuple[str, str]]:
    """The files of a project on the index: name and sha256."""
    address = f"{PyPI.simple_url}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    request = Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(request, timeout=60) as answer:
        return [(file["filename"], file["hashes"]["sha256"]) for file in json.load(answer)["files"]]


def wheels_of(name: str, version: str) -> list[str]:
    """The sha256 of the release's wheels for the supported Pythons and platforms; of its source where it has no wheel at all."""
    spelled = re.sub(r"[-_.]+", "[-_.]+", re.escape(name).replace("\\-", "-").replace("\\.", "."))
    release = re.compile(rf"^{spelled}-{re.escape(version)}[-.](?=\d|py|cp|tar)", re.IGNORECASE)
    files = [(file, digest) for file, digest in files_of(name) if release.match(file)]
    wheels = [(file, digest) for file, digest in files if file.endswith(".whl")]
    chosen = [digest for file, digest in wheels if PYTHONS.search(file) and PLATFORMS.search(file)]
    if not wheels:
        chosen = [digest for file, digest in files if file.endswith(".tar.gz")]
    if not chosen:
        raise SystemExit(f"{name} {version}: the index has no file for a supported Python")
    return sorted(set(chosen))


def main() -> None:
    """Ask the index about every pin, and write the file."""
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    text = HEAD
    for name, version in pins:
        if name == "torch":
            continue
        text += f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in wheels_of(name, version)) + "\n"
        sys.stderr.write(".")
    (ROOT / "requirements.txt").write_text(text)
    sys.stderr.write("\n")


if __name__ == "__main__":
    main()
