"""Searches through the records of whole rollouts: the groups of one with their texts, words, the same prompt elsewhere, and the tokens on
which trainer and engine differ most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from whet.types import Origin
from whet.view.folders import ViewedRun, rollouts_of
from whet.view.index import UNREADABLE, RunIndex, file_reader, found_records, record_path
from whet.view.pack import plain
from whet.view.pieces import Pieces
from whet.view.trajectories import place_of, rows_of_trajectory, token_column

pc: Any = compute
PREVIEW = 240
"""Characters of a message in a list."""
SEARCH_S = 2.0
"""Seconds after which a search answers with what it has found so far."""
MOST_HITS = 100
MOST_SHARE_TOKENS = 16_000_000
"""Tokens of a rollout up to which its trajectories' shares of the loss are added up for the list."""


def groups_of_rollout(run: ViewedRun, index: RunIndex, rollout: int) -> dict[str, Any]:
    """The groups of a rollout: of each trajectory its facts, its last message, and its share of the loss."""
    table = index.of(rollout)
    facts = plain(table.select([*(name for name in table.column_names if name not in ("row_group", "row", "num_rows"))]).to_pylist())
    path = found_records(run, rollout)
    if path is None:
        return {"rollout": rollout, "whole": False, "trajectories": facts, "prompts": {}}
    with file_reader(path) as reader:
        there = set(reader.schema_arrow.names)
        names = ["group", "trajectory", "prompt", "turns", "group_mean", "group_std", "label", "reward_components", "timings", "error"]
        rows = reader.read([name for name in names if name in there])
        shares = None
        if "first_losses" in there and sum(each["num_tokens"] or 0 for each in facts) <= MOST_SHARE_TOKENS:
            shares = _sums(reader.read(["first_losses"]).column("first_losses"))
    starts, ends = _bounds(rows)
    if len(starts) != len(facts):
        raise ValueError("the index does not fit the records: they were changed by another program")
    picked = rows.take(pa.array(starts, pa.int64())).drop_columns(["turns", "prompt"]).to_pylist(maps_as_pydicts="strict")
    turns, prompts = rows["turns"], rows["prompt"]
    found: dict[str, Any] = {}
    for i, (fact, more) in enumerate(zip(facts, picked, strict=True)):
        last = turns[ends[i] - 1].values
        text = last[len(last) - 1]["content"].as_py() if last is not None and len(last) else None
        fact |= plain({key: more.get(key) for key in ("group_mean", "group_std", "reward_components", "timings")})
        fact["label"] = _short(more.get("label"))
        fact["text"] = _short(text)
        fact["message"] = _short((more.get("error") or {}).get("message"))
        fact["share"] = None if shares is None else float(shares[starts[i] : ends[i]].sum())
        if str(fact["group"]) not in found:
            messages = prompts[starts[i]].values
            asked = messages[len(messages) - 1]["content"].as_py() if messages is not None and len(messages) else None
            found[str(fact["group"])] = _short(asked)
    return {"rollout": rollout, "whole": True, "trajectories": facts, "prompts": found}


def _bounds(rows: pa.Table) -> tuple[list[int], list[int]]:
    """First row of each trajectory, and the row after its last."""
    names = list(zip(rows["group"].to_pylist(), rows["trajectory"].to_pylist(), strict=True))
    starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    return starts, [*starts[1:], len(names)]


def _sums(column: pa.ChunkedArray) -> Any:
    """Sum of the absolute values in each list."""
    lists = column.combine_chunks()
    out = np.zeros(len(lists))
    values = lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
    parents = np.asarray(pc.list_parent_indices(lists))
    np.add.at(out, parents, np.nan_to_num(np.abs(values)))
    return out


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= PREVIEW else f"{text[:PREVIEW]}…"


def search(run: ViewedRun, pieces: Pieces | None, text: str, before: int | None) -> dict[str, Any]:
    """Trajectories whose prompt, replies or tools' replies hold a text, the newest rollouts first, whatever the case of its letters.

    Args:
        run: the run.
        pieces: texts of its tokens, in which alone the environment's replies are recorded. None: those are not searched.
        text: the text.
        before: only rollouts before this one.

    Returns:
        Hits; `before`, the rollout to go on from, null: everything was read; and `broken`, rollouts whose file cannot be read.
    """
    if not text:
        raise ValueError("type a word to look for")
    began, hits, broken = time.monotonic(), list[dict[str, Any]](), list[int]()
    for rollout in reversed(rollouts_of(run)):
        if before is not None and rollout >= before:
            continue
        if len(hits) >= MOST_HITS or time.monotonic() - began > SEARCH_S:
            return {"hits": hits, "before": rollout + 1, "broken": broken}
        path = found_records(run, rollout)
        if path is None:
            continue
        try:
            with file_reader(path) as reader:
                tokens = {"tokens", "origin"} & {*reader.schema_arrow.names} if pieces is not None else ()
                hits += _hits(reader.read(["group", "trajectory", "reward", "outcome", "prompt", "turns", *tokens]), pieces, rollout, text)
        except UNREADABLE:
            broken.append(rollout)
    return {"hits": hits, "before": None, "broken": broken}


