"""Both numbers of every formula on the page are those of the optimizer, for every trained token of four algorithms."""

from __future__ import annotations

import math
from urllib.parse import urlencode

import pytest

from tests.e2e.test_records_recomputed import CASES
from whet.observe.records import read_records

READ = """
async (tokens) => {
  const out = [];
  for (const token of tokens) {
    history.replaceState(null, "", location.hash.replace(/&token=\\d+/, ""));
    document.querySelector(".strip").scrollTop = 0;
    const target = document.querySelector(`[data-token="${token}"]`);
    target.click();
    const panel = document.querySelector(".token-panel");
    const rows = {};
    for (const row of panel.querySelectorAll("tr[data-quantity]")) {
      const text = (kind) => row.querySelector(`[data-kind=${kind}]`).textContent;
      rows[row.dataset.quantity] = [text("recorded"), text("recomputed"), row.lastChild.textContent];
    }
    out.push({ place: Number(panel.dataset.place), rows, push: panel.querySelector(".push")?.dataset.push ?? null });
  }
  return out;
}
"""
RECORDED = {"advantage": "advantages", "delta": "td_errors", "return": "returns", "kl_reward": "kl_rewards"}
OF_USE = {"ratio": "ratio", "clip": "clip", "loss": "losses"}


def read_number(text: str) -> float:
    return float(text.replace("−", "-"))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5)


@pytest.mark.parametrize("use", ["first", "last"])
@pytest.mark.parametrize("name", list(CASES))
def test_numbers_on_the_page_are_the_optimizers(open_page, played, runs, name, use):
    seen = 0
    for row in read_records(runs / name / "rollouts"):
        trained = [i for i, weight in enumerate(row["first_weights"]) if weight is not None]
        given = {"run": f"{runs.name}/{name}", "rollout": row["rollout_id"], "trajectory": row["trajectory"], "use": use}
        page = open_page(f"{played.address}#/trajectory?{urlencode(given)}")
        page.wait_for_selector(".strip .token")
        for found in page.evaluate(READ, trained):
            i, rows = found["place"], found["rows"]
            expected = {quantity: row[column] for quantity, column in RECORDED.items() if row[column] is not None}
            expected |= {quantity: row[f"{use}_{column}"] for quantity, column in OF_USE.items() if row[f"{use}_{column}"] is not None}
            skipped = row[f"{use}_clip"][i] == 10
            for quantity, column in expected.items():
                if quantity not in rows and (skipped or quantity in ("delta", "return")):
                    continue
                recorded, again, mark = rows[quantity]
                assert close(read_number(recorded), column[i]), (name, i, quantity, rows[quantity], column[i])
                assert close(read_number(again), column[i]), (name, i, quantity, rows[quantity], column[i])
                assert mark == "✓"
                seen += 1
            if not skipped:
                assert found["push"] == push_of(name, row, i, use), (name, i, rows)
            if name != "ppo":
                assert close(read_number(rows["mean"][1]), row["group_mean"]) and close(read_number(rows["std"][1]), row["group_std"])
        page.context.close()
    assert seen > 100


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
