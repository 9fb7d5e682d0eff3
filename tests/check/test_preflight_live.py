"""The counter of live bytes, against sums done by hand."""

import pytest
import torch
import torch.nn.functional as F

from whet.plan.live import LiveBytes

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
def test_what_is_made_is_counted_until_it_is_gone_and_views_are_not(device):
    before = torch.zeros(100, device=device)
    with LiveBytes(lambda _: "all") as live:
        a = before + 1
        b = a.view(10, 10)
        assert live.now("all") == 400
        c = b * 2
        del a
        assert live.now("all") == 800, "the view keeps it"
        del b
        assert live.now("all") == 400
        c.add_(1)
        before.mul_(2)
        before.t()
        assert (live.now("all"), live.peak("all")) == (400, 800)
    del c
    assert live.now("all") == 0


@DEVICES
def test_kinds_are_counted_apart(device):
    with LiveBytes(lambda t: {1: "line", 2: "square"}.get(t.dim())) as live:
        kept = [torch.zeros(5, device=device), torch.zeros(2, 2, device=device), torch.zeros((), device=device)]
        del kept[0]
    assert (live.peak("line"), live.now("line"), live.peak("square"), live.now("square"), live.peak("none")) == (20, 0, 16, 16, 0)


@DEVICES
def test_what_autograd_keeps_is_alive(device):
    weight = torch.zeros(10, 10, device=device, requires_grad=True)
    with LiveBytes(lambda _: "all") as live:
        total = (weight @ weight).exp().sum()
        assert live.now("all") == 400 + 4, "the exponential, whose gradient it is, and the sum"
        total.backward()
        del total
    assert weight.grad is not None and live.now("all") == 400


def test_a_truth_value_of_nothing_is_yes_and_a_number_is_refused():
    with LiveBytes(lambda _: None):
        assert (torch.zeros(3, device="meta") > 1).all()
        with pytest.raises(RuntimeError, match="meta"):
            torch.zeros((), device="meta").item()
        assert not (torch.zeros(3) > 1).all(), "real tensors answer for themselves"


@pytest.mark.parametrize(
    ("a", "b"),
    [((24, 16), (3, 16, 8)), ((16, 24), (24, 8)), ((3, 8, 16), (16, 24)), ((3, 8, 16), (3, 16, 8))],
    ids=["rows", "sums", "columns", "batch"],
)
def test_products_of_groups_have_the_shapes_of_real_ones(a, b):
    """Groups are stretches of rows, of the summed dimension, of columns; or there are none."""
    ends = None if len(a) == len(b) == 3 else torch.tensor([8, 16, 24], dtype=torch.int32)
    real = [torch.zeros(shape, dtype=torch.bfloat16) for shape in (a, b)]
    expected = F.grouped_mm(*real, offs=ends)
    with LiveBytes(lambda _: None):
        for dtype in (torch.float32, torch.bfloat16):
            found = F.grouped_mm(*(x.to("meta", dtype) for x in real), offs=None if ends is None else ends.to("meta"))
            assert (found.shape, found.dtype) == (expected.shape, dtype)
