"""Pages over HTTP from servers that mean harm: nothing is opened that was not checked, and nothing is unbounded."""

import gzip
import socket
import ssl
import time
import tracemalloc
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.env.browse.loopback import Loopback, fetcher, leads_to, page
from whet.env.browse.address import AddressRefused, Egress
from whet.env.browse.fetch import BLOCK_BYTES, Fetcher, FetchFailed, Network

GOOD = {"example.org": [["127.0.0.1"]]}


@pytest.fixture
def server():
    made = Loopback({"/": page(b"<p>Hello</p>")})
    yield made
    made.close()


def get(server, path="/", names=None, seen=None, **limits):
    made = fetcher(server.port, {**GOOD, **(names or {})}, **limits)
    return made.get(f"http://example.org:{server.port}{path}", [] if seen is None else seen)


def test_a_page_comes_with_its_kind_and_nothing_of_the_machine_is_sent(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    found = get(server)
    assert (found.body, found.kind, found.charset) == (b"<p>Hello</p>", "text/html", "utf-8")
    lines = server.asked[0].decode().split("\r\n")
    assert lines[:2] == ["GET / HTTP/1.1", f"Host: example.org:{server.port}"]
    assert {line.split(":")[0] for line in lines[1:] if line} == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}


def test_no_cookie_goes_back(server):
    server.answers |= {"/a": page(b"", "Location: /", "Set-Cookie: secret=1; Path=/", status="302 Found")}
    get(server, "/a")
    assert b"cookie" not in server.asked[1].lower() and b"referer" not in server.asked[1].lower()


def test_the_name_is_resolved_once_and_the_checked_address_is_connected_to(server, monkeypatch):
    """DNS rebinding: a second look at the name would see another address."""
    connected = []
    plain = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: (connected.append(address), plain(self, address))[1])
    names = {"example.org": [["127.0.0.1"], ["10.0.0.1"]]}
    found = fetcher(server.port, names)
    assert found.get(f"http://example.org:{server.port}/", []).body == b"<p>Hello</p>"
    assert connected == [("127.0.0.1", server.port)] and names == {"example.org": [["10.0.0.1"]]}
    with pytest.raises(AddressRefused, match=r"leads to 10.0.0.1"):
        found.get(f"http://example.org:{server.port}/", [])
    assert len(server.asked) == 1


@pytest.mark.parametrize("bad", ["10.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1"])
def test_one_private_address_among_several_refuses_the_name(server, bad):
    with pytest.raises(AddressRefused):
        get(server, names={"example.org": [["127.0.0.1", bad]]})
    assert not server.asked


def test_the_next_address_is_tried_where_one_does_not_answer(server):
    assert get(server, names={"example.org": [["127.0.0.2", "127.0.0.1"]]}).body


PLACES = [
    "http://10.0.0.1/", "http://localhost/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://2130706433/", "http://0x7f000001/",
    "//169.254.169.254/latest/meta-data/", "http://user@example.org/", "file:///etc/passwd", "ftp://example.org/", "gopher://example.org/",
    "http://private.example/", "http://example.org:22/",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_redirects_are_checked_like_any_url(server, place):
    server.answers["/go"] = leads_to(place)
    names = {"private.example": [["192.168.0.1"]], "localhost": [["::1"]], "10.0.0.1": [["10.0.0.1"]], "::1": [["::1"]]}
    names |= {"::ffff:7f00:1": [["::ffff:7f00:1"]], "169.254.169.254": [["169.254.169.254"]]}
    seen = []
    with pytest.raises(AddressRefused):
        get(server, "/go", names, seen)
    assert len(server.asked) == 1 and len(seen) == 2  # where it led is recorded


def test_a_real_resolver_refuses_the_names_of_this_machine():
    with pytest.raises(AddressRefused, match="which is no public address"):
        Fetcher(Egress(("*",)), 1000, 5.0, Network()).get("http://localhost/", [])


def test_redirects_end(server):
    server.answers |= {"/a": leads_to("/b"), "/b": leads_to("/a"), "/none": page(b"", status="302 Found")}
    with pytest.raises(FetchFailed, match="more than 5 redirects"):
        get(server, "/a")
    assert len(server.asked) == 6
    with pytest.raises(FetchFailed, match="without saying where"):
        get(server, "/none")


def test_relative_redirects_are_followed_and_all_urls_are_named(server):
    server.answers["/x/a"] = leads_to("../")
    found = get(server, "/x/a")
    assert found.urls == (f"http://example.org:{server.port}/x/a", f"http://example.org:{server.port}/")


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda data: zlib.compress(data)[2:-4]])
def test_compressed_pages_are_read(server, pack):
    body = b"<p>text</p>" * 1000
    encoding = "gzip" if pack is gzip.compress else "deflate"
    server.answers["/z"] = page(pack(body), f"Content-Encoding: {encoding}")
    assert get(server, "/z").body == body


