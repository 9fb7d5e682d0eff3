"""Addresses that may be opened: what a URL may say, and which machines a name may lead to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

MAX_URL_CHARS = 2048
DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NETLOC = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{0,5})?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
_REFUSED_V4 = [ipaddress.ip_network(text) for text in ("192.88.99.0/24", "168.63.129.16/32", "192.0.0.0/24")]
"""Besides what is not global: relays of 6to4, the metadata of a cloud at a public address, protocol assignments."""
_UNICAST = ipaddress.ip_network("2000::/3")
_REFUSED_V6 = [ipaddress.ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
"""In what is unicast: Teredo and other protocols, documentation, 6to4. They, and IPv4-mapped and NAT64 addresses outside of it, lead to
another address in them."""
_ISATAP = 0x5EFE


class AddressRefused(ValueError):
    """An address that is not opened. The text is the answer to the model."""


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A URL as it will be asked for."""

    scheme: str
    host: str
    """A name, or an address without brackets; in lower case, without a dot at its end."""
    port: int
    path: str
    """With the query; every character of it may be sent."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """The host as the header Host has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Egress:
    """The hosts and ports that may be opened."""

    allow: tuple[str, ...] = ()
    """Hosts: `example.org`, `*.example.org` for all below it, or `*` for every public one."""
    ports: tuple[int, ...] = (80, 443)

    def __post_init__(self) -> None:
        for host in self.allow:
            if host != "*" and not is_name(host.removeprefix("*.")) and not _is_ip(host):
                raise ValueError(f"allow: {host!r} is no host; write example.org, *.example.org, or * for every public host")
        if not all(0 < port < 65536 for port in self.ports):
            raise ValueError(f"ports: {list(self.ports)} are not ports")

    def target(self, url: str) -> WebAddress:
        """The URL taken apart.

        Raises:
            AddressRefused: it is malformed, or not among what may be opened.
        """
        target = read_url(url)
        if not any(_fits(target.host, host.lower()) for host in self.allow):
            hosts = ", ".join(self.allow) or "none"
            raise AddressRefused(f"the host {target.host} may not be opened; hosts that may: {hosts}")
        if target.port not in self.ports:
            raise AddressRefused(f"the port {target.port} may not be opened; ports that may: {', '.join(map(str, self.ports))}")
        return target


def read_url(url: str) -> WebAddress:
    """A URL taken apart, in one reading of it: what another reader could take for something else is refused.

    Raises:
        AddressRefused: it is malformed, or has a form that hides where it leads.
    """
    if len(url) > MAX_URL_CHARS:
        raise AddressRefused(f"the URL has more than {MAX_URL_CHARS} characters")
    if any(ord(character) <= 32 or ord(character) == 127 or character == "\\" for character in url):
        raise AddressRefused("the URL has spaces, control characters or a backslash in it")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressRefused(f"the URL is malformed: {error}") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise AddressRefused(f"only http:// and https:// are opened, not {url[:40]!r}")
    if "@" in parts.netloc or "%" in parts.netloc:
        raise AddressRefused("a URL may hold no user name, password or percent sign before its path")
    if not _NETLOC.fullmatch(parts.netloc):
        raise AddressRefused(f"{parts.netloc[:100]!r} is no host with a port")
    host = _host(parts.hostname or "", bracketed="[" in parts.netloc)
    port = DEFAULT_PORTS[parts.scheme] if port is None else port
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else ""
    return WebAddress(parts.scheme, host, port, path + query)


def _host(host: str, *, bracketed: bool) -> str:
    host = host.lower()
    if bracketed:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise AddressRefused(f"{host!r} is no address") from None
    if not host.isascii():
        raise AddressRefused("a host with other letters than ASCII is written in its xn-- form")
    host = host.removesuffix(".")
    last = host.rpartition(".")[2]
    if _NUMBER.fullmatch(last):  # then every reader takes it for an address, each in its own way
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError:
            raise AddressRefused(f"{host!r} is a number; write an address as four decimal numbers") from None
        return str(address)
    if not is_name(host):
        raise AddressRefused(f"{host!r} is no name of a host")
    return host


def is_name(host: str) -> bool:
    """True for the name of a host, in lower case or not."""
    labels = host.lower().split(".")
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels) and not _NUMBER.fullmatch(labels[-1])


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _fits(host: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    return allowed in ("*", host)


def is_public(address: str) -> bool:
    """True for the address of one machine in the public internet, which holds no second address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if "%" in address or not found.is_global or found.is_multicast or found.is_reserved:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in _REFUSED_V4)
    if found not in _UNICAST or any(found in network for network in _REFUSED_V6):
        return False
    return (int(found) >> 32) & 0xFFFF != _ISATAP


def check_addresses(host: str, addresses: Sequence[str], check: Callable[[str], bool] = is_public) -> None:
    """Check every address of a name: one that is not public refuses the name.

    Raises:
        AddressRefused: one is not public, or there is none.
    """
    if not addresses:
        raise AddressRefused(f"the host {host} has no address")
    refused = [address for address in addresses if not check(address)]
    if refused:
        raise AddressRefused(f"the host {host} leads to {refused[0]}, which is no public address")
