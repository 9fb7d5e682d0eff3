"""Trajectories from a run's records, whole again, and from plain rows of replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.data.files import Row, describe_value, read_rows
from whet.data.messages import messages_from, metadata_from, tools_from
from whet.types import JSON, Finish, Message, Origin, Outcome, Task, ToolCall, Trajectory, Turn, TurnNote
from whet.types.columns import Floats, Ints, Runs


def read_trajectories(path: str) -> Iterator[Trajectory]:
    """The trajectories of a file or folder, in order.

    Rows with `turns` are a run's records (`rollouts/*.parquet`), in which a trajectory's samples follow each other. Other rows need a
    `response`, and may have `label`, `metadata`, `prompt`, `tools` and `id`: each becomes a trajectory of one turn without tokens.

    Raises:
        ValueError: the files cannot be read, or a row is malformed (`file:line`).
    """
    parts: list[Row] = []
    for row in read_rows(path):
        recorded = row.values.get("turns") is not None and "response" not in row.values
        if parts and not (recorded and _same_trajectory(parts[0], row)):
            yield _from_records(parts)
            parts = []
        if recorded:
            parts.append(row)
        else:
            yield _from_reply(row)
    if parts:
        yield _from_records(parts)


def _same_trajectory(one: Row, other: Row) -> bool:
    return all(one.values.get(key) == other.values.get(key) for key in ("rollout_id", "trajectory"))


def _from_reply(row: Row) -> Trajectory:
    values = row.values
    if not isinstance(values.get("response"), str):
        found = f"it holds {describe_value(values['response'])}" if "response" in values else f"the columns are {', '.join(values)}"
        raise ValueError(f"{row.origin}: there is no text in the column 'response', which is what is scored; {found}")
    label = values.get("label")
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int | float)):
        raise ValueError(f"{row.origin}: column 'label' holds {describe_value(label)}, expected text or a number")
    prompt = values.get("prompt") or ""
    name = str(values.get("id") or f"row {row.origin.rpartition(':')[2]}")
    task = Task(
        id=name,
        prompt=prompt if isinstance(prompt, str) else messages_from(prompt, f"{row.origin}: column 'prompt'"),
        label=None if label is None else str(label),
        metadata=metadata_from(values.get("metadata"), f"{row.origin}: column 'metadata'"),
        tools=tools_from(values.get("tools"), f"{row.origin}: column 'tools'"),
        origin=row.origin,
    )
    turn = Turn(Ints(), Runs(), Ints(), Floats(), Runs(), Message("assistant", values["response"]), Finish.STOP)
    return Trajectory(name, task, (turn,), Outcome.COMPLETED)


def _from_records(rows: Sequence[Row]) -> Trajectory:
    first = rows[0]
    values = first.values
    try:
        prompt = values["prompt"]
        whole = prompt[0]["content"] if prompt and prompt[0].get("role") is None else tuple(_message(item, first.origin) for item in prompt)
        task = Task(
            id=values["task_id"],
            prompt=whole,
            label=values["label"],
            metadata=metadata_from(values.get("metadata"), f"{first.origin}: column 'metadata'"),
            origin=values["task_origin"] or first.origin,
        )
        return Trajectory(
            id=values["trajectory"],
            task=task,
            turns=tuple(_turns(values["turns"], _tokens(rows), _notes(values.get("notes") or ()), first.origin)),
            outcome=Outcome(values["outcome"]),
            temperature=values["temperature"],
            stop=values.get("stop"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{first.origin}: not a record of a trajectory as whet writes them: {type(error).__name__} {error}") from error


def _tokens(rows: Sequence[Row]) -> dict[str, list[Any]] | None:
    """The per-token columns of a trajectory's samples, one after another. None: the records left them out."""
    if any(row.values.get("tokens") is None for row in rows):
        return None
    ordered = sorted(rows, key=lambda row: row.values["order"] or 0)
    return {key: [item for row in ordered for item in row.values[key]] for key in ("tokens", "origin", "logprobs", "versions")}


def _notes(notes: Sequence[Mapping[str, Any]]) -> dict[int, tuple[TurnNote, ...]]:
    """The reports of tools and environments, by turn. A note lacks the fields that are null in the file."""
    found: dict[int, tuple[TurnNote, ...]] = {}
    for each in notes:
        metrics, attachments = each.get("metrics") or {}, each.get("attachments")
        note = TurnNote(each["tool"], dict(metrics), json.loads(attachments) if attachments else {})
        found[each["turn"]] = (*found.get(each["turn"], ()), note)
    return found


def _turns(
    turns: Sequence[Mapping[str, Any]], columns: Mapping[str, list[Any]] | None, notes: Mapping[int, tuple[TurnNote, ...]], origin: str
) -> Iterator[Turn]:
    """Cut the tokens into turns. Raises ValueError where they do not add up. A turn lacks the fields that are null in the file."""
    if columns is None:
        columns = {name: [] for name in ("tokens", "origin", "logprobs", "versions")}
        turns = [{**turn, "num_context": 0, "num_tokens": 0} for turn in turns]
    total = sum(turn["num_context"] + turn["num_tokens"] for turn in turns)
    if total != len(columns["tokens"]):
        raise ValueError(f"{origin}: the turns have {total} tokens, the record has {len(columns['tokens'])}; are samples of it missing?")
    place = 0
    for number, turn in enumerate(turns):
        middle = place + turn["num_context"]
        end = middle + turn["num_tokens"]
        yield Turn(
            context=Ints(columns["tokens"][place:middle]),
            context_origin=Runs(map(Origin, columns["origin"][place:middle])),
            tokens=Ints(columns["tokens"][middle:end]),
            logprobs=Floats(columns["logprobs"][middle:end]),
            versions=Runs(columns["versions"][middle:end]),
            message=_message(turn, origin),
            finish=Finish(turn["finish"]),
            reward=turn.get("reward"),
            restart=turn["restart"],
            notes=notes.get(number, ()),
        )
        place = end


def _message(value: Mapping[str, JSON], where: str) -> Message:
    calls = value.get("tool_calls")
    known: tuple[ToolCall, ...] = ()
    if calls:
        (message,) = messages_from([{"role": value["role"], "content": value["content"], "tool_calls": _json(calls, where)}], where)
        known = message.tool_calls
    return Message(value["role"], value["content"], known, reasoning_content=value.get("reasoning_content"))


def _json(text: str, where: str) -> JSON:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: tool_calls is no JSON: {error}") from None
