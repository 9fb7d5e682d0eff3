"""Conversations inside of one trajectory: each agent's own, as a training sample of its own, one after another or at the same time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from whet.data.parsers import Parsed
from whet.data.special import SPELLED
from whet.engine.base import EngineFailed
from whet.env.rollout import PLAY, Aborted, PromptTooLong, TrajectoryRun, turn_seed
from whet.env.sampling import ABORT_GRACE_S, Reply, read_reply
from whet.types import JSON, UNTRAINED_TOKENS, Finish, Message, Origin, Request, Turn, TurnNote
from whet.types.columns import Growing, Ints, Ragged, Runs


@dataclass(eq=False, slots=True)
class Dialogue:
    """One agent's conversation. `Dialogues.begin` makes it.

    Example:
        async with Dialogues(run) as all_of_them:
            pupil = all_of_them.begin([Message("user", "What is 3 + 4?")])
            answer = await pupil.reply()
            pupil.add(Message("user", "Are you sure?"))
            again = await pupil.reply()
    """

    owner: Dialogues
    place: int
    """Its number among the conversations of the trajectory."""
    role: str
    """Role of the agent, in a game of several; "": there is only one that trains."""
    trains: bool
    """False: what is sampled is not a part of the trajectory, and does not train."""
    context: tuple[int, ...]
    """Tokens that stand between the last sampled token and the next one."""
    origin: Origin = Origin.PROMPT
    turns: list[Turn] = field(default_factory=list[Turn])
    over: bool = False
    """True once nothing more can be sampled: a limit was met, or a reply was broken off."""
    waiting: list[Message] = field(default_factory=list[Message])
    """Messages that the next turn begins with."""
    history: Growing[Ints] = field(default_factory=lambda: Growing(Ints))
    call: asyncio.Task[Parsed | None] | None = None
    """The reply that is waited for."""
    sampling: bool = False
    """True while the engine has its request."""

    async def reply(self) -> Parsed | None:
        """The agent's next turn; None where the run's limits leave no room for one.

        A caller that is cancelled meanwhile ends this conversation, and not the others.

        Raises:
            RuntimeError: a reply is being sampled already, or nothing was said since the last one.
            Aborted: the engine was asked to stop; the trajectory ends.
            PromptTooLong: the trajectory's first prompt leaves no room.
            ValueError: the chat template cannot render the messages.
        """
        if self.call is not None:
            raise RuntimeError("a conversation has one reply at a time: this one is waited for already")
        if self.turns and not self.waiting and not self.over:
            raise RuntimeError("nothing was added since the last reply: call add with what others say")
        return await self.owner.sampled(self)

    def add(self, *messages: Message) -> None:
        """Append what others say. It is rendered as the chat template writes it behind the agent's last turn."""
        self.waiting.extend(messages)

    def note(self, reward: float | None = None, notes: Sequence[TurnNote] = ()) -> None:
        """Give the last turn a reward from the environment, or notes for the records."""
        last = self.turns[-1]
        self.turns[-1] = replace(last, reward=last.reward if reward is None else reward, notes=(*last.notes, *notes))
        self.owner.publish()

    @property
    def cut(self) -> bool:
        """True if the last turn did not end by itself."""
        return bool(self.turns) and self.turns[-1].finish is not Finish.STOP


