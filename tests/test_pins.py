"""What development installs is pinned, and every file of it is known by its hash."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {plain(line.split("==")[0]): line.split("==")[1] for line in lines if line and not line.startswith("#")}


def test_every_pin_but_torch_has_hashes_and_nothing_else_is_installed():
    entries = re.split(r"\n(?=[A-Za-z])", re.sub(r"^#.*\n", "", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE).strip())
    found = {}
    for entry in entries:
        pin, *hashes = entry.replace("\\\n", " ").split()
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
        name, version = pin.split("==")
        found[plain(name)] = version
    assert found == {name: version for name, version in pins().items() if name != "torch"}, "run `python .ci/hashes.py`"


def test_every_dependency_is_pinned_within_its_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins()[plain(requirement.name)]), requirement
