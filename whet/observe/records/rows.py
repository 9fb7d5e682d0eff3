"""Rows of a record: one for each sample, and one for each trajectory without any, with all that is not per token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from whet.observe.records.numbers import RolloutNumbers
from whet.observe.records.schema import ERROR, NOTE, PROMPT, SCHEMA, TURN
from whet.types import Group, Message, Proof, Sample, Task, Trajectory, Turn, TurnNote
from whet.types.columns import num_true


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A row of a record."""

    place: int
    """Place of the group in the rollout."""
    group: Group
    trajectory: Trajectory
    sample: int | None
    """Place of the row's sample among all. None: the trajectory gave none."""


def rows_of(rollout_id: int, groups: Sequence[Group], samples: Sequence[Sample]) -> list[RecordRow]:
    """The rows of a rollout: trajectory by trajectory as the groups have them, each with its samples in order.

    Raises:
        ValueError: samples and trajectories do not fit together.
    """
    kept = [group for group in groups if group.dropped is None]
    of_trajectory: dict[str, list[int]] = {t.id: [] for group in kept for t in group.played}
    if len(of_trajectory) != sum(len(group.played) for group in kept):
        raise ValueError(f"rollout {rollout_id} has two trajectories with one id, so samples cannot be told apart")
    for i, sample in enumerate(samples):
        if sample.trajectory not in of_trajectory:
            raise ValueError(f"samples[{i}] is of trajectory {sample.trajectory!r}, which is in none of the groups")
        of_trajectory[sample.trajectory].append(i)
    out: list[RecordRow] = []
    for place, group in enumerate(groups):
        for trajectory in group.played:
            mine = of_trajectory[trajectory.id] if group.dropped is None else []
            ordered = [*sorted(mine, key=lambda i: samples[i].order)] or [None]
            out += [RecordRow(place, group, trajectory, i) for i in ordered]
    return out


def row_columns(rollout_id: int, rows: Sequence[RecordRow], samples: Sequence[Sample], numbers: RolloutNumbers) -> dict[str, pa.Array]:
    """The columns of a record that are not per token."""
    trajectories = [row.trajectory for row in rows]
    rewards = [t.rewards for t in trajectories]
    mine = [None if row.sample is None else samples[row.sample] for row in rows]
    roles = ["" if row.sample is None else samples[row.sample].role for row in rows]
    groups = [
        numbers.groups.get((row.group.task.id, role)) if row.group.dropped is None else None for row, role in zip(rows, roles, strict=True)
    ]
    after = None if numbers.value_after is None else np.asarray(numbers.value_after)
    sizes = _mean_abs(samples, numbers.columns.get("advantages"))
    plain: dict[str, list[Any]] = {
        "rollout_id": [rollout_id] * len(rows),
        "task_id": [_text(t.task.id) for t in trajectories],
        "task_origin": [_text(t.task.origin) for t in trajectories],
        "group": [row.place for row in rows],
        "trajectory": [_text(t.id) for t in trajectories],
        "order": [None if sample is None else sample.order for sample in mine],
        "role": [_text(role or None) for role in roles],
        "baseline": [row.trajectory is row.group.baseline for row in rows],
        "dropped": [_text(row.group.dropped) for row in rows],
        "outcome": [t.outcome.value for t in trajectories],
        "valid": [t.outcome.valid if sample is None else sample.valid for t, sample in zip(trajectories, mine, strict=True)],
        "reward": [None if found is None else found.of(role) for found, role in zip(rewards, roles, strict=True)],
        "reward_components": [None if found is None else _pairs(found.components) for found in rewards],
        "reward_detail": [None if found is None else _text(found.detail) for found in rewards],
        "group_size": [None if found is None else found.size for found in groups],
        "group_mean": [None if found is None else found.mean for found in groups],
        "group_std": [None if found is None else found.std for found in groups],
        "mean_abs_advantage": [None if sizes is None or row.sample is None else sizes[row.sample] for row in rows],
        "label": [_text(t.task.label) for t in trajectories],
        "metadata": [json.dumps(dict(t.task.metadata)) if t.task.metadata else None for t in trajectories],
        "temperature": [t.temperature if sample is None else sample.temperature for t, sample in zip(trajectories, mine, strict=True)],
        "proofs": [_proofs(t, sample, numbers.proofs) for t, sample in zip(trajectories, mine, strict=True)],
        "value_after": [None if after is None or row.sample is None else float(after[row.sample]) for row in rows],
        "timings": [_pairs(t.timings) for t in trajectories],
        "counts": [_pairs(t.counts) for t in trajectories],
        "stop": [_text(t.stop) for t in trajectories],
    }
    out = {name: pa.array(values, SCHEMA.field(name).type) for name, values in plain.items()}
    errors = [None if t.error is None else {name: _text(getattr(t.error, name)) for name in ERROR.names} for t in trajectories]
    out["error"] = pa.array(errors, ERROR)
    out["prompt"] = _lists([_prompt(t.task) for t in trajectories], PROMPT)
    out["turns"] = _lists([[_turn(turn) for turn in t.turns] for t in trajectories], TURN)
    out["notes"] = _lists([[_note(i, note) for i, turn in enumerate(t.turns) for note in turn.notes] for t in trajectories], NOTE)
    return out


