"""Numbers of a rollout's training for its records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from whet.core.advantages import groups_of
from whet.core.batch import TrainBatch, as_list, repeated
from whet.core.choices import Clip
from whet.core.preference import last_tokens
from whet.observe.records import GroupNumbers, RolloutNumbers
from whet.train.base import TokenTerms
from whet.train.learners import Update
from whet.train.token_uses import TokenUse
from whet.types import Origin, Sample

KNOWN = ("advantages", "ref_logprobs", "teacher_logprobs", "token_rewards", "kl_rewards", "values", "td_errors", "returns")
"""Columns of the batch that are recorded under their own names."""
SAMPLED_ONLY = ("ref_logprobs", "teacher_logprobs", "kl_rewards")
"""Those that are computed for trained tokens alone."""


def numbers_of(batch: TrainBatch, samples: Sequence[Sample], update: Update, oldest: int) -> RolloutNumbers:
    """The numbers of a rollout.

    Args:
        batch: the rollout with its credit.
        samples: its samples.
        update: what the optimizer steps found.
        oldest: version of the oldest policy whose tokens may train.
    """
    sampled = repeated([sample.loss_mask for sample in samples], torch.bool)
    columns: dict[str, Tensor] = {}
    for name in KNOWN:
        column = getattr(batch, name)
        if column is not None and (name != "returns" or batch.values is not None):  # without a critic nothing learns them
            columns[name] = column.masked_fill(~sampled, math.nan) if name in SAMPLED_ONLY else column
    if update.train_logprobs is not None:
        columns["train_logprobs"] = update.train_logprobs
    uses = update.uses
    if uses is not None:
        columns["old_logprobs"] = uses.first.terms.old_logprobs
        columns |= _of_use("first", uses.first)
        columns |= {} if uses.last is None else _of_use("last", uses.last)
    clip = columns.get("first_clip", torch.full((batch.num_tokens,), math.nan))
    columns["first_clip"] = torch.where(clip.isnan(), _left_out(batch, sampled, oldest), clip)
    after = None if batch.scores is None or batch.values is None else batch.scores[last_tokens(batch)].numpy()
    return RolloutNumbers({name: column.numpy() for name, column in columns.items()}, after, group_numbers(batch, samples))


def group_numbers(batch: TrainBatch, samples: Sequence[Sample]) -> dict[tuple[str, str], GroupNumbers]:
    """Scores of each group, by the id of its task and the role: rewards of tokens and the KL's part count in them."""
    given = batch.token_rewards
    if batch.kl_rewards is not None:
        given = batch.kl_rewards if given is None else given + batch.kl_rewards
    valid = torch.tensor([sample.valid for sample in samples], dtype=torch.bool)
    found = groups_of(batch.with_(token_rewards=given, valid=valid))
    names = dict(zip(as_list(batch.group), ((sample.group, sample.role) for sample in samples), strict=True))
    numbers = zip(as_list(found.count), as_list(found.mean), as_list(found.std), strict=True)
    return {names[i]: GroupNumbers(int(size), mean, std) for i, (size, mean, std) in enumerate(numbers) if size}


def _of_use(prefix: str, use: TokenUse) -> dict[str, Tensor]:
    terms = {field.name: getattr(use.terms, field.name) for field in fields(TokenTerms) if field.name != "old_logprobs"}
    return {f"{prefix}_{name}": column for name, column in {**terms, "weights": use.weights}.items()}


def _left_out(batch: TrainBatch, sampled: Tensor, oldest: int) -> Tensor:
    """Why tokens of the model do not train, as codes; NaN for all others. [T]"""
    codes = torch.full((batch.num_tokens,), math.nan)
    left = (batch.origin == int(Origin.MODEL)) & ~batch.loss_mask
    codes = codes.masked_fill(left, float(Clip.MASKED))
    codes = codes.masked_fill(left & ~sampled & (batch.versions < oldest), float(Clip.TOO_OLD))
    codes = codes.masked_fill(left & ~batch.valid[batch.sample_of_token], float(Clip.UNUSABLE))
    rejected = torch.zeros_like(left) if batch.kept is None else sampled & ~batch.kept
    return codes.masked_fill(left & rejected, float(Clip.REJECTED))
