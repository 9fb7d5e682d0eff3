"""The tool `browse`: text with citations, hostile pages, the cache, and what is recorded."""

import io
import json

import pytest

from tests.env.browse.loopback import Loopback, fetcher, page
from whet.env.browse.cache import PageCache
from whet.env.browse.extract import Extractor, Text, Unreadable
from whet.env.browse.tool import Browser, Sources, browse, browse_with, show, split
from whet.env.tool_sets import build_tools

pytest.importorskip("trafilatura")
pypdf = pytest.importorskip("pypdf")

ARTICLE = """<html><head><title>On  copper</title><style>p {}</style></head><body><nav>Home | About</nav><article><h1>Copper</h1>
<p>Copper is a metal that conducts electricity well and has been used for thousands of years by people everywhere.</p>
<p>Its symbol is Cu\u202e, and its atomic number is twenty-nine, which comes after nickel and before zinc.</p>
<script>steal()</script></article></body></html>"""


@pytest.fixture(scope="module")
def extractor():
    made = Extractor()
    yield made
    made.close()


@pytest.fixture
def server():
    made = Loopback({"/": page(ARTICLE.encode())})
    yield made
    made.close()


def browser(server, extractor, **options):
    given = {"cache": None, "offline": False, "page_chars": 1000, **options}
    return Browser(fetcher(server.port, {"example.org": [["127.0.0.1"]]}), extractor=extractor, **given)


def call(made, url, part=1, sources=None):
    tool = browse_with(made, None)
    return tool(url, part, browser=made, sources=sources or Sources())


def pdf_of(*texts: str) -> bytes:
    """A PDF with a line on each page."""
    writer = pypdf.PdfWriter()
    writer.add_metadata({"/Title": "A report"})
    for text in texts:
        made = writer.add_blank_page(300, 300)
        font = pypdf.generic.DictionaryObject({
            pypdf.generic.NameObject("/Type"): pypdf.generic.NameObject("/Font"),
            pypdf.generic.NameObject("/Subtype"): pypdf.generic.NameObject("/Type1"),
            pypdf.generic.NameObject("/BaseFont"): pypdf.generic.NameObject("/Helvetica"),
        })  # fmt: skip
        fonts = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/F1"): font})
        made[pypdf.generic.NameObject("/Resources")] = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/Font"): fonts})
        stream = pypdf.generic.DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        made[pypdf.generic.NameObject("/Contents")] = writer._add_object(stream)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_a_page_is_shown_with_what_a_citation_needs(server, extractor):
    url = f"http://example.org:{server.port}/"
    result = call(browser(server, extractor), url)
    assert result.content.startswith(f"[1] On copper\nURL: {url}\nPart 1 of 1.")
    assert "Its symbol is Cu, and" in result.content and "[¶ " in result.content
    assert "steal" not in result.content and "Home | About" not in result.content
    assert result.attachments == {"url": url, "urls": [url], "part": 1}


def test_sources_are_numbered_in_their_order(server, extractor):
    server.answers["/b"] = page(b"Plain words.\n\nMore of them.", kind="text/plain")
    made, sources = browser(server, extractor), Sources()
    heads = [call(made, f"http://example.org:{server.port}{path}", sources=sources).content[:3] for path in ("/", "/b", "/")]
    assert heads == ["[1]", "[2]", "[1]"]


def test_a_pdf_has_its_pages_as_places(server, extractor):
    server.answers["/r.pdf"] = page(pdf_of("First words", "Second words"), kind="application/octet-stream")
    shown = call(browser(server, extractor), f"http://example.org:{server.port}/r.pdf").content
    assert "[1] A report" in shown and "[p. 1] First words" in shown and "[p. 2] Second words" in shown


def test_a_long_page_has_parts():
    text = Text("T", tuple((f"¶ {i}", "word " * 30) for i in range(20)))
    pieces = split(text, 500)
    assert all(len(piece) <= 500 for piece in pieces)
    assert "".join(pieces).count("word") == 600
    shown = [show(text, "http://x/", i + 1, 1, 500) for i in range(len(pieces))]
    assert f"Part 1 of {len(pieces)}" in shown[0] and "More in part 2" in shown[0] and "More in part" not in shown[-1]
    for part in (0, -1, len(pieces) + 1):
        with pytest.raises(Unreadable, match=f"the page has {len(pieces)}"):
            show(text, "http://x/", part, 1, 500)


@pytest.mark.parametrize("url", ["http://10.0.0.1/", "http://2130706433/", "file:///etc/passwd", "http://user:p@example.org/"])
def test_what_is_refused_is_an_answer_and_is_recorded(server, extractor, url):
    result = call(browser(server, extractor), url)
    assert result.content.startswith("Error: ") and result.metrics == {"browse_refused": 1.0}
    assert result.attachments["url"] == url and "error" in result.attachments


def test_a_missing_page_is_an_answer(server, extractor):
    server.answers["/404"] = page(b"", status="404 Not Found")
    server.answers["/image"] = page(b"\x89PNG", kind="image/png")
    for path, words in (("/404", "answered 404"), ("/image", "'image/png'; HTML, PDF and text")):
        result = call(browser(server, extractor), f"http://example.org:{server.port}{path}")
        assert words in result.content and result.metrics == {"browse_failed": 1.0}


