"""docs/glossary.md: each term once, in both languages, and what stands in backticks is there."""

import re
from pathlib import Path

from whet.algo.table import ALGORITHMS
from whet.config import describe
from whet.core.weights import REDUCERS
from whet.settings.rl import RunConfig
from whet.types import Outcome

PAGE = (Path(__file__).resolve().parents[1] / "docs/glossary.md").read_text()
ROWS = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| term ")]


def test_each_term_is_there_once_in_both_languages():
    terms = [word.strip() for term, _, _ in ROWS for word in term.split(",")]
    assert len(ROWS) >= 50 and len(terms) == len(set(terms))
    for term, chinese, meaning in ROWS:
        assert re.search("[\u4e00-\u9fff]", chinese), term
        assert meaning.rstrip().endswith("."), term


def test_what_it_names_is_there():
    settings = {f".{doc.path}" for doc in describe(RunConfig)}
    others = {*ALGORITHMS, *REDUCERS, *(outcome.value for outcome in Outcome), "metrics.jsonl", "mismatch/…"}
    named = {name.split(" = ")[0] for name in re.findall(r"`([^`]+)`", PAGE) if not name.startswith("whet ")}
    named -= {"sft", "dpo", "rm"}
    assert len(named) > 25
    assert {name for name in named - others if not any(path.endswith(f".{name}") for path in settings)} == set()
