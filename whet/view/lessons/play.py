"""Trajectories made by hand, with the credit, the loss and the records that whet's own code computes for them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig
from whet.algo.table import build_algorithm
from whet.config import dump_toml
from whet.core.batch import TokenOutputs, TrainBatch, batch_of
from whet.observe.records import RecordWriter
from whet.rollout.samples import samples_of_groups
from whet.train.base import TokenTerms
from whet.train.learners import Update
from whet.train.recorded import numbers_of
from whet.train.token_uses import UseTable
from whet.types import Finish, Group, Message, Origin, Outcome, Rewards, Sample, Task, ToolCall, Trajectory, Turn

PIECE = re.compile(r"<\|[a-z_]+\|>|</?[a-z_]+>|\n|[\u3400-\u9fff\u3000-\u303f\uff00-\uffef]| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\s")
"""Tokens of the made-up tokenizer: words with the space before them, single digits, Chinese characters and marks, special tokens."""
EPOCHS = 2
DRIFT = 0.5
"""Nats by which the second epoch's log-probs differ at most from the first's."""


@dataclass(frozen=True, slots=True)
class Move:
    """A turn: the model's text, and the answer to it."""

    text: str
    call: ToolCall | None = None
    answer: str = ""
    """The tool's reply; "": the trajectory ends here."""


