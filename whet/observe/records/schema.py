"""Columns of record files. `docs/records.md` gives the meaning, the unit and the nulls of each."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

VERSION = 4
"""Version of the columns, in each file's metadata. A file without one is of version 1."""
VERSION_KEY = b"whet.records_version"
CONFIG_KEY = b"whet.config_hash"
"""Key of the hash of the run's settings, in each file's metadata."""

TURN = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.string()),
        ("finish", pa.string()),
        ("reward", pa.float64()),
        ("num_context", pa.int32()),
        ("num_tokens", pa.int32()),
        ("restart", pa.bool_()),
    ]
)
NOTE = pa.struct(
    [
        ("turn", pa.int32()),
        ("tool", pa.string()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("attachments", pa.string()),
    ]
)
PROMPT = pa.struct([(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls")])
PROOF = pa.struct([("arrival", pa.bool_()), ("memory_share", pa.float64()), ("probe_nats", pa.float64())])
ERROR = pa.struct([(name, pa.string()) for name in ("kind", "message", "where", "traceback")])

SAMPLED = {"tokens": pa.int32(), "origin": pa.int8(), "loss_mask": pa.bool_(), "logprobs": pa.float32(), "versions": pa.int32()}
"""Per-token columns that come with the samples, and their types."""
USE = {
    "logprobs": pa.float32(),
    "entropy": pa.float32(),
    "ranks": pa.int32(),
    "ratio": pa.float32(),
    "clip": pa.int8(),
    "correction": pa.float32(),
    "weights": pa.float32(),
    "losses": pa.float32(),
}
"""Per-token columns of an optimizer step that used the token, without the prefix `first_` or `last_`."""
COMPUTED = {
    "advantages": pa.float32(),
    "train_logprobs": pa.float32(),
    "old_logprobs": pa.float32(),
    "ref_logprobs": pa.float32(),
    "teacher_logprobs": pa.float32(),
    "token_rewards": pa.float32(),
    "kl_rewards": pa.float32(),
    "values": pa.float32(),
    "td_errors": pa.float32(),
    "returns": pa.float32(),
    **{f"{use}_{name}": kind for use in ("first", "last") for name, kind in USE.items()},
}
"""Per-token columns that credit and optimizer steps compute, and their types."""

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("task_id", pa.string()),
        ("task_origin", pa.string()),
        ("group", pa.int32()),
        ("trajectory", pa.string()),
        ("order", pa.int32()),
        ("role", pa.string()),
        ("baseline", pa.bool_()),
        ("dropped", pa.string()),
        ("outcome", pa.string()),
        ("valid", pa.bool_()),
        ("reward", pa.float64()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("reward_detail", pa.string()),
        ("group_size", pa.int32()),
        ("group_mean", pa.float64()),
        ("group_std", pa.float64()),
        ("mean_abs_advantage", pa.float32()),
        ("label", pa.string()),
        ("metadata", pa.string()),
        ("temperature", pa.float64()),
        ("proofs", pa.map_(pa.int32(), PROOF)),
        ("value_after", pa.float32()),
        ("prompt", pa.list_(PROMPT)),
        ("turns", pa.list_(TURN)),
        ("error", ERROR),
        ("timings", pa.map_(pa.string(), pa.float64())),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("stop", pa.string()),
        ("notes", pa.list_(NOTE)),
        *[(name, pa.list_(kind)) for name, kind in {**SAMPLED, **COMPUTED}.items()],
    ]
)
"""The columns of every file; a file may have more per-token columns at its end."""


def check_version(schema: pa.Schema, file: Path) -> None:
    """Refuse records of a version that this whet does not know; a file that holds no records passes.

    Raises:
        ValueError: naming the file and both versions.
    """
    version = (schema.metadata or {}).get(VERSION_KEY, b"1").decode("utf-8", "replace")
    if version not in map(str, range(1, VERSION + 1)):
        raise ValueError(f"{file} has records of version {version!r}; this whet reads versions 1 to {VERSION}: read it with a newer whet")
