from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whet.model import digest
from whet.model.digest import differences, digests_of, tensor_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def reference(data: bytes, chunk_words: int = digest.CHUNK_WORDS) -> bytes:
    """The digest in Python's own integers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    sums = []
    for start in range(0, len(words) or 1, chunk_words):
        total = 0
        for place, word in enumerate(words[start : start + chunk_words]):
            low = mix(place)
            total += word * ((mix(low ^ 0x5BD1E995) << 33) | (low << 1) | 1)
        sums.append((total + 2**63) % 2**64 - 2**63)
    return hashlib.blake2b(repr(sums).encode(), digest_size=8).digest()


def as_bytes(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=50), st.integers(1, 9))
def test_the_sums_are_those_of_exact_integers(data, chunk_words):
    tensor = torch.tensor(data, dtype=torch.uint8)
    whole, digest.CHUNK_WORDS = digest.CHUNK_WORDS, chunk_words
    try:
        assert tensor_digest(tensor) == reference(bytes(data), chunk_words)
    finally:
        digest.CHUNK_WORDS = whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_bytes_count_not_where_they_lie(dtype):
    tensor = (torch.arange(35) % 2 if dtype == torch.bool else torch.arange(35)).to(dtype)
    rows = tensor.view(5, 7)
    assert tensor_digest(tensor) == tensor_digest(rows) == reference(as_bytes(tensor))
    assert tensor_digest(rows.T) == reference(as_bytes(rows.T))
    assert tensor_digest(tensor[3:]) == reference(as_bytes(tensor[3:])), "a slice that starts in the middle of a word"
    assert tensor_digest(tensor[:0]) == reference(b"")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.data())
def test_one_changed_bit_is_always_seen(words, data):
    tensor = torch.tensor(words, dtype=torch.int32)
    other = tensor.clone()
    place = data.draw(st.integers(0, len(words) - 1))
    bit = data.draw(st.integers(0, 31))
    other[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert tensor_digest(tensor) != tensor_digest(other)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_two_elements_that_swap_places_are_always_seen(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    a, b = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    bits = tensor.view(torch.int32)
    assume(bits[a] != bits[b])
    other = tensor.clone()
    other[a], other[b] = tensor[b], tensor[a]
    assert tensor_digest(tensor) != tensor_digest(other)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(12)), st.permutations(range(12)))
def test_any_reordering_is_seen(one, two):
    assume(one != two)
    assert tensor_digest(torch.tensor(one).float()) != tensor_digest(torch.tensor(two).float())


def test_the_multipliers_differ_in_the_bits_that_the_proof_needs():
    multipliers = digest._multipliers(digest.CHUNK_WORDS, torch.device("cpu"))
    assert bool((multipliers % 2 == 1).all())
    assert len((multipliers & (2**33 - 1)).unique()) == digest.CHUNK_WORDS


def test_words_that_swap_places_across_chunks_are_seen():
    tensor = torch.arange(2 * digest.CHUNK_WORDS + 5, dtype=torch.int32)
    other = tensor.clone()
    other[7], other[digest.CHUNK_WORDS + 7] = tensor[digest.CHUNK_WORDS + 7], tensor[7]
    swapped_chunks = torch.cat([*reversed(tensor[: 2 * digest.CHUNK_WORDS].split(digest.CHUNK_WORDS)), tensor[-5:]])
    assert len({tensor_digest(tensor), tensor_digest(other), tensor_digest(swapped_chunks)}) == 3


WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.arange(6.0).view(2, 3) + 1, "c": torch.zeros(3)}


@pytest.mark.parametrize(
    "change",
    [
        {"a.weight": WEIGHTS["a.weight"].bfloat16()},
        {"a.weight": WEIGHTS["a.weight"].view(torch.int32)},
        {"a.weight": WEIGHTS["a.weight"].view(3, 2)},
        {"a.weight": WEIGHTS["b.weight"], "b.weight": WEIGHTS["a.weight"]},
        {"c": torch.zeros(4)},
        {"c": -torch.zeros(3)},
        {"d": torch.zeros(0)},
    ],
    ids=["dtype", "dtype-same-bytes", "shape", "names-swapped", "longer", "minus-zero", "one-more"],
)
def test_what_a_weight_is_called_and_made_of_is_in_the_digest(change):
    assert digests_of(WEIGHTS.items()) != digests_of({**WEIGHTS, **change}.items())


def test_the_order_of_the_stream_does_not_matter():
    assert digests_of(reversed(WEIGHTS.items())) == digests_of(WEIGHTS.items())
    assert {len(digest) for digest in digests_of(WEIGHTS.items()).values()} == {16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight": WEIGHTS["a.weight"] + 1e-7}, ["a.weight"]),
        ({"a.weight": WEIGHTS["b.weight"], "b.weight": WEIGHTS["a.weight"]}, ["a.weight and b.weight are swapped"]),
        ({"a.weight": WEIGHTS["b.weight"], "b.weight": torch.ones(2, 3)}, ["a.weight holds b.weight", "b.weight"]),
        ({"d": torch.zeros(1)}, ["d is unknown"]),
        ({"c": None}, ["c is missing"]),
        ({}, []),
    ],
    ids=["changed", "swapped", "copied", "unknown", "missing", "same"],
)
def test_differences_are_named(change, words):
    found = {name: tensor for name, tensor in {**WEIGHTS, **change}.items() if tensor is not None}
    assert differences(digests_of(WEIGHTS.items()), digests_of(found.items())) == words


def test_parameters_and_values_that_are_no_numbers_have_digests():
    parameter = torch.nn.Parameter(torch.tensor([float("nan"), float("inf")]))
    assert tensor_digest(parameter) == reference(as_bytes(parameter.detach()))
    assert tensor_digest(torch.tensor(7.0)) == reference(as_bytes(torch.tensor([7.0])))


def test_a_stream_of_tensors_that_live_for_a_moment_has_the_digests_of_tensors_that_stay():
    kept = {f"w{i}": torch.full((64, 64), float(i)) for i in range(20)}
    assert digests_of((name, tensor.clone()) for name, tensor in kept.items()) == digests_of(kept.items())
