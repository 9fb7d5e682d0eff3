"""Run records: what every rollout was, token by token, in parquet files that any tool opens.

One row is one training sample, or one trajectory that gave none (it failed, was filtered, or is a greedy one that others are compared
with), so that no sampled token is missing from the records of its rollout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whet.files import put_in_place
from whet.types import UNSAMPLED, Group, Message, Origin, Sample, Task, Trajectory, Turn, TurnNote

ROLLOUTS = "rollouts"
"""The folder of records below a run's folder."""
VERSION = 2
"""Version of the columns, in each file's metadata. A file without one is of version 1, which has no `stop` and no `notes`."""
_VERSION_KEY = b"whet.records_version"
UNFINISHED = ".tmp"
"""Ending of a file that is still being written."""

_TURN = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.string()),
        ("finish", pa.string()),
        ("reward", pa.float64()),
        ("num_context", pa.int32()),
        ("num_tokens", pa.int32()),
        ("restart", pa.bool_()),
    ]
)
_NOTE = pa.struct(
    [
        ("turn", pa.int32()),
        ("tool", pa.string()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("attachments", pa.string()),
    ]
)
_PROMPT = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string())])
_ERROR = pa.struct([(name, pa.string()) for name in ("kind", "message", "where", "traceback")])
_COMPUTED = ("advantages", "train_logprobs")
"""The per-token columns of every file that do not come from the samples."""

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("task_id", pa.string()),
        ("task_origin", pa.string()),
        ("group", pa.int32()),
        ("trajectory", pa.string()),
        ("order", pa.int32()),
        ("baseline", pa.bool_()),
        ("dropped", pa.string()),
        ("outcome", pa.string()),
        ("valid", pa.bool_()),
        ("reward", pa.float64()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("reward_detail", pa.string()),
        ("label", pa.string()),
        ("metadata", pa.string()),
        ("temperature", pa.float64()),
        ("prompt", pa.list_(_PROMPT)),
        ("turns", pa.list_(_TURN)),
        ("error", _ERROR),
        ("timings", pa.map_(pa.string(), pa.float64())),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("stop", pa.string()),
        ("notes", pa.list_(_NOTE)),
        ("tokens", pa.list_(pa.int32())),
        ("origin", pa.list_(pa.int8())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        *[(name, pa.list_(pa.float32())) for name in _COMPUTED],
    ]
)
"""The columns of every file; a file may have more per-token columns at its end.

`group` is the place of its group in the rollout: siblings share it. `order` is the sample's place in its trajectory,
null where the trajectory gave no sample; then the tokens are those of all its turns, one after another. `baseline` marks
the greedy trajectory that its group is compared with; if it failed, the group's samples are not `valid`. `dropped` is
why its group is not trained on, null where it is; such a trajectory may come again under the same name. `reward` is
the trajectory's total, null where it has none. Per-token columns are as in `Sample`; `train_logprobs` are the
trainer's log-probs of the same tokens. A run with a critic adds `values`, what the critic expected before each token
(0 in samples that are not `valid`), and `returns`, what it learned there, 0 where nothing trained. A prompt without a
role is plain text. `tool_calls`, `metadata` and `attachments` are JSON. `stop` is the reason for which a tool or the
environment ended the trajectory, null where none gave one; `notes` are their reports, each with the number of its turn,
from 0 on. A turn added `num_context` tokens of context and then `num_tokens` sampled ones.
"""


