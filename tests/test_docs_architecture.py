"""docs/architecture.md names what there is, and its picture is of today's imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_picture_is_of_todays_imports():
    script = "import sys; sys.path.insert(0, 'docs'); import draw_architecture; sys.stdout.write(draw_architecture.picture())"
    drawn = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert drawn == (ROOT / "docs" / "pictures" / "architecture.svg").read_text(), "draw it again: python docs/draw_architecture.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`((?:whet|tests|benchmarks|docs|examples)/[A-Za-z0-9_./-]+)`", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
