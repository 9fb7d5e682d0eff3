"""The tool `search`, with a corpus and with servers that answer, fail and vanish."""

import asyncio
import json

import pytest

pytest.importorskip("bm25s")

from aiohttp import web

from whet.env.resources import Resources
from whet.env.search import tool as search_tool
from whet.env.search.client import RetrieverClient, RetrieverFailed, check_url, hits_of
from whet.env.tool_sets import build_tools
from whet.env.tools import ToolArgumentError

ROWS = [
    {"id": "cu", "title": "Copper", "contents": "The symbol is Cu. " + "x" * 50},
    {"id": "zn", "title": "Zinc", "contents": "Zinc: symbol Zn."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"name": "search", "corpus": str(path), "cache": str(tmp_path / "cache")}


async def called(entry, query):
    (tool,) = build_tools(entry)
    resources = Resources()
    try:
        return await tool.bound(await resources.open(tool.needs))({"query": query}, 30.0)
    finally:
        await resources.aclose()


def test_passages_come_as_text_and_the_query_is_recorded(corpus):
    result = asyncio.run(called({**corpus, "top_k": 2, "max_chars": 20}, "symbol copper"))
    assert result.content == "[1] (corpus:cu) Copper\nThe symbol is Cu. xx ...\n\n[2] (corpus:zn) Zinc: symbol Zn."
    assert result.metrics == {"search_results": 2}
    assert result.attachments["query"] == "symbol copper" and [each["id"] for each in result.attachments["documents"]] == ["cu", "zn"]


def test_nothing_found_is_said_and_an_empty_query_is_the_models_mistake(corpus):
    assert asyncio.run(called(corpus, "xyzzy")).content == "No passage was found."
    for query in (" ", "x" * 3000):
        with pytest.raises(ToolArgumentError):
            asyncio.run(called(corpus, query))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a corpus .* or the url"),
        ({"corpus": "a.jsonl", "url": "http://x/retrieve"}, "one of the two"),
        ({"corpus": "nowhere.jsonl"}, "there is no data file"),
        ({"url": "ftp://x"}, "is not the address of a retriever"),
        ({"url": "http://a:b@x/"}, "holds no password"),
        ({"url": "http://x/", "ranking": "dense"}, "belong to a corpus"),
        ({"url": "http://x/", "top_k": 0}, "top_k of 1 to 100"),
        ({"url": "http://x/", "api_key_env": "WHET_NO_SUCH_KEY"}, "WHET_NO_SUCH_KEY is not set"),
    ],
)
def test_wrong_options_are_told(options, words):
    with pytest.raises(ValueError, match=words):
        build_tools({"name": "search", **options})
    check_url("http://127.0.0.1:8000/retrieve")


def serve(answers, run):
    """Run `run(url)` against a server that gives the answers one after the other, the last for ever."""
    asked = []

    async def answer(request):
        asked.append(await request.json())
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(status=status, text=body)

    async def main():
        app = web.Application()
        app.router.add_post("/retrieve", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await run(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/retrieve")
        finally:
            await runner.cleanup()

    return asyncio.run(main()), asked


def ask(timeout_s=20.0):
    async def run(url):
        client = RetrieverClient(url, timeout_s)
        try:
            return await client.search("q", 2)
        finally:
            await client.close()

    return run


GOOD = (200, json.dumps({"result": [[{"document": {"id": 7, "contents": '"Title"\ntext'}, "score": 1.5}]]}))


def test_search_r1s_protocol_is_spoken_and_a_busy_server_is_asked_again():
    hits, asked = serve([(503, "busy"), GOOD], ask())
    assert asked == [{"queries": ["q"], "topk": 2, "return_scores": True}] * 2
    assert [(hit.document.id, hit.document.title, hit.score) for hit in hits] == [("7", "Title", 1.5)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "no"), "answered 404: 'no'"),
        ((401, "key"), "answered 401"),
        ((200, "<html>"), "not Search-R1's protocol"),
        ((200, "{}"), "no list `result`"),
        ((200, '{"result": []}'), "no list `result` of one list"),
        ((200, '{"result": [[{"document": {"id": 1}}]]}'), "no text `contents`"),
        ((200, "[" * 100000), "not Search-R1's protocol"),
    ],
)
def test_an_unusable_answer_is_an_error_at_once(answer, words):
    with pytest.raises(RetrieverFailed, match=words):
        serve([answer], ask())


def test_a_server_that_is_gone_is_an_error_and_no_empty_result():
    with pytest.raises(RetrieverFailed, match=r"cannot be reached: .*\(attempt \d+, within 0.6 s\)"):
        asyncio.run(ask(0.6)("http://127.0.0.1:1/retrieve"))
    with pytest.raises(RetrieverFailed, match=r"answered 500.*attempt"):
        serve([(500, "broken")], ask(0.6))


def test_a_server_that_is_gone_is_an_error_of_the_environment(monkeypatch):
    monkeypatch.setattr(search_tool, "DEADLINE_S", 0.5)
    with pytest.raises(RetrieverFailed):
        asyncio.run(called({"name": "search", "url": "http://127.0.0.1:1/retrieve"}, "q"))


def test_documents_without_scores_are_read():
    assert hits_of({"result": [[{"id": "a", "contents": "x"}]]})[0].document.id == "a"