def _mean_abs(samples: Sequence[Sample], advantages: Any) -> list[float | None] | None:
    """Mean |advantage| of each sample's trained tokens; None where it has none."""
    if advantages is None:
        return None
    pieces = np.split(np.asarray(advantages), np.cumsum([len(sample.tokens) for sample in samples])[:-1])
    trained = [num_true(sample.loss_mask) for sample in samples]
    sums = [float(np.nansum(np.abs(each), dtype=np.float64)) for each in pieces]
    return [found / count if count else None for found, count in zip(sums, trained, strict=True)]


def _lists(rows: Sequence[Sequence[tuple[Any, ...]]], kind: pa.StructType) -> pa.Array:
    """Lists of structs, each given as a tuple of its fields."""
    flat = [item for row in rows for item in row]
    fields = [pa.array([item[i] for item in flat], field.type) for i, field in enumerate(kind)]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(fields, fields=list(kind)))


def _proofs(trajectory: Trajectory, sample: Sample | None, proofs: Mapping[int, Proof]) -> list[tuple[int, dict[str, Any]]]:
    """The proof of each version that sampled tokens of a row, as far as it is known."""
    runs = [turn.versions for turn in trajectory.turns] if sample is None else [sample.versions]
    versions = sorted({version for run in runs for version in run.values})
    return [(version, proofs[version].to_json()) for version in versions if version in proofs]


def _pairs(values: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    return [(_text(name), value) for name, value in values.items()]


def _prompt(task: Task) -> list[tuple[str | None, ...]]:
    if isinstance(task.prompt, str):
        return [(None, _text(task.prompt), None, None)]
    return [_message(message) for message in task.prompt]


def _turn(turn: Turn) -> tuple[Any, ...]:
    sizes = (len(turn.context), len(turn.tokens))
    return (*_message(turn.message), turn.finish.value, turn.reward, *sizes, turn.restart)


def _note(turn: int, note: TurnNote) -> tuple[Any, ...]:
    return turn, _text(note.tool), _pairs(note.metrics), json.dumps(dict(note.attachments)) if note.attachments else None


def _message(message: Message) -> tuple[str | None, ...]:
    calls = message.to_dict().get("tool_calls") if message.tool_calls else None
    return message.role, _text(message.content), _text(message.reasoning_content), json.dumps(calls) if calls else None


def _text(text: str | None) -> str | None:
    """Text that UTF-8 can hold: a model can write a lone surrogate (JSON's \\ud800), which must not end a run."""
    return text if text is None or text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
