"""Every error that docs/errors.md shows, provoked through the command line: its status, its words, and that nothing is lost.

With WHET_WRITE_DOCS=1 the page is written from what the cases print, instead of being compared with it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.errors.error_bench import Bench, Case, Shared, check_kept, check_trained, make_shared, snapshot
from tests.errors.error_cases import CASES, PARTS
from tests.errors.error_page import HEAD, PAGE, page, section, sections_of

WRITE = os.environ.get("WHET_WRITE_DOCS") == "1"


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Shared:
    return make_shared(tmp_path_factory.mktemp("errors"))


@pytest.fixture(scope="session")
def printed():
    """What the cases printed. Where the page is to be written, that is done at the end, if every case did what it should."""
    messages: dict[str, str] = {}
    yield messages
    if WRITE and len(messages) == len(CASES):
        PAGE.write_text(page(messages))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_goes_wrong_is_said_and_nothing_is_lost(case: Case, shared: Shared, printed: dict[str, str], tmp_path):
    with Bench.open(shared, tmp_path / "home") as bench:
        told = case.provoke(bench)
        told.check()
    assert told.status == case.status, told.message
    missing = [words for words in case.words if words not in told.message]
    assert not missing, f"{missing} is not in:\n{told.message}"
    assert bool(re.search(r"^(error: |>>> )", told.message, re.MULTILINE)) == (case.status == 2), told.message
    assert str(tmp_path) not in told.message
    printed[case.id] = told.message
    if not WRITE:
        assert sections_of(PAGE.read_text()).get(case.title) == section(case, told.message), f"`make docs` writes {PAGE.name} anew"


@pytest.mark.parametrize("case", [case for case in CASES if case.seen_by_check], ids=lambda case: case.id)
def test_what_is_wrong_before_training_is_seen_by_check(case: Case, shared: Shared, tmp_path):
    with Bench.open(shared, tmp_path / "home", checks=True) as bench:
        told = case.provoke(bench)
        told.check()
    assert told.status == 2, told.message
    missing = [words for words in case.check_words or case.words if words not in told.message]
    assert not missing, f"{missing} is not in:\n{told.message}"


AGAIN = re.compile(r"same command|start (it|the run) again|goes on (from|with)|the run again")
"""What a remedy says that is to be done, after which the run trains."""


MENDED = [
    pytest.param(case, fresh, id=f"{case.id}-{'before-any-update' if fresh else 'after-one'}")
    for case in CASES
    if case.mend is not None
    for fresh in (False, True)
    if case.goes_wrong_at_once or not fresh
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "fresh"), MENDED)
def test_once_mended_it_trains(case: Case, fresh: bool, shared: Shared, tmp_path):
    with Bench.open(shared, tmp_path / "home", fresh=fresh) as bench:
        told = case.provoke(bench)
        assert told.status == 2, told.message
        assert case.mend is not None
        if fresh:
            assert not (bench.folder / "runs/demo/checkpoints").exists(), "nothing was learned, so nothing binds"
        bench.mended(*case.mend(bench))


def test_each_remedy_that_says_so_is_tried():
    assert [case.id for case in CASES if AGAIN.search(case.remedy) and case.mend is None] == []


@pytest.mark.skipif(WRITE, reason="the page is being written")
def test_the_page_has_a_section_for_each_case_and_no_other():
    text = PAGE.read_text()
    assert list(sections_of(text)) == [case.title for case in CASES]
    assert text.startswith(HEAD)
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(PARTS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b""),
        ("metrics.jsonl", None),
        ("rollouts/rollout_000000.parquet", b"x"),
        ("log.txt", b"begun anew"),
        ("config.toml", b""),
    ],
)
def test_what_is_lost_is_noticed(shared: Shared, tmp_path, name: str, content: bytes | None):
    run = Path(shutil.copytree(shared.earlier, tmp_path / "run"))
    before = snapshot(run)
    check_kept(run, before)
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    with pytest.raises(AssertionError, match=f"{name} is not what it was"):
        check_kept(run, before)


def test_a_run_that_lost_more_than_it_should_is_noticed(shared: Shared):
    check_trained(shared.earlier, {})
    with pytest.raises(AssertionError):
        check_trained(shared.earlier, {"timeout": 1})


def test_cases_are_told_apart():
    for name in ("id", "title"):
        values = [getattr(case, name) for case in CASES]
        assert len(set(values)) == len(values)
    assert all(case.words for case in CASES)
