"""The records that cross whet's boundaries. Standard library only: every layer may import this one.

Token ids, log-probs and versions are tuples here (ragged, per turn); `core.batch` turns samples into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

JSON = Any
"""A value that `json.dumps` accepts."""

UNSAMPLED = -1
"""The policy version of a token that no policy sampled (prompt and environment tokens)."""


class Origin(IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    MODEL = 1
    ENVIRONMENT = 2


class Finish(StrEnum):
    """Why a model call ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last of the turn's tokens."""
    LENGTH = "length"
    """The token limit was reached first."""
    ABORT = "abort"
    """The engine was told to stop; what was sampled so far is kept."""


class Outcome(StrEnum):
    """How a trajectory ended. Only completed and truncated ones can train."""

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
        """Whether its reward means anything: the others leave their group's statistics."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for. `arguments` is the JSON object it wrote."""

    name: str
    arguments: Mapping[str, JSON]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, in OpenAI's terms."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """For a tool's reply: which tool."""
    tool_call_id: str | None = None

    def to_dict(self) -> dict[str, JSON]:
        """The form that chat templates read."""
        out: dict[str, JSON] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.name is not None:
            out["name"] = self.name
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: a prompt, what is known about its answer, and where it came from."""

    id: str
    """Unique within a run: source name, row and epoch."""
    prompt: tuple[Message, ...] | str
    """Messages go through the chat template; a string is used as it stands."""
    label: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    tools: tuple[Mapping[str, JSON], ...] = ()
    """OpenAI tool schemas that this row brings along (an environment may add its own)."""
    origin: str = ""
    """`file:line`, for error messages."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, as data: the exception's type and text, the place, and the traceback."""

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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one model call added to a trajectory."""

    context: tuple[int, ...]
    """Token ids added before sampling: the prompt in the first turn, the environment's replies later. [C]"""
    context_origin: tuple[Origin, ...]
    """Who wrote each of them. [C]"""
    tokens: tuple[int, ...]
    """The ids the engine sampled, in order. [T]"""
    logprobs: tuple[float, ...]
    """Natural-log probability of each under the distribution it was sampled from. [T]"""
    versions: tuple[int, ...]
    """The policy version that sampled each. [T]"""
    message: Message
    """What the tokens say, with tool calls parsed."""
    finish: Finish
    reward: float | None = None
    token_rewards: tuple[float, ...] | None = None
    """Optional reward for each sampled token. [T]"""
    restart: bool = False
    """The history was rewritten: this turn's context is the whole prompt anew, and a new sample starts here."""

    def __post_init__(self) -> None:
        if len(self.context) != len(self.context_origin):
            raise ValueError(f"a turn's context has {len(self.context)} tokens but {len(self.context_origin)} origins")
        lengths = {"tokens": len(self.tokens), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        if self.token_rewards is not None:
            lengths["token_rewards"] = len(self.token_rewards)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a turn's per-token fields differ in length: {lengths}")


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
    """Seconds spent waiting, by cause: engine, env, reward."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """What happened in it, counted: tool_calls, tool_calls_malformed, tool_errors ..."""

    @property
    def response(self) -> str:
        """The text of the last model turn ("" if there is none)."""
        return self.turns[-1].message.content if self.turns else ""

    @property
    def num_tokens_sampled(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one task: several trajectories from the same prompt."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence, made from an unbroken prefix chain of a trajectory's turns.

    Per-token fields have the length of `tokens`; entry t describes `tokens[t]` given its predecessors.
    """

    tokens: tuple[int, ...]
    origin: tuple[Origin, ...]
    loss_mask: tuple[bool, ...]
    """Which tokens train. Independent of `origin`: supervised rows and trained observations differ."""
    logprobs: tuple[float, ...]
    """As sampled; 0.0 where no policy sampled the token."""
    versions: tuple[int, ...]
    """`UNSAMPLED` where no policy sampled the token."""
    group: str
    """The task's id: siblings share it."""
    trajectory: str
    order: int = 0
    """Place among the samples of the same trajectory."""
    reward: float = 0.0
    valid: bool = True
    """False: its trajectory failed; it neither trains nor counts in its group's statistics."""
    temperature: float = 1.0
    token_rewards: tuple[float, ...] | None = None
    """Rewards of single tokens, beside the trajectory's; None: there are none."""

    def __post_init__(self) -> None:
        fields = ("tokens", "origin", "loss_mask", "logprobs", "versions")
        lengths = {name: len(getattr(self, name)) for name in fields}
        if self.token_rewards is not None:
            lengths["token_rewards"] = len(self.token_rewards)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a sample's per-token fields differ in length: {lengths}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the first token of a sample has no predecessor, so it cannot train")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. The seed is per request: noise depends on (seed, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the most likely token; its log-prob is 0, since the distribution has one point."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 means no limit), not {self.top_k}")


@dataclass(frozen=True, slots=True)
class Request:
    """One model call: continue `tokens`."""

    id: str
    tokens: tuple[int, ...]
    """The whole context, from the first prompt token on."""
    sampling: SamplingParams
    conversation: str = ""
    """Requests of one conversation extend each other; the engine may keep its cache between them until it is released."""
    rank: tuple[int, ...] = ()
    """Where it stands among its rivals; a deterministic engine admits in this order."""
    chunk_tokens: int = 0
    """Deliver a chunk every so many tokens; 0: one chunk at the end (or at an abort)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply. The last one of a request carries its finish reason."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    """The policy version that sampled all of this chunk's tokens."""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's answer to a weight update."""

    version: int
    wire: Mapping[str, str]
    """Digest of each tensor as it arrived, by its name in Hugging Face files."""
    resident: Mapping[str, str] | None
    """Digest of each tensor as the engine now holds it in its own memory, tied names and buffers included; None where it cannot tell."""
    size_bytes: int = 0
    """Of the tensors that arrived."""
    num_stale_tokens: int = 0
    """Tokens that are still cached from older weights. Anything but 0 is a fault."""


@dataclass(slots=True)
class Progress:
    """The three counters of a run, never one: they part as soon as a rollout feeds several optimizer steps."""

    rollout_id: int = 0
    """Rollouts taken so far."""
    optimizer_step: int = 0
    version: int = 0
    """Weights published so far."""
