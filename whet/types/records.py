"""From a task to what is trained: messages, turns, trajectories, groups, samples. Standard library only.

What is per token is a column (`types.columns`); `core.batch` turns samples into tensors. Constructors take any sequence of
numbers and make columns of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import chain
from math import fsum, isfinite
from numbers import Real
from typing import Any

from whet.types.columns import Columns, Doubles, Floats, Ints, Ragged, Runs, to_columns
from whet.types.routes import Routes

JSON = Any
"""A value that `json.dumps` accepts."""

UNSAMPLED = -1
"""The policy version of a token that no policy sampled (prompt and environment tokens)."""


class Origin(IntEnum):
    """The writer of a token."""

    PROMPT = 0
    MODEL = 1
    ENVIRONMENT = 2


class Finish(StrEnum):
    """Why a model call ended."""

    STOP = "stop"
    """A stop token, or the end of a stop text, was sampled; it is the last of the turn's tokens."""
    LENGTH = "length"
    """The token limit was reached first."""
    ABORT = "abort"
    """The engine was asked to stop; the tokens sampled until then are kept."""


class Outcome(StrEnum):
    """The ending of a trajectory. Only completed and truncated trajectories can train."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """A token or turn limit cut it."""
    ABORTED = "aborted"
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """The engine would not run the request (for example: it can never fit into the cache)."""

    @property
    def valid(self) -> bool:
        """True if the trajectory's reward has a meaning. Trajectories without one are left out of their
        group's statistics."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for. `arguments` is the JSON object it wrote."""

    name: str
    arguments: Mapping[str, JSON]
    id: str = ""
    text: str | None = field(default=None, compare=False)
    """The JSON text that `arguments` came as, where they came as text: its spaces, escapes and order of keys are a data row's own."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, in OpenAI's terms."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """For a tool's reply: which tool."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """An assistant's thinking, where it is kept apart from the words; where it goes is up to the chat template."""

    def to_dict(self, *, as_written: bool = False) -> dict[str, JSON]:
        """The form that chat templates read; `as_written`: the arguments of calls that came as JSON text are that text."""
        out: dict[str, JSON] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.name,
                        "arguments": call.text if as_written and call.text is not None else dict(call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.name is not None:
            out["name"] = self.name
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            out["reasoning_content"] = self.reasoning_content
        return out


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: a prompt, what is known about its answer, and where it came from."""

    id: str
    """Unique within a run: source name, row and epoch."""
    prompt: tuple[Message, ...] | str
    """Messages go through the chat template; a string is used unchanged."""
    label: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    tools: tuple[Mapping[str, JSON], ...] = ()
    """OpenAI tool schemas that this row brings along (an environment may add its own)."""
    origin: str = ""
    """`file:line`, for error messages."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data: the exception's type and text, the place, and the traceback."""

    kind: str
    message: str
    where: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Rewards:
    """A score and the named parts that it is the weighted sum of."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    """Why, in words a person can read (optional)."""
    token_rewards: tuple[tuple[float, ...], ...] | None = None
    """Rewards of single tokens, on top of the total: a row for each turn, in it a number for each token that was sampled (optional)."""
    by_role: Mapping[str, float] = field(default_factory=dict[str, float])
    """Score of each role of a game: the samples of its turns train on it in place of the total (optional)."""

    def of(self, role: str) -> float:
        """Score that the samples of a role train on."""
        return self.by_role.get(role, self.total)


@dataclass(frozen=True, slots=True)
class TurnNote:
    """Numbers and structured data that a tool or an environment reports with its answer to a turn. The model never sees them."""

    tool: str = ""
    """Name of the tool; "": the environment itself."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Finite numbers by name. The mean of each over a rollout is the metric `env/<name>`."""
    attachments: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    """Data for the trajectory's record and its reward."""

    def __post_init__(self) -> None:
        metrics: Mapping[Any, Any] = self.metrics  # from a user's code
        for name, value in metrics.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
                raise TypeError(f"metrics have finite numbers by name, not {name!r}: {value!r}")
        try:
            json.dumps(dict(self.attachments), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"attachments must be JSON: {error}") from error


