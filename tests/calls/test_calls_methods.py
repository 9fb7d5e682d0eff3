"""Another process may call the methods of an object's interface, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import pytest

from whet.calls.messages import RemoteCall
from whet.calls.methods import MethodKind, RefusedCall, Target, invoke, local, methods_of
from whet.train.base import Backend, Mirror


class Shop(Protocol):
    @property
    def name(self) -> str: ...
    def price(self, what: str, *, count: int = 1) -> int: ...
    def goods(self) -> Iterable[str]: ...
    def order(self) -> Callable[[], None]: ...
    @local
    def open(self) -> None: ...


class Corner:
    name = "corner"

    def price(self, what, *, count=1):
        return len(what) * count

    def goods(self):
        yield from ("bread", "milk")

    def order(self):
        return lambda: None

    def open(self):
        raise AssertionError("it is not offered")

    def burn(self):
        raise AssertionError("it is not offered")


SHOP = {"shop": Target(Corner(), Shop)}


def test_methods_are_those_of_the_protocol_by_kind():
    assert methods_of(Shop) == {"price": MethodKind.VALUE, "goods": MethodKind.STREAM, "order": MethodKind.DEFERRED}
    assert invoke(SHOP, RemoteCall("shop", "price", ("tea",), {"count": 2})) == (MethodKind.VALUE, 6)
    assert list(invoke(SHOP, RemoteCall("shop", "goods"))[1]) == ["bread", "milk"]


@pytest.mark.parametrize("method", ["open", "burn", "name", "_abc_impl", "__init__", "__class__", "price.__globals__"])
def test_nothing_else_is_called(method):
    with pytest.raises(RefusedCall, match=r"called shop\..*not offered"):
        invoke(SHOP, RemoteCall("shop", method))
    with pytest.raises(RefusedCall):
        invoke(SHOP, RemoteCall("bank", "price", ("tea",)))


def test_the_calls_of_a_job_are_those_that_take_all_ranks():
    kinds = methods_of(Backend)
    streams = {name for name, kind in kinds.items() if kind is MethodKind.STREAM}
    assert streams == {"named_weights", "named_state"} and kinds["stage"] is MethodKind.DEFERRED
    values = {"annotate", "forward_backward", "optim_step", "export", "export_merged", "save", "load", "release_memory"}
    assert kinds.keys() == {*values, *streams, "stage"}
    assert methods_of(Mirror).keys() == {*kinds, "copy_weights"}
