"""The example examples/search_qa on some seeds, one after the other; figures go to benchmarks/results/search_qa.json.

    python benchmarks/search_qa.py [SEED ...]

Shares of the held-out questions that were answered rightly, and that were searched for, after the warm-up and at the end.
"""

from __future__ import annotations

from search_agents import measure

if __name__ == "__main__":
    measure("search_qa", ("right", "searched"))
