"""Readable text of pages: parts with the place of each, so that a report can cite them. HTML and PDF are read in bounded processes."""

from __future__ import annotations

import atexit
import base64
import importlib.util
import json
import os
import subprocess
import threading
from dataclasses import dataclass

from whet.calls.lines import AnswerTooLong, LinePipes, start_line_worker
from whet.env.browse.extract_worker import MAX_CHARS, READY, bounded
from whet.runfolder.child_environment import child_environment

CPU_LIMIT_S = 20.0
REPLY_LIMIT_S = 120.0
"""Wall time, for a machine busy with other things; the effective limit is that of the processor's time."""
START_LIMIT_S = 180.0
PROCESSES = 4
"""Pages that are read at a time."""
_REPLY_LIMIT_BYTES = 12 * MAX_CHARS
MISSING = "browsing needs the packages trafilatura and pypdf: pip install 'whet[browse]'"
HTML, PDF = ("text/html", "application/xhtml+xml"), ("application/pdf", "application/x-pdf")
TEXT = ("application/json", "application/xml", "application/ld+json")
"""Read as text, besides all of `text/`."""


class Unreadable(Exception):
    """A page has no text that can be read. The text is the answer to the model."""


@dataclass(frozen=True, slots=True)
class Text:
    """The readable text of a page."""

    title: str
    parts: tuple[tuple[str, str], ...]
    """Place and text of each: `p. 3` of a PDF, `¶ 3` of anything else."""


def check_packages() -> None:
    """Check that the packages are there. Raises ValueError if one is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("trafilatura", "pypdf")):
        raise ValueError(MISSING)


class Extractor:
    """Reads pages in processes of its own, which end with this one; one that a page ends is replaced. May be used by several threads.

    Args:
        cpu_limit_s: processor time for one page, in seconds.
    """

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._places = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_Child] = []
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def read(self, body: bytes, kind: str, charset: str) -> Text:
        """The text of a page.

        Args:
            body: its bytes.
            kind: its content type.
            charset: as its server names it; "": unknown.

        Raises:
            Unreadable: it is of another kind, has no text, or takes more time or memory than a page may.
        """
        form = form_of(kind, body)
        if form == "text":
            return plain_text(body, charset)
        line = json.dumps({"form": form, "charset": charset, "body": base64.b64encode(body).decode()}).encode() + b"\n"
        with self._places:
            child = self._idle.pop() if self._idle else _Child.started(self._cpu_limit_s)
            try:
                answer = json.loads(child.pipes.exchange(line, REPLY_LIMIT_S))
            except (TimeoutError, EOFError, AnswerTooLong, ValueError) as error:
                child.end()
                limit = f"{self._cpu_limit_s:g} s of the processor's time"
                raise Unreadable(f"its {form.upper()} cannot be read: it took over {limit}, or the reader died of it") from error
            except BaseException:  # an interrupt: its answer would be read as the next page's
                child.end()
                raise
            self._idle.append(child)
        if "error" in answer:
            raise Unreadable(f"its {form.upper()} cannot be read: {answer['error']}")
        if not answer["parts"]:
            raise Unreadable("it has no readable text")
        return Text(answer["title"], tuple((place, text) for place, text in answer["parts"]))

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            self._idle.pop().end()

    def _forget(self) -> None:
        """Forget the children after a fork: they are the parent's."""
        self._idle, self._places = [], threading.BoundedSemaphore(PROCESSES)


@dataclass(slots=True)
class _Child:
    """A process that reads pages."""

    process: subprocess.Popen[bytes]
    pipes: LinePipes

    @classmethod
    def started(cls, cpu_limit_s: float) -> _Child:
        """A new one, with the processor time for one page in seconds."""
        return cls(
            *start_line_worker(
                "whet.env.browse.extract_worker",
                cpu_limit_s,
                "reads pages",
                ready=READY,
                environment=child_environment(),
                limit_bytes=_REPLY_LIMIT_BYTES,
                timeout_s=START_LIMIT_S,
            )
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipes.close()


def form_of(kind: str, body: bytes) -> str:
    """The way in which a page is read: html, pdf or text.

    Raises:
        Unreadable: it is something else.
    """
    kind = kind.lower()
    if kind in PDF or body.startswith(b"%PDF-"):
        return "pdf"
    if kind in HTML:
        return "html"
    if kind.startswith("text/") or kind in TEXT or kind.endswith(("+json", "+xml")):
        return "text"
    raise Unreadable(f"it is {kind!r}; HTML, PDF and text can be read")


def plain_text(body: bytes, charset: str) -> Text:
    """A text as it is, its paragraphs counted."""
    try:
        text = body.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):  # an unknown charset, or one that is no charset of text
        text = body.decode("utf-8", "replace")
    paragraphs = [paragraph.strip() for paragraph in text.replace("\r\n", "\n").split("\n\n") if paragraph.strip()]
    parts = bounded([(f"¶ {number}", paragraph) for number, paragraph in enumerate(paragraphs, 1)])
    if not parts:
        raise Unreadable("it has no readable text")
    return Text(parts[0][1].split("\n", 1)[0][:200], tuple(parts))