def test_a_bomb_is_never_unpacked(server):
    bomb = zlib.compressobj(9, wbits=31)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(256)) + bomb.flush()
    server.answers["/bomb"] = page(data, "Content-Encoding: gzip")
    tracemalloc.start()
    with pytest.raises(FetchFailed, match="more than 1000000 bytes"):
        get(server, "/bomb", max_bytes=1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 8_000_000 + 4 * BLOCK_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x" * 300])
def test_other_compressions_are_refused(server, encoding):
    server.answers["/e"] = page(b"x", f"Content-Encoding: {encoding}")
    with pytest.raises(FetchFailed, match="which it was not asked for"):
        get(server, "/e")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (page(b"x" * 200_000), "more than 100000 bytes"),
        (page(b"short", "Content-Length: 50"), "before its announced length|IncompleteRead"),
        (page(b"x" * 10, "Content-Length: 99999999999999999999"), "before its announced length|OverflowError|IncompleteRead"),
        (page(gzip.compress(b"x" * 5000, mtime=0)[:20], "Content-Encoding: gzip"), "in the middle of its compressed data"),
        (page(b"not gzip", "Content-Encoding: gzip"), "incorrect header"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\nx", "IncompleteRead|ended"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "."),
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n", "more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "more than 65536 bytes"),
        (b"HTTP/1.1 " + b"9" * 100_000, "LineTooLong"),
        (b"garbage\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
        (page(b"", status="404 Not Found"), "answered 404 Not Found"),
        (page(b"", status="500 Oops"), "answered 500"),
        (page(b"", status="206 Partial"), "answered 206"),
    ],
)  # fmt: skip
def test_odd_answers_are_told_and_bounded(server, answer, words):
    server.answers["/odd"] = answer
    with pytest.raises(FetchFailed, match=words):
        get(server, "/odd")


def drip(server, data: bytes, first: bytes = b""):
    def write(line):
        line.sendall(first)
        while not server.stopped.wait(0.02):
            line.sendall(data)

    return write


@pytest.mark.parametrize(
    ("first", "data"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"", mtime=0)[:10], b"\x00\x00\x00\xff\xff"),
    ],
)  # fmt: skip
def test_a_server_that_drips_is_cut_at_the_deadline(server, first, data):
    server.answers["/drip"] = drip(server, data, first)
    began = time.monotonic()
    with pytest.raises(FetchFailed, match="did not answer in time"):
        get(server, "/drip", timeout_s=0.5)
    assert time.monotonic() - began < 10


def test_a_deadline_is_of_all_redirects(server):
    server.answers |= {"/a": leads_to("/drip"), "/drip": drip(server, b"H")}
    with pytest.raises(FetchFailed, match="in time"):
        get(server, "/a", timeout_s=0.5)
    with pytest.raises(FetchFailed, match="is not known"):
        Fetcher(Egress(("*",)), 10, 1.0, Network(resolve=_unknown)).get("http://example.org/", [])


def _unknown(host, port):
    raise socket.gaierror(-2, "unknown")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of example.org that signs itself."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "example.org")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=2))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("example.org")]), False)
    made = made.add_extension(x509.BasicConstraints(True, 0), True)
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(key.private_bytes(*form) + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_tls_asks_for_the_name_and_checks_its_certificate(certificate):
    asked = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda line, name, _: asked.append(name)
    server = Loopback({"/": page(b"over TLS"), "/down": leads_to("http://example.org/")}, context)
    try:
        names = {host: [["127.0.0.1"]] for host in ("example.org", "other.org")}
        plain = fetcher(server.port, names)
        trusting = replace(plain, network=replace(plain.network, tls=ssl.create_default_context(cafile=str(certificate))))
        assert trusting.get(f"https://example.org:{server.port}/", []).body == b"over TLS" and asked == ["example.org"]
        with pytest.raises(AddressRefused, match="from https to http"):
            trusting.get(f"https://example.org:{server.port}/down", [])
        for untrusted, host in ((trusting, "other.org"), (plain, "example.org")):
            with pytest.raises(FetchFailed, match="CERTIFICATE_VERIFY_FAILED"):
                untrusted.get(f"https://{host}:{server.port}/", [])
    finally:
        server.close()
