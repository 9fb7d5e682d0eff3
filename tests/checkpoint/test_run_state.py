"""How a run ends while its last checkpoint is still written."""

from __future__ import annotations

import pytest

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.run_state import PROOFS, RunState, SavedModels
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
    state = RunState(store, SavedModels(Unwritable()), Log(), parts={}, others={}, config="", facts={}, note=notes.append)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="the cause"), state.whole():
        state.save(Progress(), {})
        raise KeyError("the cause")
    assert notes == ["the last checkpoint was not written: [gloo] Connection closed by peer"]
    with pytest.raises(RuntimeError, match="Connection closed"), state.whole():
        state.save(Progress(), {})


class Weights:
    """A model that must not be loaded: nothing was learned."""

    def save(self, folder):
        (folder / "weights").write_text("")


class Count:
    """A state that refuses a negative one."""

    def __init__(self, value=0):
        self.value = value

    def state(self):
        return self.value

    def restore(self, state):
        if state < 0:
            raise ValueError("a position in other data")
        self.value = state


class Lines(Log):
    cut: int | None = None

    def truncate(self, offset):
        self.cut = offset


@pytest.mark.parametrize(
    ("facts", "value", "taken_up"),
    [({}, 3, True), ({"config_hash": "other"}, 3, False), ({"code": {"a.py:f": "other"}}, 3, False), ({}, -1, False)],
    ids=["same", "settings", "code", "data"],
)
def test_a_run_that_was_stopped_before_it_learned_anything_binds_no_other(tmp_path, facts, value, taken_up):
    def state(facts, *counts):
        store, log, notes = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig()), Lines(), []
        parts, others = {"data": counts[0]}, {"group_runs": counts[1]}
        made = RunState(store, SavedModels(Weights()), log, parts=parts, others=others, config="", facts=facts, note=notes.append)  # type: ignore[arg-type]
        return made, log, notes

    before = {"config_hash": "one", "code": {"a.py:f": "one"}}
    state(before, Count(3), Count(value))[0].save(Progress(), {})
    data, plays = Count(), Count()
    again, log, notes = state({**before, **facts}, data, plays)
    assert again.resume() == Progress()
    assert (data.value, plays.value) == ((3, 3) if taken_up else (0, 0))
    assert log.cut == 0 and ("begins afresh" in notes[0]) != taken_up


class Loadable(Weights):
    def load(self, folder, *, weights, optimizer):
        assert (folder / "weights").exists() and weights and optimizer


def test_proofs_come_back_and_are_no_reason_to_save(tmp_path):
    def state(value):
        store, proofs = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig()), Count(value)
        models = SavedModels(Loadable())  # type: ignore[arg-type]
        return RunState(store, models, Lines(), parts={}, others={PROOFS: proofs}, config="", facts={}, note=print), proofs

    (made, proofs), progress = state(1), Progress(1, 1, 1)
    assert made.save(progress, {}) is not None
    proofs.value = 2
    assert made.save(progress, {}) is None
    again, proofs = state(5)
    assert again.resume() == progress and proofs.value == 1
