"""Trajectories as the page takes them: what a person reads as JSON, the columns of their tokens as they are recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from whet.observe.records.schema import COMPUTED, SAMPLED
from whet.view.folders import ViewedRun
from whet.view.index import RunIndex, file_reader, record_path
from whet.view.pack import pack, plain
from whet.view.pieces import Pieces

pc: Any = compute
TOKEN_COLUMNS = {**SAMPLED, **COMPUTED}
FACTS = ["group", "trajectory", "order", "baseline", "dropped", "outcome", "valid", "reward"]
SCORED = [*FACTS, "token_rewards", "kl_rewards", "first_weights"]
"""Columns that a group's scores are computed from."""
CREDIT = ["values", "kl_rewards", "token_rewards", "old_logprobs", "teacher_logprobs", "origin", "loss_mask"]
"""Columns of tokens that credit is computed from, besides the marks of time steps and trained tokens."""
MOST_CREDIT_TOKENS = 4_000_000
"""Tokens of a rollout of which the page gets the columns of credit."""


def place_of(index: RunIndex, rollout: int, trajectory: str, group: int | None) -> dict[str, Any]:
    """The index row of a trajectory. Where several groups of a rollout have its id, `group` says which; else the last.

    Raises:
        ValueError: it is not there.
    """
    table = index.of(rollout)
    mask = pc.equal(table["trajectory"], trajectory)
    if group is not None:
        mask = pc.and_(mask, pc.equal(table["group"], group))
    found = table.filter(mask)
    if not len(found):
        raise ValueError(f"rollout {rollout} has no trajectory {trajectory!r}")
    return found.slice(len(found) - 1, 1).to_pylist()[0]


def rows_of_trajectory(run: ViewedRun, rollout: int, place: dict[str, Any]) -> pa.Table:
    """The rows of a trajectory, from the row group that they are in."""
    with file_reader(record_path(run, rollout)) as reader:
        group = int(place["row_group"])
        before = sum(reader.metadata.row_group(i).num_rows for i in range(min(group, reader.num_row_groups)))
        start, count = int(place["row"]) - before, int(place["num_rows"])
        if not 0 <= group < reader.num_row_groups or start < 0 or count < 1:
            raise ValueError("the index does not fit the records: they were changed by another program")
        table = reader.read_row_group(group).slice(start, count)
    if table["trajectory"].to_pylist() != [place["trajectory"]] * len(table) or not len(table):
        raise ValueError("the index does not fit the records: they were changed by another program")
    return table


def trajectory_pack(run: ViewedRun, index: RunIndex, pieces: Pieces | None, rollout: int, trajectory: str, group: int | None) -> bytes:
    """A trajectory: its facts and messages, the scores of its group, and the columns of its samples.

    A sample's columns are named `<place>:<column>`; columns without a number are left out.
    """
    place = place_of(index, rollout, trajectory, group)
    table = rows_of_trajectory(run, rollout, place)
    facts = table.select([name for name in table.column_names if not pa.types.is_list(table.schema.field(name).type)])
    first = table.slice(0, 1).to_pylist(maps_as_pydicts="strict")[0]
    columns: dict[str, Any] = {}
    tokens: list[Any] = []
    for row in range(len(table)):
        for name in table.column_names:
            if _is_token_column(table.schema.field(name)) and (values := token_column(table, name, row)) is not None:
                columns[f"{row}:{name}"] = values
                tokens += [values] if name == "tokens" else []
    if tokens and pieces is not None:
        columns |= pieces.columns(np.concatenate(tokens))
    head = {
        "run": run.name,
        "rollout": rollout,
        "group": place["group"],
        "samples": [plain(row) for row in facts.to_pylist(maps_as_pydicts="strict")],
        "prompt": first["prompt"] or [],
        "turns": plain(first["turns"] or []),
        "notes": plain(first.get("notes") or []),
        "siblings": siblings(run, index, rollout, int(place["group"])),
        "mean_abs_advantage": place["mean_abs_advantage"],
        "config": plain(of_settings(run)),
        "lesson": run.notes,
    }
    return pack(head, columns)


def of_settings(run: ViewedRun) -> dict[str, Any]:
    """The settings that the page computes with."""
    return {"algo": run.section("algo"), "batch": run.section("batch"), "max_tokens": run.section("rollout").get("max_tokens")}


def _is_token_column(field: pa.Field) -> bool:
    return pa.types.is_list(field.type) and (field.name in TOKEN_COLUMNS or pa.types.is_floating(field.type.value_type))


def token_column(table: pa.Table, name: str, row: int) -> Any:
    """A per-token column of a row: float32 with NaN for null, int32 or int8 with -1 for it. None: it has none, or nothing but null."""
    value = table[name][row]
    if not value.is_valid or len(value.values) == 0:
        return None
    values = value.values
    if values.null_count == len(values):
        return None
    if pa.types.is_floating(values.type):
        return values.cast(pa.float32()).to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(values.type):
        return values.cast(pa.int8()).fill_null(-1).to_numpy(zero_copy_only=False)
    kind = pa.int8() if pa.types.is_int8(values.type) else pa.int32()
    return values.cast(kind).fill_null(-1).to_numpy(zero_copy_only=False)


