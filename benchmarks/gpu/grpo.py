"""Whole GRPO steps (sampling, rewards, log-probs, update) in bfloat16, beside TRL where it is installed.

The model has the layers of Qwen3-0.6B, random weights, and the vocabulary of a tokenizer made on the spot (some hundred tokens). whet and
TRL sample 64 replies a step; the first step warms up. `grpo_step.py` has the settings.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import grpo_step
import torch

from gpu.clock import forget, peak_gib
from gpu.models import SHAPES
from gpu.record import Case, NotRun
from whet.quickstart.model import SmallModelConfig, make_model


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    shape: str
    place: grpo_step.Place
    """Of the steps that are timed."""
    static: bool
    """Whether a run with static_decode is timed, too."""
    trl_batch: tuple[int, int]


PLACE = grpo_step.Place(dtype="bfloat16")
SIZES = {
    "small": Sizes("tiny", replace(PLACE, steps=2, new_tokens=12, prompts=2), False, (16, 1)),
    "full": Sizes("0.6B", replace(PLACE, steps=3, new_tokens=128), True, (64, 1)),
}


def cases(sizes: str, device: torch.device) -> list[Case]:
    has, folder = SIZES[sizes], tempfile.TemporaryDirectory(prefix="whet-grpo-")
    place = replace(has.place, folder=Path(folder.name), device=str(device))
    model = Path(folder.name) / "model"

    def prepared(work: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        def run() -> Mapping[str, Any]:
            if not model.exists():
                prepare(model, has.shape, Path(folder.name))
            forget(device)
            return work()

        return run

    static = replace(place, changes={"engine": {"embedded": {"static_decode": True}}})
    timed = [Case("whet", prepared(lambda: whet_timed(model, place, device)))]
    timed += [Case("whet, static_decode", prepared(lambda: whet_timed(model, static, device)))] if has.static else []
    return [
        *timed,
        Case("TRL", prepared(lambda: trl_timed(model, has.trl_batch, place, device))),
    ]


def prepare(model: Path, size: str, folder: Path, **changes: int) -> None:
    """Write the model, with `changes` to its shape, and the prompts."""
    shape = {**SHAPES[size], **changes}
    config = SmallModelConfig(
        hidden_size=shape["hidden_size"], num_layers=shape["num_hidden_layers"], num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"], intermediate_size=shape["intermediate_size"],
    )  # fmt: skip
    make_model(model, grpo_step.PROMPTS * 2, config, 0)
    rows = [json.dumps({"prompt": text, "label": ""}) + "\n" for text in grpo_step.PROMPTS]
    (folder / "train.jsonl").write_text("".join(rows))


def whet_timed(model: Path, place: grpo_step.Place, device: torch.device) -> Mapping[str, Any]:
    """Medians of the steps after the first."""
    steps = grpo_step.whet_steps(model, place)
    found = {part: round(median(step[part] for step in steps[1:]), 3) for part in ("seconds", "rollout", "update")}
    return {**found, "first_s": round(steps[0]["seconds"], 3), "peak_gib": peak_gib(device)}


def trl_timed(model: Path, batch: tuple[int, int], place: grpo_step.Place, device: torch.device) -> Mapping[str, Any]:
    """The same by TRL."""
    if missing := [name for name in ("trl", "datasets") if find_spec(name) is None]:
        raise NotRun(f"{' and '.join(missing)} not installed")
    steps = grpo_step.trl_steps(model, batch, place)
    found = round(median(step["seconds"] for step in steps[1:]), 3)
    return {"seconds": found, "first_s": round(steps[0]["seconds"], 3), "peak_gib": peak_gib(device)}
