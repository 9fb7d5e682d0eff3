"""One trajectory: the model and an environment take turns, and every token is kept with who wrote it.

This is the one place that catches a rollout's errors: whatever goes wrong becomes a typed outcome on the trajectory.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from whet.data.template import Renderer
from whet.engine.base import Engine, EngineRefused
from whet.env.base import Env, Step
from whet.types import (
    Failure,
    Finish,
    Origin,
    Outcome,
    Request,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a trajectory is cut."""

    max_turns: int
    max_tokens: int
    """Of the whole trajectory: prompt, replies and the environment's answers."""
    max_turn_tokens: int
    """Sampled in one turn."""


@dataclass(slots=True)
class _Clock:
    """Seconds by cause."""

    seconds: Counter[str]
    since: float

    def charge(self, cause: str) -> None:
        now = time.monotonic()
        self.seconds[cause] += now - self.since
        self.since = now


async def run_trajectory(
    trajectory_id: str,
    task: Task,
    env: Env,
    engine: Engine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
    rank: tuple[int, ...] = (),
) -> Trajectory:
    """Play one task to its end.

    Args:
        trajectory_id: unique; also the conversation's name in the engine.
        task: what to do.
        env: its world, closed here.
        engine: who samples.
        renderer: messages to token ids and back.
        sampling: of every turn; `max_tokens` is replaced by what the limits leave, the seed is the trajectory's.
        limits: where it is cut.
        rank: its place among its rivals, for deterministic engines.

    Returns:
        A trajectory without rewards. Failures are outcomes, never exceptions; what was sampled before one is kept.
    """
    turns: list[Turn] = []
    counts: Counter[str] = Counter()
    clock = _Clock(Counter(), time.monotonic())
    error: Failure | None = None
    engine.open(trajectory_id)
    try:
        outcome = await _play(trajectory_id, task, env, engine, renderer, sampling, limits, rank, turns, counts, clock)
    except EngineRefused as refused:
        outcome, error = Outcome.REFUSED, failure_of(refused, "engine")
    except TimeoutError as late:
        outcome, error = Outcome.TIMEOUT, failure_of(late, "env")
    except Exception as fault:  # the rollout boundary
        outcome, error = Outcome.ENV_ERROR, failure_of(fault, "env")
    finally:
        engine.release(trajectory_id)
    try:
        await env.close()
    except Exception as fault:  # the rollout boundary
        outcome, error = Outcome.ENV_ERROR, error or failure_of(fault, "env.close")
    return Trajectory(
        trajectory_id, task, tuple(turns), outcome, None, error, sampling.temperature, dict(clock.seconds), dict(counts)
    )


def failure_of(error: BaseException, where: str) -> Failure:
    """An exception as data."""
    return Failure(type(error).__name__, str(error), where, "".join(traceback.format_exception(error)))


async def _play(
    name: str,
    task: Task,
    env: Env,
    engine: Engine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
    rank: tuple[int, ...],
    turns: list[Turn],
    counts: Counter[str],
    clock: _Clock,
) -> Outcome:
    task = await env.start(task)
    clock.charge("env")
    context = renderer.prompt(task, env.tools)
    origin = Origin.PROMPT
    history: list[int] = []
    for index in range(limits.max_turns):
        history.extend(context)
        room = min(limits.max_turn_tokens, limits.max_tokens - len(history))
        if room < 1:
            return Outcome.TRUNCATED
        request = Request(
            f"{name}/{index}", tuple(history), replace(sampling, max_tokens=room), name, rank=rank
        )
        turn = await _sample_turn(request, context, origin, engine, renderer)
        clock.charge("engine")
        history.extend(turn.tokens)
        turns.append(turn)
        if turn.finish is not Finish.STOP:
            return Outcome.ABORTED if turn.finish is Finish.ABORT else Outcome.TRUNCATED
        step = await env.step(renderer.parse(turn.tokens))
        clock.charge("env")
        counts.update(step.counts)
        if step.reward is not None:
            turns[-1] = replace(turn, reward=step.reward)
        if step.done:
            return Outcome.COMPLETED
        context, origin = _context_of(step, renderer, turn.tokens), Origin.ENVIRONMENT
    return Outcome.TRUNCATED


def _context_of(step: Step, renderer: Renderer, last: Sequence[int]) -> tuple[int, ...]:
    if step.text:
        return renderer.encode(step.text)
    return renderer.reply(step.messages, last)


async def _sample_turn(
    request: Request, context: tuple[int, ...], origin: Origin, engine: Engine, renderer: Renderer
) -> Turn:
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish = Finish.ABORT
    async for chunk in engine.generate(request):
        tokens.extend(chunk.tokens)
        logprobs.extend(chunk.logprobs)
        versions.extend([chunk.version] * len(chunk.tokens))
        finish = chunk.finish or finish
    return Turn(
        context,
        (origin,) * len(context),
        tuple(tokens),
        tuple(logprobs),
        tuple(versions),
        renderer.parse(tokens).message,
        finish,
    )
