"""One trajectory: the model and an environment take turns, and every token is kept with its origin.

A rollout's errors are caught here and nowhere else: every error becomes a typed outcome on the
trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from whet.config import ConfigError
from whet.data.parsers import Parsed, ToolSchemas
from whet.data.special import SPELLED
from whet.data.template import Renderer
from whet.engine.base import Engine, EngineFailed, EngineRefused, closing_reply
from whet.env.base import Appraising, Env, Resumable, Step
from whet.env.deadline import Deadline
from whet.env.failure import failure_of
from whet.env.history import THINKING_LEFT_OUT, MessageHistory
from whet.env.limits import CLOSE_TIMEOUT_S, Limits
from whet.env.sampling import Reply, in_time, read_reply
from whet.types import Chunk, Failure, Finish, Message, Origin, Outcome, ReplyLatency, Request, SamplingParams, Task, Trajectory, Turn
from whet.types.columns import Growing, Ints, Ragged, Runs

PLAY = "rollout.play"
"""Place of a trajectory while a user's function plays it and no model call is running."""
CUT_BY_ANSWER = "cut_by_answer"
"""In a trajectory's counts: what the environment answered left no room within the limits for another turn."""


class Aborted(Exception):
    """The engine was asked to stop in the middle of a turn. The function that plays the trajectory ends
    with this error, too."""


class PromptTooLong(ValueError):
    """A prompt leaves no room to sample."""


@dataclass(frozen=True, slots=True)
class _Next:
    """The beginning of the next turn."""

    context: Ints
    origin: Origin
    restart: bool = False
    begun: Turn | None = None
    """The part of the turn that was sampled before."""


@dataclass(slots=True)
class TokenCount:
    """Number of tokens that an engine handed over."""

    total: int = 0


