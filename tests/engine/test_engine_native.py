"""The compiled decode step: what transformers' modules compute, the same bits in any company, and a reason wherever it is not used."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from tests.engine.engine_setup import CONFIGS, SHAPE, VOCAB, plain_logprobs, tiny
from whet.engine.embedded import core
from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.compiled import library as compiled
from whet.engine.embedded.compiled import native
from whet.engine.embedded.compiled.library import NotCompiled
from whet.engine.embedded.compiled.native import checked
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.scheduler import Sequence
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams

pytestmark = pytest.mark.long

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
SHAPES = {
    "qwen3": CONFIGS["qwen3"],
    "qwen2, biases": CONFIGS["qwen2"],
    "llama, no groups": CONFIGS["llama"],
    "llama, biases": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral, one kv head": lambda: MistralConfig(**(SHAPE | {"num_key_value_heads": 1}), sliding_window=None, head_dim=48),
    "qwen3, heads of 128": lambda: Qwen3Config(head_dim=128, **SHAPE),
    "llama, stretched rotation": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    ),
}


def model_of(kind: str) -> CausalModel:
    """Random weights, biases among them."""
    model = random_causal(SHAPES[kind](), ModelConfig(path="", device="cpu"), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in model.named_weights():
            if name.endswith("bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
            if "norm" in name:
                tensor.mul_(1 + torch.randn(tensor.shape, generator=generator) / 4)
    return model


def core_of(model: CausalModel, *, compiled: bool = True, **sizes: int) -> EngineCore:
    sizes = {"cache_tokens": 2048, "block_size": 4, "max_running": 32, "max_batch_tokens": 64} | sizes
    return EngineCore(model, EmbeddedConfig(**sizes, compiled=compiled))


def played(engine: EngineCore, lengths: tuple[int, ...], new_tokens: int = 24) -> list[Sequence]:
    """Prompts of these lengths, each with a reply."""
    out: list[Sequence] = []
    for i, length in enumerate(lengths):
        prompt = tuple((5 * j + 11 * i) % VOCAB for j in range(length))
        out.append(engine.add(Request(str(i), prompt, SamplingParams(new_tokens, 1.0, seed=i))))
    while engine.has_work:
        for item in engine.step():
            if item.finish is not None:
                engine.finish(item.sequence)
    return out


@needs_compiler
@pytest.mark.parametrize("kind", SHAPES)
def test_replies_and_scores_are_those_of_plain_transformers_in_float64(kind):
    model = model_of(kind)
    engine = core_of(model, cache_tokens=160)
    sequences = played(engine, (1, 3, 16, 17, 40, 33))
    assert engine._native is not None and engine.rows.size_bytes == 0 and engine.scheduler.num_preempted > 0
    exact = AutoModelForCausalLM.from_config(SHAPES[kind](), attn_implementation="sdpa", dtype=torch.float64).eval()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.hf.state_dict().items()})
    for sequence in sequences:
        table = plain_logprobs(exact, tuple(sequence.tokens))
        expected = [float(table[i, t]) for i, t in enumerate(sequence.tokens[1:])]
        assert len(sequence.logprobs) == 24
        assert sequence.logprobs == pytest.approx(expected[-24:], abs=1e-4)
        assert engine.score(tuple(sequence.tokens), 1.0).logprobs == pytest.approx(expected, abs=1e-4)


@needs_compiler
def test_a_sequence_has_the_same_bits_in_any_company_and_with_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(native, "WORK_PER_THREAD", 1)
    model = model_of("qwen3")
    step = checked(model)
    lengths = (1, 2, 15, 16, 17, 31, 40, 64, 7)
    threads = torch.get_num_threads()

    def states(chosen: list[int]) -> dict[int, torch.Tensor]:
        store, free, sequences = KVStore(80, 4), list(range(80)), []
        for i in chosen:
            tokens = [(5 * j + 11 * i) % VOCAB for j in range(lengths[i])]
            blocks = [free.pop() for _ in range(-(-len(tokens) // 4))]
            sequences.append(Sequence(Request(str(i), tuple(tokens), SamplingParams(1)), i, tokens, blocks=blocks))
        while any(s.num_pending_tokens > 1 for s in sequences):
            behind = [s for s in sequences if s.num_pending_tokens > 1]
            step.hidden(behind, store)
            for s in behind:
                s.num_cached_tokens += 1
        return dict(zip(chosen, step.hidden(sequences, store), strict=True))

    with torch.inference_mode():
        together = states(list(range(9)))
        try:
            for count in (2, 3):
                torch.set_num_threads(count)
                assert all(torch.equal(found, together[i]) for i, found in states([8, 3, 4, 0, 7, 1, 2, 5, 6]).items())
        finally:
            torch.set_num_threads(threads)
        for i in range(9):
            assert torch.equal(states([i])[i], together[i])


@needs_compiler
@pytest.mark.parametrize("vocab", [97, 3, 1000])
def test_logits_are_the_output_layers_with_the_same_bits_in_any_company(monkeypatch, vocab):
    monkeypatch.setattr(native, "WORK_PER_THREAD", 1)
    model = random_causal(Qwen3Config(head_dim=16, **(SHAPE | {"vocab_size": vocab})), ModelConfig(path="", device="cpu"), seed=3)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(vocab))
    step = checked(model)
    states = torch.randn(9, 64)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        together = step.logits(states).clone()
        exact = states.double() @ model.lm_head.weight.double().T + model.lm_head.bias.double()
        assert torch.allclose(together.double(), exact, atol=1e-5)
        try:
            torch.set_num_threads(3)
            assert torch.equal(step.logits(states.flip(0)).flip(0), together)
        finally:
            torch.set_num_threads(threads)
        for i in range(9):
            assert torch.equal(step.logits(states[i : i + 1])[0], together[i])


@needs_compiler
def test_a_request_gets_the_same_bits_in_any_company():
    """Sampled, narrowed or greedy; prompts of a token, since the others' prefill is torch's."""
    model = model_of("qwen3")
    options = [SamplingParams(20, 1.0), SamplingParams(20, 0.8, top_k=7), SamplingParams(20, 0.0), SamplingParams(20, 1.0, top_p=0.9)]

    def told(numbers: range) -> list[tuple[list[int], list[float]]]:
        engine = core_of(model)
        found = [engine.add(Request(str(i), (i + 1,), replace(options[i % 4], seed=i))) for i in numbers]
        while engine.has_work:
            for item in engine.step():
                if item.finish is not None:
                    engine.finish(item.sequence)
        return [(s.tokens, s.logprobs) for s in found]

    together = told(range(9))
    assert [told(range(i, i + 1))[0] for i in range(9)] == together


@needs_compiler
@pytest.mark.parametrize("kind", ["qwen3", "llama, stretched rotation"])
def test_the_rotation_is_kept_and_grows(kind, monkeypatch):
    model = model_of(kind)
    expected = [(s.tokens, s.logprobs) for s in played(core_of(model), (1, 3, 40))]
    monkeypatch.setattr(native, "POSITIONS", 2)
    engine = core_of(model)
    assert [(s.tokens, s.logprobs) for s in played(engine, (1, 3, 40))] == expected
    assert engine._native is not None and 63 < len(engine._native._rotation[0]) < 128


@needs_compiler
def test_changed_weights_are_seen_in_the_next_step():
    model = model_of("qwen3")
    engine, slow = core_of(model), core_of(model, compiled=False)
    tokens = tuple(range(20))
    before = engine.score(tokens, 1.0).logprobs
    with torch.no_grad():
        for _, tensor in model.named_weights():
            tensor.mul_(1.1)
    layer = model.hf.model.layers[0].mlp  # other memory under the same name
    layer.up_proj.weight.data = layer.up_proj.weight.data.clone() * 0.9
    layer.down_proj.weight = torch.nn.Parameter(layer.down_proj.weight.detach() * 0.8)  # another tensor
    engine.begin_version(1)
    assert engine._native is not None and slow._native is None
    assert engine.score(tokens, 1.0).logprobs == pytest.approx(slow.score(tokens, 1.0).logprobs, abs=1e-4)
    assert engine.score(tokens, 1.0).logprobs != pytest.approx(before, abs=1e-2)


@needs_compiler
def test_a_step_that_computes_something_else_is_not_used(monkeypatch):
    def swapped(layer):
        found = list(tensors(layer))
        found[12], found[14] = found[14], found[12]
        return iter(found)

    tensors = native.layer_tensors
    monkeypatch.setattr(native, "layer_tensors", swapped)
    with pytest.raises(NotCompiled, match="away from those of the model's own modules"):
        checked(model_of("qwen3"))


@needs_compiler
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny("qwen3", "float64"), "it computes in float32, and the model is in float64"),
        (lambda: tiny("small", "float32"), r"sizes that are multiples of \d+, and the model's .* are \(32, 96, 8\)"),
    ],
)
def test_a_model_that_it_does_not_know_is_decoded_with_torch_and_told_why(model, reason):
    if "multiples" in reason and compiled.library().decode_vector_floats() <= 8:
        pytest.skip("this processor's vectors are short enough")
    core._tell.cache_clear()
    engine = core_of(model())
    with pytest.warns(UserWarning, match=reason):
        engine.score((1, 2, 3, 4), 1.0)
    assert engine._native is None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C compiler .no-such-compiler.; install one"),
        ("false", "false cannot build decode.c and draw.c: no message"),
    ],
)
def test_without_a_working_compiler_the_reason_is_told(compiler, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotCompiled, match=reason):
        compiled.library.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_a_build_is_kept_for_later_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.library.__wrapped__().decode_vector_floats() in (4, 8, 16)
    (built,) = tmp_path.rglob("*.so")
    monkeypatch.setattr(compiled, "_build", None)
    assert compiled.library.__wrapped__().decode_vector_floats() in (4, 8, 16)
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    assert built.parent.name == f"whet-{os.geteuid()}" and built.parent.stat().st_mode & 0o777 == 0o700
    assert built.stem.rpartition("-")[2] == hashlib.sha256(built.read_bytes()).hexdigest()


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A file in the cache that was built, and whatever is loaded from now on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = []

    def load(path):
        loaded.append(path)
        raise OSError("not loaded in a test")

    monkeypatch.setattr(compiled.ctypes, "CDLL", load)
    with pytest.raises(NotCompiled, match="not loaded in a test"):
        compiled.library.__wrapped__()
    loaded.clear()
    (file,) = tmp_path.rglob("*.so")
    return file, loaded


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_what_others_can_have_written_is_not_loaded(what, how, built, monkeypatch):
    file, loaded = built
    path = file.parent if what == "folder" else file
    words = "belongs to user"
    if how == "owner" and os.geteuid() == 0:
        os.chown(path, 12345, -1)
    elif how == "owner":
        monkeypatch.setattr(compiled.os, "geteuid", lambda: 12345)
        os.rename(file.parent, file.parent.with_name("whet-12345"))
    else:
        path.chmod(0o722)
        words = "others may write into"
    with pytest.raises(NotCompiled, match=words):
        compiled.library.__wrapped__()
    assert not loaded


@needs_compiler
def test_a_file_of_other_contents_than_its_name_says_is_built_anew(built, monkeypatch):
    file, loaded = built
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0")
    with pytest.raises(NotCompiled, match="not loaded in a test"):
        compiled.library.__wrapped__()
    assert len(loaded) == 1 and file.read_bytes() == whole, "the same was built, under the same name"


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "file"])
def test_no_link_in_the_cache_is_followed(what, built, tmp_path):
    file, loaded = built
    path = file.parent if what == "folder" else file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotCompiled, match="is not loaded"):
        compiled.library.__wrapped__()
    assert not loaded


@needs_compiler
def test_a_file_that_is_swapped_after_it_was_looked_at_is_not_the_one_that_is_loaded(built, monkeypatch, tmp_path):
    file, loaded = built
    opened = compiled._open

    def swapping(path):
        found = opened(path)
        (tmp_path / "other").write_text("made by somebody else")
        os.replace(tmp_path / "other", path)
        return found

    whole = file.read_bytes()
    monkeypatch.setattr(compiled, "_open", swapping)
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: loaded.append(Path(path).read_bytes()) or compiled.ctypes.pythonapi)
    with pytest.raises((NotCompiled, AttributeError)):
        compiled.library.__wrapped__()
    assert all(each == whole for each in loaded)


@needs_compiler
def test_modules_that_do_more_than_they_say_are_not_replaced():
    """As a model cut over several processes has: hooks that exchange, and tensors that are a part."""
    model = model_of("qwen3")
    handle = model.hf.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(NotCompiled, match="the model's Linear has hooks"):
        checked(model)
    handle.remove()
    handle = model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(NotCompiled, match="an output layer that is a plain linear one"):
        checked(model)
    handle.remove()
    part = model.hf.model.layers[1].mlp.up_proj
    part.weight = torch.nn.Parameter(part.weight[:48].detach().clone())
    with pytest.raises(NotCompiled, match="it reads whole tensors"):
        checked(model)
