"""The tool `browse`: opens a page of the web or of a corpus, and shows its text with what a report needs to cite it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.env.browse.address import AddressRefused, Egress
from whet.env.browse.cache import PageCache
from whet.env.browse.extract import Extractor, Text, Unreadable, check_packages, plain_text
from whet.env.browse.fetch import Fetcher, FetchFailed, Page
from whet.env.resources import per_run, per_trajectory
from whet.env.search.corpus import corpus_files
from whet.env.search.searcher import Searcher
from whet.env.tools import ToolResult
from whet.types import Task

CORPUS = "corpus:"
MIN_PAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Browser:
    """Everything that a call needs besides its arguments."""

    fetcher: Fetcher
    cache: PageCache | None
    offline: bool
    page_chars: int
    extractor: Extractor
    corpus: Searcher | None = None

    def open(self, url: str, seen: list[str]) -> Text:
        """The text at an address. Blocks.

        Args:
            url: of the web, or `corpus:ID`.
            seen: every URL that is asked for is appended.

        Raises:
            AddressRefused, FetchFailed, Unreadable: with the answer to the model.
        """
        if url.startswith(CORPUS):
            seen.append(url)
            return self._document(url.removeprefix(CORPUS))
        page = self._page(url, seen)
        return self.extractor.read(page.body, page.kind, page.charset)

    def _document(self, name: str) -> Text:
        if self.corpus is None:
            raise AddressRefused("there is no corpus here; open a URL")
        document = self.corpus.find(name)
        if document is None:
            raise FetchFailed(f"the corpus has no document {name[:200]!r}")
        text = plain_text(document.contents.encode("utf-8", "replace"), "utf-8")
        return Text(document.title, text.parts)

    def _page(self, url: str, seen: list[str]) -> Page:
        self.fetcher.egress.target(url)  # also for what the cache holds
        kept = None if self.cache is None else self.cache.find(url, passing=self.offline)
        if kept is not None:
            seen += kept.urls
            for step in kept.urls:
                self.fetcher.egress.target(step)
            return kept
        if self.offline:
            seen.append(url)
            raise FetchFailed(f"{url[:300]} is not in the cache, and this run opens nothing else")
        try:
            page = self.fetcher.get(url, seen)
        except FetchFailed as error:
            if self.cache is not None:
                self.cache.keep_error(url, error)
            raise
        if self.cache is not None:
            self.cache.keep(url, page)
        return page


@dataclass(slots=True)
class Sources:
    """Pages that a trajectory has opened, numbered in their order."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, url: str) -> int:
        return self.numbers.setdefault(url, len(self.numbers) + 1)


@asynccontextmanager
async def opened_sources(task: Task) -> AsyncIterator[Sources]:
    """The numbers of a trajectory's sources."""
    yield Sources()


def browse(
    corpus: str | None = None,
    allow: Sequence[str] = (),
    ports: Sequence[int] = (80, 443),
    page_chars: int = 4000,
    max_bytes: int = 8 << 20,
    timeout_s: float = 20.0,
    cache: str | None = None,
    offline: bool = False,
) -> Callable[..., ToolResult]:
    """A tool that opens pages.

    Args:
        corpus: a data file or a folder whose documents are opened as `corpus:ID`.
        allow: hosts that may be opened: `example.org`, `*.example.org`, or `*` for every public one. None of the web's without it.
        ports: that may be opened.
        page_chars: characters of a page that are shown at a time; a longer one has several parts.
        max_bytes: of a page, as sent and after decompression.
        timeout_s: for a page with all its redirects.
        cache: folder in which pages are kept.
        offline: open what the cache has, and nothing else.

    Raises:
        ValueError: the options do not fit together, or a package is missing.
    """
    check_packages()
    if corpus is None and not allow:
        raise ValueError('browse opens nothing: name a corpus, or hosts in allow, such as ["*.wikipedia.org"]')
    if offline and cache is None:
        raise ValueError("offline = true opens what a cache has; name its folder in cache")
    if page_chars < MIN_PAGE_CHARS or max_bytes < 1 or not timeout_s > 0:
        raise ValueError(f"browse needs page_chars of at least {MIN_PAGE_CHARS}, max_bytes and timeout_s above 0")
    if corpus is not None:
        corpus_files(corpus)
    egress = Egress(tuple(allow), tuple(ports))
    folder = None if cache is None else PageCache(Path(cache).expanduser())
    return browse_with(Browser(Fetcher(egress, max_bytes, timeout_s), folder, offline, page_chars, Extractor()), corpus)


def browse_with(browser: Browser, corpus: str | None) -> Callable[..., ToolResult]:
    """The tool with its parts.

    Args:
        browser: opens pages.
        corpus: as for `browse`.
    """

    @asynccontextmanager
    async def browser_of_run() -> AsyncIterator[Browser]:
        if corpus is None:
            yield browser
        else:
            searcher = await asyncio.to_thread(Searcher, corpus)
            parts = (browser.fetcher, browser.cache, browser.offline, browser.page_chars, browser.extractor)
            yield Browser(*parts, searcher)
        browser.extractor.close()

    shared: Any = per_run(browser_of_run)
    own: Any = per_trajectory(opened_sources)

    def browse(url: str, part: int = 1, browser: Any = shared, sources: Any = own) -> ToolResult:
        """Opens a page and shows its text. A long page has several parts.

        Args:
            url: http:// or https:// address, or corpus:ID of a passage that a search found.
            part: number of the part to show.
        """
        seen: list[str] = []
        try:
            text = browser.open(url, seen)
            shown = show(text, seen[-1], part, sources.number(url), browser.page_chars)
        except (AddressRefused, FetchFailed, Unreadable) as error:
            kind = "browse_refused" if isinstance(error, AddressRefused) else "browse_failed"
            return ToolResult(f"Error: {error}", metrics={kind: 1.0}, attachments=_attached(url, seen, {"error": str(error)}))
        return ToolResult(shown, metrics={"browse_opened": 1.0}, attachments=_attached(url, seen, {"part": part}))

    return browse


def _attached(url: str, seen: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
    """For the record: every URL that was asked for, since a URL itself carries data out."""
    return {"url": url, "urls": list(seen), **more}


def show(text: Text, url: str, part: int, number: int, page_chars: int) -> str:
    """A part of a page as the model reads it.

    Raises:
        Unreadable: there is no such part.
    """
    pieces = split(text, page_chars)
    if not 1 <= part <= len(pieces):
        raise Unreadable(f"there is no part {part}; the page has {len(pieces)}")
    head = f"[{number}] {text.title or url}\nURL: {url}\nPart {part} of {len(pieces)}"
    more = f"\n\n(More in part {part + 1} of the same URL.)" if part < len(pieces) else ""
    return f"{head}. Cite as [{number}] with the place in brackets.\n\n{pieces[part - 1]}{more}"


def split(text: Text, page_chars: int) -> list[str]:
    """The text in pieces of at most `page_chars` characters, each paragraph and page with its place in brackets."""
    pieces: list[str] = [""]
    for place, contents in text.parts:
        room = page_chars - len(place) - 5
        for begin in range(0, len(contents), room):
            chunk = f"[{place}] {contents[begin : begin + room]}"
            if pieces[-1] and len(pieces[-1]) + 1 + len(chunk) > page_chars:
                pieces.append("")
            pieces[-1] += f"\n{chunk}" if pieces[-1] else chunk
    return pieces
