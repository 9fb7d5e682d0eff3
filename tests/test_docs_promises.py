"""Every promise of SECURITY.md and docs/dependable.md names its test, and that test is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("SECURITY.md", "docs/dependable.md")
NAMED = re.compile(r"`(tests/[\w/]+?(?:\.py)?)(?:::(\w+))?`")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def promise_rows(text: str) -> list[str]:
    """The rows of every table whose last column is called `test`."""
    rows: list[str] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.rstrip().endswith("| test |"):
            inside = True
        elif inside and not set(line) <= set("|- "):
            rows.append(line)
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_a_named_test_is_there(page):
    named = NAMED.findall(text_of(page))
    assert named
    for path, function in named:
        assert (ROOT / path).exists(), f"{page}: {path}"
        if function:
            assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE), f"{page}: {path}::{function}"


def test_every_promise_of_security_names_a_test():
    rows = promise_rows(text_of("SECURITY.md"))
    assert len(rows) > 20
    for row in rows:
        assert NAMED.search(row.rstrip(" |").rpartition("|")[2]), row


def test_every_section_of_dependable_names_a_test():
    sections = re.split(r"^## ", text_of("docs/dependable.md"), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        assert NAMED.search(section), section.splitlines()[0]
