"""A task that a tiny model learns in seconds: two turns with an environment's question between them, and a reward for the second answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.two_turns import QUESTION
from whet.quickstart.model import SmallModelConfig, make_model
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig
from whet.settings.supervised import DpoRunConfig, RewardModelRunConfig, SupervisedRunConfig

HERE = Path(__file__).parent
WANTED, OTHER = "blue", "red"
"""What the second turn may say; the first is rewarded."""
OPENINGS = ("go", "start", "begin", "now")
READY = ("yes", "sure")
"""What the first turn may say; either is as good."""
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, max_positions=128)


def prompt_of(opening: str, ready: str) -> list[dict[str, str]]:
    """A conversation up to its second answer."""
    said = [("user", opening), ("assistant", ready), ("user", QUESTION)]
    return [{"role": role, "content": content} for role, content in said]


def talks(num: int, share_wanted: float, seed: int) -> list[dict[str, Any]]:
    """Conversations of two turns, of which this share has the wanted answer."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(num):
        answer = WANTED if i < share_wanted * num else OTHER
        rows.append({"messages": [*prompt_of(draw.choice(OPENINGS), draw.choice(READY)), {"role": "assistant", "content": answer}]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_start(folder: Path) -> Path:
    """The model that every run starts from, and the prompts `folder/train.jsonl`. It has learned the form of a conversation, and says
    either word as often."""
    rows = talks(128, 0.5, seed=1)
    make_model(folder / "random", [message["content"] for row in rows for message in row["messages"]], SHAPE, 0)
    write_rows(folder / "train.jsonl", [{"prompt": opening, "label": WANTED} for opening in OPENINGS])
    train_on_data(sft_config(folder, "start", write_rows(folder / "talks.jsonl", rows), folder / "random", num_steps=50))
    return folder / "start/model"


def sft_config(folder: Path, name: str, data: Path, model: Path, num_steps: int) -> SupervisedRunConfig:
    return SupervisedRunConfig.model_validate(
        {**common(folder, name, model, lr=1e-2), "data": {"path": str(data)}, "num_steps": num_steps, "samples_per_step": 32}
    )


def dpo_config(folder: Path, name: str, data: Path, model: Path, num_steps: int) -> DpoRunConfig:
    return DpoRunConfig.model_validate(
        {
            **common(folder, name, model, lr=1e-3),
            "data": {"path": str(data), "prompt_key": "prompt"},
            "num_steps": num_steps,
            "pairs_per_step": 8,
        }
    )


def pairs(*, flipped: bool) -> list[dict[str, Any]]:
    """Preference pairs over the second answer."""
    chosen, rejected = (OTHER, WANTED) if flipped else (WANTED, OTHER)
    return [{"prompt": prompt_of(opening, ready), "chosen": chosen, "rejected": rejected} for opening in OPENINGS for ready in READY]


LIKED, DISLIKED = (WANTED, "start", "now"), (OTHER, "go", "begin")
"""Answers for a reward model, more than two, so that a new head is right about some pairs and wrong about others."""


def rated_pairs(*, held_out: bool, flipped: bool = False) -> list[dict[str, Any]]:
    """Preference pairs of a liked answer and a disliked one. Half of the pairings are held out, as is one of the first turns."""
    names = ("rejected", "chosen") if flipped else ("chosen", "rejected")
    return [
        {"prompt": prompt_of(opening, READY[held_out]), names[0]: liked, names[1]: disliked}
        for opening in OPENINGS
        for i, liked in enumerate(LIKED)
        for k, disliked in enumerate(DISLIKED)
        if ((i + k) % 3 == 0) == held_out
    ]


def rm_config(folder: Path, name: str, data: Path, model: Path, num_steps: int, lr: float) -> RewardModelRunConfig:
    return RewardModelRunConfig.model_validate(
        {
            **common(folder, name, model, lr=lr),
            "data": {"path": str(data), "prompt_key": "prompt"},
            "num_steps": num_steps,
            "pairs_per_step": 12,
        }
    )


@torch.no_grad()
def rated(model: Path, pairs: list[dict[str, Any]]) -> tuple[float, float]:
    """The share of pairs whose chosen answer plain transformers scores higher with the model, and by how much on average."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()

    def score(pair: dict[str, Any], side: str) -> float:
        messages = [*pair["prompt"], {"role": "assistant", "content": pair[side]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")  # the last token is the turn's end
        return float(hf(input_ids=torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits)

    margins = [score(pair, "chosen") - score(pair, "rejected") for pair in pairs]
    return sum(margin > 0 for margin in margins) / len(margins), sum(margins) / len(margins)


def common(folder: Path, name: str, model: Path, lr: float) -> dict[str, Any]:
    """What the settings of every kind of run have."""
    return {
        "run_dir": str(folder / name),
        "deterministic": True,
        "model": {"path": str(model), "device": "cpu"},
        "train": {"optim": {"lr": lr}},
        "checkpoint": {"interval": None},
        "observe": {"display": "none"},
    }


def rl_config(folder: Path, name: str, model: Path, **changes: Any) -> RunConfig:
    """Two optimizer steps a rollout, so that the second one is off-policy. `changes` replace whole tables."""
    return RunConfig.model_validate(
        {
            **common(folder, name, model, lr=3e-3),
            "data": {"train": str(folder / "train.jsonl")},
            "num_rollouts": 9,
            "batch": {"prompts_per_rollout": 4, "samples_per_prompt": 8, "steps_per_rollout": 2},
            "rollout": {"max_turns": 2, "max_turn_tokens": 4, "max_tokens": 96},
            "env": {"name": f"{HERE / 'two_turns.py'}:TwoTurns", "parser": "none"},
            "reward": {"name": "exact"},
            **changes,
        }
    )


@torch.no_grad()
def chance_of_wanted(model: Path, *, of_both: bool = False) -> float:
    """How likely the model is to begin its second answer with the wanted word, as plain transformers has it: a mean over the prompts.
    `of_both`: given that it is one of the two words."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted, other = (tokenizer.encode(word, add_special_tokens=False) for word in (WANTED, OTHER))
    assert len(wanted) == len(other) == 1, "a word is a token"
    chances: list[float] = []
    for opening in OPENINGS:
        for ready in READY:
            text = tokenizer.apply_chat_template(prompt_of(opening, ready), add_generation_prompt=True, tokenize=False)
            tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            found = hf(input_ids=tokens).logits[0, -1].softmax(-1)
            chances.append(float(found[wanted] / (found[wanted] + found[other] if of_both else 1)))
    return sum(chances) / len(chances)
