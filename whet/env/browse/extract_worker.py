"""Reads HTML and PDF in a process of its own, which `whet.env.browse.extract` starts and bounds. Requests and answers are lines of JSON.

A page is written by anybody: parsers in C read it, and one page can ask for any time and memory, so only limits of a process hold.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

MEMORY_LIMIT_BYTES = 512 << 20
"""Memory in addition to that of the process at its start."""
MAX_CHARS = 1_000_000
"""Limit on the text of one page."""
MAX_PDF_PAGES = 300
READY = b"ready\n"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def main(cpu_limit_s: float) -> None:
    """Answer requests until there are no more.

    Args:
        cpu_limit_s: processor time for one page, in seconds.
    """
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    logging.disable(logging.CRITICAL)
    import pypdf  # noqa: F401 (loaded before memory is limited)
    import trafilatura  # noqa: F401

    socket.socket = _no_network  # pyright: ignore[reportAttributeAccessIssue]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the system bounds no address space
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    replies.write(READY)
    replies.flush()
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # its signal ends the process, whatever it is in
        answer = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(answer + b"\n")
        replies.flush()


def _no_network(*_: Any, **__: Any) -> NoReturn:
    raise OSError("a page that is read opens no connection")


def _answer(request: dict[str, str]) -> bytes:
    body = base64.b64decode(request["body"])
    read = {"html": read_html, "pdf": read_pdf}[request["form"]]
    try:
        title, parts = read(body, request["charset"])
        return json.dumps({"title": clean(title)[:300], "parts": bounded(parts)}).encode()
    except MemoryError:
        return json.dumps({"error": "it needs too much memory"}).encode()
    except RecursionError:
        return json.dumps({"error": "it is nested too deeply"}).encode()
    except Exception as error:  # parsers of others raise anything
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}).encode()


def bounded(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places and texts, up to the limit on all of them."""
    kept, left = list[tuple[str, str]](), MAX_CHARS
    for place, text in parts:
        text = clean(text).strip()[:left]
        if text:
            kept.append((place, text))
            left -= len(text)
    return kept


def clean(text: str) -> str:
    """The text without characters that are not seen, and without halves of characters."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode()


def read_pdf(body: bytes, charset: str) -> tuple[str, list[tuple[str, str]]]:
    """Title and pages of a PDF, each place the page's number."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(body), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted")
    parts: list[tuple[str, str]] = []
    num_chars = 0
    for number, page in enumerate(reader.pages, 1):
        if number > MAX_PDF_PAGES or num_chars > MAX_CHARS:
            break
        text = page.extract_text()
        num_chars += len(text)
        parts.append((f"p. {number}", text))
    found = reader.metadata.title if reader.metadata is not None else None
    return found if isinstance(found, str) else "", parts


def read_html(body: bytes, charset: str) -> tuple[str, list[tuple[str, str]]]:
    """Title and paragraphs of the main text, each place the paragraph's number; all of the text where no main text is found."""
    import lxml.html
    from trafilatura import bare_extraction

    parser = lxml.html.HTMLParser(encoding=_known(charset), no_network=True, huge_tree=False)
    tree = lxml.html.document_fromstring(body, parser=parser)
    title = str(tree.findtext(".//title") or "")
    found: Any = bare_extraction(tree, favor_recall=True, include_comments=False, include_tables=True, with_metadata=False)
    text = "" if found is None else str(found.text or "")
    if not text.strip():
        for element in tree.xpath("//script|//style|//noscript|//template"):
            element.drop_tree()
        text = str(tree.text_content())
    paragraphs = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
    return " ".join(title.split()), [(f"¶ {number}", paragraph) for number, paragraph in enumerate(paragraphs, 1)]


def _known(charset: str) -> str | None:
    """The charset if Python knows it as one of text; None: the page's own word counts."""
    import codecs

    try:
        return charset if charset and codecs.lookup(charset)._is_text_encoding else None
    except LookupError:
        return None
