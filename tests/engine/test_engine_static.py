"""Decode steps of fixed shapes, on tensors that stay in place, compute what ordinary steps compute."""


import pytest

from tests.engine.engine_setup import DEVICE, engine_of, plain, plain_logprobs, reply_to, serve, serve_all, tiny
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.static import StaticDecode
from whet.types import Request, SamplingParams

SIZES = {"cache_tokens": 120, "block_size": 4, "max_running": 7, "max_batch_tokens": 40}
"""Sequences are preempted, and steps mix prefill with decoding."""


def requests():
    return [
        Request(f"r{i}", tuple((5 * i + k) % 97 for k in range(1 + 6 * (i % 5))), SamplingParams(20, float(i % 3 > 0), seed=i, top_p=0.9))
        for i in range(11)
    ]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [("qwen3", "float64", 1e-8), ("llama", "float64", 1e-8), ("qwen2", "float32", 1e-4)]
)
def test_tokens_and_logprobs_are_those_of_ordinary_steps(kind, dtype, tolerance):
    static = engine_of(tiny(kind, dtype), static_decode=True, **SIZES)
    found = serve_all(static, requests())
    assert static.core.scheduler.num_preempted > 0
    expected = serve_all(engine_of(tiny(kind, dtype), compiled=False, **SIZES), requests())
    for name, reply in expected.items():
        assert found[name].tokens == reply.tokens
        assert found[name].logprobs == pytest.approx(reply.logprobs, abs=tolerance)


def test_a_step_keeps_its_tensors_and_what_pads_it_writes_nowhere_else():
    core = EngineCore(tiny(), EmbeddedConfig(**SIZES, static_decode=True))
    one = core.add(Request("a", (1, 2, 3), SamplingParams(40)))
    for i in range(2):
        core.add(Request(f"b{i}", (4, 5, 6 + i), SamplingParams(40)))
    core.step()
    core.step()
    static = core._static
    assert isinstance(static, StaticDecode) and list(static._steps) == [(4, 1)]
    step = static._steps[4, 1]
    kept = step._inputs.data_ptr()
    before = {layer: [pool.clone() for pool in pair] for layer, pair in core.store._layers.items()}
    places = [(s.blocks, s.num_cached_tokens) for s in core.scheduler.running]
    slots = {blocks[at // 4] * 4 + at % 4 for blocks, at in places if at // 4 < len(blocks)}
    core.step()
    for layer, pair in core.store._layers.items():
        for pool, old in zip(pair, before[layer], strict=True):
            changed = (pool != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
            assert len(changed) == 3 and slots <= set(changed)
    assert step._inputs.data_ptr() == kept and one.num_sampled == 3
    core.step()
    assert set(static._steps) == {(4, 1), (4, 2)}


def test_scores_go_through_it_too():
    engine = engine_of(tiny(), static_decode=True, **SIZES)
    tokens = tuple((7 * i + 3) % 97 for i in range(30))
    used: list[int] = []
    hidden = engine.core._static.hidden
    engine.core._static.hidden = lambda sequences: used.append(len(sequences)) or hidden(sequences)

    async def play():
        return (await engine.score(tokens)).logprobs

    table = plain_logprobs(plain(), tokens)
    assert serve(engine, play) == pytest.approx([float(table[i, t]) for i, t in enumerate(tokens[1:])], abs=1e-8)
    assert used == [1] * 5


def test_steps_are_made_anew_where_the_cache_or_the_weights_lie_elsewhere():
    from whet.model.causal import random_causal
    from whet.model.config import ModelConfig

    held = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device=DEVICE), seed=0)
    other = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device=DEVICE), seed=1)
    engine = engine_of(held, shares=False, static_decode=True, **SIZES)
    request = requests()[4]

    async def play():
        static, steps = engine.core._static, []
        replies = [await reply_to(engine, request)]
        steps.append(dict(static._steps))
        await engine.flush()
        assert not static._steps, "what they were made of takes memory"
        replies.append(await reply_to(engine, request))
        steps.append(dict(static._steps))
        await engine.update(list(other.named_weights()), 1)
        replies.append(await reply_to(engine, request))
        steps.append(dict(static._steps))
        weight = held.hf.get_output_embeddings().weight
        weight.data = weight.data.clone()  # as a trainer may that puts its parameters elsewhere
        await engine.update(list(other.named_weights()), 2)
        assert not static._steps
        replies.append(await reply_to(engine, request))
        return replies, steps

    (first, flushed, renewed, moved), (made, again, kept) = serve(engine, play)
    assert flushed.tokens == first.tokens and all(made[shape] is not again[shape] for shape in made)
    assert kept == again  # weights that are copied into their place are read there
    expected = serve_all(engine_of(other, compiled=False, **SIZES), [request])[request.id]
    assert renewed.tokens == moved.tokens == expected.tokens != first.tokens


def test_ranks_and_fixed_shapes_do_not_go_together():
    with pytest.raises(ValueError, match="static_decode is for copies of one process, and tensor_parallel is 2"):
        EmbeddedConfig(static_decode=True, tensor_parallel=2)
