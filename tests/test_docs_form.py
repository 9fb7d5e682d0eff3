"""The form of README and of the pages in docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE = 110
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
WRAPPED = [*PAGES, "SECURITY.md", "benchmarks/README.md", "examples/rlhf/README.md"]


def prose(text: str) -> list[str]:
    """The lines of a page that are neither code, tables, headings nor HTML."""
    without_code = re.sub(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in without_code.splitlines() if not re.match(r" *[|#<]", line)]


def test_prose_is_what_is_wrapped():
    text = "# Title\n\nWords.\n\n| a | b |\n|---|---|\n\n- An item\n\n  ```text\n  code\n  ```\n\n```\ncode\n```\n"
    assert [line for line in prose(text) if line] == ["Words.", "- An item"]


@pytest.mark.parametrize("page", WRAPPED)
def test_lines_of_prose_are_short(page):
    assert [line for line in prose((ROOT / page).read_text()) if len(line) > MAX_LINE] == []
