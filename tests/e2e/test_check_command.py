"""`whet check` and `whet doctor` as a user types them, and the page about them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.typed import whet_here
from whet.check import doctor
from whet.check.check import check
from whet.check.reading import AREAS
from whet.model.config import ModelConfig
from whet.model.meta import meta_causal
from whet.quickstart.model import CHAT_TEMPLATE
from whet.quickstart.run import QuickstartConfig, make_files

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/check.md").read_text()
VARIES = re.compile(r"\d+% of [\d.]+ \w+ \([^)]*\)|[\d.]+ \w+ (?=are free)")
"""The device's memory, and the share of it that is used; the room on the disk."""


def whet(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """whet in a folder, from the tree that is tested."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'whet'; from whet.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, check=False)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def table(title: str) -> list[str]:
    """The first column of the table below a heading."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's example stands on."""
    folder = tmp_path_factory.mktemp("check")
    make_files(QuickstartConfig(num_demonstrations=40, num_held_out=10), folder)
    (folder / "run.toml").write_text(blocks("toml")[0])
    return folder


def stable(text: str) -> str:
    return VARIES.sub("", text)


def test_the_pages_example_is_what_the_command_prints(folder):
    command, *output = blocks("console")[0].splitlines()
    assert command == "$ whet check run.toml"
    done = whet(folder, *command.split()[2:], "--json", "out/check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stable(done.stdout).splitlines() == stable("\n".join(output)).splitlines()
    report = json.loads((folder / "out/check.json").read_text())
    assert (report["command"], report["failed"]) == ("train", 0)
    assert list(dict.fromkeys(finding["area"] for finding in report["findings"])) == list(AREAS)
    assert report["memory_bytes"]["parameters"] > 0


def test_the_pages_faults_are_found_and_end_with_status_2(folder):
    command, *output = blocks("console")[1].splitlines()
    done = whet_here(*command.split()[2:], cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    printed = stable(done.stdout).splitlines()
    assert output[0] == "..."
    odd = [line for line in printed[:-1] if line.split()[1] in ("FAIL", "warn", "skip")]
    assert stable("\n".join(output[1:])).splitlines() == [*odd, printed[-1]]


def test_the_page_lists_the_areas_that_there_are():
    assert table("What is looked at") == list(AREAS)
    assert table("whet doctor") == list(doctor.CHECKS)
    shown = [line.split()[0] for line in blocks("console")[2].splitlines()[1:]]
    assert list(dict.fromkeys(shown)) == list(doctor.CHECKS)


def test_the_page_names_the_parts_of_the_memory_plan(folder, monkeypatch):
    monkeypatch.chdir(folder)
    plan = check(Path("run.toml"), ["algo.kl_coef=0.1"], lambda finding: None).memory
    section = PAGE.partition("## The memory plan\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([\w ]+) \|", section, re.MULTILINE)[1:] == list(plan)


def test_doctor_prints_every_area_and_writes_json(tmp_path):
    done = whet(tmp_path, "doctor", "--json", "out/doctor.json")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = list(dict.fromkeys(line.split()[0] for line in done.stdout.splitlines()))
    assert printed == list(doctor.CHECKS)
    assert json.loads((tmp_path / "out/doctor.json").read_text())["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_model_of_0_6_billion_parameters_is_checked_without_its_weights_being_read(tmp_path):
    """In Qwen3-0.6B's shape, with a vocabulary and a weights file of its size."""
    tokens = {f"t{i}": i for i in range(151_643)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *pre_tokenizers.ByteLevel.alphabet()]
    tokens |= {text: len(tokens) + i for i, text in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(tmp_path / "model")
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    shape.save_pretrained(tmp_path / "model")
    weights = meta_causal(shape, ModelConfig(path="x", dtype="bfloat16")).named_weights()
    save_file({name: torch.zeros(p.shape, dtype=p.dtype) for name, p in weights}, tmp_path / "model/model.safetensors", {"format": "pt"})
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(7473)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    done = whet(
        tmp_path, "check", str(ROOT / "examples/gsm8k_grpo.toml"), "model.path=model", "model.dtype=bfloat16", "data.train=gsm8k.jsonl",
        "evaluate.sets.gsm8k.path=gsm8k.jsonl", "model.gradient_checkpointing=true", "--json", "check.json",
    )  # fmt: skip
    report = json.loads((tmp_path / "check.json").read_text())
    assert [f for f in report["findings"] if f["status"] in ("FAIL", "skip") and f["area"] != "memory"] == [], done.stdout
    assert report["memory_bytes"]["parameters"] == 2 * 596_049_920
    assert report["memory_bytes"]["float32 masters"] == report["memory_bytes"]["gradients"] == 4 * 596_049_920
