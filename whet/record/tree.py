"""The model calls of one program as a tree: each call goes on from a recorded reply, or begins another conversation under a named rule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from whet.data.parsers import ToolSchemas
from whet.env.sampling import Reply
from whet.types import Finish, Message, Origin, Turn
from whet.types.columns import Ints, Ragged, Runs
from whet.types.routes import Routes


class Rule(StrEnum):
    """Relation of a call to those before it."""

    FIRST = "first"
    """The program's first conversation."""
    EXTENDS = "extends"
    """It goes on from a recorded reply: the sample goes on, token by token."""
    BRANCH = "branch"
    """It goes on from where another call went on before, or asks the same once more: a new sample begins with the recorded tokens."""
    REWRITTEN = "rewritten"
    """It begins as an earlier conversation does, with another history (compaction, edits, a template that cannot go on): a new sample."""
    OTHER = "other"
    """Another conversation, such as a sub-agent's: a new sample."""


@dataclass(slots=True, eq=False)
class Spec:
    """A call whose prompt is being made."""

    model: str = ""
    """Name that the program asked for."""
    trained: bool = True
    """False: what is sampled is recorded, and does not train."""
    rule: Rule = Rule.FIRST
    parent: RecordedCall | None = None
    """The call whose reply it goes on from."""
    context: Ints = field(default_factory=Ints)
    """Tokens after the parent's reply; of a call without a parent: its whole prompt."""
    messages: tuple[Message, ...] = ()
    at: str = ""
    """Digest of tools and messages."""
    tools: str = ""
    """Digest of the tools."""
    schemas: ToolSchemas = ()
    text: str | None = None
    """Prompt of a completion, in place of messages."""

    @property
    def prompt(self) -> Ints:
        """The whole prompt."""
        return self.context if self.parent is None else Ints.join((self.parent.whole, self.context))


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One sampled reply of a program's call. A call for several samples is several of these."""

    number: int
    spec: Spec
    continues: bool
    """True if the reply goes on in the sample of the parent's reply."""
    reply: Reply = field(default_factory=Reply)
    message: Message | None = None
    """The reply as the program sees it; None: it is being sampled, or was cut."""

    @property
    def whole(self) -> Ints:
        """Prompt and reply."""
        return Ints.join((self.spec.prompt, self.reply.tokens.column()))

    def turn(self, *, first: bool, nucleus: bool, routes: bool, text: str) -> Turn:
        """Its part of the trajectory.

        Args:
            first: it is the trajectory's first.
            nucleus: the run records the tokens that each was drawn from.
            routes: the run records the experts that tokens went to.
            text: the reply's, for one that was cut.
        """
        context = self.spec.context if self.continues else self.spec.prompt
        return Turn(
            context=context,
            context_origin=Runs.repeat(Origin.ENVIRONMENT if self.continues else Origin.PROMPT, len(context)),
            tokens=self.reply.tokens.column(),
            logprobs=self.reply.logprobs.column(),
            versions=Runs[int].from_runs(self.reply.versions),
            nucleus=Ragged.join(self.reply.nucleus) if nucleus else None,
            routes=(self.reply.all_routes if self.reply.tokens else Routes.unknown(len(context))) if routes else None,
            message=self.message or Message("assistant", text),
            finish=self.reply.finish or Finish.ABORT,
            restart=not (self.continues or first),
        )


