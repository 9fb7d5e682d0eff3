"""The form of README and of the pages in docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE = 110
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
EXAMPLES = sorted(f"examples/{path.parent.name}" for path in (ROOT / "examples").glob("*/README.md"))
FOLDERS = ["benchmarks", *EXAMPLES, "recipes"]
WRAPPED = ["README.md", *PAGES, "SECURITY.md", *(f"{folder}/README.md" for folder in FOLDERS)]
LINKED = [*WRAPPED, "CHANGELOG.md"]


def prose(text: str) -> list[str]:
    """The lines of a page that are neither code, tables, headings nor HTML."""
    return [line for line in without_code(text).splitlines() if not re.match(r" *[|#<]", line)]


def test_prose_is_what_is_wrapped():
    text = "# Title\n\nWords.\n\n| a | b |\n|---|---|\n\n- An item\n\n  ```text\n  code\n  ```\n\n```\ncode\n```\n"
    assert [line for line in prose(text) if line] == ["Words.", "- An item"]


@pytest.mark.parametrize("page", WRAPPED)
def test_lines_of_prose_are_short(page):
    assert [line for line in prose((ROOT / page).read_text()) if len(line) > MAX_LINE] == []

def test_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_index_has_every_page_once():
    named = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    assert sorted(f"docs/{name}" for name in named) == [page for page in PAGES if page != "docs/README.md"]


def test_anchors_are_those_of_github():
    text = "# A tool, token by token\n\n```\n# code\n```\n\n## `whet doctor`\n\n## Again\n\n## Again\n\n## Again\n"
    assert anchors(text) == {"a-tool-token-by-token", "whet-doctor", "again", "again-1", "again-2"}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target, anchor in links(path.read_text()):
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), f"{target}#{anchor}"


def without_code(text: str) -> str:
    return re.sub(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[tuple[str, str]]:
    """The file and the anchor of every relative link of a page."""
    found = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "", without_code(text)))
    return [(target.partition("#")[0], target.partition("#")[2]) for target in found if "://" not in target]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {f"{name}-{names[:i].count(name)}" if name in names[:i] else name for i, name in enumerate(names)}