class Dialogues:
    """The conversations of one trajectory, which ends with them.

    Their turns are the trajectory's, one conversation after another in the order in which they began, however they interleaved: each
    that trains is a training sample, and every token that was sampled in it is there once. What the engine had handed over when a reply
    was broken off is kept. A deterministic engine samples one reply of a trajectory at a time.
    """

    def __init__(self, run: TrajectoryRun) -> None:
        self._run = run
        self._all: list[Dialogue] = []
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._num_calls = 0
        self._one_at_a_time = asyncio.Lock() if run.engine.capabilities.deterministic else None
        self.failure: Exception | None = None
        """The first error of the engine, or the end of its time: it ends the trajectory, whatever a caller does with it."""
        self.cut = False
        """A limit refused a turn."""
        self._closed = False

    def begin(
        self,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, JSON]] = (),
        *,
        role: str = "",
        trains: bool = True,
        task_tools: bool = False,
    ) -> Dialogue:
        """A new conversation.

        Args:
            messages: its beginning, as a prompt; a text is taken unchanged.
            tools: OpenAI schemas of the tools that the prompt lists.
            role: the agent's role, where the roles of a game have scores of their own.
            trains: False: the agent is played by the policy, and does not learn from it.
            task_tools: list the tools that the task brings along, too.

        Raises:
            ValueError: the chat template cannot render them.
        """
        run = self._run
        prompt = messages if isinstance(messages, str) else tuple(messages)
        task = replace(run.task, prompt=prompt, tools=run.task.tools if task_tools else ())
        spelled = run.renderer.num_spelled
        context = run.renderer.prompt(task, tools)
        self._count_spelled(spelled)
        found = Dialogue(self, len(self._all), role, trains, context)
        self._all.append(found)
        return found

    async def __aenter__(self) -> Self:
        self._run.turns.clear()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End what is being sampled, and publish all turns. An error of the engine is raised even where a caller went on after it."""
        failure, self._closed = self.failure, True
        try:
            await self._end_all()
        finally:
            self.publish()
            left_out = sum(len(turn.tokens) for each in self._all if not each.trains for turn in each.turns)
            if left_out:
                self._run.counts[UNTRAINED_TOKENS] = left_out
        if failure is not None and not isinstance(error, asyncio.CancelledError):
            if isinstance(failure, EngineFailed):
                self._run.place = "engine"
            raise failure

    def publish(self) -> None:
        """Make the turns so far those of the trajectory."""
        turns: list[Turn] = []
        for conversation in self._all:
            if conversation.trains:
                for i, turn in enumerate(conversation.turns):
                    turns.append(replace(turn, restart=True) if i == 0 and turns else turn)
        self._run.turns[:] = turns

    def score(self, rewards: Mapping[str, float]) -> None:
        """Give the last turn of each role, of those in which something was sampled, a reward."""
        for role, reward in rewards.items():
            mine = [each for each in self._all if each.trains and each.role == role and any(turn.tokens for turn in each.turns)]
            if mine:
                last = max(i for i, turn in enumerate(mine[-1].turns) if turn.tokens)
                mine[-1].turns[last] = replace(mine[-1].turns[last], reward=reward)
        self.publish()

    async def sampled(self, conversation: Dialogue) -> Parsed | None:
        """The next turn of a conversation, as `Dialogue.reply` gives it."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise RuntimeError("the conversations of this trajectory are over: nobody waited for this reply")
        if conversation.over:
            return None
        self._num_calls += 1
        name = f"{self._run.id}/{self._num_calls - 1}"
        call = conversation.call = asyncio.create_task(self._call(conversation, name), name=f"reply {name}")
        self._running[name] = call
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.done():  # nobody waits any more; the engine hands over what it has
                conversation.over = True
                asyncio.ensure_future(self._abort(name)).add_done_callback(_seen)
            raise
        finally:
            call.add_done_callback(_seen)

    async def _call(self, conversation: Dialogue, name: str) -> Parsed | None:
        try:
            if self._one_at_a_time is None:
                return await self._sample(conversation, name)
            async with self._one_at_a_time:
                return await self._sample(conversation, name)
        finally:
            conversation.call = None
            del self._running[name]
            self.publish()
            if not self._running:
                self._run.place, self._run.request = PLAY, ""

    async def _sample(self, conversation: Dialogue, name: str) -> Parsed | None:
        run = self._run
        context = self._context(conversation)
        room = min(run.limits.max_turn_tokens, run.limits.max_tokens - len(conversation.history) - len(context))
        rivals = [other for other in self._all if other.trains] if conversation.trains else [conversation]
        taken = sum(len(other.turns) + other.sampling for other in rivals)
        if room < 1 or taken >= run.limits.max_turns:
            conversation.over = self.cut = True
            if room < 1 and not any(other.turns for other in self._all):
                run.place = "limits"
                raise PromptTooLong(
                    f"the prompt has {len(context)} tokens, which leaves no room within rollout.max_tokens = {run.limits.max_tokens}; "
                    "raise it, or drop such prompts with data.max_prompt_tokens"
                )
            return None
        conversation.history.extend(Ints.of(context))
        reply = Reply(len(context))
        began, conversation.sampling = time.monotonic(), True
        try:
            run.place, run.request = "engine", name
            if run.deadline.left_s == 0:
                raise run.deadline.error("the engine")
            request = self._request(conversation, name, room, reply)
            in_time = await read_reply(run.engine, request, run.stream(request), run.deadline, reply)
            if not in_time:
                raise run.deadline.error("the engine")
            if not reply.tokens and reply.finish is None:
                raise EngineFailed("the engine ended a reply without a token and without a reason")
        except Exception as error:  # of the engine: it ends the trajectory
            self.failure = self.failure or error
            raise
        finally:
            conversation.sampling = False
            run.charge("engine", began)
            run.charge_parts(reply.latency)
            self._keep(conversation, context, reply)
        if reply.finish is Finish.ABORT:
            if not conversation.over:
                self.failure = self.failure or Aborted(run.id)
                await self._end_others(name)
            conversation.over = True
            raise Aborted(run.id)
        return self._parsed(conversation, reply)

    def _context(self, conversation: Dialogue) -> tuple[int, ...]:
        """Tokens before the next turn: the prompt, or what others said since the last one."""
        run, messages = self._run, tuple(conversation.waiting)
        if not conversation.turns:
            assert not messages, "a prompt is given whole to begin"
            return conversation.context
        run.place = "renderer"
        spelled = run.renderer.num_spelled
        context = run.renderer.reply(messages, conversation.turns[-1].tokens)
        self._count_spelled(spelled)
        conversation.waiting.clear()
        conversation.origin = Origin.ENVIRONMENT
        return context

    def _request(self, conversation: Dialogue, name: str, room: int, reply: Reply) -> Request:
        run = self._run
        own = run.sampling.seed if conversation.place == 0 else turn_seed(run.sampling.seed, -conversation.place)
        return Request(
            id=name,
            tokens=(tokens := conversation.history.column()),
            sampling=replace(run.sampling, max_tokens=room, seed=turn_seed(own, len(conversation.turns))),
            conversation=run.id,
            rank=run.rank,
            chunk_tokens=run.chunk_tokens,
            routes_from=reply.routes_from(len(tokens)) if run.sampling.routes else 0,
        )

    def _keep(self, conversation: Dialogue, context: tuple[int, ...], reply: Reply) -> None:
        """Make a turn of what was sampled, even if the reply was broken off."""
        if not reply.tokens and reply.finish is None:
            return
        run, tokens = self._run, reply.tokens.column()
        conversation.turns.append(
            Turn(
                context=Ints.of(context),
                context_origin=Runs.repeat(conversation.origin, len(context)),
                tokens=tokens,
                logprobs=reply.logprobs.column(),
                versions=Runs[int].from_runs(reply.versions),
                nucleus=Ragged.join(reply.nucleus) if run.sampling.nucleus else None,
                routes=reply.all_routes if run.sampling.routes else None,
                message=Message("assistant", run.renderer.decode(tokens)),
                finish=reply.finish or Finish.ABORT,
                role=conversation.role,
            )
        )
        conversation.history.extend(tokens)

    def _parsed(self, conversation: Dialogue, reply: Reply) -> Parsed:
        self._run.place = "parser"
        parsed = self._run.renderer.parse(reply.tokens.column())
        conversation.turns[-1] = replace(conversation.turns[-1], message=parsed.message)
        return parsed

    async def _abort(self, name: str) -> None:
        with suppress(EngineFailed, TimeoutError):  # an engine that is gone or hangs answers no abort
            async with asyncio.timeout(ABORT_GRACE_S):
                await self._run.engine.abort(name)

    async def _end_others(self, name: str) -> None:
        await asyncio.gather(*(self._abort(other) for other in self._running if other != name))

    async def _end_all(self) -> None:
        """Ask the engine to stop, wait for what it hands over, and leave what does not answer."""
        running = dict(self._running)
        if not running:
            return
        for conversation in self._all:
            conversation.over = conversation.over or conversation.call is not None
        try:
            await asyncio.gather(*(self._abort(name) for name in running))
            await asyncio.wait(running.values(), timeout=ABORT_GRACE_S)
        finally:
            for call in running.values():
                call.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _count_spelled(self, before: int) -> None:
        found: Counter[str] = self._run.counts
        if self._run.renderer.num_spelled > before:
            found[SPELLED] += self._run.renderer.num_spelled - before


def _seen(done: asyncio.Future[Any]) -> None:
    """Nobody may wait for it any more."""
    if not done.cancelled():
        done.exception()