class CallTree:
    """Calls in the order in which they began, found again by the conversation that they ended with."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self._ends: dict[str, RecordedCall] = {}
        """The newest call by the digest of its conversation, its own reply included."""
        self._begins: set[str] = set()
        """Digests of the beginnings of conversations: tools, and messages up to the first of a user."""
        self._extended: set[int] = set()
        """Numbers of the calls that another one extends."""

    def place(self, spec: Spec, messages: tuple[Message, ...], tools: ToolSchemas) -> tuple[Message, ...]:
        """Find the recorded reply that a conversation goes on from, and note it in `spec`.

        Returns:
            The messages behind that reply; all of them where it goes on from none.
        """
        spec.messages, spec.schemas = messages, tools
        spec.tools = digest_of(json.dumps(list(map(dict, tools)), sort_keys=True, default=str))
        chain = chain_of(spec.tools, messages)
        spec.at = chain[-1]
        start = next((i for i, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
        spec.rule = Rule.REWRITTEN if chain[start + 1] in self._begins else Rule.OTHER if self.calls else Rule.FIRST
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].role == "assistant":
                return messages
            if messages[i - 1].role == "assistant" and (found := self._ends.get(chain[i])) is not None:
                spec.parent = found
                return messages[i:]
        return messages

    def place_text(self, spec: Spec, text: str) -> str:
        """Find the recorded completion that a text goes on from. Returns the text behind it; all of it where it goes on from none."""
        spec.text = text
        ended = [call for call in self.calls if call.spec.text is not None and call.message is not None]
        found = [call for call in ended if text.startswith((call.spec.text or "") + call.message.content)]  # pyright: ignore[reportOptionalMemberAccess]
        spec.rule = Rule.OTHER if self.calls else Rule.FIRST
        if not found:
            return text
        spec.parent = max(found, key=lambda call: len(call.whole))
        assert spec.parent.message is not None
        return text[len((spec.parent.spec.text or "") + spec.parent.message.content) :]

    def begin(self, spec: Spec) -> RecordedCall:
        """A reply that is sampled now."""
        spec = replace(spec)  # a request for several samples has one
        parent, continues = spec.parent, False
        if parent is not None:
            continues = parent.number not in self._extended and parent.spec.trained and spec.trained
            spec.rule = Rule.BRANCH if parent.number in self._extended else Rule.EXTENDS
            if spec.trained:
                self._extended.add(parent.number)
        elif any(call.spec.at == spec.at for call in self.calls if spec.text is None):
            spec.rule = Rule.BRANCH
        elif spec.messages:
            start = next((i for i, message in enumerate(spec.messages) if message.role == "user"), len(spec.messages) - 1)
            self._begins.add(chain_of(spec.tools, spec.messages[: start + 1])[-1])
        call = RecordedCall(len(self.calls), spec, continues, Reply(len(spec.context if continues else spec.prompt)))
        self.calls.append(call)
        return call

    def drop(self, call: RecordedCall) -> None:
        """Forget that a call without a token went on from its parent: the program asks again."""
        if call.continues and call.spec.parent is not None:
            self._extended.discard(call.spec.parent.number)
            call.continues = False

    def end(self, call: RecordedCall, *forms: Message) -> None:
        """Its reply is whole. The program sees it in one of these forms, by its route; the first is the trajectory's."""
        call.message = forms[0]
        for message in forms if call.spec.text is None else ():
            self._ends[digest_of(call.spec.at + _key(message))] = call

    def trained(self) -> Iterator[RecordedCall]:
        """Every call that trains and sampled something, each once, sample by sample."""
        by_parent: dict[int, list[RecordedCall]] = {}
        for call in self.calls:
            if call.continues and call.spec.parent is not None:
                by_parent.setdefault(call.spec.parent.number, []).append(call)
        for call in self.calls:
            following: RecordedCall | None = None if call.continues else call
            while following is not None:
                if following.spec.trained and (following.reply.tokens or following.reply.finish is not None):
                    yield following
                following = next(iter(by_parent.get(following.number, ())), None)


def chain_of(tools: str, messages: Sequence[Message]) -> list[str]:
    """Digests of a conversation: of its tools, then with each further message."""
    chain = [tools]
    for message in messages:
        chain.append(digest_of(chain[-1] + _key(message)))
    return chain


def digest_of(text: str) -> str:
    """A digest that tells texts apart."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _key(message: Message) -> str:
    """Text by which a message is known again, in whichever form a client sends it back: arguments as JSON, an assistant's words without the
    space around them, neither thinking nor ids of calls."""
    calls: Sequence[object] = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    content = message.content.strip() if message.role == "assistant" else message.content
    return json.dumps([message.role, content, calls, message.name or ""], sort_keys=True, default=str)
