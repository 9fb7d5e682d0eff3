from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from whet.model import forest
from whet.model.forest import FlexForestRow, ForestRow, Segment, Span, block_mask, forest_row, spans_of

CPU = torch.device("cpu")


@st.composite
def forests(draw):
    """Segments in depth-first order: each goes on from the one before it, from an ancestor of that one, or from nothing."""
    out = []
    path = [-1]
    for i in range(draw(st.integers(1, 8))):
        path = path[: draw(st.integers(1, len(path)))] if draw(st.booleans()) else path
        out.append(Segment(draw(st.integers(1, 9)), path[-1]))
        path.append(i)
    return out


def sees(segments):
    """[T, T] whether query t sees key u, one token and one ancestor at a time; and the positions."""
    starts, used = [], 0
    for segment in segments:
        starts.append(used)
        used += segment.length
    mask, positions = torch.zeros(used, used, dtype=torch.bool), []
    for i, segment in enumerate(segments):
        above, parent = [], segment.parent
        while parent >= 0:
            above = [*range(starts[parent], starts[parent] + segments[parent].length), *above]
            parent = segments[parent].parent
        for t in range(starts[i], starts[i] + segment.length):
            above.append(t)
            mask[t, above] = True
            positions.append(len(above) - 1)
    return mask, positions


