import torch
import torch.distributed as dist

from tests.parallel.ranks import on_ranks
from whet.core.batch import TrainBatch, batch_of
from whet.train.sending import broadcast_object, receive_object, send_object
from whet.types import Sample


def batch() -> TrainBatch:
    samples = [
        Sample((5, 6, 7), (0, 1, 1), (False, True, True), (0.0, -0.5, -0.25), (-1, 3, 4), "g", f"t{i}", nucleus=(b"", b"", b"\1\0\0\0"))
        for i in range(3)
    ]
    return batch_of(samples)


def sent() -> object:
    group = dist.new_group(backend="gloo")
    first = dist.get_rank() == 0
    column = torch.arange(12).view(3, 4)[:, 1]
    odd = {"empty": torch.empty(0), "scalar": torch.tensor(2.5, dtype=torch.float64), "column": column, "words": ("a", None)}
    found = broadcast_object(("update", batch(), odd) if first else None, group)
    ended = broadcast_object(None, group)
    assert ended is None
    return found


class Rule:
    """What every rank has its own of, and could not be pickled."""

    def __init__(self, factor):
        self.factor = factor
        self.within = lambda value: value * self.factor

    def apply(self, value):
        return self.within(value)


def shared():
    rule = Rule(10 + dist.get_rank())
    group = dist.new_group(backend="gloo")
    given = {"rule": rule, "function": rule.within}
    found = broadcast_object(("call", rule.apply, rule.within, torch.ones(2)) if dist.get_rank() == 0 else None, group, given)
    return found[1](2), found[2](3), found[3].tolist()


def test_a_shared_object_is_each_rank_s_own():
    assert on_ranks(3, shared) == [((10 + rank) * 2, (10 + rank) * 3, [1.0, 1.0]) for rank in range(3)]


def one_to_another():
    pair = ("rows", batch(), torch.zeros(0, 2))
    if dist.get_rank() == 1:
        send_object(pair, 2)
    return receive_object(1) if dist.get_rank() == 2 else None


def test_a_rank_sends_an_object_to_one_other():
    first, second, (name, received, empty) = on_ranks(3, one_to_another)
    assert first is None and second is None and name == "rows" and empty.shape == (0, 2)
    assert torch.equal(received.tokens, batch().tokens) and torch.equal(received.nucleus_ids, batch().nucleus_ids)


def test_every_rank_gets_the_controller_s_objects_and_their_tensors_as_they_are():
    for name, received, odd in on_ranks(3, sent):
        assert name == "update" and odd["words"] == ("a", None) and odd["empty"].shape == (0,)
        assert odd["scalar"] == 2.5 and odd["scalar"].dtype == torch.float64 and odd["scalar"].shape == ()
        assert odd["column"].tolist() == [1, 5, 9]
        expected = batch().columns()
        assert received.columns().keys() == expected.keys()
        for key, column in received.columns().items():
            assert torch.equal(column, expected[key]) and column.dtype == expected[key].dtype
