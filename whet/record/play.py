"""A trajectory that something else than turns plays: its model calls go through a session of the recorder, and become the turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from whet.engine.base import EngineFailed, closing_reply
from whet.engine.embedded.grammar import Grammars
from whet.env.rollout import Aborted, TrajectoryRun, turn_seed
from whet.record.server import Recorder
from whet.record.session import Session, Training
from whet.record.tree import Rule
from whet.serve.errors import ApiError
from whet.serve.service import Service
from whet.serve.settings import ServeConfig, ServerLimits
from whet.types import JSON, UNTRAINED_TOKENS, Chunk, Finish, Outcome, Request, Task, Turn, TurnNote


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model's address for one trajectory's program."""

    url: str
    """`http://127.0.0.1:PORT/s/KEY`, for Anthropic's clients; OpenAI's take `openai_url`."""
    key: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program."""

    score: float | None = None
    """Reward of the last turn; None: it gives none."""
    attachments: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


Playing = Callable[[Task, Endpoint], Awaitable[Ended]]
"""Plays a task with the model at an endpoint."""


async def play_recorded(run: TrajectoryRun, recorder: Recorder, training: Training, playing: Playing) -> Outcome:
    """Let a program play, and keep its calls as the trajectory's turns.

    Raises:
        Aborted: the engine was asked to stop.
        ValueError: the run is deterministic, or no model call trains.
        Exception: what `playing` raises, or the engine.
    """
    if run.engine.capabilities.deterministic:
        raise ValueError("programs cannot play with deterministic = true: when a program calls depends on the clock")
    calls = _Calls(run)
    session = Session(run.renderer, calls.stream, training, nucleus=run.sampling.nucleus, routes=run.sampling.routes)
    session.service = _service(run, session, recorder)
    try:
        with recorder.opened(session) as key:
            ended = await _played(run, calls, playing, Endpoint(f"{recorder.address}/s/{key}", key))
    finally:
        await session.close()
        run.turns[:] = session.turns()
        run.counts.update({f"calls_{rule}": sum(call.spec.rule is rule for call in session.tree.calls) for rule in Rule})
        untrained = [call for call in session.tree.calls if not call.spec.trained]
        run.counts["calls_untrained"] += len(untrained)
        if untrained:
            run.counts[UNTRAINED_TOKENS] = sum(len(call.reply.tokens) for call in untrained)
        run.counts["calls_retried"] += session.num_retries
    if not run.turns:
        where = "does it use the address in OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
        words = str(ended.attachments.get("stderr", "")).strip()[-800:]
        raise ValueError(f"the program ended without a model call that trains: {where}" + (f" Its last words: {words}" if words else ""))
    run.turns[-1] = _noted(run.turns[-1], ended)
    return Outcome.TRUNCATED if calls.cut else Outcome.COMPLETED


async def _played(run: TrajectoryRun, calls: _Calls, playing: Playing, endpoint: Endpoint) -> Ended:
    working = asyncio.ensure_future(playing(run.task, endpoint))
    stopped = asyncio.ensure_future(calls.stopped.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if calls.failure is not None:
            run.place = "engine"
            raise calls.failure
        if calls.stopped.is_set():
            raise Aborted(run.id)
        fault = working.exception()
        # Most programs end at an error of the API, which a limit of the run was, and some at a reply that is not whole.
        if (calls.cut or calls.cut_replies) and isinstance(fault, Exception):
            calls.cut = True
            return Ended(attachments={"ended_by": f"{type(fault).__name__}: {fault}"})
        return working.result()
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


class _Calls:
    """The model calls of one program, sampled as the run samples."""

    def __init__(self, run: TrajectoryRun) -> None:
        self._run = run
        self.cut = False
        """A limit of the run refused a call, or cut a reply at which the program failed."""
        self.cut_replies: list[list[int]] = []
        """Tokens of the conversations whose last reply a limit of the run has cut, and which no later call went on from."""
        self.stopped = asyncio.Event()
        """The engine was asked to stop, or failed: nothing is sampled any more."""
        self.failure: Exception | None = None

    async def stream(self, request: Request, number: int) -> AsyncIterator[Chunk]:
        run, limits = self._run, self._run.limits
        room = min(limits.max_turn_tokens, limits.max_tokens - len(request.tokens))
        if number >= limits.max_turns or room < 1:
            self.cut = True
            which = f"rollout.max_turns = {limits.max_turns}" if number >= limits.max_turns else f"rollout.max_tokens = {limits.max_tokens}"
            # Clients know this sentence: they do not ask again after it.
            words = f"this model's maximum context length is used up: the trajectory is at its limit ({which})"
            raise ApiError(400, words, code="context_length_exceeded")
        asked, tokens = request.sampling, list(request.tokens)
        self.cut_replies = [cut for cut in self.cut_replies if tokens[: len(cut)] != cut]
        sampling = replace(
            run.sampling,
            max_tokens=min(asked.max_tokens, room),
            stop=tuple(dict.fromkeys((*run.sampling.stop, *asked.stop))),
            grammar=asked.grammar or run.sampling.grammar,
            logit_bias=asked.logit_bias,
            raw_logprobs=asked.raw_logprobs,
            top_logprobs=asked.top_logprobs,
            seed=turn_seed(run.sampling.seed, number),
        )
        run.request = request.id
        began = time.monotonic()
        try:
            mine = replace(request, sampling=sampling, conversation=run.id, rank=run.rank)
            async with closing_reply(run.stream(mine)) as chunks:
                async for chunk in chunks:
                    tokens += chunk.tokens
                    if chunk.finish is Finish.ABORT:
                        self.stopped.set()
                    if chunk.finish is Finish.LENGTH and room < asked.max_tokens:
                        self.cut_replies.append(tokens)
                    yield chunk
        except EngineFailed as error:
            self.failure = self.failure or error
            self.stopped.set()
            raise
        finally:
            run.charge("engine", began)


def _service(run: TrajectoryRun, session: Session, recorder: Recorder) -> Service:
    limits = ServerLimits(max_running=256, max_samples=64)
    return Service(
        engine=run.engine,
        renderer=run.renderer,
        config=ServeConfig.model_validate({"model": {"path": "policy"}, "limits": limits.model_dump(), "stream_interval": 2**30}),
        texts=recorder.texts,
        load=_loads_nothing,
        try_grammar=Grammars(run.renderer, len(run.renderer.tokenizer)).check,
        prompts=session,
        generate=session.generate,
        any_model=True,
    )


def _loads_nothing(source: object) -> Any:
    raise AssertionError("a session changes no weights")


def _noted(turn: Turn, ended: Ended) -> Turn:
    note = TurnNote("", ended.metrics, ended.attachments)
    notes = (*turn.notes, note) if ended.attachments or ended.metrics else turn.notes
    return replace(turn, reward=turn.reward if ended.score is None else ended.score, notes=notes)
