"""docs/scaling.md shows what `whet plan` prints. `WHET_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from whet.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BLOCK = re.compile(r"```console\n\$ (whet plan [^\n]+)\n(.*?)```", re.DOTALL)
ALL = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}


def dense(hidden, layers, heads, width, *, tied=False):
    return Qwen3Config(
        **ALL, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, intermediate_size=width,
        tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "Qwen/Qwen3-0.6B": lambda: dense(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-8B": lambda: dense(4096, 36, 32, 12288),
    "Qwen/Qwen3-32B": lambda: dense(5120, 64, 64, 25600),
    "Qwen/Qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        **ALL, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    ),
}  # fmt: skip
COMMANDS = [found.group(1) for found in BLOCK.finditer(PAGE.read_text())]
QUICK = ["whet plan Qwen/Qwen3-8B --devices 8"]
"""Seconds; those of one device count every layer."""


def test_every_size_is_on_the_page():
    assert set(QUICK) < set(COMMANDS)
    for size in (1, 8, 64):
        assert sum(f"--devices {size}" in command.split("Qwen3")[1] for command in COMMANDS) >= 3


@pytest.mark.parametrize("command", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in COMMANDS])
def test_the_page_shows_what_the_command_prints(command, tmp_path, monkeypatch):
    words = shlex.split(command)[1:]
    SHAPES[words[1]]().save_pretrained(tmp_path)
    monkeypatch.setattr("whet.plan.plan.resolve_model_path", lambda _: tmp_path)
    printed = CliRunner().invoke(app, words).output
    if os.environ.get("WHET_WRITE_DOCS"):
        block = f"```console\n$ {command}\n{printed}```"
        PAGE.write_text(BLOCK.sub(lambda found: block if found.group(1) == command else found.group(0), PAGE.read_text()))
    shown = next(found.group(2) for found in BLOCK.finditer(PAGE.read_text()) if found.group(1) == command)
    assert printed == shown