def _hits(rows: pa.Table, pieces: Pieces | None, rollout: int, text: str) -> list[dict[str, Any]]:
    found: dict[int, str] = {}
    for column in ("turns", "prompt"):
        lists = rows[column].combine_chunks()
        parents, values = np.asarray(pc.list_parent_indices(lists)), lists.flatten()
        for name in ("content", "reasoning_content", "tool_calls"):
            texts = values.field(name)
            mask = pc.fill_null(pc.match_substring(texts, text, ignore_case=True), False)
            for place in np.flatnonzero(np.asarray(mask)):
                found.setdefault(int(parents[place]), _around(texts[int(place)].as_py(), text))
    for row in range(len(rows)):
        if pieces is None or not {"tokens", "origin"} <= {*rows.column_names}:
            break
        tokens, origin = (None if row in found else token_column(rows, name, row) for name in ("tokens", "origin"))
        if tokens is None or origin is None or len(tokens) != len(origin):
            continue
        whole = pieces.text(tokens[origin == Origin.ENVIRONMENT])
        if text.lower() in whole.lower():
            found[row] = _around(whole, text)
    facts = rows.select(["group", "trajectory", "reward", "outcome"]).take(pa.array(sorted(found), pa.int64())).to_pylist()
    return [{**plain(fact), "rollout": rollout, "text": found[row]} for row, fact in zip(sorted(found), facts, strict=True)]


def _around(whole: str, text: str) -> str:
    place = max(whole.lower().find(text.lower()), 0)
    start = max(0, place - 60)
    end = place + len(text) + 120
    return ("…" if start else "") + whole[start:end] + ("…" if end < len(whole) else "")


def same_prompt(indexes: Sequence[tuple[ViewedRun, RunIndex]], task: str, prompt: Any) -> dict[str, Any]:
    """Trajectories of one row of data in all runs, the newest first, and the runs whose files cannot be read. A run whose row of that name
    has another prompt is left out."""
    row = task.rpartition("#")[0] or task
    out: list[dict[str, Any]] = []
    broken: list[str] = []
    for run, index in indexes:
        try:
            out += [{"run": run.name, **plain(each)} for each in _of_prompt(run, index, row, prompt)]
        except UNREADABLE:
            broken.append(run.name)
    return {"trajectories": out, "broken": broken}


def _of_prompt(run: ViewedRun, index: RunIndex, row: str, prompt: Any) -> list[dict[str, Any]]:
    table = index.whole(["rollout_id", "group", "task_id", "trajectory", "reward", "outcome", "num_tokens"])
    if not len(table):
        return []
    mask = pc.or_(pc.equal(table["task_id"], row), pc.starts_with(table["task_id"], f"{row}#"))
    found = table.filter(mask).drop_columns(["task_id"])
    if not len(found) or _prompt_of(run, index, found.slice(len(found) - 1, 1).to_pylist()[0]) != prompt:
        return []
    return found.slice(max(0, len(found) - 200)).to_pylist()[::-1]


def _prompt_of(run: ViewedRun, index: RunIndex, one: dict[str, Any]) -> Any:
    """The prompt of a trajectory of an index; None where its records are gone."""
    if found_records(run, one["rollout_id"]) is None:
        return None
    place = place_of(index, one["rollout_id"], one["trajectory"], one["group"])
    return rows_of_trajectory(run, one["rollout_id"], place)["prompt"][0].as_py()


def worst_tokens(run: ViewedRun, pieces: Pieces | None, rollout: int, count: int = 50) -> dict[str, Any]:
    """The trained tokens of a rollout on which the trainer's log-prob differs most from the engine's."""
    best: list[tuple[float, dict[str, Any]]] = []
    total = 0
    with file_reader(record_path(run, rollout)) as reader:
        names = ["group", "trajectory", "order", "tokens", "logprobs", "train_logprobs", "loss_mask", "versions"]
        there = [name for name in names if name in reader.schema_arrow.names]
        for group in range(reader.num_row_groups):
            rows = reader.read_row_group(group, there)
            for row in range(len(rows)):
                needed = ("train_logprobs", "logprobs", "loss_mask")
                trained, sampled, mask = (token_column(rows, name, row) if name in there else None for name in needed)
                if trained is None or sampled is None or mask is None:
                    continue
                mask = mask == 1
                difference = np.where(mask & (trained != 0), trained.astype(np.float64) - sampled, 0.0)
                total += int(np.count_nonzero(mask))
                for place in np.argsort(-np.abs(difference), kind="stable")[:count]:
                    if difference[place] == 0:
                        break
                    best.append((abs(float(difference[place])), _token_of(rows, row, int(place), pieces)))
            best = sorted(best, key=lambda each: -each[0])[:count]
    return {"rollout": rollout, "tokens": total, "worst": [each for _, each in best]}


def _token_of(rows: pa.Table, row: int, place: int, pieces: Pieces | None) -> dict[str, Any]:
    token = int(token_column(rows, "tokens", row)[place])
    piece = pieces.of(token) if pieces is not None else None
    return {
        **{name: rows[name][row].as_py() for name in ("group", "trajectory", "order")},
        "place": place,
        "token": token,
        "piece": None if piece is None else list(piece[:64]),
        "sampled": float(token_column(rows, "logprobs", row)[place]),
        "trained": float(token_column(rows, "train_logprobs", row)[place]),
        "version": int(token_column(rows, "versions", row)[place]),
    }
