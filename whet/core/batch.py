"""The batch that credit and losses read: columns in sample space. torch only, no layout, no mesh.

Samples are contiguous. Entry t of a per-token column describes `tokens[t]` given its predecessors in its sample, so the
first entry of a sample never trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from whet.types import Sample
from whet.types.columns import Column, Doubles, Ragged, Runs
from whet.types.routes import Routes


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Numbers that a model computes for the tokens of a batch. Entries that were not asked for are 0."""

    logprobs: Tensor
    """Natural-log probability of each token at its sample's temperature. [T] float32"""
    entropy: Tensor
    """Entropy in nats of the distribution that the token was drawn from. [T] float32"""
    values: Tensor | None = None
    """From a scalar head, of every token but a sample's first: the score of its predecessor, so what was expected before it. [T] float32"""
    scores: Tensor | None = None
    """From a scalar head: the score of each token itself, which has seen it; a reward model's is that of a sample's last. [T] float32"""
    ranks: Tensor | None = None
    """Place of each token among the vocabulary's, the likeliest being 1. None where nobody asked. [T] float32"""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of a rollout, or of one optimizer step, as columns. Frozen: `with_` returns a new one."""

    tokens: Tensor
    """[T] int64"""
    lengths: Tensor
    """Tokens of each sample. [N] int64"""
    origin: Tensor
    """`types.Origin` of each token. [T] int8"""
    loss_mask: Tensor
    """Which tokens train. [T] bool"""
    rollout_logprobs: Tensor
    """As the engine reported them; 0 where nothing was sampled. [T] float32"""
    versions: Tensor
    """The policy version that sampled each token. [T] int64"""
    temperature: Tensor
    """Sampling temperature. [N] float32"""
    rewards: Tensor
    """Total reward of the sample's trajectory. [N] float64"""
    group: Tensor
    """Index of the sample's group, or of its role in the group: what it is compared with. [N] int64"""
    trajectory: Tensor
    """Index of the sample's trajectory, or of its role in the trajectory: what counts once. [N] int64"""
    order: Tensor
    """Place among the samples of the same trajectory. [N] int64"""
    valid: Tensor
    """False where the trajectory failed, or has no valid greedy one to be compared with: it neither trains nor counts. [N] bool"""
    truncated: Tensor | None = None
    """True if a limit cut the sample's trajectory, which would have continued. None: no trajectory was
    cut. [N] bool"""
    weights: Tensor | None = None
    """Share of each token in the loss: loss = sum(weights * terms). [T] float32"""
    old_logprobs: Tensor | None = None
    """Log-probs under the policy before this rollout's first optimizer step. [T] float32"""
    ref_logprobs: Tensor | None = None
    """Log-probs under the reference policy. [T] float32"""
    teacher_logprobs: Tensor | None = None
    """Log-probs under the teacher, for distillation. [T] float32"""
    squared_probs: Tensor | None = None
    """Sum over the vocabulary of the squared probabilities of the distribution each token was drawn from. [T] float32"""
    values: Tensor | None = None
    """The critic's estimate of the return before each token. [T] float32"""
    scores: Tensor | None = None
    """A scalar head's number for each token, which it has seen. A reward model's score of a sample is that of its last token; a critic's is
    the estimate of the return after the token. [T] float32"""
    token_rewards: Tensor | None = None
    """Rewards of single tokens, in addition to the trajectory's. [T] float32"""
    nucleus_sizes: Tensor | None = None
    """Number of token ids each token was drawn from; 0: the whole vocabulary. [T] int64"""
    nucleus_ids: Tensor | None = None
    """Ids of these nuclei, token after token: every log-prob of a token is renormalised over them.
    [sum(nucleus_sizes)] int32"""
    routes: Tensor | None = None
    """Experts that each token's predecessor goes to, in each layer with a router: numbers plus 1, 0 where the trainer's own router
    chooses. [T, L, K] uint8 or int16"""
    baseline: Tensor | None = None
    """Score of the greedy trajectory of the sample's task, for ReMax; as in `rewards`, 0 and without
    meaning where `valid` is False. [N] float64"""
    correction: Tensor | None = None
    """Importance weight of the trainer's policy over the engine's; in an optimizer step 0 where a token is rejected. [T] float32"""
    kept: Tensor | None = None
    """False where off-policy correction rejects a token. [T] bool"""
    chosen: Tensor | None = None
    """Tokens that a covariance criterion picked. [T] bool"""
    advantages: Tensor | None = None
    """[T] float32"""
    returns: Tensor | None = None
    """Targets of the critic. [T] float32"""
    td_errors: Tensor | None = None
    """r + gamma V' - V of each time step, for the records; NaN elsewhere. [T] float32"""
    kl_rewards: Tensor | None = None
    """The KL's part of each token's reward, for the records. [T] float32"""
    unit: Tensor | None = None
    """Samples that a loss reads together, such as a preference pair, have the same number and are
    neighbours: no micro-batch, rank or step takes one without the other. None: every sample is a unit
    by itself. [N] int64"""
    margin: Tensor | None = None
    """Margin by which the chosen reply of the sample's pair should win. [N] float32"""

    def __post_init__(self) -> None:
        num_tokens, num_samples = int(self.tokens.shape[0]), int(self.lengths.shape[0])
        if int(self.lengths.sum()) != num_tokens:
            raise ValueError(f"lengths sum to {int(self.lengths.sum())}, but there are {num_tokens} tokens")
        if (self.nucleus_sizes is None) != (self.nucleus_ids is None):
            raise ValueError("nucleus_sizes and nucleus_ids come together")
        num_ids = 0 if self.nucleus_sizes is None else int(self.nucleus_sizes.sum())
        for name, column in self.columns().items():
            expected = num_samples if name in PER_SAMPLE else num_ids if name == "nucleus_ids" else num_tokens
            wanted = (expected, *column.shape[1:3]) if name == "routes" else (expected,)
            if tuple(column.shape) != wanted:
                raise ValueError(f"column {name} has shape {tuple(column.shape)}, expected {wanted}")
        if bool(self.loss_mask[self.starts[self.lengths > 0]].any()):
            raise ValueError("the first token of a sample has no predecessor, so it cannot train")

    def columns(self) -> dict[str, Tensor]:
        """The columns that are there, by name."""
        out: dict[str, Tensor] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                out[item.name] = value
        return out

    @property
    def num_samples(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def starts(self) -> Tensor:
        """Index of each sample's first token. [N] int64"""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def sample_of_token(self) -> Tensor:
        """Which sample each token belongs to. [T] int64"""
        return torch.repeat_interleave(torch.arange(self.num_samples, device=self.lengths.device), self.lengths)

    def with_(self, **columns: Tensor | None) -> TrainBatch:
        """A copy with some columns replaced."""
        return replace(self, **columns)

    def select(self, samples: Sequence[int]) -> TrainBatch:
        """The given samples, in the given order."""
        index = torch.tensor(list(samples), dtype=torch.int64, device=self.lengths.device)
        token_index = stretches(self.lengths, index)
        columns = self.columns()
        ids = columns.pop("nucleus_ids", None)
        chosen: dict[str, Any] = {name: column[index if name in PER_SAMPLE else token_index] for name, column in columns.items()}
        if ids is not None:
            chosen["nucleus_ids"] = ids[stretches(columns["nucleus_sizes"], token_index)]
        return TrainBatch(**chosen)

    def to(self, device: torch.device) -> TrainBatch:
        """A copy on another device; float64 columns become float32 on mps, which has no float64."""
        columns = self.columns()
        if device.type == "mps":
            columns = {name: c.float() if c.dtype == torch.float64 else c for name, c in columns.items()}
        return replace(self, **{name: column.to(device) for name, column in columns.items()})

    def ragged(self, column: Tensor) -> list[list[float]]:
        """A per-token column as one list per sample."""
        return [as_list(piece) for piece in torch.split(column, as_list(self.lengths))]


PER_SAMPLE = frozenset(
    {"lengths", "temperature", "rewards", "group", "trajectory", "order", "valid", "truncated", "baseline", "unit", "margin"}
)


def stretches(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Indices of all entries of the chosen items, where item i has `lengths[i]` entries in a row.
    [sum(lengths[chosen])] int64"""
    starts, sizes = (lengths.cumsum(0) - lengths)[chosen], lengths[chosen]
    places = torch.arange(int(sizes.sum()), device=chosen.device)
    return places + torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)


def as_list(column: Tensor) -> list[Any]:
    """The numbers of a column."""
    return column.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def one_per_trajectory(batch: TrainBatch) -> Tensor:
    """Indices of the first sample of each valid trajectory, so that siblings count once. [M] int64"""
    first: dict[int, int] = {}
    for i, (trajectory, valid) in enumerate(zip(as_list(batch.trajectory), as_list(batch.valid), strict=True)):
        if valid:
            first.setdefault(trajectory, i)
    return torch.tensor(list(first.values()), dtype=torch.int64, device=batch.lengths.device)


def batch_of(samples: Sequence[Sample]) -> TrainBatch:
    """Samples as columns.

    Raises:
        ValueError: if there are none, or one was sampled greedily, so that its log-probs cannot be computed again.
    """
    if not samples:
        raise ValueError("there are no samples to train on: every trajectory failed before its first token")
    for sample in samples:
        if not sample.temperature > 0:
            raise ValueError(
                f"trajectory {sample.trajectory} was sampled at temperature {sample.temperature}: such a distribution "
                "has no gradient; sample training rollouts at a temperature above 0"
            )
    groups = {name: i for i, name in enumerate(dict.fromkeys((s.group, s.role) for s in samples))}
    trajectories = {name: i for i, name in enumerate(dict.fromkeys((s.trajectory, s.role) for s in samples))}

    return TrainBatch(
        tokens=joined([s.tokens for s in samples]).long(),
        lengths=torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
        origin=repeated([s.origin for s in samples], torch.int8),
        loss_mask=repeated([s.loss_mask if s.valid else Runs[bool].repeat(False, len(s.tokens)) for s in samples], torch.bool),
        rollout_logprobs=joined([s.logprobs for s in samples]),
        versions=repeated([s.versions for s in samples], torch.int64),
        temperature=torch.tensor([s.temperature for s in samples], dtype=torch.float32),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
        group=torch.tensor([groups[s.group, s.role] for s in samples], dtype=torch.int64),
        trajectory=torch.tensor([trajectories[s.trajectory, s.role] for s in samples], dtype=torch.int64),
        order=torch.tensor([s.order for s in samples], dtype=torch.int64),
        valid=torch.tensor([s.valid for s in samples], dtype=torch.bool),
        truncated=torch.tensor([s.truncated for s in samples], dtype=torch.bool) if any(s.truncated for s in samples) else None,
        token_rewards=_token_rewards(samples),
        baseline=_baseline(samples),
        routes=_routes(samples),
        **_nucleus(samples),
    )


def _baseline(samples: Sequence[Sample]) -> Tensor | None:
    """A column if the samples have greedy trajectories to be compared with."""
    if all(s.baseline is None for s in samples):
        return None
    assert all(s.baseline is not None or not s.valid for s in samples), "a sample without a baseline among others is not valid"
    return torch.tensor([0.0 if s.baseline is None else s.baseline for s in samples], dtype=torch.float64)


def _token_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """One column if any sample has token rewards; they are 0 in samples that failed, as everywhere."""
    if all(s.token_rewards is None for s in samples):
        return None
    rows = [s.token_rewards if s.token_rewards is not None and s.valid else Doubles.zeros(len(s.tokens)) for s in samples]
    return joined(rows).float()


def _nucleus(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Two columns if any sample has a nucleus."""
    if all(s.nucleus is None for s in samples):
        return {}
    rows = [s.nucleus if s.nucleus is not None else Ragged.empty(len(s.tokens)) for s in samples]
    return {"nucleus_sizes": joined([row.counts for row in rows]).long(), "nucleus_ids": joined([row.ids for row in rows])}


def _routes(samples: Sequence[Sample]) -> Tensor | None:
    """One column if any sample has experts that an engine reported."""
    found = Routes.join(Routes.unknown(len(s.tokens)) if s.routes is None else s.routes for s in samples)
    if not found.width:
        return None
    entries = torch.frombuffer(bytearray(found.data), dtype=torch.uint8 if found.itemsize == 1 else torch.int16)
    return entries.view(len(found), found.layers, found.top_k)


def own_routes(batch: TrainBatch) -> Tensor:
    """Experts that each token itself goes to; 0 for a sample's last, which predicts nothing. [T, L, K]"""
    assert batch.routes is not None
    ends = (batch.starts + batch.lengths - 1)[batch.lengths > 0]
    return batch.routes.roll(-1, 0).index_fill_(0, ends, 0)


def predecessor_routes(own: Tensor, batch: TrainBatch) -> Tensor:
    """`TrainBatch.routes` of what tokens themselves go to: the inverse of `own_routes`. [T, L, K]"""
    return own.roll(1, 0).index_fill_(0, batch.starts[batch.lengths > 0], 0)


_DTYPES = {"i": torch.int32, "f": torch.float32, "d": torch.float64}


def joined(columns: Sequence[Column[Any]]) -> Tensor:
    """Columns of one type, one after another. [T] int32, float32 or float64"""
    data = bytearray().join(column.view for column in columns)
    dtype = _DTYPES[columns[0].code]
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def repeated(columns: Sequence[Runs[Any]], dtype: torch.dtype) -> Tensor:
    """Runs, one after another. [T]

    Some runs at a time: `torch.repeat_interleave` takes 8 bytes for each entry that it makes.
    """
    values = torch.tensor([value for column in columns for value in column.values], dtype=dtype)
    lengths = torch.tensor([length for column in columns for length in column.lengths], dtype=torch.int64)
    out, done = torch.empty(int(lengths.sum()), dtype=dtype), 0
    for first in range(0, len(values), 256):
        some = torch.repeat_interleave(values[first : first + 256], lengths[first : first + 256])
        out[done : done + len(some)] = some
        done += len(some)
    return out
