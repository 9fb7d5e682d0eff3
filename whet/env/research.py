"""The environment `research`: the model searches a corpus, opens pages of it, and writes a report that cites them by their ids.

It is the tool environment with two tools. The reply without a call is the report; it may cite the pages alone that were opened before.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from whet.data.parsers import Parsed
from whet.env.base import EnvFactory, Step
from whet.env.resources import per_run
from whet.env.search.corpus import Document, corpus_files
from whet.env.search.index import Hit
from whet.env.search.searcher import Searcher
from whet.env.search.tool import MAX_QUERY_CHARS, MAX_TOP_K
from whet.env.threads import DaemonThreads
from whet.env.tool_env import ToolEnv
from whet.env.tool_sets import AnyTool
from whet.env.tools import Tool, ToolArgumentError, ToolResult
from whet.types import JSON, Task, Trajectory, Turn, TurnNote

MIN_PAGE_CHARS = 200
_REPORT = re.compile(r"<report>((?:(?!<report>).)*?)</report>", re.DOTALL)
_CITATION = re.compile(r"\[([^\[\]\n]{1,300})\](?!\()")
"""Text in square brackets that is no link of Markdown."""
_LIST = re.compile(r"[,;]")


@dataclass(frozen=True, slots=True)
class Findings:
    """The work of a trajectory in the environment `research`."""

    report: str | None
    """None: a limit cut it before it wrote one."""
    opened: tuple[str, ...]
    """Ids of the pages that were opened, in order, each once."""
    cited: tuple[str, ...]
    """Ids that the report cites, and that were opened before it."""
    not_opened: tuple[str, ...]
    """All other citations of the report: pages that were never opened, or that there are not."""
    queries: tuple[str, ...]
    """Queries of its searches, in order."""


def findings(trajectory: Trajectory) -> Findings:
    """The work of a trajectory, for a reward."""
    notes = [note for turn in trajectory.turns for note in turn.notes]
    last = next((note.attachments for note in reversed(notes) if note.tool == "report"), None)
    queries = tuple(note.attachments["query"] for note in notes if note.tool == "search")
    if last is None:
        return Findings(None, _opened(notes), (), (), queries)
    return Findings(last["report"], tuple(last["opened"]), tuple(last["cited"]), tuple(last["not_opened"]), queries)


def research(
    tool_env: Callable[[Sequence[AnyTool]], ToolEnv],
    threads: DaemonThreads,
    corpus: str,
    top_k: int = 5,
    snippet_chars: int = 300,
    page_chars: int = 4000,
    max_actions: int = 16,
) -> EnvFactory:
    """A maker of research environments over one corpus.

    Args:
        tool_env: makes the environment that runs the tools.
        threads: threads of the tools.
        corpus: a data file or a folder, as for `read_corpus`.
        top_k: pages of a search's result.
        snippet_chars: characters of each page that the result shows, besides its id and title.
        page_chars: characters of a page that are shown at a time; a longer one has several parts.
        max_actions: searches and openings of a trajectory; further ones are answered that the report is due.

    Raises:
        ValueError: there is no such corpus, or a number makes no sense.
    """
    corpus_files(corpus)
    if not 1 <= top_k <= MAX_TOP_K or snippet_chars < 0 or page_chars < MIN_PAGE_CHARS or max_actions < 1:
        raise ValueError(
            f"research needs a top_k of 1 to {MAX_TOP_K}, snippet_chars of at least 0, page_chars of at least {MIN_PAGE_CHARS} and "
            f"max_actions of at least 1, not {top_k}, {snippet_chars}, {page_chars} and {max_actions}"
        )

    @asynccontextmanager
    async def corpus_index() -> AsyncIterator[Searcher]:
        yield await asyncio.to_thread(Searcher, corpus)

    index: Any = per_run(corpus_index)
    tools = [Tool(function, threads) for function in _functions(index, top_k, snippet_chars, page_chars)]

    def make(**opened: Any) -> ResearchEnv:
        bound: list[AnyTool] = [tool.bound({"index": opened["index"]}) if opened else tool for tool in tools]
        return ResearchEnv(tool_env(bound), tool_env([_Spent(tool) for tool in bound]), max_actions)

    return EnvFactory(make, {"index": index})


def _functions(found: Any, top_k: int, snippet_chars: int, page_chars: int) -> tuple[Callable[..., ToolResult], ...]:
    """The tools `search` and `open` over an index, a resource."""

    def search(query: str, index: Any = found) -> ToolResult:
        """Searches for pages. Shows the id, the title and the beginning of each.

        Args:
            query: words or a question.
        """
        if not query.strip():
            raise ValueError("the query is empty; write words to search for")
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError(f"the query has {len(query)} characters; write at most {MAX_QUERY_CHARS}")
        hits: Sequence[Hit] = index.search(query, top_k)
        documents = [{"id": hit.document.id, "score": hit.score if math.isfinite(hit.score) else 0.0} for hit in hits]
        shown = listed([hit.document for hit in hits], snippet_chars)
        return ToolResult(shown, metrics={"search_results": len(hits)}, attachments={"query": query, "documents": documents})

    def open(page: str, index: Any = found) -> ToolResult:
        """Opens a page that a search found, and shows its text. The report cites it by its id in square brackets. A long page has parts:
        ID#2 is the second one.

        Args:
            page: id of the page.
        """
        document, part = _find(index, page.strip())
        shown = page_text(document, part, page_chars)
        return ToolResult(shown, metrics={"pages_opened": 1.0}, attachments={"page": document.id, "part": part})

    return search, open


class ResearchEnv:
    """Runs the tools, and checks the citations of the report: the reply without a call, or what it has in `<report>` tags.

    Args:
        tools: runs the calls.
        spent: runs them once no searches and openings are left.
        max_actions: searches and openings of a trajectory.
    """

    def __init__(self, tools: ToolEnv, spent: ToolEnv, max_actions: int) -> None:
        self._tools, self._spent, self._max_actions = tools, spent, max_actions
        self._notes: list[TurnNote] = []
        """Notes of the answered turns, which hold all that the next answer depends on."""

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        return self._tools.tools

    async def start(self, task: Task) -> Task:
        return task

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        self._notes = [note for turn in turns[:-1] for note in turn.notes]  # the last one is to be answered, or goes on
        return task

    async def step(self, reply: Parsed) -> Step:
        if not reply.message.tool_calls and not reply.malformed:
            return Step(done=True, notes=(report_note(reply.message.content, _opened(self._notes)),))
        num_actions = sum(note.tool in ("search", "open") for note in self._notes)
        step = await (self._tools if num_actions < self._max_actions else self._spent).step(reply)
        self._notes += step.notes
        return step

    async def close(self) -> None:
        pass


class _Spent:
    """A tool of which no call is left."""

    def __init__(self, tool: AnyTool) -> None:
        self._tool = tool
        self.name, self.needs = tool.name, tool.needs

    @property
    def schema(self) -> Mapping[str, JSON]:
        return self._tool.schema

    def bound(self, opened: Mapping[str, Any]) -> _Spent:
        return _Spent(self._tool.bound(opened))

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float | None) -> ToolResult:
        raise ToolArgumentError("no search and no opening is left; write the report from what was read")


def report_note(reply: str, opened: Sequence[str]) -> TurnNote:
    """The report of a trajectory, with its citations.

    Args:
        reply: the last reply.
        opened: ids of the pages that were opened before.
    """
    tagged = _REPORT.findall(reply)
    report = (tagged[-1] if tagged else reply).strip()
    named = list(dict.fromkeys(citations(report, opened)))
    cited, others = [name for name in named if name in opened], [name for name in named if name not in opened]
    metrics = {"pages_read": float(len(opened)), "citations_valid": float(len(cited)), "citations_invalid": float(len(others))}
    return TurnNote("report", metrics, {"report": report, "opened": list(opened), "cited": cited, "not_opened": others})


def citations(text: str, opened: Sequence[str]) -> Iterator[str]:
    """Every citation of a report: the text in square brackets, or each part of it between commas and semicolons.

    Args:
        text: the report.
        opened: ids that may hold commas and semicolons themselves.
    """
    for found in _CITATION.finditer(text):
        whole = found[1].strip()
        parts = [whole] if whole in opened else [part.strip() for part in _LIST.split(whole)]
        yield from (part for part in parts if part)


def _opened(notes: Iterable[TurnNote]) -> tuple[str, ...]:
    """Ids of the pages that were opened, in order, each once."""
    return tuple(dict.fromkeys(note.attachments["page"] for note in notes if note.tool == "open"))


def _find(index: Searcher, page: str) -> tuple[Document, int]:
    """The page of an id, and the part that is asked for.

    Raises:
        ValueError: there is none.
    """
    whole = index.find(page)
    name, mark, part = page.rpartition("#")
    if whole is None and mark and part.isdecimal() and len(part) < 6:
        whole = index.find(name)
    else:
        part = "1"
    if whole is None:
        raise ValueError(f"there is no page {page[:200]!r}; open one by the id that a search shows")
    return whole, int(part)


def listed(documents: Sequence[Document], snippet_chars: int) -> str:
    """The result of a search as the model reads it."""
    if not documents:
        return "No page was found."
    return "\n".join(f"{document.id}: {document.title}{_snippet(document, snippet_chars)}" for document in documents)


def _snippet(document: Document, num_chars: int) -> str:
    """The beginning of a page on lines of its own."""
    text = document.contents.strip()
    if num_chars == 0 or text == document.title:
        return ""
    return f"\n{text}\n" if len(text) <= num_chars else f"\n{text[:num_chars].rstrip()} ...\n"


def page_text(document: Document, part: int, page_chars: int) -> str:
    """A part of a page as the model reads it.

    Raises:
        ValueError: there is no such part.
    """
    text = document.contents.strip()
    cuts = [*_cuts(text, page_chars), len(text)]
    if not 1 <= part < len(cuts):
        raise ValueError(f"there is no part {part} of {document.id}; it has {len(cuts) - 1}")
    shown = f"{document.id}: {document.title}\n{text[cuts[part - 1] : cuts[part]].strip()}"
    return shown if part == len(cuts) - 1 else f"{shown}\n(Part {part} of {len(cuts) - 1}; open {document.id}#{part + 1} for the next one.)"


def _cuts(text: str, size: int) -> Iterator[int]:
    """Places where the parts of a text begin: ends of lines, else of words, in the last half of what fits."""
    at = 0
    while True:
        yield at
        if len(text) - at <= size:
            return
        half, end = at + size // 2, at + size
        at = max(text.rfind("\n", half, end), 0) or max(text.rfind(" ", half, end), 0) or end
