"""The environment seam: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from whet.data.parsers import Parsed
from whet.env.resources import Resource
from whet.types import JSON, Message, Task, Turn, TurnNote


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a turn: messages, raw text that goes inside the assistant's turn, a rewritten history, or nothing (it
    is over)."""

    messages: tuple[Message, ...] = ()
    """Rendered as the chat template puts them between two turns of the assistant; what closes the turn is added if need
    be."""
    text: str = ""
    """Text that is appended unchanged, with nothing around it. The sampled tokens stay: the text
    follows the turn's stop token, so an environment that answers this way needs its own stop token
    (rollout.stop_token_ids), not the one that closes a turn."""
    history: tuple[Message, ...] = ()
    """The conversation rewritten (shortened, summed up, another agent's): the next turn begins from these messages as from a prompt, and
    a new training sample of the same trajectory begins with it. What was sampled before still trains."""
    done: bool = False
    """The conversation is over. What is answered along with it is not tokenised: nothing would be sampled after it."""
    truncated: bool = False
    """With `done`: a limit of the environment cut the conversation, which would have gone on. The trajectory is truncated, not completed,
    and its last token bootstraps from the value where the algorithm does so (algo.bootstrap_truncated)."""
    reward: float | None = None
    """For this turn, if the environment gives any: information, for the records and for a reward, which reads it as
    `turn.reward`. It trains nothing by itself; docs/rewards.md turns it into token rewards."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of events in this step."""
    stop: str | None = None
    """Short reason for the end, with `done`: it is `Trajectory.stop`, and `outcome/stopped/<reason>` counts it."""
    notes: tuple[TurnNote, ...] = ()
    """Numbers and structured data for the records, the metrics and the reward."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.messages, self.text, self.history))) > 1:
            raise ValueError("an environment's step answers with messages, raw text or a rewritten history, with one of them alone")
        if not (self.messages or self.text or self.history or self.done):
            raise ValueError("an environment's step that is not done must answer something")
        if self.truncated and not self.done:
            raise ValueError("an environment's step is truncated, and is not done")
        if self.stop is not None and not self.done:
            raise ValueError(f"an environment's step gives the reason {self.stop!r} for an end, and is not done")


@runtime_checkable
class Env(Protocol):
    """The world of one conversation. A new one is made for each trajectory, in the event loop; work
    that waits or can fail belongs in `start`, or in a resource that trajectories share (`per_group`,
    `per_run`).

    `start`, `step` and `close` may raise: a `TimeoutError` makes the trajectory a timeout, anything else an environment
    error. They are cancelled when the trajectory's time is over; `close` is called in every case, once.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        """OpenAI schemas of the tools that the prompt lists. Read after `start`."""
        ...

    async def start(self, task: Task) -> Task:
        """Begin. The task it returns is the one that is played and scored; its id must stay the same."""
        ...

    async def step(self, reply: Parsed) -> Step:
        """Answer a turn of the model."""
        ...

    async def close(self) -> None:
        """Let go of what `start` took, whether or not it came to an end."""
        ...


@runtime_checkable
class Resumable(Env, Protocol):
    """An environment that can continue a conversation that another one of its kind began, perhaps in
    another process. With any other environment, a resumed run restarts its unfinished conversations."""

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        """In place of `start`: be as before the answer to the last of `turns`, or, where an abort cut that one, to the one before it.

        Args:
            task: as `start` returned it.
            turns: the conversation so far, one at least.
        """
        ...


@runtime_checkable
class Appraising(Env, Protocol):
    """An environment that gives a trajectory a reward at its end, also where the run's limits cut it before the environment saw the end."""

    async def appraise(self) -> float | None:
        """Reward of the last turn of a trajectory that the run's limits ended, in place of the one of its `Step`. None: it has none."""
        ...


@dataclass(frozen=True, slots=True)
class EnvFactory:
    """A maker of environments, one for each trajectory."""

    make: Callable[..., Env]
    """Called with the open resources by name, or without any for an environment that is never started, only asked for its tools."""
    needs: Mapping[str, Resource] = field(default_factory=dict[str, Resource])
    resumes: bool = True
    """False: conversations start again instead, although the environments have `resume`."""

    def __call__(self, **opened: Any) -> Env:
        return self.make(**opened)

    @property
    def resumable(self) -> bool:
        return self.resumes and isinstance(self.make(), Resumable)


class SingleTurn:
    """The environment of a plain question: the first reply ends it."""

    tools: Sequence[Mapping[str, JSON]] = ()

    async def start(self, task: Task) -> Task:
        return task

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass
