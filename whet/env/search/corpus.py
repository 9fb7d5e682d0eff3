"""The documents that are searched: rows of data files, or a folder of text files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whet.data.files import data_files, read_rows
from whet.data.hub import DATA_SUFFIXES

TEXT_SUFFIXES = (".txt", ".md")
MAX_TEXT_BYTES = 1 << 24
"""Limit on one text file."""
TITLE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a corpus, or a passage of a larger one."""

    id: str
    """Unique in its corpus."""
    title: str
    contents: str
    """All of its text."""

    @property
    def text(self) -> str:
        """The text that is indexed."""
        return f"{self.title}\n{self.contents}" if self.title and not self.contents.startswith(self.title) else self.contents


def corpus_files(path: str) -> list[Path]:
    """The files of a corpus, in the order in which they are read.

    Raises:
        ValueError: there are none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        rows = [file for file in folder.iterdir() if file.suffix in DATA_SUFFIXES]
        if files and not rows:
            return files
        if not rows:
            kinds = ", ".join((*DATA_SUFFIXES, *TEXT_SUFFIXES))
            raise ValueError(f"the folder {path} is no corpus: it holds no file that ends in {kinds}")
    return data_files(path)


def read_corpus(path: str) -> Iterator[Document]:
    """The documents of a corpus, each id once.

    Args:
        path: a jsonl, json, parquet or csv file with the columns `contents`, and `id` and `title` if there are such; a folder of such; or a
            folder of .txt and .md files, whose ids are their paths in it.

    Raises:
        ValueError: a row has no contents, an id comes twice, or a file cannot be read; with `file:line`.
    """
    seen: set[str] = set()
    for place, document in _documents(path):
        if document.id in seen:
            raise ValueError(f"{place}: the id {document.id!r} is a second document's; ids of a corpus are unique")
        seen.add(document.id)
        yield document
    if not seen:
        raise ValueError(f"the corpus {path} holds no document")


def _documents(path: str) -> Iterator[tuple[str, Document]]:
    files = corpus_files(path)
    if files[0].suffix in TEXT_SUFFIXES:
        root = Path(path).expanduser()
        for file in files:
            yield str(file), _text_document(file, root)
        return
    for number, row in enumerate(read_rows(path)):
        name, title, contents = row.get("id"), row.get("title"), row.get("contents")
        if not isinstance(contents, str) or not contents.strip():
            raise ValueError(f"{row.origin}: a document needs a text `contents`; this row has {', '.join(row.values) or 'nothing'}")
        if title is not None and not isinstance(title, str):
            raise ValueError(f"{row.origin}: the `title` of a document is a text, not {title!r}")
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
            raise ValueError(f"{row.origin}: the `id` of a document is a text or a number, not {name!r}")
        yield row.origin, Document(str(number if name is None else name), title or _first_line(contents), contents)


def _text_document(file: Path, root: Path) -> Document:
    if file.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"{file} is larger than {MAX_TEXT_BYTES >> 20} MiB; split it")
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 at byte {error.start}") from None
    name = file.relative_to(root).as_posix()
    return Document(name, _first_line(text) or name, text)


def _first_line(text: str) -> str:
    """The first line, as a title: Search-R1's corpora have theirs there, in quotes."""
    return text.strip().split("\n", 1)[0].strip().strip('"# ')[:TITLE_CHARS]


def digest_of(path: str) -> str:
    """A digest of the contents and the names of a corpus' files."""
    total = hashlib.sha256()
    for file in corpus_files(path):
        with open(file, "rb") as opened:
            contents = hashlib.file_digest(opened, "sha256").hexdigest()
        total.update(json.dumps([file.name, contents]).encode())
    return total.hexdigest()
