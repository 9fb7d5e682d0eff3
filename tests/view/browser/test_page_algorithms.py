"""The page's formulas of every built-in algorithm, loss and option; and words in place of a number that it cannot compute."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.view.browser.numbers import compare, numbers_on_page
from tests.view.browser.variants import UNKNOWN, VARIANTS
from whet.algo.table import ALGORITHMS
from whet.observe.records import read_records


def test_every_built_in_algorithm_is_played():
    from tests.e2e.test_records_recomputed import CASES

    assert {each["algo"]["name"] for each in (VARIANTS | CASES).values()} > ALGORITHMS.keys()


@pytest.fixture(scope="module")
def served(variants):
    from tests.view.served import serving

    with serving(variants) as found:
        yield found


@pytest.mark.parametrize("name", list(VARIANTS))
def test_numbers_of_every_algorithm(open_page, served, variants, name):
    unknown = UNKNOWN.get(name, {})
    seen: Counter[str] = Counter()
    for row in read_records(variants / name / "rollouts"):
        if row["order"] is None:
            continue
        for use in ("first", "last"):
            found = numbers_on_page(open_page, served.address, row, f"{variants.name}/{name}", use)
            seen += compare(row, found, use, unknown)
            if row["mean_abs_advantage"]:
                assert all(words in one["text"] for one in found for words in unknown.values()), (name, found[0]["text"])
    wanted = {"advantage", "ratio", "clip", "loss", "weight"} - unknown.keys()
    assert min([seen[quantity] for quantity in wanted], default=1) > 0, seen
