"""Trajectories and rewards as JSON, for the pipe between whet and its reward workers, and for checkpoints.

Plain data both ways: what comes back from a worker that ran a user's code is parsed, never unpickled. Columns are the
base64 of their memory (little-endian), runs are lists of [value, length].
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import replace
from typing import Any, TypeVar

from whet.types import (
    JSON,
    Failure,
    Finish,
    Message,
    Origin,
    Outcome,
    Rewards,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    TurnNote,
)
from whet.types.columns import Column, Doubles, Floats, Ints, Ragged, Runs
from whet.types.routes import Routes

C = TypeVar("C", bound=Column[Any])


def rewards_to_json(rewards: Rewards) -> JSON:
    return {
        "total": rewards.total,
        "components": dict(rewards.components),
        "detail": rewards.detail,
        "token_rewards": rewards.token_rewards,
        "by_role": dict(rewards.by_role),
    }


def rewards_from_json(data: JSON) -> Rewards:
    rows: list[list[float]] | None = data["token_rewards"]
    token_rewards = None if rows is None else tuple(map(tuple, rows))
    return Rewards(data["total"], data["components"], data["detail"], token_rewards, data.get("by_role", {}))


def trajectory_to_json(trajectory: Trajectory, *, bulky: bool = True) -> JSON:
    """Everything the record holds. Task metadata must be JSON already, as the record promises.

    `bulky`: whether the turns' nuclei and experts are among it, which may take more room than all the rest.
    """
    error = trajectory.error
    return {
        "id": trajectory.id,
        "task": _task_to_json(trajectory.task),
        "turns": [_turn_to_json(turn if bulky else replace(turn, nucleus=None, routes=None)) for turn in trajectory.turns],
        "outcome": trajectory.outcome.value,
        "rewards": None if trajectory.rewards is None else rewards_to_json(trajectory.rewards),
        "error": None if error is None else [error.kind, error.message, error.where, error.traceback],
        "temperature": trajectory.temperature,
        "timings": dict(trajectory.timings),
        "counts": dict(trajectory.counts),
        "stop": trajectory.stop,
    }


def trajectory_from_json(data: JSON) -> Trajectory:
    return Trajectory(
        id=data["id"],
        task=_task_from_json(data["task"]),
        turns=tuple(_turn_from_json(turn) for turn in data["turns"]),
        outcome=Outcome(data["outcome"]),
        rewards=None if data["rewards"] is None else rewards_from_json(data["rewards"]),
        error=None if data["error"] is None else Failure(*data["error"]),
        temperature=data["temperature"],
        timings=data["timings"],
        counts=data["counts"],
        stop=data.get("stop"),
    )


def _task_to_json(task: Task) -> JSON:
    prompt = task.prompt if isinstance(task.prompt, str) else [_message_to_json(message) for message in task.prompt]
    return {
        "id": task.id,
        "prompt": prompt,
        "label": task.label,
        "metadata": dict(task.metadata),
        "tools": [dict(tool) for tool in task.tools],
        "origin": task.origin,
    }


def _task_from_json(data: JSON) -> Task:
    prompt = data["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(_message_from_json(message) for message in prompt)
    return Task(data["id"], prompt, data["label"], data["metadata"], tuple(data["tools"]), data["origin"])


def _message_to_json(message: Message) -> JSON:
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": [[call.name, dict(call.arguments), call.id, call.text] for call in message.tool_calls],
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }


def _message_from_json(data: JSON) -> Message:
    calls = tuple(ToolCall(*call) for call in data["tool_calls"])
    return Message(data["role"], data["content"], calls, data["name"], data["tool_call_id"], data["reasoning_content"])


def _turn_to_json(turn: Turn) -> JSON:
    return {
        "context": _column_to_json(turn.context),
        "context_origin": turn.context_origin.runs(),
        "tokens": _column_to_json(turn.tokens),
        "logprobs": _column_to_json(turn.logprobs),
        "versions": turn.versions.runs(),
        "message": _message_to_json(turn.message),
        "finish": turn.finish.value,
        "reward": turn.reward,
        "token_rewards": None if turn.token_rewards is None else _column_to_json(turn.token_rewards),
        "nucleus": None if turn.nucleus is None else [_column_to_json(turn.nucleus.counts), _column_to_json(turn.nucleus.ids)],
        "routes": None if turn.routes is None else _routes_to_json(turn.routes),
        "restart": turn.restart,
        "role": turn.role,
        "notes": [[note.tool, {name: float(x) for name, x in note.metrics.items()}, dict(note.attachments)] for note in turn.notes],
    }


def _turn_from_json(data: JSON) -> Turn:
    rewards, nucleus = data["token_rewards"], data["nucleus"]
    return Turn(
        context=_column_from_json(Ints, data["context"]),
        context_origin=Runs[Origin].from_runs((Origin(origin), length) for origin, length in data["context_origin"]),
        tokens=_column_from_json(Ints, data["tokens"]),
        logprobs=_column_from_json(Floats, data["logprobs"]),
        versions=Runs[int].from_runs(data["versions"]),
        message=_message_from_json(data["message"]),
        finish=Finish(data["finish"]),
        reward=data["reward"],
        token_rewards=None if rewards is None else _column_from_json(Doubles, rewards),
        restart=data["restart"],
        role=data.get("role", ""),
        notes=tuple(TurnNote(*note) for note in data.get("notes", ())),
        nucleus=None if nucleus is None else Ragged.of_parts(*(_column_from_json(Ints, part) for part in nucleus)),
        routes=None if data.get("routes") is None else _routes_from_json(data["routes"]),
    )


def _routes_to_json(routes: Routes) -> JSON:
    return [len(routes), routes.layers, routes.top_k, routes.itemsize, b64encode(routes.data).decode()]


def _routes_from_json(data: JSON) -> Routes:
    length, layers, top_k, itemsize, entries = data
    return Routes(b64decode(entries), layers, top_k, itemsize) if entries else Routes.unknown(length)


def _column_to_json(column: Column[Any]) -> str:
    return b64encode(column.view).decode()


def _column_from_json(kind: type[C], data: JSON) -> C:
    return kind.frombytes(b64decode(data))
