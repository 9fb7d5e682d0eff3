"""Rows from jsonl, json, parquet and csv files, folders of them and hub data sets, each with the place it came from."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from whet.data.arrow import row_cleaner
from whet.data.hub import DATA_SUFFIXES, HUB_NAME, dataset_files
from whet.data.strict_json import parse_json
from whet.types import JSON

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]")
_EXCERPT = 30
"""Characters shown on each side of a syntax error."""

MAX_ROW_BYTES = 1 << 28
"""Size limit of a line of a jsonl file."""
MAX_LIST_BYTES = 1 << 31
"""Size limit of a json file that is one list."""
BATCH_ROWS, BUFFER_BYTES = 256, 1 << 20
"""Rows of a parquet file that are decoded together, and how much of each column is read ahead."""


_TABLE, _PACKED = "; write its rows as one of these, with pandas say", "; unpack it first"
_ADVICE = {**dict.fromkeys((".xlsx", ".arrow"), _TABLE), **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip"), _PACKED)}
"""Advice for files of other formats, by suffix."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a data file."""

    values: Mapping[str, JSON]
    """Values by column."""
    origin: str
    """`file:N`, where N is the line of a jsonl or csv file and the record of any other, counted from 1."""

    def get(self, name: str) -> JSON:
        """The value of a column, or of a key in one: `reward_model.ground_truth`. None: the row does not have it."""
        return self._find(name)[1]

    def has(self, name: str) -> bool:
        """True if the row has this column, or this key in one."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[bool, JSON]:
        found: JSON = self.values
        for part in [name] if name in self.values else name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return False, None
            found = found[part]
        return True, found


def paths_text(path: str | Sequence[str]) -> str:
    """Data files by their names."""
    return path if isinstance(path, str) else ", ".join(path)


def read_rows(path: str | Sequence[str]) -> Iterator[Row]:
    """The rows of one or several paths, one path after the other.

    A path is a `.jsonl`, `.json` (a list of objects, or one object per line), `.parquet`, `.csv` or `.tsv` file, a folder of them
    (read in the order of their names), or a hub data set `owner/name` or `owner/name:split`. A slice of its rows may
    follow: `path@[a:b]`, with Python's meaning.

    Raises:
        ValueError: a path does not exist or holds no data files, or a record is malformed (with `file:line`).
    """
    for entry in [path] if isinstance(path, str) else path:
        text, rows = split_slice(entry)
        yield from _sliced(_read_files(data_files(text)), rows)


def data_files(path: str) -> list[Path]:
    """The files that a path (without a slice) names.

    Raises:
        ValueError: there are none.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if file.suffix in DATA_SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"the folder {path} holds no {', '.join(DATA_SUFFIXES)} file")
        return files
    if local.exists():
        if local.suffix not in DATA_SUFFIXES:
            advice = _ADVICE.get(local.suffix.lower(), "")
            raise ValueError(f"cannot read {path}: expected a file that ends in {', '.join(DATA_SUFFIXES)}{advice}")
        return [local]
    name, _, split = path.partition(":")
    if HUB_NAME.fullmatch(name) and not name.endswith(DATA_SUFFIXES):
        return dataset_files(name, split or None)
    raise ValueError(f"there is no data file or folder {path}{_near_file(local)}")


def _near_file(missing: Path) -> str:
    if not missing.parent.is_dir():
        return f" (nor a folder {missing.parent})"
    readable = [file.name for file in missing.parent.iterdir() if file.is_dir() or file.suffix in DATA_SUFFIXES]
    near = difflib.get_close_matches(missing.name, readable)
    return f"; did you mean {' or '.join(str(missing.parent / name) for name in near)}?" if near else ""


def split_slice(entry: str) -> tuple[str, slice | None]:
    """A path and the slice of its rows, if it has one. Raises ValueError for a slice that cannot be read."""
    if not entry.endswith("]") or "@[" not in entry:
        return entry, None
    match = _SLICE.fullmatch(entry)
    if match is None:
        raise ValueError(f"cannot read the slice of {entry!r}: write path@[start:stop], for example path@[:100]")
    start, stop = (None if bound is None else int(bound) for bound in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def _sliced(rows: Iterator[Row], cut: slice | None) -> Iterator[Row]:
    if cut is None:
        return rows
    if (cut.start or 0) >= 0 and (cut.stop is None or cut.stop >= 0):
        return islice(rows, cut.start, cut.stop)
    return _from_the_end(rows, cut)


def _from_the_end(rows: Iterator[Row], cut: slice) -> Iterator[Row]:
    """A slice with a place counted from the end. No more rows are held than are counted there."""
    start, stop = cut.start or 0, cut.stop
    if start >= 0:  # and stop is below 0: a number of rows in it is never known
        waiting = deque[Row]()
        for row in islice(rows, start, None):
            waiting.append(row)
            if len(waiting) > -stop:
                yield waiting.popleft()
        return
    last, count = deque[Row](maxlen=-start), 0
    for row in rows:
        last.append(row)
        count += 1
    first = max(0, count + start)
    yield from islice(last, len(last) if stop is None else max(0, (stop if stop >= 0 else count + stop) - first))


def _read_files(files: Sequence[Path]) -> Iterator[Row]:
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": _read_lines,
        ".json": _read_json,
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".tsv": _read_csv,
    }
    for file in files:
        yield from readers[file.suffix](file)


