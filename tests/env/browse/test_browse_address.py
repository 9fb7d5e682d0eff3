"""Addresses that no page may lead to, in every spelling."""

import ipaddress
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.env.browse.address import AddressRefused, Egress, check_addresses, is_public, read_url

ANY = Egress(("*",), tuple(range(1, 65536)))

PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254",
    "172.16.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.9", "224.0.0.1",
    "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1",
    "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1",
    "fe80::1%eth0", "fec0::1", "ff02::1", "2606:4700::5efe:7f00:1", "2606:4700:0:0:200:5efe:a00:1", "2606:4700::1%lo",
    "localhost", "", "8.8.8.8 ", "0x7f.1", "127.1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450:4001:829::200e"]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public(address):
    assert not is_public(address)
    with pytest.raises(AddressRefused):
        check_addresses("example.org", ["1.1.1.1", address])  # one that is not public refuses the name


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_that_is_public(address):
    assert is_public(address)
    check_addresses("example.org", [address])


def test_a_name_without_addresses_is_refused():
    with pytest.raises(AddressRefused, match="has no address"):
        check_addresses("example.org", [])


@given(st.ip_addresses(v=4))
@settings(max_examples=300, deadline=None)
def test_an_ipv4_address_within_any_ipv6_address_is_refused(address):
    number = int(address)
    for prefix in ("::ffff:0:0", "::", "64:ff9b::", "64:ff9b:1::"):
        assert not is_public(str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | number)))
    assert not is_public(str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80) | 1)))  # 6to4
    assert not is_public(str(ipaddress.IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF))))  # Teredo
    assert not is_public(str(ipaddress.IPv6Address((0x2606 << 112) | (0x5EFE << 32) | number)))  # ISATAP


NUMBERS = st.integers(0, 255)
DIGITS = [str, hex, lambda n: f"0{n:o}", lambda n: f"0x{n:08X}", lambda n: f"{n:03d}"]


FOUR = {"min_size": 4, "max_size": 4}


@given(st.lists(NUMBERS, **FOUR), st.lists(st.sampled_from(DIGITS), **FOUR), st.integers(1, 4), st.booleans())
@settings(max_examples=400, deadline=None)
def test_no_spelling_of_an_ipv4_address_is_read_as_another(parts, digits, num_parts, dot):
    """What the C library would take for an address is refused, or read as the same address."""
    rest = int.from_bytes(bytes(parts[num_parts - 1 :]))
    host = ".".join(form(number) for form, number in zip(digits, [*parts[: num_parts - 1], rest], strict=False)) + "." * dot
    try:
        read = read_url(f"http://{host}/").host
    except AddressRefused:
        return
    assert socket.inet_aton(read) == socket.inet_aton(host.rstrip(".")) and str(ipaddress.IPv4Address(read)) == read


TRICKS = [
    "http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://127.1/", "http://127.0.1/", "http://0/", "http://0x7f.1/",
    "http://127.0.0.1.:80/x@", "http://127.0.0.01/", "http://0177.0.0.1/", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://08.0.0.1/",
    "http://①②⑦.⓪.⓪.①/", "http://１２７.0.0.1/", "http://127。0。0。1/", "http://localhost。/", "http://ⓛocalhost/", "http://ex\u00adample.org/",
    "http://user@example.org/", "http://user:pass@example.org/", "http://example.org@127.0.0.1/", "http://127.0.0.1\\@example.org/",
    "http://example.org\\.evil.org/", "http://example.org%2f@127.0.0.1/", "http://127.0.0.1%00.example.org/", "http://%31%32%37.0.0.1/",
    "http://example.org /", " http://example.org/", "http://example.org/\r\nHost: x", "http://exam\tple.org/", "http://example.org:0x50/",
    "http://example.org:99999/", "http://example.org:-1/", "http://[::1%25lo]/", "http://[::1]x/", "http://[127.0.0.1]/", "http://[v1.x]/",
    "http://[::ffff:127.0.0.1/", "http://::1/", "http:///path", "http:example.org", "//example.org/", "example.org", "", "http://",
    "ftp://example.org/", "file:///etc/passwd", "gopher://127.0.0.1:6379/_x", "data:text/html,x", "javascript:alert(1)", "dict://x/",
    "HTTP+UNIX://x/", "http://..example.org/", "http://example..org/", "http://-example.org/", "http://exam!ple.org/",
    "http://" + "a" * 64 + ".org/", "http://" + "a." * 130 + "org/", "http://example.org/" + "a" * 2048, "http://example.0x7f/",
]  # fmt: skip


@pytest.mark.parametrize("url", TRICKS)
def test_a_url_that_hides_where_it_leads_is_refused(url):
    if url.startswith("http://127.0.0.1.:80"):
        assert not is_public(ANY.target(url).host)  # one dot at the end is read away
        return
    with pytest.raises(AddressRefused):
        ANY.target(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "sent"),
    [
        ("http://Example.ORG", "example.org", 80, "/"),
        ("https://example.org./a b".replace(" ", "%20"), "example.org", 443, "/a%20b"),
        ("https://example.org:8443/x?q=1&r=%2F#frag", "example.org", 8443, "/x?q=1&r=%2F"),
        ("http://example.org/ä?q=日", "example.org", 80, "/%C3%A4?q=%E6%97%A5"),
        ("http://8.8.8.8/", "8.8.8.8", 80, "/"),
        ("http://[2606:4700:0::1]/", "2606:4700::1", 80, "/"),
        ("http://xn--bcher-kva.example/", "xn--bcher-kva.example", 80, "/"),
        ("http://example.org/@user:x", "example.org", 80, "/@user:x"),
    ],
)
def test_a_plain_url_is_read(url, host, port, sent):
    target = ANY.target(url)
    assert (target.host, target.port, target.path) == (host, port, sent) and target.path.isascii()


def test_only_what_is_allowed_is_opened():
    egress = Egress(("example.org", "*.wikipedia.org", "8.8.8.8"), (443,))
    for host in ("example.org", "EXAMPLE.org", "en.wikipedia.org", "a.b.wikipedia.org", "8.8.8.8"):
        assert egress.target(f"https://{host}/")
    for host in ("wikipedia.org", "evilwikipedia.org", "example.org.evil.com", "evil.example.org", "1.1.1.1", "x"):
        with pytest.raises(AddressRefused, match="may not be opened"):
            egress.target(f"https://{host}/")
    with pytest.raises(AddressRefused, match="the port 80"):
        egress.target("http://example.org/")
    with pytest.raises(AddressRefused, match="hosts that may: none"):
        Egress().target("http://example.org/")


@pytest.mark.parametrize("host", ["http://example.org", "example.org/x", "*", "*.", "a*b.org", "", "**.org", "0x7f.1"])
def test_a_wrong_allow_list_is_told(host):
    if host == "*":
        assert Egress((host,))
        return
    with pytest.raises(ValueError, match="is no host"):
        Egress((host,))
