"""Huge pages are got where the system gives them, and change nothing of what lies in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from whet.engine.embedded import pages
from whet.engine.embedded.cache import lazy_zeros
from whet.engine.embedded.pages import SIZE, ask_for_huge_pages

needs_huge_pages = pytest.mark.skipif(not pages._given(), reason="this system gives no huge pages")


def huge_bytes() -> int:
    """That this process has."""
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("size", [0, 1, 1000, SIZE // 4 - 1, SIZE // 4, SIZE + 17, 3 * SIZE])
def test_contents_stay(size, now):
    for start in (0, 3, 1024):
        tensor = torch.arange(start + size, dtype=torch.float32)
        ask_for_huge_pages(tensor[start:], now=now)
        assert torch.equal(tensor, torch.arange(start + size, dtype=torch.float32))


@needs_huge_pages
def test_pages_that_are_there_become_huge_ones():
    before, tensor = huge_bytes(), torch.arange(32 * SIZE // 8)
    ask_for_huge_pages(tensor, now=True)
    assert huge_bytes() - before > 16 * SIZE
    assert torch.equal(tensor, torch.arange(32 * SIZE // 8))


@needs_huge_pages
def test_a_cache_grows_by_huge_pages():
    before, cache = huge_bytes(), lazy_zeros(torch.empty(0), (64, SIZE // 4))
    assert huge_bytes() == before and cache[7, 5] == 0
    cache[3:9] = 1
    assert 4 * SIZE <= huge_bytes() - before <= 8 * SIZE
    assert cache.sum() == 6 * SIZE // 4


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_where_the_system_gives_none_nothing_is_asked(monkeypatch, tmp_path, setting):
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(pages, "SETTING", path)
    monkeypatch.setattr(pages, "_given", pages._given.__wrapped__)
    monkeypatch.setattr(pages, "_libc", None)
    ask_for_huge_pages(torch.zeros(SIZE), now=True)