class RecordWriter:
    """Writes `rollouts/rollout_000012.parquet` below a run's folder, whole or not at all; what `write` wrote is on the disk."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        """Make the folder, so that a failure is reported before anything is played.

        `every`: record the rollouts whose id it divides; 0 records none. Raises ValueError if the
        folder cannot be made.
        """
        if every < 0:
            raise ValueError(f"records_every must be 0 (never) or more, not {every}")
        self._folder, self._every = Path(folder) / ROLLOUTS, every
        try:
            if every:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"records cannot be written to {self._folder}: {error.strerror}; choose another folder") from error

    def write(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        columns: Mapping[str, Sequence[Sequence[float | None]]] | None = None,
    ) -> Path | None:
        """Record a rollout, replacing an earlier record of the same one; None where it is not to be recorded.

        `columns[name][i]` are further per-token values of `samples[i]`, as long as its tokens (advantages,
        train_logprobs, and any other name), stored in float32.
        Raises ValueError where samples, trajectories and columns do not fit together.
        """
        if self._every == 0 or rollout_id % self._every != 0:
            return None
        columns = columns or {}
        _check_columns(samples, columns)
        rows = list(_rows(rollout_id, groups, samples, columns))
        extra = [pa.field(name, pa.list_(pa.float32())) for name in columns if name not in SCHEMA.names]
        table = pa.Table.from_pylist(rows, schema=pa.schema([*SCHEMA, *extra], {_VERSION_KEY: str(VERSION).encode()}))
        path = self._folder / f"rollout_{rollout_id:06d}.parquet"
        unfinished = path.with_suffix(UNFINISHED)
        pq.write_table(table, unfinished, compression="zstd")
        put_in_place(unfinished, path)
        return path


def drop_records(folder: Path, first: int) -> None:
    """Remove the records in a run's (or an evaluation set's) folder from rollout `first` on, and what a crash left half-written: they are
    of rollouts that a resumed run plays again."""
    for path in (Path(folder) / ROLLOUTS).glob("rollout_*"):
        number = path.stem.removeprefix("rollout_")
        if path.suffix == UNFINISHED or (path.suffix == ".parquet" and number.isdigit() and int(number) >= first):
            path.unlink()


def read_table(path: Path) -> pa.Table:
    """The records in a file, or in every record file of a folder in the order of the rollouts.

    Columns that only some files have are null in the others.

    Raises:
        ValueError: there are no records, or those of a newer version of whet.
    """
    path = Path(path)
    files = sorted(path.glob("rollout_*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ValueError(f"no records at {path}: expected a rollout_*.parquet file or a folder of them")
    tables = [pq.read_table(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        check_version(table.schema, file)
    return pa.concat_tables([table.replace_schema_metadata() for table in tables], promote_options="default")


def check_version(schema: pa.Schema, file: Path) -> None:
    """Refuse records of a version that this whet does not know; a file that holds no records passes.

    Raises:
        ValueError: naming the file and both versions.
    """
    version = (schema.metadata or {}).get(_VERSION_KEY, b"1").decode("utf-8", "replace")
    if version not in map(str, range(1, VERSION + 1)):
        raise ValueError(f"{file} has records of version {version!r}; this whet reads versions 1 to {VERSION}: read it with a newer whet")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The rows of `read_table` as dictionaries, maps included."""
    return read_table(path).to_pylist(maps_as_pydicts="strict")


def null_for_nan(row: list[float]) -> Sequence[float | None]:
    """A sample's numbers, with null for those that were not computed."""
    return [None if math.isnan(x) else x for x in row] if math.isnan(sum(row)) else row


def _check_columns(samples: Sequence[Sample], columns: Mapping[str, Sequence[Sequence[float | None]]]) -> None:
    for name, values in columns.items():
        if name in SCHEMA.names and name not in _COMPUTED:
            raise ValueError(f"a record already has a column {name!r} from its samples: give yours another name")
        if len(values) != len(samples):
            raise ValueError(f"column {name!r} is for {len(values)} samples, but there are {len(samples)}")
        for i, (sample, row) in enumerate(zip(samples, values, strict=True)):
            if len(row) != len(sample.tokens):
                where = f"the {len(sample.tokens)} tokens of samples[{i}] (trajectory {sample.trajectory!r})"
                raise ValueError(f"column {name!r} has {len(row)} values for {where}")


def _rows(
    rollout_id: int,
    groups: Sequence[Group],
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Sequence[float | None]]],
) -> Iterator[dict[str, Any]]:
    """Trajectory by trajectory as the groups have them, each with its samples in order."""
    kept = [group for group in groups if group.dropped is None]
    of_trajectory: dict[str, list[int]] = {t.id: [] for group in kept for t in group.played}
    if len(of_trajectory) != sum(len(group.played) for group in kept):
        raise ValueError(f"rollout {rollout_id} has two trajectories with one id, so samples cannot be told apart")
    for i, sample in enumerate(samples):
        if sample.trajectory not in of_trajectory:
            raise ValueError(f"samples[{i}] is of trajectory {sample.trajectory!r}, which is in none of the groups")
        of_trajectory[sample.trajectory].append(i)
    for place, group in enumerate(groups):
        for trajectory in group.played:
            marks = {"rollout_id": rollout_id, "group": place, "baseline": trajectory is group.baseline, "dropped": group.dropped}
            base = {**marks, **_trajectory_fields(trajectory)}
            mine = of_trajectory[trajectory.id] if group.dropped is None else []
            indices = sorted(mine, key=lambda i: samples[i].order)
            for i in indices:
                yield {**base, **_sample_fields(samples[i]), **{name: rows[i] for name, rows in columns.items()}}
            if not indices:
                yield {**base, **_unsampled_fields(trajectory)}


