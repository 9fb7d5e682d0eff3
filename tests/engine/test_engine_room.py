"""The cache has room for what a run plays, within a share of the device's memory."""

import pytest
import torch

from tests.engine.engine_setup import tiny
from whet.engine.embedded import room
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.room import token_bytes, with_cache
from whet.model.meta import without_contents
from whet.plan.live import LiveBytes


def memory(monkeypatch, num_bytes):
    monkeypatch.setattr(room, "device_memory", lambda device: (num_bytes, "memory"))


def test_a_token_has_the_bytes_that_the_cache_stores_of_it():
    model = tiny(dtype="float32")
    text = model.config.get_text_config()
    assert token_bytes(model) == 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    with LiveBytes(lambda _: None):
        assert token_bytes(without_contents(model)) == token_bytes(model)


def test_what_the_settings_say_stays(monkeypatch):
    memory(monkeypatch, 1)
    assert with_cache(EmbeddedConfig(cache_tokens=99), tiny(), 50).cache_tokens == 99


@pytest.mark.parametrize(
    ("tokens_in_memory", "longest", "expected"),
    [
        (10**6, 50, 10 * 50),  # every sequence that runs has room
        (1000, 50, 200),  # a fifth of the memory
        (100, 50, 50),  # one sequence always has room
        (10**6, 10**6, 10 * 256),  # the model's positions
    ],
)
def test_the_cache_holds_the_sequences_that_run_within_a_fifth_of_the_memory(monkeypatch, tokens_in_memory, longest, expected):
    model = tiny()
    assert model.max_positions == 256
    memory(monkeypatch, tokens_in_memory * token_bytes(model))
    sizes = EmbeddedConfig(max_running=10, block_size=1)
    assert with_cache(sizes, model, longest, torch.device("cpu")).cache_tokens == expected
    halves = with_cache(sizes.model_copy(update={"copies": 2}), model, longest, torch.device("cpu"))
    assert halves.cache_tokens == (100 if expected == 200 else expected)


def test_an_engine_without_a_size_has_one():
    core = EngineCore(tiny(), EmbeddedConfig(max_running=3, block_size=16))
    assert core.max_tokens == 256 and core.store.num_blocks == 3 * 256 // 16
