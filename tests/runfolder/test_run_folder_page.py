"""docs/run_folder.md names what the code writes, and all that this package writes."""

import ast
import re
from pathlib import Path

import pytest

from whet.runfolder.contents import LOG_LINES, METRIC_LINES
from whet.runfolder.environment import environment
from whet.runfolder.journal import Journal
from whet.runfolder.lock import claim
from whet.runfolder.passed_on import blank
from whet.runfolder.report import _PARTS, README

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/run_folder.md").read_text()
FOLDER, ZIP = (re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE) for part in PAGE.split("## Reporting a problem"))
FOREIGN = {"wandb/"}
"""Written by other packages."""


def strings() -> set[str]:
    """Every string in whet's source, the fixed parts of f-strings included."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "whet").rglob("*.py"))
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_name_on_the_page_is_one_that_the_code_has():
    known = strings()
    assert len(FOLDER) > 20
    for name in set(FOLDER) - FOREIGN:
        for part in filter(None, name.split("/")):
            if "<" not in part:
                assert part in known, f"{name}: no string {part!r} in the code"
                continue
            begin, *_, end = re.split("<[^>]+>", part)
            assert not begin or any(text.startswith(begin.rstrip("_.")) for text in known), name
            assert not end or any(text.endswith(end) for text in known), name


def test_every_file_that_this_package_writes_is_on_the_page(tmp_path):
    with claim(tmp_path, "whet train a.toml"):
        journal = Journal(tmp_path)
        journal.started("whet train a.toml", environment())
        journal.ended("finished")
        journal.close()
        written = {path.name for path in tmp_path.iterdir()}
    assert {".lock", ".owner.json", "log.txt", "starts.jsonl", "failures.jsonl", "end.json"} == written <= set(FOLDER)


def test_the_page_lists_what_a_report_holds():
    listed = {part.split(",")[0] for part in _PARTS} | {README}
    assert {re.sub("rollout_<n>", "*", name) for name in ZIP} == listed


BLANKS = [blank("x" * 31), blank(3), blank(dict.fromkeys(range(3)))]


@pytest.mark.parametrize("words", [f"the last {LOG_LINES:,} lines", f"the last {METRIC_LINES} lines", *BLANKS])
def test_its_numbers_are_the_codes(words):
    assert words in PAGE.replace("\n", " ")
