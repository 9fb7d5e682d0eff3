"""The environment of the example: Search-R1's tags, inside one turn of the assistant.

The model writes `<search>words</search>` and is stopped there; `<information>passages</information>` follows in the same turn, and
the model goes on from there until `<answer>words</answer>`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.resources import per_run
from whet.env.search.searcher import Searcher
from whet.types import JSON, Task, Turn, TurnNote

CORPUS = Path(__file__).with_name("corpus.jsonl")
QUERY = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*$", re.DOTALL)
MALFORMED = "\nMy action is not correct. I write <search> and </search> around a query, or <answer> and </answer> around the answer.\n"


@asynccontextmanager
async def index() -> AsyncIterator[Searcher]:
    """The corpus, opened once for a run."""
    yield await asyncio.to_thread(Searcher, str(CORPUS))


class SearchTags:
    """Answers a query with passages.

    Args:
        top_k: passages for a query.
        searcher: the open index.
    """

    tools: Sequence[Mapping[str, JSON]] = ()

    def __init__(self, top_k: int = 1, searcher: Searcher = per_run(index)) -> None:
        self._top_k, self._searcher = top_k, searcher

    async def start(self, task: Task) -> Task:
        return task

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        return task  # a query has all that its answer depends on

    async def step(self, reply: Parsed) -> Step:
        text = reply.message.content.rstrip()
        found = QUERY.search(text)
        if found is None:
            malformed = "</search>" in text
            return Step(text=MALFORMED, counts={"searches_malformed": 1}) if malformed else Step(done=True)
        query = found.group(1).strip()
        hits = await asyncio.to_thread(self._searcher.search, query, self._top_k)
        note = TurnNote("search", {"found": len(hits)}, {"query": query, "documents": [hit.document.id for hit in hits]})
        return Step(text=information([hit.document.contents for hit in hits]), counts={"searches": 1}, notes=(note,))

    async def close(self) -> None:
        pass


def information(passages: Sequence[str]) -> str:
    """The passages as the model reads them. Tags in a passage are taken apart: a passage closes nothing."""
    plain = "\n".join(passages).replace("</", "< /") or "Nothing was found."
    return f"\n\n<information> {plain} </information>\n\n"
