"""A client of retrieval servers that speak Search-R1's protocol."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from whet.env.search.corpus import Document
from whet.env.search.index import Hit
from whet.types import JSON

MAX_ANSWER_BYTES = 1 << 24
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 5.0
PASSING = frozenset({408, 409, 425, 429})
"""Statuses that may be others the next time, besides all from 500 on."""


class RetrieverFailed(Exception):
    """A retrieval server did not answer, or not as the protocol says. It is an error of the environment, never an empty result."""


class _Final(RetrieverFailed):
    """It would fail again."""


class RetrieverClient:
    """Asks one server. Made and used in one event loop.

    Args:
        url: of its route, `http://HOST:PORT/retrieve`.
        timeout_s: for a search with all of its attempts.
        headers: sent with each request.
    """

    def __init__(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._session = aiohttp.ClientSession(headers=headers, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """The documents that the server finds.

        Raises:
            RetrieverFailed: no usable answer came within `timeout_s`.
        """
        body = {"queries": [query], "topk": top_k, "return_scores": True}
        last, wait_s, attempts = "it did not answer", FIRST_WAIT_S, 0
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                while True:
                    attempts += 1
                    try:
                        return await self._ask(body)
                    except _Final as error:
                        raise RetrieverFailed(f"the retriever {self._url} {error}") from error
                    except RetrieverFailed as error:
                        last = str(error)
                    except aiohttp.ClientError as error:
                        last = f"cannot be reached: {type(error).__name__}: {error}"
                    await asyncio.sleep(wait_s * (0.5 + random.random()))
                    wait_s = min(2 * wait_s, MAX_WAIT_S)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RetrieverFailed(f"the retriever {self._url} {last} (attempt {attempts}, within {self._timeout_s:g} s)") from None

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, body: JSON) -> list[Hit]:
        async with self._session.post(self._url, json=body, allow_redirects=False) as answer:
            data = await _read(answer)
            shown = data[:200].decode("utf-8", "replace")
            if answer.status != 200:
                kind = RetrieverFailed if answer.status >= 500 or answer.status in PASSING else _Final
                raise kind(f"answered {answer.status}: {shown!r}")
        try:
            return hits_of(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise _Final(f"answered what is not Search-R1's protocol ({error}): {shown!r}") from None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise _Final(f"answered more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(data)


def check_url(url: str) -> None:
    """Check the address of a server.

    Raises:
        ValueError: it is none of http or https, or holds a password.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
        parts = None
    if not good or parts is None:
        raise ValueError(f"url: {url!r} is not the address of a retriever; write http://HOST:PORT/retrieve")
    if "@" in parts.netloc:
        raise ValueError("url: an address holds no password; name the variable that has the key in api_key_env")


def hits_of(answer: JSON) -> list[Hit]:
    """The documents of the one query in an answer.

    Raises:
        ValueError: it has another form.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise ValueError("no list `result` of one list")
    return [_hit(item, place) for place, item in enumerate(cast(list[Any], result[0]))]


def _hit(item: Any, place: int) -> Hit:
    """One entry: with its score, or the document alone, as servers write it that were asked for none."""
    scored = isinstance(item, dict) and isinstance(item.get("document"), dict)
    document: Any = item["document"] if scored else item
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise ValueError(f"result {place} has no text `contents`")
    score = item.get("score") if scored else None
    name, title = document.get("id"), document.get("title")
    if title is None:
        title = contents.split("\n", 1)[0].strip().strip('"')[:200]
    given = score if isinstance(score, int | float) and not isinstance(score, bool) else 0.0
    return Hit(Document(str(place if name is None else name), str(title), contents), float(given))
