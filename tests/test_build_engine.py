"""This machine's address, as servers of several machines reach it."""

from __future__ import annotations

import socket

import pytest

from whet.build import engine
from whet.build.engine import address_of


def test_servers_of_this_machine_reach_it_by_loopback():
    assert address_of(["http://localhost:1", "http://127.0.0.1:2"]) == "127.0.0.1"


def test_a_server_elsewhere_decides_wherever_it_stands(monkeypatch):
    ways = {"http://localhost:1": "127.0.0.1", "http://far:1": "10.0.0.3", "http://farther:1": "10.1.0.3"}
    monkeypatch.setattr(engine, "_address_to", ways.__getitem__)
    assert address_of(list(ways)) == "10.0.0.3"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_server_may_have_an_address_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert address_of(["http://[::1]:8000"]) == "::1"


def test_a_host_that_nobody_knows_is_named(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"engine\.urls: there is no way to http://far:1: Name or service not known"):
        address_of(["http://far:1"])