def _read_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_ROW_BYTES + 1), b""), start=1):
            origin = f"{file}:{number}"
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(f"{origin}: the line has over {MAX_ROW_BYTES >> 20} MiB, too much for a row; are its line ends lost?")
            text = _decode(line, origin).rstrip("\r\n")
            if number == 1 and text.lstrip().startswith("["):
                raise ValueError(f"{origin}: a JSON list begins here; name the file .json, or write a row in each line")
            if text.strip():
                yield Row(_object(_parse(text, origin), origin), origin)


def _read_json(file: Path) -> Iterator[Row]:
    with file.open("rb") as opened:
        head = opened.read(1024).decode("utf-8-sig", errors="replace").lstrip()
    if not head.startswith("["):
        yield from _read_lines(file)
        return
    with file.open("rb") as opened:
        data = opened.read(MAX_LIST_BYTES + 1)
    if len(data) > MAX_LIST_BYTES:
        size = f"over {MAX_LIST_BYTES >> 20} MiB"
        raise ValueError(f"{file}: a JSON list is read whole, and this one has {size}; write it as .jsonl, a row in each line")
    items = _parse(_decode(data, str(file)), str(file))
    for number, item in enumerate(items, start=1):
        yield Row(_object(item, f"{file}:{number}"), f"{file}:{number}")


def _read_csv(file: Path) -> Iterator[Row]:
    """A table with a line of names; every value is text, and an empty one is null."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        names: list[str] | None = None
        try:
            for cells in reader:
                origin = f"{file}:{reader.line_num}"
                if names is None:
                    names = cells
                    if len(cells) == 1 and any(mark in cells[0] for mark in ";\t|"):
                        raise ValueError(f"{origin}: one column, {cells[0]!r}: whet reads values between commas (.csv) or tabs (.tsv)")
                elif len(cells) != len(names) and cells:
                    raise ValueError(f"{origin}: {len(cells)} values for {len(names)} columns ({', '.join(names)})")
                elif cells:
                    yield Row({name: cell or None for name, cell in zip(names, cells, strict=True)}, origin)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file}:{reader.line_num + 1}: not csv in UTF-8: {error}") from None


def _read_parquet(file: Path) -> Iterator[Row]:
    """A few rows of a row group in memory at a time: one may hold the whole file."""
    from pyarrow import ArrowException, parquet

    from whet.observe.records import check_version

    number = 0
    try:
        with parquet.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as reader:
            check_version(reader.schema_arrow, file)
            clean = row_cleaner(reader.schema_arrow)
            for group in range(reader.num_row_groups):
                for batch in reader.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                    for values in batch.to_pylist():
                        number += 1
                        yield Row(clean(values), f"{file}:{number}")
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # it cannot even be opened
            raise
        place = f"{file} (after record {number})" if number else str(file)
        what = "is not a parquet file, or is damaged; copy or download it again"
        raise ValueError(f"{place} {what}: {' '.join(str(error).split())}") from None


def _decode(line: bytes, origin: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin}: not UTF-8 text (byte {error.start})") from None


def _parse(text: str, origin: str) -> JSON:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        # A line of a jsonl file has its number in the origin; a whole json file has it in the error.
        place = f"{origin}: not valid JSON at " + (f"line {error.lineno}, " if error.lineno > 1 else "")
        start = max(0, error.pos - _EXCERPT)
        excerpt = text[start : error.pos + _EXCERPT].strip()
        raise ValueError(f"{place}column {error.colno}: {error.msg}, near {excerpt!r}") from None
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def _object(value: JSON, origin: str) -> Mapping[str, JSON]:
    if not isinstance(value, dict):
        raise ValueError(f"{origin}: expected an object with a key for each column, found {describe_value(value)}")
    return value


def describe_value(value: JSON) -> str:
    """A value's type in JSON's words, with the value if it is short."""
    kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    shown = repr(value)
    kind = kinds.get(type(value), type(value).__name__)
    return f"{kind} ({shown if len(shown) <= 60 else shown[:57] + '...'})"
