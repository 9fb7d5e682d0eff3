"""An index of a corpus on disk: built once, memory-mapped, and safe to build by several processes at once. Nothing in it is unpickled."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.env.search.corpus import Document, digest_of, read_corpus
from whet.env.search.words import words_of

if TYPE_CHECKING:
    import numpy as np

FORM = 1
"""Form of the files; another one is another index."""
WHOLE = "whole.json"
MISSING = "searching a corpus needs the package bm25s: pip install 'whet[search]'"


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found."""

    document: Document
    score: float
    """Larger is better; scores of different kinds of search do not compare."""


def cache_folder(given: str | None) -> Path:
    """The folder of all indexes."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "whet/search"


class Documents:
    """The documents of an index, read from the disk when they are asked for."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._text = np.memmap(folder / "documents.jsonl", np.uint8, "r")
        self._ends = np.load(folder / "ends.npy", mmap_mode="r", allow_pickle=False)
        self._by_id: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> Document:
        begin = 0 if place == 0 else int(self._ends[place - 1])
        return Document(*json.loads(self._text[begin : int(self._ends[place])].tobytes()))

    def find(self, name: str) -> Document | None:
        """The document with an id."""
        if self._by_id is None:
            self._by_id = {self[place].id: place for place in range(len(self))}
        return self[self._by_id[name]] if name in self._by_id else None


class WordIndex:
    """BM25 (Robertson and Zaragoza, 2009) as Lucene computes it, by bm25s.

    Args:
        folder: made by `open_index`.
    """

    def __init__(self, folder: Path) -> None:
        import bm25s

        self.documents = Documents(folder)
        self._bm25 = bm25s.BM25.load(folder / "bm25", mmap=True, load_corpus=False, allow_pickle=False, show_progress=False)

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Places and scores of the best documents that share a word with the query; of equal ones the first in the corpus."""
        known = self._bm25.vocab_dict
        ids = sorted({known[word] for word in words_of(query, query=True) if word in known})
        return best_of(self._bm25.get_scores_from_ids(ids), top_k) if ids else []


def best_of(scores: np.ndarray, top_k: int, least: float = 0.0) -> list[tuple[int, float]]:
    """Places and values of the largest scores above `least`, the first place first among equals."""
    import numpy as np

    if len(scores) > top_k:
        bound = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        places = np.flatnonzero(scores >= max(bound, least))
    else:
        places = np.arange(len(scores))
    places = places[scores[places] > least]
    order = np.lexsort((places, -scores[places]))[:top_k]
    return [(int(place), float(scores[place])) for place in places[order]]


def open_index(corpus: str, cache: Path) -> WordIndex:
    """The index of a corpus, which is built if the cache does not have it.

    Raises:
        ValueError: the corpus cannot be read, or bm25s is missing.
    """
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise ValueError(MISSING) from error
    name = f"words-{FORM}-{bm25s.__version__}-{digest_of(corpus)[:32]}"
    return WordIndex(made_once(cache / name, lambda folder: _build(corpus, folder)))


def made_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The folder, which `build` fills first if it is not there, or not whole.

    Processes that build at once write the same; the first counts.

    Args:
        folder: where readers find it, whole or not at all.
        build: writes into an empty folder.
    """
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        build(draft)
        sizes = {file.relative_to(draft).as_posix(): file.stat().st_size for file in sorted(draft.rglob("*")) if file.is_file()}
        for name in sizes:
            with open(draft / name, "rb") as file:
                os.fsync(file.fileno())
        (draft / WHOLE).write_text(json.dumps(sizes))
        if folder.exists() and not _is_whole(folder):  # damaged; another process may move it away first
            with suppress(FileNotFoundError):
                folder.rename(draft / "damaged")
        with suppress(OSError):  # another process was first
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not _is_whole(folder):
        raise ValueError(f"the index {folder} cannot be written or is damaged; remove it")
    return folder


def _is_whole(folder: Path) -> bool:
    """True if all files are there with their sizes."""
    try:
        sizes: dict[str, int] = json.loads((folder / WHOLE).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _build(corpus: str, folder: Path) -> None:
    import bm25s
    import numpy as np

    ends: list[int] = []
    words: dict[str, int] = {}
    texts: list[Sequence[int]] = []
    with open(folder / "documents.jsonl", "wb") as file:
        for document in read_corpus(corpus):
            file.write(json.dumps([document.id, document.title, document.contents], ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            ends.append(file.tell())
            texts.append([words.setdefault(word, len(words)) for word in words_of(document.text)])
    np.save(folder / "ends.npy", np.asarray(ends, np.int64), allow_pickle=False)
    bm25: Any = bm25s.BM25(method="lucene")
    bm25.index((texts, words), show_progress=False)
    bm25.save(folder / "bm25", allow_pickle=False, show_progress=False)