def dense(q, k, v, scale, mask):
    """Attention from the definition, with a mask."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def inputs(num_tokens, heads=(4, 2), dtype=torch.float64, size=4, value_size=4):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(heads[0], size), (heads[1], size), (heads[1], value_size)]
    q, k, v = (torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v, torch.randn(num_tokens, heads[0], value_size, generator=generator, dtype=torch.float64).to(dtype)


def both(row, segments, q, k, v, pull):
    """Output and gradients of a row and of the definition."""
    outs = row(0, q, k, v, 0.7), dense(*(x.double() for x in (q, k, v)), 0.7, sees(segments)[0]).to(q.dtype)
    return [(out, *torch.autograd.grad((pull * out).sum(), (q, k, v))) for out in outs]


def relative(found, expected):
    return float((found - expected).detach().double().norm() / expected.detach().double().norm())


@settings(max_examples=120, deadline=None)
@given(forests(), st.sampled_from([(2, 2), (4, 2), (4, 1)]), st.sampled_from([1, 2, 3, 128]), st.sampled_from([1, 4, 1024]))
def test_a_forest_row_is_masked_attention_in_outputs_and_gradients(segments, heads, chunk, key_block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "CHUNK", chunk)
        patch.setattr(forest, "OWN_TOKENS", 2 * chunk)
        patch.setattr(forest, "KEY_BLOCK", key_block)
        patch.setattr(forest, "SCORES", 3 * key_block)
        row = ForestRow(segments, CPU)
    q, k, v, pull = inputs(sum(s.length for s in segments), heads, value_size=6)
    for found, expected in zip(*both(row, segments, q, k, v, pull), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert row.positions.tolist() == sees(segments)[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rows_longer_than_every_block_and_lower_precision(dtype, tolerance):
    segments = [Segment(1100, -1), Segment(130, 0), Segment(3, 1), Segment(40, 1), Segment(300, 0), Segment(70, -1)]
    q, k, v, pull = inputs(sum(s.length for s in segments), dtype=dtype)
    for found, expected in zip(*both(ForestRow(segments, CPU), segments, q, k, v, pull), strict=True):
        assert found.dtype == dtype
        assert relative(found, expected) <= tolerance


def test_scores_of_any_size_do_not_overflow():
    segments = [Segment(5, -1), Segment(3, 0), Segment(4, 0)]
    q, k, v, pull = inputs(12)
    with torch.no_grad():
        q.mul_(1e4)
    for found, expected in zip(*both(ForestRow(segments, CPU), segments, q, k, v, pull), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_each_visible_pair_is_in_one_part():
    segments = [Segment(300, -1), Segment(5, 0), Segment(140, 0), Segment(7, 2), Segment(9, 2), Segment(20, -1)]
    row, mask = ForestRow(segments, CPU), sees(segments)[0]
    count = torch.zeros(len(mask) + 1, len(mask) + 1, dtype=torch.int64)
    for own in row.parts.own:
        for places in own.gather.view(own.num, own.length):
            for t in range(own.length):
                count[places[t], places[: t + 1]] += 1
    for cross in row.parts.cross:
        count[cross.queries, cross.keys] += 1
    assert torch.equal(count[:-1, :-1], mask.long())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=25, deadline=None)
@given(forests())
def test_the_block_mask_of_cuda_sees_the_same(segments):
    q, k, v, _ = inputs(sum(s.length for s in segments), dtype=torch.float32, size=16, value_size=16)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(forest, "compiled_flex", lambda: flex_attention)
        row = FlexForestRow(segments, CPU)
        found = row(0, q, k, v, 0.7)
        expected = dense(q, k, v, 0.7, sees(segments)[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert row.positions.tolist() == sees(segments)[1]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 2**20))
def test_the_blocks_of_the_mask_are_those_that_every_pair_of_tokens_gives(lengths, shape):
    """Blocks seen whole, blocks seen in part, and their order; found without a mask of all pairs, which for 64k tokens takes 17 GB."""
    parents = [-1 if i == 0 or shape >> i & 1 else i - 1 - (shape >> 2 * i & 1) * (i > 1) for i in range(len(lengths))]
    segments = [Segment(n, p) for n, p in zip(lengths, parents, strict=True)]
    try:
        spans = spans_of(segments)
    except ValueError:
        assume(False)
    total = -(-spans[-1].end // 128) * 128
    stops = torch.cat([torch.full((s.end - s.start,), s.stop) for s in spans] + [torch.arange(spans[-1].end, total) + 1])
    found = block_mask(stops, CPU)

    def pair(b, h, q, k):
        return (k <= q) & (q < stops[k])

    expected = create_block_mask(pair, None, None, total, total, device="cpu", BLOCK_SIZE=128)
    for kind in ("kv", "full_kv"):
        counts, order = (getattr(found, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        wanted_counts, wanted = (getattr(expected, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        assert torch.equal(counts, wanted_counts)
        for row, known, n in zip(order[0, 0], wanted[0, 0], counts[0, 0].tolist(), strict=True):
            assert row[:n].tolist() == known[:n].tolist()


def test_the_mask_of_a_long_row_is_small():
    """64k tokens in a second: a mask of all pairs would be 4 billion of them."""
    stops = torch.full((65536,), 65536)
    mask = block_mask(stops, CPU)
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 512 and mask.full_kv_num_blocks[0, 0].tolist() == list(range(512))


def test_cuda_gets_the_kernel_where_it_has_the_type(monkeypatch):
    monkeypatch.setattr(forest, "FlexForestRow", lambda segments, device: "flex")
    monkeypatch.setattr(forest, "ForestRow", lambda segments, device: "products")
    cuda = torch.device("cuda")
    assert [forest_row([], cuda, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == ["flex", "flex", "products"]
    assert forest_row([], CPU, torch.bfloat16) == "products"


def test_spans_by_hand():
    segments = [Segment(3, -1), Segment(2, 0), Segment(4, 1), Segment(1, 1), Segment(5, 0), Segment(2, -1)]
    assert spans_of(segments) == [
        Span(0, 3, 15, 0),
        Span(3, 5, 10, 3),
        Span(5, 9, 9, 5),
        Span(9, 10, 10, 5),
        Span(10, 15, 15, 3),
        Span(15, 17, 17, 0),
    ]


def test_segments_out_of_order_are_refused():
    with pytest.raises(ValueError, match="segment 3 goes on from segment 1, which is no ancestor of the one before it"):
        spans_of([Segment(1, -1), Segment(1, 0), Segment(1, 0), Segment(1, 1)])
