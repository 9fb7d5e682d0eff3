from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from whet.core.logprobs import Nucleus, chunked_logprobs, chunked_squared_probs, logprobs_and_entropy

N, H, V = 13, 5, 11


class Head:
    """A linear head that remembers how many rows it was asked for at a time."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(1)
        self.weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
        self.rows = []

    def __call__(self, hidden):
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


def inputs(dtype=torch.float64, n=N):
    torch.manual_seed(0)
    hidden = torch.randn(n, H, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (n,))
    temperature = torch.linspace(0.5, 2.0, n)
    return hidden, targets, temperature


def reference(hidden, weight, targets, temperature):
    """Row by row, from the definition."""
    logprobs, entropies = [], []
    for row, target, heat in zip(hidden, targets.tolist(), temperature.double(), strict=True):
        logits = (weight @ row) / heat
        p = logits.exp() / logits.exp().sum()
        logprobs.append(p[target].log())
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, N - 1, N, N + 4])
def test_any_chunk_size_gives_the_definition_and_its_gradient(chunk_tokens, entropy_grad):
    hidden, targets, temperature = inputs()
    head = Head()
    coefficients = torch.randn(2, N, dtype=torch.float64)

    def gradients(logprobs, entropy):
        value = (coefficients[0] * logprobs).sum()
        if entropy_grad:
            value = value + (coefficients[1] * entropy).sum()
        return torch.autograd.grad(value, (hidden, head.weight))

    found = chunked_logprobs(head, hidden, targets, temperature, chunk_tokens, entropy_grad=entropy_grad)
    expected = reference(hidden, head.weight, targets, temperature)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert found[1].requires_grad == entropy_grad
    for a, b in zip(gradients(*found), gradients(*expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, N])
def test_nothing_larger_than_a_chunk_of_logits_is_computed_or_saved(chunk_tokens, entropy_grad):
    hidden, targets, temperature = inputs()
    head = Head()
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropy = chunked_logprobs(head, hidden, targets, temperature, chunk_tokens, entropy_grad=entropy_grad)
        (logprobs.sum() + (entropy.sum() if entropy_grad else 0)).backward()
    of_logits = [shape for shape in saved if shape[-1:] == (V,) and len(shape) == 2]
    assert max(head.rows) == chunk_tokens
    assert all(rows <= chunk_tokens for rows, _ in of_logits)
    if chunk_tokens < N:
        assert not of_logits, "chunks are recomputed, so none of their logits outlives the forward pass"
        assert sum(head.rows) == 2 * N
    else:
        assert sum(head.rows) == N


def test_without_gradient_nothing_is_computed_twice():
    hidden, targets, temperature = inputs()
    head = Head()
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(head, hidden, targets, temperature, 3, entropy_grad=True)
    assert sum(head.rows) == N and max(head.rows) == 3
    assert not logprobs.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tokens_at_all(dtype):
    hidden, targets, temperature = inputs(dtype, n=0)
    logprobs, entropy = chunked_logprobs(Head(dtype), hidden, targets, temperature, 4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, H)


def test_lower_precision_logits_are_normalised_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 1000).to(torch.bfloat16)
    targets = torch.tensor([0, 1, 2, 3])
    logprobs, entropy = logprobs_and_entropy(logits, targets, torch.ones(4))
    expected = logits.double().log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected[range(4), targets], rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 10), st.integers(2, 40))
def test_a_flat_distribution_has_log_v_of_entropy_at_any_temperature(heat, size):
    logprobs, entropy = logprobs_and_entropy(
        torch.full((1, size), 3.0, dtype=torch.float64), torch.tensor([size - 1]), torch.tensor([heat])
    )
    expected = torch.tensor(float(size)).double().log()
    torch.testing.assert_close(torch.stack([-logprobs[0], entropy[0]]), expected.expand(2))


def nucleus_of(rows):
    """Lists of ids as a Nucleus."""
    counts = torch.tensor([0, *(len(row) for row in rows)])
    return Nucleus(torch.tensor([i for row in rows for i in row], dtype=torch.int64), counts.cumsum(0))


def test_a_nucleus_renormalises_and_keeps_the_target_and_the_entropy():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    targets, ones = torch.tensor([1, 0, 2]), torch.ones(3)
    found, entropy = logprobs_and_entropy(logits, targets, ones, nucleus=nucleus_of([[1, 2], [2], []]))
    e = [math.exp(x) for x in (1, 2, 3)]
    assert found.tolist() == pytest.approx([math.log(e[1] / (e[1] + e[2])), math.log(e[0] / (e[0] + e[2])), math.log(e[2] / sum(e))])
    torch.testing.assert_close(entropy, logprobs_and_entropy(logits, targets, ones)[1])


@pytest.mark.parametrize("chunk_tokens", [1, 4, N])
def test_a_nucleus_in_chunks_has_the_plain_gradient(chunk_tokens):
    hidden, targets, temperature = inputs()
    head = Head()
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(V, generator=generator)[: i % 5].tolist() for i in range(N)]
    coefficients = torch.randn(N, dtype=torch.float64)
    found, _ = chunked_logprobs(head, hidden, targets, temperature, chunk_tokens, nucleus=nucleus_of(rows))
    expected = []
    for row, target, heat, ids in zip(hidden, targets.tolist(), temperature.double(), rows, strict=True):
        weights = ((head.weight @ row) / heat).exp()
        kept = sorted({*ids, target}) if ids else range(V)
        expected.append((weights[target] / weights[list(kept)].sum()).log())
    expected = torch.stack(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad((coefficients * column).sum(), (hidden, head.weight)) for column in (found, expected)]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 4, N])
def test_squared_probs_over_a_nucleus(chunk_tokens):
    hidden, _, temperature = inputs()
    head, rows = Head(), [[*range(i % 5)] for i in range(N)]
    found = chunked_squared_probs(head, hidden, temperature, chunk_tokens, nucleus=nucleus_of(rows))
    for square, row, heat, ids in zip(found, hidden, temperature.double(), rows, strict=True):
        probs = ((head.weight @ row) / heat)[ids or [*range(V)]].softmax(-1)
        torch.testing.assert_close(square, probs.square().sum().detach(), rtol=1e-12, atol=1e-12)


def test_a_nucleus_whose_offsets_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 2 ids, but its offsets end at 3"):
        Nucleus(torch.tensor([1, 2]), torch.tensor([0, 3]))


@pytest.mark.parametrize("chunk_tokens", [1, 5, N])
def test_sums_of_squared_probabilities(chunk_tokens):
    hidden, _, temperature = inputs()
    head = Head()
    found = chunked_squared_probs(head, hidden, temperature, chunk_tokens)
    expected = ((hidden @ head.weight.T) / temperature[:, None]).softmax(-1).square().sum(-1)
    torch.testing.assert_close(found, expected.detach())
    assert not found.requires_grad and max(head.rows) <= chunk_tokens


def peak_bytes(num_tokens, chunk_tokens, entropy_grad=False, vocab=4000, width=8):
    """The most that is allocated at a time in a forward and backward pass, as torch's allocator tells it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets, temperature = torch.randint(vocab, (num_tokens,)), torch.ones(num_tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        logprobs, entropy = chunked_logprobs(
            lambda rows: rows @ weight.T, hidden, targets, temperature, chunk_tokens, entropy_grad=entropy_grad
        )
        (logprobs.sum() + (entropy.sum() if entropy_grad else 0)).backward()
    changes = [(event.start_ns(), event.nbytes()) for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_memory_grows_with_the_chunk_and_not_with_the_tokens(entropy_grad):
    row = 4000 * 4
    """Bytes of one token's logits."""
    few, many, wide, whole = (peak_bytes(n, chunk, entropy_grad) for n, chunk in ((64, 8), (256, 8), (256, 32), (256, 256)))
    assert whole > 256 * row, "all logits at once are seen"
    assert 8 * row < few < 64 * row
    assert many - few < 8 * row, "four times the tokens, and less than one more chunk of logits"
    assert 24 * row < wide - many < 24 * row * 8, "a larger chunk takes in proportion"
