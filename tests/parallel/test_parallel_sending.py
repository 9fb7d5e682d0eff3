import torch
import torch.distributed as dist

from tests.parallel.ranks import on_ranks
from whet.core.batch import TrainBatch, batch_of
from whet.train.sending import broadcast_object
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


def test_every_rank_gets_the_controller_s_objects_and_their_tensors_as_they_are():
    for name, received, odd in on_ranks(3, sent):
        assert name == "update" and odd["words"] == ("a", None) and odd["empty"].shape == (0,)
        assert odd["scalar"] == 2.5 and odd["scalar"].dtype == torch.float64 and odd["scalar"].shape == ()
        assert odd["column"].tolist() == [1, 5, 9]
        expected = batch().columns()
        assert received.columns().keys() == expected.keys()
        for key, column in received.columns().items():
            assert torch.equal(column, expected[key]) and column.dtype == expected[key].dtype
