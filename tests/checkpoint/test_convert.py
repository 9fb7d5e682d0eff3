"""Weights go from Hugging Face to DCP, into training, and back, and give the same logits everywhere."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.parallel.tiny_models import SIZES, step_of
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.convert import convert
from whet.checkpoint.store import CheckpointStore, find_checkpoint, write_manifest
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.folders import INDEX, read_weights
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Progress

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
NO_HEAD = {key: value for key, value in SIZES.items() if key != "head_dim"}
KINDS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**NO_HEAD),
    "qwen3_tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE, num_experts=4),
    "glm4": lambda: Glm4Config(**SIZES),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **MOE, **EXPERTS),
    "deepseek_v3": lambda: DeepseekV3Config(**(NO_HEAD | MOE | EXPERTS | MLA), n_shared_experts=1),
}
PROMPT = (3, 14, 15, 9, 26, 5)


def folder_of(kind, path, dtype=torch.float32):
    """A model in Hugging Face format, with what no gradient changes set to something."""
    torch.manual_seed(4)
    hf = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=dtype)
    for name, buffer in hf.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn_like(buffer))
    hf.save_pretrained(path)
    return path


def load(folder):
    return load_causal(folder, ModelConfig(path="", device="cpu"), trainable=True)


@torch.no_grad()
def logits(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return hf.eval()(input_ids=torch.tensor([PROMPT])).logits[0]


def score(folder):
    """What the engine makes of it."""
    from concurrent.futures import ThreadPoolExecutor

    async def main():
        with ThreadPoolExecutor(1) as thread:
            engine = EmbeddedEngine(load(folder), EmbeddedConfig(cache_tokens=128), thread, shares_weights=True, deterministic=False)
            try:
                return (await engine.score(PROMPT)).logprobs
            finally:
                await engine.close()

    return asyncio.run(main())


def trained(dcp, source):
    """A step of training from a DCP checkpoint, into the checkpoint of a run."""
    backend = TorchBackend(load(source), TrainConfig(optim={"lr": 1e-2}), 10)
    with torch.no_grad():
        for _, tensor in backend.named_weights():
            tensor.zero_()
    backend.load(find_checkpoint(dcp).folder, optimizer=False)
    algorithm, batch = step_of("grpo")
    backend.forward_backward(batch, algorithm.loss)
    backend.optim_step()
    run = dcp.with_name("run")

    def write(folder):
        backend.save(folder)
        (folder / "config.toml").write_text(f'[model]\npath = "{source}"\n')

    CheckpointStore(run / "checkpoints", CheckpointConfig()).save(Progress(1, 1, 1), {}, {}, write)
    return run, backend


@pytest.mark.parametrize("kind", KINDS)
def test_the_round_trip_through_training_gives_equal_logits(kind, tmp_path):
    source = folder_of(kind, tmp_path / "hf")
    found = convert(source, tmp_path / "dcp", "dcp", shard_bytes=2**14)
    assert found.left_out == () and len(list((tmp_path / "dcp/weights").glob("*.distcp"))) > 1
    convert(tmp_path / "dcp", tmp_path / "back", "hf", shard_bytes=2**14)
    assert digests_of(read_weights(tmp_path / "back")) == digests_of(read_weights(source)), "to the bit, under the names of files"
    assert (tmp_path / "back" / INDEX).is_file() and torch.equal(logits(tmp_path / "back"), logits(source))
    run, backend = trained(tmp_path / "dcp", source)
    convert(run, tmp_path / "trained", "hf", model=str(source))
    backend.model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        own = backend.model.hf(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    after = logits(tmp_path / "trained")
    assert not torch.allclose(after, logits(source), atol=1e-2), "it learned"
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)
    expected = after.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(score(tmp_path / "trained")), expected, atol=1e-4, rtol=1e-4)


def test_a_type_may_be_chosen_and_is_said(tmp_path):
    source = folder_of("qwen3_moe", tmp_path / "hf")
    convert(source, tmp_path / "half", "hf", dtype="bfloat16")
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in read_weights(source)}
    assert digests_of(read_weights(tmp_path / "half")) == digests_of(wanted.items())
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"


def test_rows_that_pad_a_vocabulary_are_left_out_and_unknown_tensors_are_told(tmp_path):
    source = folder_of("llama", tmp_path / "hf")
    file = source / "model.safetensors"
    state = load_file(file)
    kept = dict(state)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.full((7, 32), 9.0)])
    save_file(state | {"extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    found = convert(source, tmp_path / "out", "hf")
    assert found.left_out == ("extra.weight",)
    assert digests_of(read_weights(tmp_path / "out")) == digests_of(kept.items())


@pytest.mark.parametrize("kind", ["missing", "shape", "cut"])
def test_what_is_missing_or_damaged_is_named_and_nothing_is_left(kind, tmp_path):
    source = folder_of("llama", tmp_path / "hf")
    file, name = source / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    state = load_file(file)
    if kind == "missing":
        del state[name]
    elif kind == "shape":
        state[name] = state[name][:-1].contiguous()
    save_file(state, file, {"format": "pt"})
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"model\.safetensors" if kind == "cut" else r"layers\.1\.mlp\.up_proj\.weight"):
        convert(source, tmp_path / "out", "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    source = folder_of("qwen2", tmp_path / "hf")

    def flipped(folder):
        for name, tensor in read_weights(folder):
            yield name, (tensor + 1e-6 if name == "model.norm.weight" else tensor)

    monkeypatch.setattr("whet.checkpoint.convert.read_weights", flipped)
    with pytest.raises(ValueError, match=r"does not read back as it was written: model\.norm\.weight;"):
        convert(source, tmp_path / "out", "hf")
    with pytest.raises(ValueError, match="is there already"):
        convert(source, source, "hf")
    with pytest.raises(ValueError, match="is no model folder"):
        convert(tmp_path / "nothing", tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "config.json"])
def test_nothing_outside_a_models_folder_is_copied(name, tmp_path):
    source, secret = folder_of("llama", tmp_path / "hf"), tmp_path / "secret"
    if (source / name).exists():
        (source / name).rename(secret)
    else:
        secret.write_text("a key")
    (source / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} leads out of the folder, and no such link is followed"):
        convert(source, tmp_path / "out", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "secret"]


@pytest.mark.parametrize("settings", ['[model]\npath = "{secret}"\n', "model = 3", "[", "[model]"])
def test_no_path_that_a_checkpoint_s_settings_name_is_followed(settings, tmp_path):
    source = folder_of("llama", tmp_path / "hf")
    convert(source, tmp_path / "start", "dcp")
    run, _ = trained(tmp_path / "start", source)
    saved = find_checkpoint(run)
    named = source.rename(tmp_path / "secret")
    (saved.folder / "config.toml").write_text(settings.format(secret=named))
    (saved.folder / "manifest.json").unlink()
    write_manifest(saved.folder, saved.progress, saved.metrics, saved.facts)
    with pytest.raises(ValueError, match=r"holds weights alone.* by --model: no path in a checkpoint is followed"):
        convert(run, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    convert(run, tmp_path / "out", "hf", model=str(named))
    for own in (named, tmp_path / "start"):
        with pytest.raises(ValueError, match=r"has a config\.json of its own: leave --model out"):
            convert(own, tmp_path / "again", "hf", model=str(named))


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path):
    model = tmp_path / "models--a--b"
    source = folder_of("llama", model / "snapshots/0123")
    (model / "blobs").mkdir()
    for path in list(source.iterdir()):
        path.rename(model / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    convert(source, tmp_path / "out", "hf")
    assert digests_of(read_weights(tmp_path / "out")) == digests_of(read_weights(source))
    (source / "more.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("a key")
    with pytest.raises(ValueError, match=r"more\.txt leads out of the folder"):
        convert(source, tmp_path / "out2", "hf")


PEAK = """
import sys
from pathlib import Path
import torch
from transformers import LlamaConfig
from whet.checkpoint.convert import convert
from whet.model.config import ModelConfig
from whet.model.folders import write_weights
from whet.model.meta import meta_causal

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def make(folder, layers):
    config = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8)
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    named = meta_causal(config, ModelConfig(path="", device="cpu")).hf.named_parameters()
    write_weights(folder, ((name, torch.ones(t.shape)) for name, t in named), 2**24)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

folder = Path(sys.argv[1])
make(folder / "small", 1)
for to, source in (("dcp", "small"), ("hf", "small-dcp")):
    convert(folder / source, folder / f"{source}-{to}", to, shard_bytes=2**24)
size = make(folder / "large", 13)
before = peak()
for to, source in (("dcp", "large"), ("hf", "large-dcp")):
    convert(folder / source, folder / f"{source}-{to}", to, shard_bytes=2**24)
print(size, peak() - before)
"""


@pytest.mark.slow
def test_a_model_of_200_mb_is_converted_in_much_less_memory(tmp_path):
    out = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True, cwd=Path.cwd())
    size, grown = map(int, out.stdout.split()[-2:])
    assert size > 200e6 and grown < 80e6
