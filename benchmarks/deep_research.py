"""The example examples/deep_research on some seeds, one after the other; figures go to benchmarks/results/deep_research.json.

    python benchmarks/deep_research.py [SEED ...]

After the warm-up and at the end, over the held-out companies: the mean score of the rubric; the shares of reports with the right figure as
that of the first quarter, of those that cite the filing after opening it, of those that give a figure of the whole year; the shares that
opened the filing, and that cite what they did not open.
"""

from __future__ import annotations

from search_agents import measure

if __name__ == "__main__":
    measure("deep_research", ("report", "report/first_quarter", "report/official", "report/full_year", "opened_filing", "unread"))
