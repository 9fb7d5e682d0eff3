"""`whet retriever`: Search-R1's protocol, keys and bounds, over real connections."""

import asyncio
import json
import threading
from contextlib import suppress
from http.client import HTTPConnection

import pytest

pytest.importorskip("bm25s")

from whet.env.search.client import RetrieverClient
from whet.env.search.searcher import Searcher
from whet.runs.retriever import serve_corpus
from whet.serve.access import Keys
from whet.serve.retriever import Retriever, RetrieverServer
from whet.serve.server import bind

KEY = "k" * 20
ROWS = [{"id": "cu", "title": "Copper", "contents": "Copper: symbol Cu."}, {"id": "zn", "title": "Zinc", "contents": "Zinc: symbol Zn."}]


@pytest.fixture(scope="module")
def searcher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Searcher(str(folder / "c.jsonl"), cache=str(folder / "cache"))


@pytest.fixture(params=[None, KEY])
def address(searcher, request):
    """Port of a server, and the headers that open it."""
    keys, ready = Keys(api=request.param), threading.Event()
    with bind("127.0.0.1", 0, keys) as bound:
        retriever = Retriever(searcher)
        server = RetrieverServer(retriever, "127.0.0.1", keys, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        assert ready.wait(30)
        yield bound.getsockname()[1], {} if request.param is None else {"Authorization": f"Bearer {request.param}"}
        server.should_exit = True
        thread.join(30)
        retriever.close()


def post(address, body, path="/retrieve", method="POST", attempts=3, **more):
    line = HTTPConnection("127.0.0.1", address[0], timeout=30)
    data = body if isinstance(body, str) else json.dumps(body)
    try:
        with suppress(BrokenPipeError):  # an answer may come before the whole body is sent
            line.request(method, path, data, {"Content-Type": "application/json", **address[1], **more})
        answer = line.getresponse()
    except ConnectionResetError:  # and so may the end of the connection, which takes the answer with it
        if attempts == 1:
            raise
        return post(address, body, path, method, attempts - 1, **more)
    out = answer.status, json.loads(answer.read())
    line.close()
    return out


def test_search_r1s_protocol(address):
    status, answer = post(address, {"queries": ["symbol copper", "xyzzy"], "topk": 2, "return_scores": True})
    first, second = answer["result"]
    assert status == 200 and second == []
    assert [hit["document"]["id"] for hit in first] == ["cu", "zn"] and first[0]["score"] > first[1]["score"] > 0
    assert first[0]["document"]["contents"] == "Copper: symbol Cu."
    document = {"id": "zn", "contents": "Zinc: symbol Zn.", "title": "Zinc"}
    assert post(address, {"queries": ["zinc"], "topk": 1})[1] == {"result": [[document]]}
    assert post(address, "", "/health", "GET") == (200, {"status": "ok", "documents": 2})


def test_whets_client_speaks_to_it(address):
    async def ask():
        client = RetrieverClient(f"http://127.0.0.1:{address[0]}/retrieve", 20.0, address[1])
        try:
            return await client.search("zinc", 3)
        finally:
            await client.close()

    assert [hit.document.id for hit in asyncio.run(ask())] == ["zn"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "queries"),
        ({"queries": []}, 400, "queries"),
        ({"queries": ["q"] * 257}, 400, "queries"),
        ({"queries": ["q" * 2001]}, 400, "queries"),
        ({"queries": "q"}, 400, "queries"),
        ({"queries": ["q"], "topk": 101}, 400, "topk"),
        ({"queries": ["q"], "topk": 0}, 400, "topk"),
        ({"queries": ["q"], "top_k": 1}, 400, "did you mean topk"),
        ("{", 400, "JSON"),
        ("[" * 50_000, 400, ""),
        (json.dumps({"queries": ["x" * (1 << 20)]}), 413, "limit"),
    ],
)
def test_bodies_are_bounded_and_errors_name_the_field(address, body, status, words):
    found, answer = post(address, body)
    assert found == status and words in answer["error"]["message"]


def test_a_key_is_asked_for_and_web_pages_are_refused(address):
    if address[1]:
        assert post((address[0], {}), {"queries": ["q"]})[0] == 401
    else:
        assert post(address, {"queries": ["q"]}, Origin="http://evil.example")[0] == 403
    assert post(address, {}, "/nowhere")[0] == 404


def test_other_machines_need_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WHET_API_KEY", raising=False)
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ValueError, match="WHET_API_KEY"):
        serve_corpus(str(path), "0.0.0.0", 0, "bm25", None, str(tmp_path), print)
    with pytest.raises(ValueError, match="dense and hybrid search need a model"):
        serve_corpus(str(path), "127.0.0.1", 0, "dense", None, str(tmp_path), print)