@dataclass(frozen=True, slots=True)
class Played:
    """A trajectory of a lesson."""

    steps: tuple[Move, ...]
    reward: float
    components: dict[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    expected: tuple[float, float] = (0.0, 0.0)
    """The critic's estimates before the first of the trained tokens, and before the last."""


@dataclass(frozen=True, slots=True)
class Example:
    """A run of a lesson: prompts, the trajectories of each, and the algorithm."""

    algorithm: dict[str, Any]
    prompts: tuple[tuple[str, tuple[Played, ...]], ...]
    reference: bool = False
    words: dict[str, Any] = field(default_factory=dict[str, Any])
    """Title, text and stops, each in English (en) and Chinese (zh)."""


def words(en: str, zh: str) -> dict[str, str]:
    """A text in both languages."""
    return {"en": en, "zh": zh}


def stop(trajectory: str, token: int | None, en: str, zh: str, **more: Any) -> dict[str, Any]:
    """A place to look at."""
    at = {"rollout": 0, "trajectory": trajectory, **({} if token is None else {"token": token}), **more}
    return {"at": at, "words": words(en, zh)}


class MadeUpTokens:
    """The ids of the texts of a lesson, given as they come."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        pieces = PIECE.findall(text)
        assert "".join(pieces) == text, f"the made-up tokenizer cannot write {text!r}"
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def save(self, file: Path) -> None:
        """Write it as a tokenizer.json."""
        Tokenizer(WordLevel(self.ids, unk_token=next(iter(self.ids)))).save(str(file))


def write_example(folder: Path, example: Example) -> None:
    """Write the run of an example: settings, tokenizer, words and the records of its one rollout."""
    config = TypeAdapter(AlgorithmConfig).validate_python(example.algorithm)
    vocabulary = MadeUpTokens()
    groups = [_group(i, prompt, played, vocabulary) for i, (prompt, played) in enumerate(example.prompts)]
    samples = samples_of_groups(groups)
    batch = _annotated(batch_of(samples), samples, example)
    counts = {len(played) for _, played in example.prompts}
    algorithm = build_algorithm(config, StepPlan(EPOCHS, samples_per_prompt=max(counts)))
    batch, _ = algorithm.assign_credit(batch)
    step = algorithm.prepare(batch.with_(weights=algorithm.reducer(batch)))
    table = UseTable(batch)
    for epoch in range(EPOCHS):
        table.add(list(range(len(samples))), step, None, _terms(algorithm, step, epoch))
    update = Update({}, batch.old_logprobs, batch.num_tokens, table.uses())
    (folder / "model").mkdir(parents=True)
    RecordWriter(folder).write(0, groups, samples, numbers_of(batch, samples, update, 0))
    settings = {"num_rollouts": 1, "batch": {"epochs": EPOCHS, "samples_per_prompt": max(counts)}}
    (folder / "config.toml").write_text(dump_toml({**settings, "algo": config.model_dump(exclude_none=True)}), encoding="utf-8")
    vocabulary.save(folder / "model/tokenizer.json")
    (folder / "lesson.json").write_text(json.dumps(example.words, ensure_ascii=False), encoding="utf-8")


def _group(number: int, prompt: str, played: Sequence[Played], vocabulary: MadeUpTokens) -> Group:
    task = Task(f"lesson/{number}#0", (Message("user", prompt),))
    return Group(task, tuple(_trajectory(task, i, prompt, each, vocabulary) for i, each in enumerate(played)))


def _trajectory(task: Task, number: int, prompt: str, played: Played, vocabulary: MadeUpTokens) -> Trajectory:
    turns: list[Turn] = []
    given, origin = f"<|user|>\n{prompt}<|end|>\n<|assistant|>\n", Origin.PROMPT
    for step in played.steps:
        context, tokens = vocabulary.tokens(given), vocabulary.tokens(f"{step.text}<|end|>")
        seed = f"{task.id}/{number}/{len(turns)}"
        logprobs = [-0.05 - 1.6 * made_up(seed, i) ** 2 for i in range(len(tokens))]
        content = step.text if step.call is None else ""
        message = Message("assistant", content, () if step.call is None else (step.call,))
        sizes = (0,) * len(tokens)
        turns.append(Turn(context, (origin,) * len(context), tokens, logprobs, sizes, message, Finish.STOP))  # pyright: ignore[reportArgumentType]
        given, origin = f"\n<|tool|>\n{step.answer}<|end|>\n<|assistant|>\n", Origin.ENVIRONMENT
    rewards = Rewards(played.reward, played.components or {"score": played.reward}, played.detail)
    return Trajectory(f"{task.id}/{number}", task, tuple(turns), Outcome.COMPLETED, rewards)


def made_up(seed: str, place: int) -> float:
    """A number in [0, 1) that is always the same."""
    value = math.sin(sum(ord(letter) * (i + 1) for i, letter in enumerate(seed)) * 0.37 + place * 12.9898) * 43758.5453
    return value - math.floor(value)


def _annotated(batch: TrainBatch, samples: Sequence[Sample], example: Example) -> TrainBatch:
    """The batch with what models say of its tokens: the trainer as the engine, and made-up numbers of a reference and a critic."""
    batch = batch.with_(old_logprobs=batch.rollout_logprobs)
    if example.reference:
        away = torch.tensor([0.6 * (made_up("reference", i) - 0.4) for i in range(batch.num_tokens)])
        batch = batch.with_(ref_logprobs=batch.rollout_logprobs - away)
    if example.algorithm["name"] == "ppo":
        played = [each for _, all_played in example.prompts for each in all_played]
        values = torch.cat([_values(sample, each) for sample, each in zip(samples, played, strict=True)])
        batch = batch.with_(values=values, scores=torch.zeros(batch.num_tokens))
    return batch


def _values(sample: Sample, played: Played) -> Tensor:
    """The critic's estimates: from the first expected to the last, with some doubt on the way. [T]"""
    trained = [i for i, trains in enumerate(sample.loss_mask) if trains]
    first, last = played.expected
    out = torch.zeros(len(sample.tokens))
    for k, i in enumerate(trained):
        share = k / max(len(trained) - 1, 1)
        out[i] = first + (last - first) * share + 0.1 * (made_up(sample.trajectory, i) - 0.5)
    return out


def _terms(algorithm: Any, step: TrainBatch, epoch: int) -> TokenTerms:
    """The loss of an epoch. In the second the log-probs have moved along the advantages, by made-up distances."""
    assert step.old_logprobs is not None and step.advantages is not None and step.weights is not None
    moved = torch.tensor([DRIFT * (1.15 * made_up(f"epoch{epoch}", i) - 0.15) for i in range(step.num_tokens)]) * epoch
    logprobs = (step.old_logprobs + moved * torch.sign(step.advantages)).clamp(max=-1e-3)
    entropy = torch.tensor([0.2 + 1.5 * made_up("entropy", i) for i in range(step.num_tokens)])
    found = algorithm.loss(step, TokenOutputs(logprobs, entropy))
    detail = found.detail()
    ranks = torch.tensor([1.0 + math.floor(4 * made_up("rank", i) ** 3) for i in range(step.num_tokens)])
    none = torch.full_like(logprobs, math.nan)
    correction = none if detail.correction is None else detail.correction
    columns = (logprobs, entropy, ranks, detail.old_logprobs, detail.ratio, detail.clip.float(), correction, step.weights * found.terms)
    return TokenTerms(*(column.detach().float().masked_fill(~step.loss_mask, math.nan) for column in columns))
