"""How a run ends while its last checkpoint is still written."""

from __future__ import annotations

import pytest

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.run_state import RunState
from whet.checkpoint.store import CheckpointStore
from whet.types import Progress


class Unwritable:
    """A model whose part of a checkpoint cannot be written, and no disk is to blame."""

    def stage(self, folder):
        def write():
            raise RuntimeError("[gloo] Connection closed by peer")

        return write


class Log:
    def tell(self):
        return 0


def test_a_checkpoint_that_is_not_written_does_not_hide_why_the_run_ends(tmp_path):
    notes = []
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(async_save=True))
    state = RunState(store, Unwritable(), Log(), parts={}, others={}, config="", facts={}, note=notes.append)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="the cause"), state.whole():
        state.save(Progress(), {})
        raise KeyError("the cause")
    assert notes == ["the last checkpoint was not written: [gloo] Connection closed by peer"]
    with pytest.raises(RuntimeError, match="Connection closed"), state.whole():
        state.save(Progress(), {})
