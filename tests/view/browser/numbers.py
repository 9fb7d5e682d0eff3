"""Numbers of every trained token, read from the page, and compared with the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from urllib.parse import urlencode

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
    out.push({ place: Number(panel.dataset.place), rows, push: panel.querySelector(".push")?.dataset.push ?? null, text: panel.innerText });
  }
  return out;
}
"""
RECORDED = {"advantage": "advantages", "delta": "td_errors", "return": "returns", "kl_reward": "kl_rewards"}
OF_USE = {"ratio": "ratio", "clip": "clip", "loss": "losses", "weight": "weights"}


def read_number(text: str) -> float:
    return math.nan if text == "–" else float(text.replace("−", "-"))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5)


def numbers_on_page(open_page, address: str, row, run: str, use: str):
    """What the page says of each trained token of a recorded trajectory."""
    trained = [i for i, weight in enumerate(row["first_weights"] or ()) if weight is not None]
    given = {"run": run, "rollout": row["rollout_id"], "trajectory": row["trajectory"], "use": use, "sample": row["order"]}
    page = open_page(f"{address}#/trajectory?{urlencode(given)}")
    page.wait_for_selector(".strip .token")
    found = page.evaluate(READ, trained)
    page.context.close()
    return found


def compare(row, found, use: str, unknown: Collection[str] = ()) -> Counter[str]:
    """How often each quantity was seen to be that of the record, recorded and recomputed; those in `unknown` must have a dash."""
    seen: Counter[str] = Counter()
    for one in found:
        i, rows = one["place"], one["rows"]
        skipped = row[f"{use}_clip"][i] == 10
        expected = {quantity: row[column] for quantity, column in RECORDED.items() if row[column] is not None}
        expected |= {quantity: row[f"{use}_{column}"] for quantity, column in OF_USE.items() if row[f"{use}_{column}"] is not None}
        for quantity, column in expected.items():
            if quantity not in rows or (quantity == "return" and rows[quantity][0] == "–"):
                assert skipped or quantity in ("delta", "return") or quantity in unknown, (i, quantity, rows)
                continue
            recorded, again, mark = rows[quantity]
            assert close(read_number(recorded), column[i]), (i, quantity, rows[quantity], column[i])
            if quantity in unknown:
                assert (again, mark) == ("–", ""), (i, quantity, rows[quantity])
                continue
            assert close(read_number(again), column[i]), (i, quantity, rows[quantity], column[i])
            assert mark == "✓", (i, quantity, rows[quantity])
            seen[quantity] += 1
    return seen
