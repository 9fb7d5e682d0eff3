"""Rows with common beginnings by flex_attention, compiled for CUDA, are those that plain matrix products give."""

from __future__ import annotations

import pytest
import torch

from whet.model.attention import PackedRow
from whet.model.forest import ForestRow, Segment, forest_row

pytestmark = pytest.mark.cuda
TREES = {
    "a group": [Segment(130, -1), *[Segment(40 + 3 * i, 0) for i in range(5)]],
    "several roots": [Segment(7, -1), Segment(300, -1), Segment(20, 1), Segment(65, 2), Segment(9, 1), Segment(31, -1)],
    "one token": [Segment(1, -1)],
    "a chain": [Segment(384, -1)],
}
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


def inputs(num, device, dtype, heads=(4, 2), dim=64):
    generator = torch.Generator().manual_seed(num)
    shapes = [(num, heads[0], dim), (num, heads[1], dim), (num, heads[1], dim), (num, heads[0], dim)]
    q, k, v, pull = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), pull


def learned(row, q, k, v, pull):
    out = row(0, q, k, v, 0.3)
    return out.detach(), *torch.autograd.grad((pull * out).sum(), (q, k, v))


def apart(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 128)], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_a_compiled_forest_row_is_the_products_in_outputs_and_gradients(tree, dim, dtype, device):
    segments = TREES[tree]
    given = inputs(sum(s.length for s in segments), device, dtype, dim=dim)
    row = forest_row(segments, device, dtype)
    for found, expected in zip(learned(row, *given), learned(ForestRow(segments, device), *given), strict=True):
        assert apart(found, expected) < TOLERANCES[dtype]
    assert row.positions.device.type == device.type


def test_a_forest_is_its_chains(device):
    """A shared prompt's gradient is the sum of what every chain's is."""
    prompt, replies = 140, [33, 64, 5]
    q, k, v, pull = inputs(prompt + sum(replies), device, torch.float32)
    ends = [prompt + sum(replies[: i + 1]) for i in range(len(replies))]
    chains = [torch.cat([torch.arange(prompt), torch.arange(end - num, end)]) for end, num in zip(ends, replies, strict=True)]
    places = torch.cat(chains).to(device)
    row = forest_row([Segment(prompt, -1), *[Segment(num, 0) for num in replies]], device, torch.float32)
    packed = PackedRow([prompt + num for num in replies], device)
    share = torch.ones(len(q), 1, 1, device=device)
    share[:prompt] = 1 / len(replies)
    found = row(0, q, k, v, 0.3)
    expected = packed(0, q[places], k[places], v[places], 0.3)
    assert apart(found[places].detach(), expected.detach()) < 2e-4
    mine = torch.autograd.grad((pull * found).sum(), (q, k, v))
    theirs = torch.autograd.grad(((pull * share)[places] * expected).sum(), (q, k, v))
    assert all(apart(a, b) < 5e-4 for a, b in zip(mine, theirs, strict=True))


def test_rows_of_many_lengths_never_hold_every_score(device):
    """After some recompilations torch would run it uncompiled, with all scores of a row in memory."""
    for number in range(12):
        segments = [Segment(500 + 131 * number, -1), *[Segment(40 + number, 0)] * 8]
        given = inputs(sum(s.length for s in segments), device, torch.bfloat16)
        row = forest_row(segments, device, torch.bfloat16)
        learned(row, *given)
    num = 8192
    segments = [Segment(num // 2, -1), *[Segment(num // 16, 0)] * 8]
    given = inputs(num, device, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    learned(forest_row(segments, device, torch.bfloat16), *given)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    scores = 4 * num * num * 2  # of 4 heads, in bfloat16
    assert used < scores / 2, f"{used / 2**20:.0f} MiB, and the scores of all heads would be {scores / 2**20:.0f}"
