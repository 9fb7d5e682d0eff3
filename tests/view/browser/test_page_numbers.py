"""Both numbers of every formula on the page are those of the optimizer, for every trained token of four algorithms."""

from __future__ import annotations

import math
from collections import Counter
from urllib.parse import urlencode

import pytest

from tests.e2e.test_records_recomputed import CASES
from tests.view.browser.numbers import close, compare, numbers_on_page, read_number
from whet.observe.records import read_records


@pytest.mark.parametrize("use", ["first", "last"])
@pytest.mark.parametrize("name", list(CASES))
def test_numbers_on_the_page_are_the_optimizers(open_page, played, runs, name, use):
    seen: Counter[str] = Counter()
    for row in read_records(runs / name / "rollouts"):
        found = numbers_on_page(open_page, played.address, row, f"{runs.name}/{name}", use)
        seen += compare(row, found, use)
        for one in found:
            i, rows = one["place"], one["rows"]
            if row[f"{use}_clip"][i] != 10:
                assert one["push"] == push_of(name, row, i, use), (name, i, rows)
            if name != "ppo":
                assert close(read_number(rows["mean"][1]), row["group_mean"]) and close(read_number(rows["std"][1]), row["group_std"])
    assert min(seen[quantity] for quantity in ("advantage", "ratio", "clip", "loss", "weight")) > 20


def push_of(name: str, row, i: int, use: str) -> str:
    """The direction in which the policy loss moves the token's probability."""
    advantage = row["advantages"][i]
    if advantage == 0 or (name != "cispo" and row[f"{use}_clip"][i] != 0):
        return "still"
    return "up" if advantage > 0 else "down"


def test_a_token_of_the_environment_says_where_value_goes(open_page, played, runs):
    row = next(row for row in read_records(runs / "ppo/rollouts") if len(row["turns"]) > 1)
    inside = row["origin"].index(2)
    before = max(i for i, weight in enumerate(row["first_weights"]) if weight is not None and i < inside)
    after = min(i for i, weight in enumerate(row["first_weights"]) if weight is not None and i > inside)
    given = {"run": f"{runs.name}/ppo", "rollout": row["rollout_id"], "trajectory": row["trajectory"], "token": inside}
    page = open_page(f"{played.address}#/trajectory?{urlencode(given)}")
    hop = page.locator(".hop button")
    hop.first.wait_for()
    assert [text.split()[0] for text in hop.all_inner_texts()] == [str(before), str(after)]
    hop.nth(1).click()
    assert page.locator(".token-panel").get_attribute("data-place") == str(after)


def test_an_action_is_the_sum_of_its_tokens(open_page, played, runs):
    for row in read_records(runs / "ppo/rollouts")[:4]:
        given = {"run": f"{runs.name}/ppo", "rollout": row["rollout_id"], "trajectory": row["trajectory"], "view": "steps"}
        page = open_page(f"{played.address}#/trajectory?{urlencode(given)}")
        page.wait_for_selector("tr[data-step]")
        actions, tokens = (page.locator(f".ties [data-kind={kind}]").all_inner_texts() for kind in ("action", "tokens"))
        assert len(actions) == len(row["turns"]) == len(tokens)
        assert all(math.isclose(read_number(a), read_number(b), rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(actions, tokens, strict=True))
        logprobs = [read_number(text) for text in page.locator("tr[data-step] [data-kind=logprob]").all_inner_texts()]
        assert sum(logprobs) == pytest.approx(sum(row["logprobs"]), rel=1e-4)
        page.context.close()
