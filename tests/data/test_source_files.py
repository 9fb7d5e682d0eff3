"""Reading rows: formats, slices, folders, and what is said about malformed files."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from whet.data import files
from whet.data.files import read_rows


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbers(*count):
    return [{"n": n} for n in range(*count)]


def read(*paths):
    return [row.values["n"] for row in read_rows([str(path) for path in paths])]


def test_the_three_formats_give_the_same_rows(tmp_path):
    rows = [{"n": 1, "text": "é\u2028x"}, {"n": 2, "text": None}, {"n": 3, "text": ""}]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text("\n " + json.dumps(rows, indent=2))
    jsonl(tmp_path / "c.json", rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=2)
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet"):
        read_back = list(read_rows(str(tmp_path / name)))
        assert [dict(row.values) for row in read_back] == rows
        assert [row.origin for row in read_back] == [f"{tmp_path / name}:{n}" for n in (1, 2, 3)]


def test_blank_lines_count_as_lines_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"n": 1}\r\n\n{"n": 2}'.encode())
    rows = list(read_rows(str(tmp_path / "a.jsonl")))
    assert [(row.values["n"], row.origin.rpartition(":")[2]) for row in rows] == [(1, "1"), (2, "3")]


def test_nested_parquet_columns_become_lists_and_objects(tmp_path):
    row = {"n": 0, "prompt": [{"role": "user", "content": "hi"}], "extra": {"index": 3, "split": None}}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert [dict(found.values) for found in read_rows(str(tmp_path / "a.parquet"))] == [row]


def test_folders_are_read_in_the_order_of_names_and_paths_in_their_own(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "b.jsonl", numbers(2, 4))
    jsonl(folder / "a.jsonl", numbers(0, 2))
    (folder / "README.md").write_text("no rows")
    one = jsonl(tmp_path / "one.jsonl", numbers(9, 10))
    assert read(folder) == [0, 1, 2, 3]
    assert read(one, folder, f"{folder}@[1:3]") == [9, 0, 1, 2, 3, 1, 2]


BOUNDS = st.none() | st.integers(-12, 12)


@settings(max_examples=60, deadline=None)
@given(start=BOUNDS, stop=BOUNDS)
def test_slices_are_those_of_python(tmp_path_factory, start, stop):
    path = jsonl(tmp_path_factory.mktemp("slices") / "a.jsonl", numbers(7))
    text = ":".join("" if bound is None else str(bound) for bound in (start, stop))
    assert read(f"{path}@[{text}]") == list(range(7))[start:stop]


def test_a_slice_stops_reading_at_its_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\nnot json\n')
    assert read(f"{path}@[:2]") == [0, 1]


@pytest.mark.parametrize("text", ["[1:2:3]", "[x:2]", "[3]"])
def test_a_malformed_slice_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="cannot read the slice of"):
        read(f"{tmp_path}/a.jsonl@{text}")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"n": 1, "question" 2}', ["bad.jsonl:2", "column 21", "Expecting ':'", '"question" 2']),
        ('{"n": 1', ["bad.jsonl:2", "column 8", "Expecting ','"]),
        ("[1, 2]", ["bad.jsonl:2", "expected an object", "a list ([1, 2])"]),
        ("null", ["bad.jsonl:2", "found null"]),
        ('{"n": 1} {"n": 2}', ["bad.jsonl:2", "column 10", "Extra data"]),
        ('{"n": NaN}', ["bad.jsonl:2: NaN is no JSON value; write null"]),
        ('{"n": 1, "m": 2, "n": 3}', ["bad.jsonl:2: the key 'n' occurs 2 times in one object"]),
        ("[" * 100_000, ["bad.jsonl:2: its lists and objects are nested too deeply"]),
    ],
)
def test_a_malformed_line_is_shown_with_its_place(tmp_path, line, parts):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"n": 0}\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        read(path)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_the_excerpt_of_a_long_line_is_short(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"n": "' + "a" * 5000 + '" oops, "m": "' + "b" * 5000 + '"}')
    with pytest.raises(ValueError, match="oops") as error:
        read(path)
    assert len(str(error.value)) - len(str(path)) < 200


@pytest.mark.parametrize("text", ['[{"n": 1}]', '[\n{"n": 1}\n]', ' [\n'])
def test_a_list_in_a_file_of_lines_is_told_with_what_to_do(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: a JSON list begins here.*name the file \.json, or write a row in each line"):
        read(path)


FORMATS = [("a.xlsx", "write its rows as one of these"), ("a.jsonl.gz", "unpack it first"), ("a.txt", "")]


@pytest.mark.parametrize(("name", "advice"), FORMATS)
def test_files_of_other_formats_are_told_with_what_to_do(tmp_path, name, advice):
    (tmp_path / name).write_text("n\n1\n")
    with pytest.raises(ValueError, match=rf"cannot read .*{name}: expected a file that ends in \.jsonl, \.json, \.parquet.*{advice}"):
        read(tmp_path / name)


def test_a_malformed_json_list_names_the_line_or_the_item(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('[\n{"n": 1},\n{"n" 2}\n]')
    with pytest.raises(ValueError, match=r"bad\.json: not valid JSON at line 3, column 6"):
        read(path)
    path.write_text('[{"n": 1}, 5]')
    with pytest.raises(ValueError, match=r"bad\.json:2: expected an object"):
        read(path)


def test_bytes_that_are_no_text_and_files_that_are_no_parquet(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"n": 1}\n{"n": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl:2: not UTF-8 text \(byte 7\)"):
        read(tmp_path / "latin.jsonl")
    (tmp_path / "fake.parquet").write_text("{}")
    with pytest.raises(ValueError, match=r"fake\.parquet is not a parquet file"):
        read(tmp_path / "fake.parquet")


@pytest.mark.parametrize("what", ["data", "footer", "half"])
def test_a_damaged_parquet_file_is_named(tmp_path, what):
    path = tmp_path / "bad.parquet"
    parquet.write_table(pa.Table.from_pylist([{"n": f"row {n}"} for n in range(200)]), path, row_group_size=100)
    content = path.read_bytes()
    second = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = second.dictionary_page_offset
    damaged = {
        "data": content[:start] + b"\xff" * 60 + content[start + 60 :],
        "footer": content[:-200] + b"\xff" * 192 + content[-8:],
        "half": content[: len(content) // 2],
    }
    path.write_bytes(damaged[what])
    rows = read_rows(str(path))
    with pytest.raises(ValueError, match=r"bad\.parquet.* is not a parquet file, or is damaged; copy or download it again: ") as error:
        list(rows)
    assert ("(after record 100)" in str(error.value)) == (what == "data")


def test_a_list_in_a_json_file_is_read_by_the_letter_too(tmp_path):
    (tmp_path / "bad.json").write_text('[{"n": NaN}]')
    with pytest.raises(ValueError, match=r"bad\.json: NaN is no JSON value"):
        read(tmp_path / "bad.json")


def test_paths_that_hold_nothing(tmp_path):
    jsonl(tmp_path / "train.jsonl", numbers(1))
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "measured.parquet.tmp").touch()
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("measured.parquet", r"no data file or folder [^ ]*measured\.parquet$"),
        ("trian.jsonl", r"no data file or folder .*; did you mean .*train\.jsonl\?"),
        ("nowhere/train.jsonl", "nor a folder"),
        ("notes.txt", r"ends in \.jsonl, \.json, \.parquet"),
        ("empty", "holds no"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(tmp_path / path)


def test_a_row_group_is_not_read_whole(tmp_path):
    """One group of 60,000 rows: 70 MB of text as it is decoded."""
    file = tmp_path / "a.parquet"
    texts = pa.array([f"{i % 7} " * 600 for i in range(60_000)])
    parquet.write_table(pa.table({"prompt": texts.dictionary_encode().cast(pa.string())}), file, row_group_size=10**9)
    del texts
    pa.default_memory_pool().release_unused()
    before, rows, most = pa.total_allocated_bytes(), read_rows(f"{file}@[:5000]"), 0
    for _ in rows:
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 40 << 20, most >> 20


CUTS = ["[-3:]", "[:-3]", "[-5:-2]", "[2:-2]", "[-4:8]", "[-100:3]", "[-2:3]", "[8:-9]", "[:-100]", "[-5:5]", "[-3:-5]"]


@pytest.mark.parametrize("cut", CUTS)
def test_slices_from_the_end_are_pythons_and_hold_no_more_than_they_count(cut, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"n": {i}}}\n' for i in range(10)))
    expected = eval(f"list(range(10)){cut}")
    assert [row.values["n"] for row in read_rows(f"{file}@{cut}")] == expected


def test_a_line_without_an_end_is_an_error_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_LIST_BYTES", 1000)
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as opened:
        opened.write(b'{"a": 1}\n')
        opened.truncate(1 << 40)
    rows = read_rows(str(file))
    assert next(rows).values == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the line has over 0 MiB, too much for a row"):
        next(rows)
    listed = tmp_path / "a.json"
    with open(listed, "wb") as opened:
        opened.write(b'[{"a": 1},')
        opened.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"a JSON list is read whole, and this one has over 0 MiB; write it as \.jsonl"):
        next(read_rows(str(listed)))


def test_csv_and_tsv_are_rows_of_text(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffprompt,label\n"What is\n1, or 2?",3\nHow?,\n\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("prompt\tlabel\nx, y\t1\n")
    rows = list(read_rows(str(tmp_path / "a.csv")))
    assert [row.values for row in rows] == [{"prompt": "What is\n1, or 2?", "label": "3"}, {"prompt": "How?", "label": None}]
    assert [row.origin.rpartition(":")[2] for row in rows] == ["3", "4"]
    assert [row.values for row in read_rows(str(tmp_path / "a.tsv"))] == [{"prompt": "x, y", "label": "1"}]
    (tmp_path / "bad.csv").write_text("prompt,label\na,b,c\n")
    with pytest.raises(ValueError, match=r"bad\.csv:2: 3 values for 2 columns \(prompt, label\)"):
        list(read_rows(str(tmp_path / "bad.csv")))
    for header in ("prompt;label", "prompt\tlabel"):
        (tmp_path / "bad.csv").write_text(f"{header}\nWhat?;3\n")
        with pytest.raises(ValueError, match=r"bad\.csv:1: one column, 'prompt.*label': whet reads values between commas"):
            list(read_rows(str(tmp_path / "bad.csv")))
    (tmp_path / "bad.csv").write_bytes(b"prompt\n\xff\n")
    with pytest.raises(ValueError, match=r"bad\.csv:\d: not csv in UTF-8"):
        list(read_rows(str(tmp_path / "bad.csv")))
