"""Search in a corpus: what is found, in which order, in several languages, and the index on disk."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("bm25s")

from hypothesis import given, settings
from hypothesis import strategies as st

from whet.env.search.corpus import read_corpus
from whet.env.search.index import WHOLE, best_of, made_once
from whet.env.search.searcher import Searcher, fuse
from whet.env.search.words import words_of

ROWS = [
    {"id": "cu", "title": "Copper", "contents": "Copper: the symbol is Cu."},
    {"id": "br", "title": "Brasília", "contents": "Brasília is the capital of Brazil."},
    {"id": "jp", "title": "東京", "contents": "東京都は日本の首都です。"},
    {"id": "cn", "title": "北京", "contents": "北京是中国的首都。"},
    {"id": "th", "title": "กรุงเทพ", "contents": "กรุงเทพเป็นเมืองหลวงของประเทศไทย"},
    {"id": "same1", "title": "Twin", "contents": "zebra stripes"},
    {"id": "same2", "title": "Twin", "contents": "zebra stripes"},
]


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus.jsonl", ROWS)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("symbol of copper", "cu"),
        ("COPPER", "cu"),
        ("brasilia", "br"),
        ("capital Brazil", "br"),
        ("日本の首都", "jp"),
        ("中国", "cn"),
        ("北京", "cn"),
        ("ＣＯＰＰＥＲ", "cu"),
        ("เมืองหลวง", "th"),
    ],
)
def test_documents_are_found_in_every_script(corpus, tmp_path, query, first):
    assert Searcher(corpus, cache=str(tmp_path / "cache")).search(query, 1)[0].document.id == first


def test_equal_documents_come_in_the_corpus_order_and_unknown_words_find_nothing(corpus, tmp_path):
    searcher = Searcher(corpus, cache=str(tmp_path / "cache"))
    hits = searcher.search("zebra", 5)
    assert [hit.document.id for hit in hits] == ["same1", "same2"] and hits[0].score == hits[1].score > 0
    assert [hit.document.id for hit in searcher.search("zebra", 1)] == ["same1"]
    assert searcher.search("xyzzy", 5) == [] and searcher.search("?!", 5) == []
    assert searcher.find("cu").title == "Copper" and searcher.find("none") is None


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_best_are_those_of_a_plain_sort(scores, top_k):
    wanted = sorted(((i, s) for i, s in enumerate(scores) if s > 0), key=lambda pair: (-pair[1], pair[0]))[:top_k]
    assert best_of(np.asarray(scores, np.float32), top_k) == [(i, float(s)) for i, s in wanted]


def test_bm25_is_the_formula(tmp_path):
    """Lucene's BM25 in a few lines of its own."""
    texts = ["apple pear apple", "pear plum", "plum plum plum fig fig"]
    corpus = write(tmp_path / "c.jsonl", [{"id": i, "contents": text} for i, text in enumerate(texts)])
    found = {hit.document.id: hit.score for hit in Searcher(corpus, cache=str(tmp_path / "cache")).search("apple plum", 3)}
    split = [text.split() for text in texts]
    mean = sum(map(len, split)) / 3
    for i, words in enumerate(split):
        score = 0.0
        for word in ("apple", "plum"):
            having = sum(word in other for other in split)
            idf = np.log(1 + (3 - having + 0.5) / (having + 0.5))
            tf = words.count(word)
            score += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        assert found[str(i)] == pytest.approx(score, rel=1e-5)


@pytest.mark.long
@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_words_of_any_text_can_be_searched_for(text):
    words = words_of(text)
    assert all(word and not word.isspace() for word in words)
    assert set(words_of(text, query=True)) <= set(words)


def test_the_index_is_built_once_and_nothing_in_it_is_a_pickle(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    Searcher(corpus, cache=str(cache))
    (folder,) = cache.iterdir()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    Searcher(corpus, cache=str(cache)).search("copper", 1)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    monkeypatch.undo()
    for file in folder.rglob("*.npy"):
        np.load(file, allow_pickle=False)
    write(Path(corpus), ROWS[:2])
    assert len(Searcher(corpus, cache=str(cache)).documents) == 2 and len(list(cache.iterdir())) == 2


def test_a_damaged_index_is_built_again(corpus, tmp_path):
    cache = tmp_path / "cache"
    Searcher(corpus, cache=str(cache))
    (folder,) = cache.iterdir()
    (folder / "ends.npy").write_bytes(b"torn")
    assert Searcher(corpus, cache=str(cache)).search("copper", 1)[0].document.id == "cu"
    (folder / WHOLE).unlink()
    assert Searcher(corpus, cache=str(cache)).search("copper", 1)[0].document.id == "cu"
    assert list(cache.iterdir()) == [folder]


def _build(folder: str, barrier, results) -> None:
    def build(draft: Path) -> None:
        barrier.wait(30)  # both have found nothing, and both build
        (draft / "file").write_text("same")

    made_once(Path(folder), build)
    results.put((Path(folder) / "file").read_text())


def test_two_processes_build_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    jobs = [context.Process(target=_build, args=(str(tmp_path / "index"), barrier, results)) for _ in range(2)]
    for job in jobs:
        job.start()
    assert [results.get(timeout=60) for _ in jobs] == ["same", "same"]
    for job in jobs:
        job.join(30)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1, "contents": "a"}, {"id": "1", "contents": "b"}], r"corpus.jsonl:2: the id '1' is a second"),
        ([{"id": 1, "text": "a"}], r"corpus.jsonl:1: a document needs a text `contents`; this row has id, text"),
        ([{"id": 1, "contents": " "}], "needs a text `contents`"),
        ([{"id": [1], "contents": "a"}], "the `id` of a document"),
        ([], "holds no document"),
    ],
)
def test_a_wrong_corpus_is_told_with_its_place(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        list(read_corpus(write(tmp_path / "corpus.jsonl", rows)))


def test_a_folder_of_texts_is_a_corpus(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.md").write_text("# One\nabout lions")
    (tmp_path / "two.txt").write_text("about tigers")
    found = list(read_corpus(str(tmp_path)))
    assert [(each.id, each.title) for each in found] == [("a/one.md", "One"), ("two.txt", "about tigers")]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b.txt is not UTF-8"):
        list(read_corpus(str(tmp_path)))


def counts(texts):
    """An encoder of a few letters."""
    return np.asarray([[text.lower().count(letter) + 0.01 for letter in "abcdez"] for text in texts], np.float64)


def test_dense_and_hybrid_search(corpus, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    given = {"model": str(tmp_path / "model"), "cache": str(tmp_path / "cache"), "encode": counts}
    dense = Searcher(corpus, "dense", **given)
    titled = [row["contents"] if row["contents"].startswith(row["title"]) else f"{row['title']}\n{row['contents']}" for row in ROWS]
    vectors = counts(titled)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    (query,) = counts(["zebra"])
    wanted = np.lexsort((range(len(ROWS)), -np.round(vectors @ query / np.linalg.norm(query), 6)))
    assert [hit.document.id for hit in dense.search("zebra", 4)] == [ROWS[i]["id"] for i in wanted[:4]]
    hybrid = Searcher(corpus, "hybrid", **given)
    assert {hit.document.id for hit in hybrid.search("zebra", 2)} == {"same1", "same2"}


def test_fusion_adds_reciprocal_ranks():
    assert fuse([[(4, 9.0), (2, 1.0)], [(2, 0.5), (7, 0.1)]]) == [(2, 1 / 62 + 1 / 61), (4, 1 / 61), (7, 1 / 62)]
