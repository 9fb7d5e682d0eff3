"""One trajectory: the model and an environment take turns, and every token is kept with who wrote it.

This is the one place that catches a rollout's errors: whatever goes wrong becomes a typed outcome on the trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from whet.data.parsers import Parsed
from whet.data.template import Renderer
from whet.engine.base import Engine, EngineRefused
from whet.env.base import Env, Step
from whet.env.failure import failure_of
from whet.env.sampling import Reply, read_reply
from whet.types import Failure, Finish, Message, Origin, Outcome, Request, SamplingParams, Task, Trajectory, Turn

CLOSE_TIMEOUT_S = 30.0
"""For an environment to close, whatever time its trajectory had."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a trajectory is cut."""

    max_turns: int
    max_tokens: int
    """Of the whole trajectory: prompt, replies and the environment's answers."""
    max_turn_tokens: int
    """Sampled in one turn."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_turn_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a trajectory's time is over. Made inside the event loop; None: never."""

    timeout_s: float | None = None
    at: float | None = None
    """By the event loop's clock. None: each wait for the environment or the reward has `timeout_s` of its own, and the engine any time."""

    @classmethod
    def after(cls, timeout_s: float | None, *, per_wait: bool = False) -> Deadline:
        """A deadline `timeout_s` from now, or one for each wait."""
        return cls(timeout_s, None if timeout_s is None or per_wait else asyncio.get_running_loop().time() + timeout_s)

    @property
    def left_s(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - asyncio.get_running_loop().time())

    def error(self, place: str) -> TimeoutError:
        """What a trajectory fails with that was still waiting for `place`."""
        what = f"the trajectory's {self.timeout_s} s (rollout.timeout_s)"
        return TimeoutError(f"{what} were over while it waited for {place}")

    @asynccontextmanager
    async def ends(self, place: str) -> AsyncIterator[None]:
        """Cancel what is awaited inside once the time is over, and raise `error(place)`."""
        limit = asyncio.timeout(self.timeout_s) if self.at is None else asyncio.timeout_at(self.at)
        try:
            async with limit:
                yield
        except TimeoutError as late:
            if limit.expired():
                raise self.error(place) from late
            raise


class PromptTooLong(ValueError):
    """A prompt leaves no room to sample."""


