"""The lots of tests: what `make test` leaves to `make test-rest` is marked `long`."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def long_after(num: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of `parametrize`, of which all after the first `num` are marked `long`. A case that has marks keeps them."""
    out: list[Any] = []
    for i, case in enumerate(cases):
        if i < num:
            out.append(case)
        elif isinstance(case, ParameterSet):
            out.append(pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id))
        else:
            out.append(pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long))
    return out