_TURN_COLUMNS: Columns = {
    "context": Ints,
    "context_origin": Runs,
    "tokens": Ints,
    "logprobs": Floats,
    "versions": Runs,
    "token_rewards": Doubles,
    "nucleus": Ragged,
}
_SAMPLE_COLUMNS: Columns = {
    "tokens": Ints,
    "origin": Runs,
    "loss_mask": Runs,
    "logprobs": Floats,
    "versions": Runs,
    "token_rewards": Doubles,
    "nucleus": Ragged,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """The part of a trajectory that one model call added."""

    context: Ints
    """Token ids added before sampling: the prompt in the first turn, the environment's replies later. [C]"""
    context_origin: Runs[Origin]
    """Writer of each of these tokens. [C]"""
    tokens: Ints
    """The ids the engine sampled, in order. [T]"""
    logprobs: Floats
    """Natural-log probability of each under the distribution it was sampled from. [T]"""
    versions: Runs[int]
    """The policy version that sampled each. [T]"""
    message: Message
    """The message that the tokens decode to, with tool calls parsed."""
    finish: Finish
    reward: float | None = None
    """The environment's reward for this turn (`Step.reward`). It is recorded, and a reward may read it;
    credit assignment does not use it."""
    token_rewards: Doubles | None = None
    """Optional reward for each sampled token. [T]"""
    nucleus: Ragged | None = None
    """The token ids that each sampled token was drawn from, as int32 one after another; none: the whole vocabulary. None where nothing
    was left out, or nobody asked. [T]"""
    routes: Routes | None = None
    """Experts that the predecessor of each token of the context, then of each sampled one, went to. None: nobody asked. [C + T]"""
    restart: bool = False
    """The history was rewritten: this turn's context is the whole new prompt, and a new sample begins
    here."""
    notes: tuple[TurnNote, ...] = ()
    """Reports of tools or the environment with their answer to this turn (`Step.notes`)."""
    role: str = ""
    """Role of the agent whose turn it is, in a game of several; "": the trajectory has no roles."""

    def __post_init__(self) -> None:
        to_columns(self, _TURN_COLUMNS)
        if len(self.context) != len(self.context_origin):
            raise ValueError(f"a turn's context has {len(self.context)} tokens but {len(self.context_origin)} origins")
        lengths = {"tokens": len(self.tokens), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        optional = {"token_rewards": self.token_rewards, "nucleus": self.nucleus}
        lengths |= {name: len(items) for name, items in optional.items() if items is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a turn's per-token fields differ in length: {lengths}")
        if self.routes is not None and len(self.routes) != len(self.context) + len(self.tokens):
            raise ValueError(f"a turn of {len(self.context) + len(self.tokens)} tokens has the experts of {len(self.routes)}")


UNTRAINED_TOKENS = "tokens_untrained"
"""In a trajectory's counts: tokens that were sampled for agents and calls that do not train."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One run of a policy through a task."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    outcome: Outcome
    rewards: Rewards | None = None
    error: Failure | None = None
    temperature: float = 1.0
    """The sampling temperature of every model turn in it."""
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent waiting, by cause: engine, env, reward; parts of engine's, where the engine reports them: queue, prefill, decode."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts of events in the trajectory: tool_calls, tool_calls_malformed, tool_errors ..."""
    stop: str | None = None
    """Reason for which a tool or the environment ended it; None: no reason was given."""

    @property
    def response(self) -> str:
        """The text of the last model turn ("" if there is none)."""
        return self.turns[-1].message.content if self.turns else ""

    @property
    def num_tokens_sampled(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def num_tokens_untrained(self) -> int:
        """Tokens that were sampled for agents and calls that do not train; no turn has them."""
        return self.counts.get(UNTRAINED_TOKENS, 0)

    @property
    def num_tokens_played(self) -> int:
        """All tokens that were sampled for it."""
        return self.num_tokens_sampled + self.num_tokens_untrained

    @property
    def oldest(self) -> int | None:
        """Version that sampled the oldest of its tokens; None: it has none."""
        return min((version for turn in self.turns for version in turn.versions.values), default=None)

    @property
    def token_reward(self) -> float:
        """All rewards of single tokens, added up."""
        return fsum(chain.from_iterable(turn.token_rewards or () for turn in self.turns))


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one task: several trajectories from the same prompt."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """The greedy trajectory of the task that the siblings are compared with, where the algorithm asks for one. It is never trained on."""
    dropped: str | None = None
    """Why it is not trained on: a filter's reason, left_over, too_old, retried. Then it need not be whole."""

    @property
    def played(self) -> tuple[Trajectory, ...]:
        """The siblings, then the greedy one if there is one."""
        return self.trajectories if self.baseline is None else (*self.trajectories, self.baseline)


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence, made from an unbroken prefix chain of a trajectory's turns.

    Per-token fields have the length of `tokens`; entry t describes `tokens[t]` given its predecessors.
    """

    tokens: Ints
    origin: Runs[Origin]
    loss_mask: Runs[bool]
    """Which tokens train. Independent of `origin`: supervised rows and trained observations differ."""
    logprobs: Floats
    """As sampled; 0.0 where no policy sampled the token."""
    versions: Runs[int]
    """`UNSAMPLED` where no policy sampled the token."""
    group: str
    """The task's id: siblings share it. Samples of a role are compared with those of the same role alone."""
    trajectory: str
    order: int = 0
    """Place among the samples of the same trajectory."""
    reward: float = 0.0
    valid: bool = True
    """False: its trajectory failed, or the greedy one that it is to be compared with did; it neither trains nor counts in its group's
    statistics."""
    temperature: float = 1.0
    token_rewards: Doubles | None = None
    """Rewards of single tokens, in addition to the trajectory's reward; None: no token has one."""
    nucleus: Ragged | None = None
    """As in `Turn`; empty where no policy sampled the token."""
    routes: Routes | None = None
    """Experts that each token's predecessor went to, as the engine chose them. None: nobody asked."""
    baseline: float | None = None
    """The score of the greedy trajectory of the same task; None: no such trajectory was sampled, or it
    failed."""
    truncated: bool = False
    """A token or turn limit cut its trajectory, which would have gone on."""
    role: str = ""
    """Role of the agent that sampled it (`Turn.role`). The samples of a trajectory's role are scored and counted as a trajectory is."""

    def __post_init__(self) -> None:
        to_columns(self, _SAMPLE_COLUMNS)
        fields = ("tokens", "origin", "loss_mask", "logprobs", "versions")
        lengths = {name: len(getattr(self, name)) for name in fields}
        optional = {"token_rewards": self.token_rewards, "nucleus": self.nucleus, "routes": self.routes}
        lengths |= {name: len(items) for name, items in optional.items() if items is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a sample's per-token fields differ in length: {lengths}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the first token of a sample has no predecessor, so it cannot train")


def unsampled(tokens: Ints, loss_mask: Runs[bool], group: str = "", trajectory: str = "") -> Sample:
    """A sample none of whose tokens a policy sampled: all have the origin `PROMPT`."""
    count = len(tokens)
    origin, versions = Runs[Origin].repeat(Origin.PROMPT, count), Runs[int].repeat(UNSAMPLED, count)
    return Sample(tokens, origin, loss_mask, Floats.zeros(count), versions, group, trajectory)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replies to one prompt, the first preferred to the second. They are learned from together or not at all."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0
    """Margin by which the chosen reply should win, in the unit of the loss's logits; 0: no margin."""


@dataclass(slots=True)
class Progress:
    """The three counters of a run, never one: they part as soon as a rollout feeds several optimizer steps."""

    rollout_id: int = 0
    """Rollouts taken so far."""
    optimizer_step: int = 0
    version: int = 0
    """Weights published so far."""
