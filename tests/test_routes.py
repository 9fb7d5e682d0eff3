"""Columns of chosen experts: what is not known is 0, narrow and wide ones join, and all of them survive a pipe and a checkpoint."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from whet.core.batch import batch_of, own_routes, predecessor_routes
from whet.types import Origin, Sample, Turn
from whet.types.json_codec import _routes_from_json, _routes_to_json
from whet.types.routes import Routes, entry_bytes

ROWS = np.arange(1, 25, dtype=np.uint8).reshape(4, 3, 2)


def narrow(rows=ROWS):
    return Routes(rows.tobytes(), 3, 2)


def wide(rows=ROWS):
    return Routes((rows.astype(np.int16) + 400).tobytes(), 3, 2, 2)


def test_entries_are_small():
    assert [entry_bytes(num) for num in (8, 255, 256)] == [1, 1, 2]
    assert (len(narrow()), narrow().width, wide().width) == (4, 6, 12)
    assert np.array_equal(narrow().numpy(), ROWS) and narrow()[1] == ROWS[1].tobytes()
    assert np.array_equal(wide()[1:3].numpy(), ROWS[1:3].astype(np.int16) + 400)
    assert narrow()[-1] == ROWS[3].tobytes() and narrow()[::2] == Routes.join([narrow()[0:1], narrow()[2:3]])
    with pytest.raises(ValueError, match="5 bytes are not whole tokens of 3 layers x 2 experts x 1 bytes"):
        Routes(bytes(5), 3, 2)
    with pytest.raises(TypeError):
        narrow().data[0] = 3


def test_joined_columns_take_the_widest_entries_and_zeros_for_what_is_unknown():
    joined = Routes.join([Routes.unknown(2), narrow(), wide()])
    assert len(joined) == 10 and joined.itemsize == 2
    assert np.array_equal(joined.numpy(), np.concatenate([np.zeros((2, 3, 2)), ROWS, ROWS.astype(np.int16) + 400]))
    assert joined[2:6] == narrow() and joined[2:6] != narrow()[:3] and joined != Routes.unknown(10)
    assert Routes.join([Routes.unknown(2), Routes()]) == Routes.unknown(2)
    with pytest.raises(ValueError, match="different shapes"):
        Routes.join([narrow(), Routes(bytes(4), 2, 2)])


@pytest.mark.parametrize("column", [narrow(), wide(), narrow()[1:3], Routes.unknown(3), Routes()])
def test_columns_survive_a_pipe_and_a_checkpoint(column):
    for again in (pickle.loads(pickle.dumps(column)), _routes_from_json(_routes_to_json(column))):
        assert again == column and (again.layers, again.itemsize) == (column.layers, column.itemsize)


def sample(name, routes, num=4):
    mask = (False, *(True,) * (num - 1))
    return Sample(range(num), (Origin.MODEL,) * num, mask, (0.0,) * num, (0,) * num, "g", name, routes=routes)


def test_a_batch_has_the_experts_of_its_samples_alone():
    assert batch_of([sample("a", None), sample("b", Routes.unknown(4))]).routes is None
    batch = batch_of([sample("a", None, 2), sample("b", narrow()), sample("c", narrow()[:3], 3)])
    assert np.array_equal(batch.routes.numpy(), np.concatenate([np.zeros((2, 3, 2)), ROWS, ROWS[:3]]))
    chosen = batch.select([2, 0])
    assert np.array_equal(chosen.routes.numpy(), np.concatenate([ROWS[:3], np.zeros((2, 3, 2))]))
    own = own_routes(batch)
    assert np.array_equal(own.numpy()[2:6], np.concatenate([ROWS[1:], np.zeros((1, 3, 2))]))
    back = predecessor_routes(own, batch)
    assert np.array_equal(back.numpy()[3:6], ROWS[1:]) and not back[[0, 2, 6]].any()
    with pytest.raises(ValueError, match="column routes has shape"):
        batch.with_(routes=batch.routes[:-1])


def test_a_turn_has_the_experts_of_all_of_its_tokens():
    told = {"message": None, "finish": None, "logprobs": (0.0, 0.0), "versions": (0, 0)}
    turn = Turn((1, 2), (Origin.PROMPT,) * 2, (3, 4), routes=narrow(), **told)
    assert turn.routes == narrow()
    with pytest.raises(ValueError, match="a turn of 4 tokens has the experts of 3"):
        Turn((1, 2), (Origin.PROMPT,) * 2, (3, 4), routes=narrow()[:3], **told)