async def run_trajectory(
    trajectory_id: str,
    task: Task,
    env: Env,
    engine: Engine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
    rank: tuple[int, ...] = (),
    deadline: Deadline | None = None,
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
        deadline: when its time is over, waiting for its turn in the engine included.

    Returns:
        A trajectory without rewards. Failures are outcomes, never exceptions; what was sampled before one is kept, a
        turn that the deadline cut short included. An engine that fails makes it aborted, an environment an environment
        error.
    """
    run = _Run(trajectory_id, task, engine, renderer, sampling, limits, rank, deadline or Deadline())
    error: Failure | None = None
    closing: Failure | None = None
    engine.open(trajectory_id)
    try:
        outcome = await run.play(env)
    except (EngineRefused, PromptTooLong) as refused:
        outcome, error = Outcome.REFUSED, failure_of(refused, run.place)
    except TimeoutError as late:
        outcome, error = Outcome.TIMEOUT, failure_of(late, run.place)
    except Exception as fault:  # the rollout boundary
        outcome = Outcome.ABORTED if run.place == "engine" else Outcome.ENV_ERROR
        error = failure_of(fault, run.place)
    finally:
        engine.release(trajectory_id)
        closing = await _close(env)
    if closing is not None:
        late = closing.kind == TimeoutError.__name__
        outcome, error = (Outcome.TIMEOUT if late else Outcome.ENV_ERROR, closing) if outcome.valid else (outcome, error or closing)
    return Trajectory(
        id=trajectory_id,
        task=run.task,
        turns=tuple(run.turns),
        outcome=outcome,
        error=error,
        temperature=sampling.temperature,
        timings=dict(run.seconds),
        counts=dict(run.counts),
    )


async def _close(env: Env) -> Failure | None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await env.close()
    except Exception as fault:  # the rollout boundary
        return failure_of(fault, "env.close")
    return None


@dataclass(slots=True)
class _Run:
    """A trajectory on its way, and what it is waiting for."""

    id: str
    task: Task
    engine: Engine
    renderer: Renderer
    sampling: SamplingParams
    limits: Limits
    rank: tuple[int, ...]
    deadline: Deadline
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    place: str = ""
    """What it is at: env.start, renderer, limits, engine, parser or env.step."""
    history: list[int] = field(default_factory=list)
    """Every token so far: what the engine continues."""

    async def play(self, env: Env) -> Outcome:
        async with self._waits_for("env.start"):
            started = await env.start(self.task)
        if started.id != self.task.id:
            ids = f"from {self.task.id!r} to {started.id!r}"
            raise ValueError(f"the environment changed the task's id {ids}; it must stay the same")
        self.task = started
        self.place = "renderer"
        context, origin = self.renderer.prompt(self.task, env.tools), Origin.PROMPT
        for _ in range(self.limits.max_turns):
            self.history.extend(context)
            room = min(self.limits.max_turn_tokens, self.limits.max_tokens - len(self.history))
            if room < 1:
                return self._without_room()
            turn, parsed = await self._sample(context, origin, room)
            if turn.finish is not Finish.STOP:
                return Outcome.ABORTED if turn.finish is Finish.ABORT else Outcome.TRUNCATED
            async with self._waits_for("env.step"):
                step = await env.step(parsed)
            self.counts.update(step.counts)
            if step.reward is not None:
                self.turns[-1] = replace(turn, reward=step.reward)
            if step.done:
                return Outcome.COMPLETED
            self.place = "renderer"
            context, origin = self._context_of(step, turn), Origin.ENVIRONMENT
        return Outcome.TRUNCATED

    def _without_room(self) -> Outcome:
        if self.turns:
            return Outcome.TRUNCATED
        self.place = "limits"
        raise PromptTooLong(
            f"the prompt has {len(self.history)} tokens, which leaves no room within rollout.max_tokens = "
            f"{self.limits.max_tokens}; raise it, or drop such prompts with data.max_prompt_tokens"
        )

    def _context_of(self, step: Step, turn: Turn) -> tuple[int, ...]:
        if step.text:
            return self.renderer.encode(step.text)
        return self.renderer.reply(step.messages, turn.tokens)

    async def _sample(self, context: tuple[int, ...], origin: Origin, room: int) -> tuple[Turn, Parsed]:
        """One model call. What it sampled is kept as a turn whatever happens to it."""
        self.place = "engine"
        left_s = self.deadline.left_s
        if left_s == 0:
            raise self.deadline.error("the engine")
        sampling = replace(self.sampling, max_tokens=room)
        request = Request(f"{self.id}/{len(self.turns)}", tuple(self.history), sampling, self.id, rank=self.rank)
        reply = Reply()
        began = time.monotonic()
        try:
            in_time = await read_reply(self.engine, request, left_s, reply)
        finally:
            self._charge("engine", began)
            self._keep(reply, context, origin)
        if not in_time:
            raise self.deadline.error("the engine")
        self.place = "parser"
        parsed = self.renderer.parse(reply.tokens)
        self.turns[-1] = replace(self.turns[-1], message=parsed.message)
        return self.turns[-1], parsed

    def _keep(self, reply: Reply, context: tuple[int, ...], origin: Origin) -> None:
        """Its message is the plain text until it is parsed: a parser of the user's may fail."""
        if not reply.tokens and reply.finish is None:
            return
        turn = Turn(
            context=context,
            context_origin=(origin,) * len(context),
            tokens=tuple(reply.tokens),
            logprobs=tuple(reply.logprobs),
            versions=tuple(reply.versions),
            nucleus=tuple(reply.nucleus) if self.sampling.nucleus else None,
            message=Message("assistant", self.renderer.decode(reply.tokens)),
            finish=reply.finish or Finish.ABORT,
        )
        self.turns.append(turn)
        self.history.extend(turn.tokens)

    @asynccontextmanager
    async def _waits_for(self, place: str) -> AsyncIterator[None]:
        """Name what is waited for, charge the time to it, and end the wait at the deadline."""
        self.place = place
        began = time.monotonic()
        try:
            async with self.deadline.ends(place):
                yield
        finally:
            self._charge("env", began)

    def _charge(self, cause: str, began: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + time.monotonic() - began
