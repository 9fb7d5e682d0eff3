"""The tool `search`: passages of a local corpus, or of a retrieval server."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from whet.env.resources import per_run
from whet.env.search.client import RetrieverClient, check_url
from whet.env.search.corpus import corpus_files
from whet.env.search.index import Hit
from whet.env.search.searcher import Ranking, Searcher
from whet.env.threads import DaemonThreads
from whet.env.tools import ToolResult

MAX_QUERY_CHARS = 2000
MAX_TOP_K = 100
Find = Callable[[str], Awaitable[Sequence[Hit]]]


def search(
    corpus: str | None = None,
    url: str | None = None,
    top_k: int = 3,
    max_chars: int = 1000,
    ranking: Ranking = "bm25",
    model: str | None = None,
    cache: str | None = None,
    api_key_env: str | None = None,
) -> Callable[..., Awaitable[ToolResult]]:
    """A tool that searches.

    Args:
        corpus: a data file or a folder, as for `read_corpus`.
        url: a server in place of the corpus: `whet retriever`, or any that speaks Search-R1's protocol.
        top_k: passages of a result.
        max_chars: of one passage; a longer one is cut.
        ranking: of a corpus: bm25 (by words), dense (by meaning) or hybrid (both, fused).
        model: folder of a sentence-transformers model, for dense and hybrid.
        cache: folder of the indexes; None: whet's own in the user's cache.
        api_key_env: variable of the environment with the server's key.

    Raises:
        ValueError: the options do not fit together, or name nothing.
    """
    check_options(corpus, url, ranking, model)
    if not 1 <= top_k <= MAX_TOP_K or max_chars < 1:
        raise ValueError(f"search needs a top_k of 1 to {MAX_TOP_K} and max_chars of at least 1, not {top_k} and {max_chars}")
    if api_key_env is not None and api_key_env not in os.environ:
        raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
    headers = None if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}

    @asynccontextmanager
    async def search_index() -> AsyncIterator[Find]:
        if corpus is not None:
            threads = DaemonThreads()
            searcher = await asyncio.to_thread(Searcher, corpus, ranking, model, cache)
            yield lambda query: threads.run(lambda: searcher.search(query, top_k), None)
            return
        assert url is not None
        client = RetrieverClient(url, DEADLINE_S, headers)
        try:
            yield lambda query: client.search(query, top_k)
        finally:
            await client.close()

    found: Any = per_run(search_index)

    async def search(query: str, index: Any = found) -> ToolResult:
        """Searches for passages about something.

        Args:
            query: words or a question.
        """
        if not query.strip():
            raise ValueError("the query is empty; write words to search for")
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError(f"the query has {len(query)} characters; write at most {MAX_QUERY_CHARS}")
        hits: Sequence[Hit] = await index(query)
        scores = [hit.score if math.isfinite(hit.score) else 0.0 for hit in hits]
        documents = [{"id": hit.document.id, "score": score} for hit, score in zip(hits, scores, strict=True)]
        attachments: Any = {"query": query, "documents": documents}
        return ToolResult(text_of(hits, max_chars), metrics={"search_results": len(hits)}, attachments=attachments)

    return search


DEADLINE_S = 25.0
"""For a search by a server, with all attempts: less than `env.tool_timeout_s`, so that what is said is why it failed."""


def check_options(corpus: str | None, url: str | None, ranking: str, model: str | None) -> None:
    """Check what is to be searched, without reading it.

    Raises:
        ValueError: it names nothing, or its options do not fit together.
    """
    if (corpus is None) == (url is None):
        raise ValueError("search needs a corpus (a file or folder of documents) or the url of a retriever, one of the two")
    if ranking not in ("bm25", "dense", "hybrid"):
        raise ValueError(f"there is no ranking {ranking!r}; choose bm25, dense or hybrid")
    if url is not None:
        check_url(url)
        if ranking != "bm25" or model is not None:
            raise ValueError("ranking and model belong to a corpus; a server has its own")
        return
    assert corpus is not None
    corpus_files(corpus)
    if (ranking == "bm25") != (model is None):
        raise ValueError("dense and hybrid search need a model, the folder of a sentence-transformers model; bm25 takes none")


def text_of(hits: Sequence[Hit], max_chars: int) -> str:
    """The result as the model reads it."""
    if not hits:
        return "No passage was found."
    return "\n\n".join(f"[{number}] {_passage(hit, max_chars)}" for number, hit in enumerate(hits, 1))


def _passage(hit: Hit, max_chars: int) -> str:
    document = hit.document
    contents = document.contents.strip()
    cut = contents if len(contents) <= max_chars else contents[:max_chars].rstrip() + " ..."
    title = "" if contents.lstrip('"# ').startswith(document.title) else f"{document.title}\n"
    return f"(corpus:{document.id}) {title}{cut}"
