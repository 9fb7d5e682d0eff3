"""What several tests of whole runs share."""

from contextlib import contextmanager

import pytest

import whet.build.session
from whet.stop import Stop


@pytest.fixture
def stop(monkeypatch):
    """What asks the next run to stop, without a signal."""
    asked = Stop()

    @contextmanager
    def never():
        yield asked

    monkeypatch.setattr(whet.build.session, "on_signals", never)
    return asked