def test_hostile_pages_are_answers_and_the_next_page_is_read():
    small = Extractor(cpu_limit_s=2.0)
    try:
        deep = b"<div>" * 200_000 + b"deep"
        nested = b"%PDF-1.7\n" + b"<<" * 100_000
        pages = ((deep, "text/html"), (nested, "application/pdf"), (b"", "text/html"), (b"\0" * 99, "text/html"))
        for body, kind in pages:
            try:
                assert small.read(body, kind, "no-such-charset").parts
            except Unreadable as error:
                assert str(error)
        with pytest.raises(Unreadable, match=r"PDF cannot be read"):
            small.read(pdf_bomb(), "application/pdf", "")
        assert small.read(ARTICLE.encode(), "text/html", "rot13").title == "On copper"
    finally:
        small.close()


def pdf_bomb() -> bytes:
    """A page whose contents are 640 MB of zeros, packed twice."""
    import zlib

    pack = zlib.compressobj(9)
    once = b"".join(pack.compress(bytes(1 << 22)) for _ in range(160)) + pack.flush()
    data = zlib.compress(once, 9)
    head = f"<< /Length {len(data)} /Filter [/FlateDecode /FlateDecode] >>".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
        head + b"\nstream\n" + data + b"\nendstream",
    ]
    out = b"%PDF-1.7\n"
    for number, each in enumerate(objects, 1):
        out += b"%d 0 obj\n" % number + each + b"\nendobj\n"
    return out + b"trailer << /Root 1 0 R /Size 5 >>\n%%EOF"


def test_a_reader_that_dies_is_an_answer(extractor, monkeypatch):
    made = Extractor()
    made.read(ARTICLE.encode(), "text/html", "")
    made._idle[0].process.kill()
    with pytest.raises(Unreadable, match="the reader died of it"):
        made.read(ARTICLE.encode(), "text/html", "")
    assert made.read(ARTICLE.encode(), "text/html", "").title == "On copper"
    made.close()


def test_a_run_is_repeated_without_a_network(server, extractor, tmp_path):
    url, gone = f"http://example.org:{server.port}/", f"http://example.org:{server.port}/gone"
    server.answers["/gone"] = page(b"", status="503 Busy")
    cache = PageCache(tmp_path / "pages")
    first = [call(browser(server, extractor, cache=cache), each) for each in (url, gone)]
    server.close()
    again = [call(browser(server, extractor, cache=cache, offline=True), each) for each in (url, gone)]
    assert [each.content for each in again] == [each.content for each in first]
    missing = call(browser(server, extractor, cache=cache, offline=True), url + "other")
    assert "is not in the cache" in missing.content
    assert not list(tmp_path.rglob(".*"))
    refused = call(browser(server, extractor, cache=cache, offline=True), url.replace(f":{server.port}", ":22"))
    assert refused.metrics == {"browse_refused": 1.0}


def test_a_passing_error_is_tried_again_and_a_damaged_page_too(server, extractor, tmp_path):
    cache = PageCache(tmp_path / "pages")
    url = f"http://example.org:{server.port}/"
    good, server.answers["/"] = server.answers["/"], page(b"", status="503 Busy")
    assert "answered 503" in call(browser(server, extractor, cache=cache), url).content
    server.answers["/"] = good
    assert "On copper" in call(browser(server, extractor, cache=cache), url).content
    call(browser(server, extractor, cache=cache), url)
    assert len(server.asked) == 2  # the third is the cache's
    (blob,) = [path for path in (tmp_path / "pages/pages").rglob("*") if path.is_file()]
    blob.write_bytes(b"other")
    assert "On copper" in call(browser(server, extractor, cache=cache), url).content and len(server.asked) == 3


def test_a_document_of_the_corpus_is_a_page(server, extractor, tmp_path):
    pytest.importorskip("bm25s")
    from whet.env.search.searcher import Searcher

    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "cu", "title": "Copper", "contents": "Its symbol is Cu.\n\nIt is red."}) + "\n")
    made = browser(server, extractor, corpus=Searcher(str(path), cache=str(tmp_path / "cache")))
    assert "[1] Copper\nURL: corpus:cu" in call(made, "corpus:cu").content
    assert "[¶ 2] It is red." in call(made, "corpus:cu").content
    assert "no document 'xx'" in call(made, "corpus:xx").content
    assert "there is no corpus" in call(browser(server, extractor), "corpus:cu").content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "browse opens nothing"),
        ({"allow": ["http://x"]}, "is no host"),
        ({"allow": ["x.org"], "offline": True}, "name its folder in cache"),
        ({"allow": ["x.org"], "ports": [0]}, "are not ports"),
        ({"allow": ["x.org"], "page_chars": 3}, "page_chars of at least"),
        ({"corpus": "nowhere.jsonl"}, "there is no data file"),
    ],
)
def test_wrong_options_are_told(options, words):
    with pytest.raises(ValueError, match=words):
        browse(**options)


def test_it_is_a_tool_by_name():
    (tool,) = build_tools({"name": "browse", "allow": ["example.org"]})
    assert tool.name == "browse" and set(tool.schema["function"]["parameters"]["properties"]) == {"url", "part"}
    assert {name: need.level for name, need in tool.needs.items()} == {"browser": 0, "sources": 2}