@dataclass(slots=True)
class TrajectoryRun:
    """A trajectory on its way. It can be asked at any moment what there is of it."""

    id: str
    """Unique; also the conversation's name in the engine."""
    task: Task
    engine: Engine
    renderer: Renderer
    sampling: SamplingParams
    """Sampling of every turn. `max_tokens` is replaced by the tokens that the limits leave, the
    trajectory's seed by the turn's (`turn_seed`)."""
    limits: Limits
    rank: tuple[int, ...] = ()
    """Its place among its rivals, for deterministic engines."""
    deadline: Deadline = field(default_factory=Deadline)
    """When its time is over, waiting for its turn in the engine included."""
    chunk_tokens: int = 0
    """Tokens after which the engine hands over a chunk; 0: at the end of a turn. `so_far` returns the
    tokens handed over."""
    sampled: TokenCount = field(default_factory=TokenCount)
    """Counts what the engine hands over, for this trajectory and others."""
    num_tokens: int = 0
    """Its tokens: those that it continues from, and those that the engine handed over since."""
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of events, except for those of the answer to the last turn."""
    answered: Counter[str] = field(default_factory=Counter)
    """Counts of events in the answer to the last turn. They are kept apart, since a run that continues
    from here gets the answer again."""
    seconds: dict[str, float] = field(default_factory=dict)
    stop: str | None = None
    """Reason that the environment gave for the end."""
    place: str = ""
    """Present place of the trajectory: env.resources, env.start, renderer, limits, engine, parser or env.step."""
    history: Growing[Ints] = field(default_factory=lambda: Growing(Ints))
    """Every token of the present chain so far: what the engine continues."""
    request: str = ""
    """The id of the request that the engine has from it; none: it waits for something else."""
    tools: ToolSchemas = ()
    """Those that its turns may call: the environment's, then the row's."""
    conversation: MessageHistory = field(default_factory=MessageHistory)
    """Its messages, where the renderer leaves the thinking of earlier turns out."""
    _lacks_room: bool = False
    """The limits left no room for the last turn that a user's function asked for."""
    _open: tuple[_Next, Reply] | None = None
    """The turn that is being sampled."""

    def resume_from(self, interrupted: Trajectory) -> None:
        """Begin with what an earlier run of the same trajectory left; its last turn may have been cut by an abort."""
        self.task, self.turns = interrupted.task, list(interrupted.turns)
        self.counts, self.seconds = Counter(interrupted.counts), dict(interrupted.timings)
        self.num_tokens = interrupted.num_tokens_played

    async def to_end(self, open_env: Callable[[], Awaitable[Env]], play: Play | None = None) -> Trajectory:
        """Play the task to its end, or go on from the turns that there are.

        Args:
            open_env: makes the environment, which is closed here. A deterministic engine waits for it as for an answer.
            play: in place of taking turns with the environment; it calls `sample` and returns how the trajectory ended.

        Returns:
            A trajectory without rewards. Failures are outcomes, never exceptions; what was sampled before one is kept, a
            turn that the deadline cut short included. An engine that fails makes it aborted, an environment an environment
            error.

        Raises:
            ConfigError: the environment that the settings name cannot be made.
        """
        env: Env | None = None
        error: Failure | None = None
        closing: Failure | None = None
        self.engine.open(self.id)
        try:
            env = await open_env()
            if play is None and isinstance(env, PlaysItself):
                play = _by_itself
            outcome = await (self._play(env) if play is None else self._played(play, env))
        except Exception as fault:  # the rollout boundary
            if env is None and isinstance(fault, ConfigError):
                raise
            outcome, error = self._failure(fault)
        finally:
            try:
                self.engine.release(self.id)
            finally:  # an engine that is gone says so
                closing = None if env is None else await _close(env)
        if closing is not None:
            late = closing.kind == TimeoutError.__name__
            outcome, error = (Outcome.TIMEOUT if late else Outcome.ENV_ERROR, closing) if outcome.valid else (outcome, error or closing)
        return replace(self.so_far(), outcome=outcome, error=error, counts=self._counts(whole=True), stop=self.stop)

    @property
    def oldest(self) -> int | None:
        """Version that sampled the oldest of its tokens so far; None: it has none."""
        begun = () if self._open is None else self._open[1].versions
        return min(chain((v for turn in self.turns for v in turn.versions.values), (v for v, _ in begun)), default=None)

    def _failure(self, fault: Exception) -> tuple[Outcome, Failure]:
        """The outcome of an error at the present place."""
        if isinstance(fault, EngineRefused | PromptTooLong):
            outcome = Outcome.REFUSED
        elif isinstance(fault, TimeoutError):
            outcome = Outcome.TIMEOUT
        else:
            outcome = Outcome.ABORTED if self.place == "engine" else Outcome.ENV_ERROR
        return outcome, failure_of(fault, self.place)

    def so_far(self) -> Trajectory:
        """The trajectory so far, as an aborted one that another run can continue."""
        turns = list(self.turns)
        turn = None if self._open is None else self._turn_of(*self._open)
        if turn is not None:
            turns.append(turn)
        return Trajectory(
            id=self.id,
            task=self.task,
            turns=tuple(turns),
            outcome=Outcome.ABORTED,
            temperature=self.sampling.temperature,
            timings=dict(self.seconds),
            counts=self._counts(whole=turn is not None),
        )

    def _counts(self, *, whole: bool) -> dict[str, int]:
        """With what the answer to the last turn counted, or without."""
        counts = Counter(self.counts)
        if whole:
            counts.update(self.answered)
        return dict(counts)

    async def _played(self, play: Play, env: Env) -> Outcome:
        """Play with a user's function, from the beginning: the state of an interrupted function is
        unknown."""
        self.turns.clear()
        self.place = PLAY
        self.tools = (*env.tools, *self.task.tools)
        playing = asyncio.ensure_future(play(self, env))
        try:
            if not await in_time(playing, self.deadline):
                raise self.deadline.error(self.place)
            answer = playing.result()
        except Aborted:
            return Outcome.ABORTED
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        if answer not in tuple(Outcome):
            raise ValueError(f"rollout.play returned {answer!r}; return how the trajectory ended, an Outcome ({', '.join(Outcome)})")
        if self._lacks_room and answer == Outcome.TRUNCATED and self.turns:
            self._count_cut()
        return Outcome(answer)

    async def _play(self, env: Env) -> Outcome:
        async with self.waits_for("env.start"):
            started = await _started(env, self.task, self.turns)
        if started.id != self.task.id:
            ids = f"from {self.task.id!r} to {started.id!r}"
            raise ValueError(f"the environment changed the task's id {ids}; it must stay the same")
        self.task = started
        self.place = "renderer"
        self.tools = (*env.tools, *started.tools)
        coming = self._pick_up() if self.turns else self._prompted(self.task, env, self.counts)
        while True:
            parsed = self._parsed() if coming is None else await self._sample(coming)
            if parsed is None:
                return await self._cut(env, self._without_room())
            turn = self.turns[-1]
            if turn.finish is not Finish.STOP:
                return Outcome.ABORTED if turn.finish is Finish.ABORT else await self._cut(env, Outcome.TRUNCATED)
            step = await self.step(env, parsed)
            if step.done:
                return Outcome.TRUNCATED if step.truncated else Outcome.COMPLETED
            self.place = "renderer"
            coming = self._after(step, turn, env, parsed)

    async def _cut(self, env: Env, outcome: Outcome) -> Outcome:
        """The outcome of a trajectory that the limits ended, once the environment has given it a reward, if it does so."""
        if isinstance(env, Appraising):
            async with self.waits_for("env.step"):
                reward = await env.appraise()
            if reward is not None:
                self.turns[-1] = replace(self.turns[-1], reward=reward)
        return outcome

    async def step(self, env: Env, reply: Parsed) -> Step:
        """The environment's answer to the last turn, which keeps its reward and notes; a user's own way to play may call this, too.

        A trajectory that goes on from here later gets the answer again, in place of this one.
        """
        before = self.place
        async with self.waits_for("env.step"):
            step = await env.step(reply)
        self.answered.clear()
        self.answered.update(step.counts)
        turn = self.turns[-1]
        if step.reward is not None or step.notes or turn.notes:
            self.turns[-1] = replace(turn, reward=turn.reward if step.reward is None else step.reward, notes=step.notes)
        self.stop, self.place = step.stop, before
        return step

    async def sample(self, context: Sequence[int], origin: Origin, *, restart: bool = False) -> Parsed | None:
        """One model call, for a user's own way to play: adds the next turn to the end of `turns`.

        Args:
            context: tokens before the turn, after all tokens so far.
            origin: writer of the context.
            restart: discard the history: the context is the whole new history, and the turn begins
                another sample.

        Returns:
            The parsed reply; None: the limits leave no room for it.

        Raises:
            Aborted: the engine was asked to stop. Do not catch it.
        """
        parsed = await self._sample(_Next(Ints.of(context), origin, restart))
        if parsed is not None and self.turns[-1].finish is Finish.ABORT:
            raise Aborted(self.id)
        self.place, self._lacks_room = PLAY, parsed is None
        return parsed

    def _pick_up(self) -> _Next | None:
        """The interrupted last turn to continue; None: the turns end before the environment's answer."""
        begun = self.turns.pop() if self.turns[-1].finish is Finish.ABORT else None
        for turn in self.turns:
            if turn.restart:
                self.history.clear()
            self.history.extend(turn.context)
            self.history.extend(turn.tokens)
        if begun is None:
            return None
        origin = begun.context_origin[0] if begun.context_origin else Origin.ENVIRONMENT
        return _Next(begun.context, origin, begun.restart, begun)

    def _count_cut(self) -> None:
        if len(self.turns) < self.limits.max_turns:  # else it is the number of turns that cuts it
            self.answered[CUT_BY_ANSWER] = 1

    def _without_room(self) -> Outcome:
        """Outcome of a trajectory that the limits leave no room to continue."""
        if self.turns:
            self._count_cut()
            return Outcome.TRUNCATED
        self.place = "limits"
        raise PromptTooLong(
            f"the prompt has {len(self.history)} tokens, which leaves no room within rollout.max_tokens = "
            f"{self.limits.max_tokens}; raise it, or drop such prompts with data.max_prompt_tokens"
        )

    def _prompted(self, task: Task, env: Env, counts: Counter[str], *, restart: bool = False) -> _Next:
        spelled = self.renderer.num_spelled
        self.conversation.begin(task)
        context = self.renderer.prompt(task, env.tools)
        self._count_spelled(spelled, counts)
        return _Next(Ints.of(context), Origin.PROMPT, restart)

    def _count_spelled(self, before: int, counts: Counter[str]) -> None:
        if self.renderer.num_spelled > before:
            counts[SPELLED] += self.renderer.num_spelled - before

    def _after(self, step: Step, turn: Turn, env: Env, reply: Parsed) -> _Next:
        history = step.history
        if self.renderer.strips and step.messages:
            self.conversation.add(reply, self.renderer.text_of(turn.tokens), step.messages)
            history = self.conversation.without_thinking(self.renderer, self.tools)
            self.answered[THINKING_LEFT_OUT] += bool(history)
        if history:
            return self._prompted(replace(self.task, prompt=history), env, self.answered, restart=True)
        spelled = self.renderer.num_spelled
        context = self.renderer.plain(step.text, turn.tokens) if step.text else self.renderer.reply(step.messages, turn.tokens)
        self._count_spelled(spelled, self.answered)
        return _Next(Ints.of(context), Origin.ENVIRONMENT)

    async def _sample(self, coming: _Next) -> Parsed | None:
        """One model call. Its sampled tokens are kept as a turn, even if it fails."""
        if coming.restart:
            self.history.clear()
        self.history.extend(coming.context)
        room = min(self.limits.max_turn_tokens, self.limits.max_tokens - len(self.history))
        if room < 1 or len(self.turns) == self.limits.max_turns:
            return None
        self.place = "engine"
        reply = _reply_of(coming)
        self._open = coming, reply
        began = time.monotonic()
        in_time = False
        try:
            if self.deadline.left_s == 0:
                raise self.deadline.error("the engine")
            if len(reply.tokens) < room:
                request = self._request(reply, room)
                in_time = await read_reply(self.engine, request, self.stream(request), self.deadline, reply)
            else:  # the limits are lower than when it was started
                in_time, reply.finish = True, Finish.LENGTH
        finally:
            self.request = ""
            self._open = None
            self.charge("engine", began)
            self.charge_parts(reply.latency)
            if not in_time:
                self._keep(coming, reply)
        if not in_time:
            raise self.deadline.error("the engine")
        if not reply.tokens and reply.finish is None:
            raise EngineFailed("the engine ended a reply without a token and without a reason")
        return self._read(coming, reply)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """The engine's reply to a request, each of its tokens counted."""
        async with closing_reply(self.engine.generate(request)) as chunks:
            async for chunk in chunks:
                self.sampled.total += len(chunk.tokens)
                self.num_tokens += len(chunk.tokens)
                yield chunk

    def _read(self, coming: _Next, reply: Reply) -> Parsed:
        """Keep a whole reply as a turn; its message is the plain text if a parser of the user's fails."""
        self.place = "parser"
        try:
            parsed = self.renderer.parse(reply.tokens.column(), self.tools, coming.context)
        except Exception:  # of a user's parser: it is raised on, and the tokens stay
            self._keep(coming, reply)
            raise
        self._keep(coming, reply, parsed.message)
        return parsed

    def _parsed(self) -> Parsed:
        """The parsed text of the last turn."""
        self.place = "parser"
        return self.renderer.parse(self.turns[-1].tokens, self.tools, self.turns[-1].context)

    def _request(self, reply: Reply, room: int) -> Request:
        num_begun, turn = len(reply.tokens), len(self.turns)
        self.request = f"{self.id}/{turn}"
        tokens = self.history.column() + reply.tokens.column() if reply.tokens else self.history.column()
        return Request(
            id=self.request,
            tokens=tokens,
            sampling=replace(self.sampling, max_tokens=room - num_begun, seed=turn_seed(self.sampling.seed, turn)),
            conversation=self.id,
            rank=self.rank,
            chunk_tokens=self.chunk_tokens,
            num_begun=num_begun,
            routes_from=reply.routes_from(len(tokens)) if self.sampling.routes else 0,
        )

    def _keep(self, coming: _Next, reply: Reply, message: Message | None = None) -> None:
        turn = self._turn_of(coming, reply, message)
        if turn is not None:
            self.turns.append(turn)
            self.history.extend(turn.tokens)
            self.counts.update(self.answered)
            self.answered.clear()

    def _turn_of(self, coming: _Next, reply: Reply, message: Message | None = None) -> Turn | None:
        """A turn whose message is its plain text unless it was parsed; None: nothing was sampled."""
        if not reply.tokens and reply.finish is None:
            return None
        tokens = reply.tokens.column()
        return Turn(
            context=coming.context,
            context_origin=Runs.repeat(coming.origin, len(coming.context)),
            tokens=tokens,
            logprobs=reply.logprobs.column(),
            versions=Runs[int].from_runs(reply.versions),
            nucleus=Ragged.join(reply.nucleus) if self.sampling.nucleus else None,
            routes=reply.all_routes if self.sampling.routes else None,
            message=message or Message("assistant", self.renderer.decode(tokens)),
            finish=reply.finish or Finish.ABORT,
            restart=coming.restart,
        )

    @asynccontextmanager
    async def waits_for(self, place: str) -> AsyncIterator[None]:
        """Name what is waited for, charge the time to it, and end the wait at the deadline."""
        self.place = place
        began = time.monotonic()
        try:
            if self.deadline.timeout_s is None:
                yield
                return
            async with self.deadline.ends(place):
                yield
        finally:
            self.charge("env", began)

    def charge_parts(self, latency: ReplyLatency | None) -> None:
        """Add the parts of the engine's time."""
        if latency is not None:
            for cause, seconds in (("queue", latency.queue_s), ("prefill", latency.prefill_s), ("decode", latency.decode_s)):
                self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def charge(self, cause: str, began: float) -> None:
        """Add the seconds since `began` (of `time.monotonic`) to those of a cause."""
        self.seconds[cause] = self.seconds.get(cause, 0.0) + time.monotonic() - began


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a trajectory's turn, counted from 0: its own even where an earlier turn saw the same tokens.

    The first turn has the trajectory's seed, each later one 63 bits of a hash of it and of the turn's number: a turn that was cut
    off goes on with the noise that it began with.
    """
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/turn/{turn}".encode(), digest_size=8).digest(), "big") >> 1


Play = Callable[[TrajectoryRun, Env], Awaitable[Outcome]]
"""Plays a trajectory in a user's own way: `rollout.play`."""


@runtime_checkable
class PlaysItself(Env, Protocol):
    """An environment that decides by itself which model calls a trajectory has; turns are not taken with it."""

    async def play(self, run: TrajectoryRun) -> Outcome:
        """Play the trajectory, as a function of `rollout.play` does."""
        ...


async def _by_itself(run: TrajectoryRun, env: Env) -> Outcome:
    assert isinstance(env, PlaysItself)
    return await env.play(run)


async def _started(env: Env, task: Task, turns: Sequence[Turn]) -> Task:
    if not turns:
        return await env.start(task)
    assert isinstance(env, Resumable), "only what can be resumed is kept in the middle"
    return await env.resume(task, turns)


async def _close(env: Env) -> Failure | None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await env.close()
    except Exception as fault:  # the rollout boundary
        return failure_of(fault, "env.close")
    return None


def _reply_of(coming: _Next) -> Reply:
    """The reply to extend: empty, or with the tokens sampled so far for the turn."""
    reply, begun = Reply(len(coming.context)), coming.begun
    if begun is not None:
        routes = begun.routes if begun.tokens else None  # of the context alone nothing is known yet
        reply.add(begun.tokens, begun.logprobs, begun.versions.runs(), begun.nucleus, routes)
    return reply
