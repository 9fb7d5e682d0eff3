"""Settings of every test: property tests have no deadline, since speed is no property, and the same examples on every machine.

On a transformers that cannot cut layers or experts, whet refuses to, by name: tests that meet the refusal are skipped with it.
"""

import os
from collections.abc import Generator
from importlib.metadata import version

import pytest
from hypothesis import settings

CUTS = (5, 23)
"""The first transformers whose layers whet can cut over ranks."""
REFUSAL = "cutting layers or experts needs transformers 5.23 or newer"

STARTED_IN = os.getcwd()

pytest_plugins = ["tests.durations"]

settings.register_profile("whet", deadline=None, derandomize=True)
settings.load_profile("whet")


def cuts_layers() -> bool:
    """Whether the installed transformers can cut layers and experts over ranks."""
    return tuple(int(part) for part in version("transformers").split(".")[:2]) >= CUTS


needs_cut_layers = pytest.mark.skipif(not cuts_layers(), reason=REFUSAL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except BaseException as error:
        _skip_refused(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except BaseException as error:
        _skip_refused(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if (found := os.getcwd()) != STARTED_IN:
        os.chdir(STARTED_IN)
        pytest.fail(f"the test has left the process in {found}: paths of a run are relative to where it was started")
    return result


def _skip_refused(error: BaseException) -> None:
    if not cuts_layers() and REFUSAL in str(error):
        pytest.skip(f"transformers {version('transformers')}: {REFUSAL}")