def siblings(run: ViewedRun, index: RunIndex, rollout: int, group: int) -> list[dict[str, Any]]:
    """The trajectories of a group with what their scores are made of. A trajectory counts once, however many samples it has."""
    table = index.of(rollout)
    mine = table.filter(pc.equal(table["group"], group))
    with file_reader(record_path(run, rollout)) as reader:
        there = [name for name in SCORED if name in reader.schema_arrow.names]
        rows = reader.read_row_groups(sorted(set(mine["row_group"].to_pylist())), there)
    rows = rows.filter(pc.equal(rows["group"], group))
    found: dict[str, dict[str, Any]] = {}
    for row in range(len(rows)):
        name = rows["trajectory"][row].as_py()
        one = {key: rows[key][row].as_py() for key in ("baseline", "dropped", "outcome", "valid", "reward")}
        entry = found.setdefault(name, {"trajectory": name, **plain(one), "added": 0.0, "samples": 0, "trained": 0})
        entry["samples"] += 1
        for key in ("token_rewards", "kl_rewards"):
            values = token_column(rows, key, row) if key in there else None
            entry["added"] += 0.0 if values is None else float(np.nansum(values, dtype=np.float64))
        weights = token_column(rows, "first_weights", row) if "first_weights" in there else None
        entry["trained"] += 0 if weights is None else int(np.count_nonzero(~np.isnan(weights)))
    lengths = dict(zip(mine["trajectory"].to_pylist(), mine["num_tokens"].to_pylist(), strict=True))
    return [{**entry, "num_tokens": lengths.get(name)} for name, entry in found.items()]


def rollout_pack(run: ViewedRun, rollout: int) -> bytes:
    """The columns that the credit of a whole rollout is computed from, of every row with a sample.

    Of a rollout of more than `MOST_CREDIT_TOKENS` tokens the head alone, with `too_long`.
    """
    with file_reader(record_path(run, rollout)) as reader:
        there = set(reader.schema_arrow.names)
        facts = reader.read([name for name in (*FACTS, "value_after", "turns") if name in there])
        total = sum(turn["num_context"] + turn["num_tokens"] for turns in facts["turns"].to_pylist() for turn in turns or ())
        if total > MOST_CREDIT_TOKENS:
            return pack({"too_long": True, "tokens": total}, {})
        names = [name for name in (*CREDIT, "tokens", "td_errors", "first_weights") if name in there]
        tokens = reader.read(names)
    rows = [i for i, order in enumerate(facts["order"].to_pylist()) if order is not None and tokens["tokens"][i].is_valid]
    ids = {name: code for code, name in enumerate(dict.fromkeys(facts["trajectory"].to_pylist()))}
    lengths = [len(tokens["tokens"][i].values) for i in rows]
    head = {"too_long": False, "tokens": total, "whole": len(rows) == sum(order is not None for order in facts["order"].to_pylist())}
    picked = facts.take(pa.array(rows, pa.int64()))
    columns: dict[str, Any] = {
        "length": np.array(lengths, np.int32),
        "group": np.array(picked["group"].to_pylist(), np.int32),
        "trajectory": np.array([ids[name] for name in picked["trajectory"].to_pylist()], np.int32),
        "order": np.array(picked["order"].to_pylist(), np.int32),
        "valid": np.array(picked["valid"].to_pylist(), np.int8),
        "truncated": np.array([each == "truncated" for each in picked["outcome"].to_pylist()], np.int8),
        "reward": np.array([np.nan if each is None else each for each in picked["reward"].to_pylist()], np.float64),
    }
    if "value_after" in there:
        columns["value_after"] = np.array([np.nan if each is None else each for each in picked["value_after"].to_pylist()], np.float64)
    for name in CREDIT:
        if name in there and (joined := _joined(tokens, name, rows, lengths)) is not None:
            columns[name] = joined
    for name, mark in (("td_errors", "step"), ("first_weights", "trains")):
        joined = _joined(tokens, name, rows, lengths) if name in there else None
        columns[mark] = np.zeros(sum(lengths), np.int8) if joined is None else (~np.isnan(joined)).astype(np.int8)
    return pack(head, columns)


def _joined(table: pa.Table, name: str, rows: list[int], lengths: list[int]) -> Any:
    """A column of some rows, one after another; None where no row has a number."""
    found = [token_column(table, name, row) for row in rows]
    known = next((values for values in found if values is not None), None)
    if known is None:
        return None
    empty = np.nan if known.dtype.kind == "f" else -1
    return np.concatenate([np.full(n, empty, known.dtype) if each is None else each for each, n in zip(found, lengths, strict=True)])
