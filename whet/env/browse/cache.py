"""Pages on disk, so that a run can be repeated without a network. Contents are kept by their digest, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whet.env.browse.fetch import FetchFailed, Page


@dataclass(frozen=True, slots=True)
class PageCache:
    """A folder of pages and of the errors that came in their place. May be shared by several processes.

    Args:
        folder: it is made when something is kept.
    """

    folder: Path

    def find(self, url: str, *, passing: bool) -> Page | None:
        """The page of a URL; None: there is none.

        Args:
            url: as it was asked for.
            passing: also errors that may be over by now.

        Raises:
            FetchFailed: an error is kept in the place of the page.
        """
        try:
            entry = json.loads(self._entry(url).read_bytes())
            if entry["url"] != url:
                return None
            if "error" in entry:
                if entry["passing"] and not passing:
                    return None
                raise FetchFailed(entry["error"], passing=entry["passing"])
            body = self._blob(entry["sha256"]).read_bytes()
            if hashlib.sha256(body).hexdigest() != entry["sha256"]:
                return None
            return Page(tuple(entry["urls"]), entry["kind"], entry["charset"], body)
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: it is got again
            return None

    def keep(self, url: str, page: Page) -> None:
        """Keep a page."""
        digest = hashlib.sha256(page.body).hexdigest()
        if not self._blob(digest).exists():
            _write(self._blob(digest), page.body)
        self._keep(url, {"urls": list(page.urls), "kind": page.kind, "charset": page.charset, "sha256": digest})

    def keep_error(self, url: str, error: FetchFailed) -> None:
        """Keep an error: a repeated run answers the same."""
        self._keep(url, {"error": str(error), "passing": error.passing})

    def _keep(self, url: str, entry: dict[str, object]) -> None:
        _write(self._entry(url), json.dumps({"url": url, **entry}).encode())

    def _entry(self, url: str) -> Path:
        digest = hashlib.sha256(url.encode()).hexdigest()
        return self.folder / "urls" / digest[:2] / f"{digest}.json"

    def _blob(self, digest: str) -> Path:
        if len(digest) != 64 or not digest.isalnum():
            raise ValueError("no digest")
        return self.folder / "pages" / digest[:2] / digest


def _write(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees none, the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