def _trajectory_fields(trajectory: Trajectory) -> dict[str, Any]:
    task, rewards, error = trajectory.task, trajectory.rewards, trajectory.error
    return {
        "task_id": _text(task.id),
        "task_origin": _text(task.origin),
        "trajectory": _text(trajectory.id),
        "outcome": trajectory.outcome.value,
        "reward": rewards.total if rewards else None,
        "reward_components": list(rewards.components.items()) if rewards else None,
        "reward_detail": _text(rewards.detail) if rewards else None,
        "label": _text(task.label),
        "metadata": json.dumps(dict(task.metadata)) if task.metadata else None,
        "prompt": _prompt(task),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "error": {name: _text(getattr(error, name)) for name in _ERROR.names} if error else None,
        "timings": list(trajectory.timings.items()),
        "counts": list(trajectory.counts.items()),
        "stop": _text(trajectory.stop),
        "notes": [_note(place, note) for place, turn in enumerate(trajectory.turns) for note in turn.notes],
    }


def _sample_fields(sample: Sample) -> dict[str, Any]:
    return {
        "order": sample.order,
        "valid": sample.valid,
        "temperature": sample.temperature,
        **{name: getattr(sample, name).numpy() for name in ("tokens", "origin", "loss_mask", "logprobs", "versions")},
    }


def _unsampled_fields(trajectory: Trajectory) -> dict[str, Any]:
    """The tokens of a trajectory that gave no sample: its turns' contexts and tokens, none of them trained. Their rewards are there if
    the file has a column for them."""
    fields: dict[str, list[Any]] = {"tokens": [], "origin": [], "logprobs": [], "versions": []}
    rewarded: list[float] = []
    for turn in trajectory.turns:
        num_context = len(turn.context)
        fields["tokens"] += [*turn.context, *turn.tokens]
        fields["origin"] += [*turn.context_origin, *[Origin.MODEL] * len(turn.tokens)]
        fields["logprobs"] += [*[0.0] * num_context, *turn.logprobs]
        fields["versions"] += [*[UNSAMPLED] * num_context, *turn.versions]
        rewarded += [*[0.0] * num_context, *(turn.token_rewards or [0.0] * len(turn.tokens))]
    if any(turn.token_rewards for turn in trajectory.turns):
        fields["token_rewards"] = rewarded
    untrained = {"loss_mask": [False] * len(fields["tokens"]), "temperature": trajectory.temperature}
    return {"order": None, "valid": trajectory.outcome.valid, **fields, **untrained}


def _prompt(task: Task) -> list[dict[str, str | None]]:
    if isinstance(task.prompt, str):
        return [{"role": None, "content": _text(task.prompt), "tool_calls": None}]
    return [_message(message) for message in task.prompt]


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        **_message(turn.message),
        "finish": turn.finish.value,
        "reward": turn.reward,
        "num_context": len(turn.context),
        "num_tokens": len(turn.tokens),
        "restart": turn.restart,
    }


def _note(turn: int, note: TurnNote) -> dict[str, Any]:
    return {
        "turn": turn,
        "tool": _text(note.tool),
        "metrics": [(_text(name), value) for name, value in note.metrics.items()],
        "attachments": json.dumps(dict(note.attachments)) if note.attachments else None,
    }


def _message(message: Message) -> dict[str, str | None]:
    calls = message.to_dict().get("tool_calls")
    return {"role": message.role, "content": _text(message.content), "tool_calls": json.dumps(calls) if calls else None}


def _text(text: str | None) -> str | None:
    """Text that UTF-8 can hold: a model can write a lone surrogate (JSON's \\ud800), which must not end a run."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
