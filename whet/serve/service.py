"""The state that all routes share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from whet.data.parsers import ToolSchemas
from whet.data.template import Renderer
from whet.engine.base import Engine
from whet.serve.bodies import BodyMemory
from whet.serve.bounds import CHARACTERS_EACH, num_characters, texts_in
from whet.serve.broadcast import Broadcasts, FileTensors
from whet.serve.calls import Calls, Generate
from whet.serve.control import Control, LoadWeights
from whet.serve.errors import ApiError
from whet.serve.gate import Gate
from whet.serve.settings import ServeConfig
from whet.serve.text import DecodeText
from whet.types import JSON, Grammar, Message, Task

PIECE = 4
"""Characters for each token that the engine can hold, which are counted at a time."""
T = TypeVar("T")


class Prompts(Protocol):
    """Makes the tokens of prompts: called on the event loop, what is returned makes them on a thread."""

    def of_messages(
        self, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None, drop_thinking: bool
    ) -> Callable[[], tuple[int, ...]]:
        """Tokens of a conversation, up to where the model begins; the options are those of `Service.prompt`."""
        ...

    def of_text(self, text: str) -> Callable[[], tuple[int, ...]]:
        """Tokens of a completion's prompt."""
        ...


@dataclass(frozen=True, slots=True)
class PlainPrompts:
    """Prompts as the chat template and the tokenizer make them."""

    renderer: Renderer

    def of_messages(
        self, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None, drop_thinking: bool
    ) -> Callable[[], tuple[int, ...]]:
        return lambda: whole_prompt(self.renderer, messages, tools, thinking=thinking, drop_thinking=drop_thinking)

    def of_text(self, text: str) -> Callable[[], tuple[int, ...]]:
        return lambda: self.renderer.encode(text)


def whole_prompt(
    renderer: Renderer, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None, drop_thinking: bool
) -> tuple[int, ...]:
    """A conversation's tokens, all of them rendered; the options are those of `Service.prompt`."""
    renderer = renderer if thinking is None else renderer.with_thinking(thinking)
    shown = renderer.without_lost_thinking(messages, tools) if drop_thinking else messages
    return renderer.prompt(Task("serve", shown), tools)


@dataclass(slots=True, eq=False)
class Service:
    """An engine with what turns requests into token ids and back."""

    engine: Engine
    renderer: Renderer
    config: ServeConfig
    texts: Executor
    """Thread that tokenizes texts: a long text delays other texts and not the event loop."""
    load: LoadWeights
    try_grammar: Callable[[Grammar], None]
    """Raises ValueError if the engine's grammars could not be this."""
    prompts: Prompts | None = None
    """None: the renderer's."""
    generate: Generate | None = None
    """Samples requests; None: the engine does."""
    any_model: bool = False
    """Requests may name any model."""
    files: FileTensors | None = None
    """The model's weights as a trainer broadcasts them; None: none are taken."""
    digests: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    """Tells a digest of each tensor in the engine's memory; None: it cannot tell."""
    began: int = field(default_factory=lambda: int(time.time()))
    grammars: Executor = field(init=False)
    """Thread that reads grammars: a large one delays other grammars only. It is made for the first
    grammar."""
    bodies: BodyMemory = field(init=False)
    gate: Gate = field(init=False)
    calls: Calls = field(init=False)
    control: Control = field(init=False)
    broadcasts: Broadcasts = field(init=False)
    health: asyncio.Task[None] | None = field(init=False, default=None)
    """The newest look at the engine's health, which all who ask meanwhile wait for."""

    def __post_init__(self) -> None:
        limits = self.config.limits
        self.grammars = ThreadPoolExecutor(1, "grammars")
        self.bodies = BodyMemory(limits.max_body_bytes)
        self.gate = Gate(limits.max_running, limits.max_waiting)
        self.calls = Calls(self.engine, self.gate, limits.timeout_s, self.generate)
        self.control = Control(self.engine, self.calls, self.load, self.config.weight_version)
        self.broadcasts = Broadcasts(self.files, self.config.engine.embedded.tensor_parallel)

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.config.name or self.config.model.path

    @property
    def most(self) -> int:
        """Most tokens of a prompt and its reply together."""
        return self.engine.capabilities.max_tokens

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model. None is accepted.

        Raises:
            ApiError: 404 for another model than the one that is served.
        """
        if name is not None and name != self.name and not self.any_model:
            message = f"the model {name[:200]!r} does not exist here; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_samples(self, num: int) -> None:
        """Refuse a request for too many samples.

        Raises:
            ApiError: 400 for more samples than one request may have.
        """
        most = self.config.limits.max_samples
        if num > most:
            raise ApiError(400, f"{num} samples in one request are over the limit of {most} (limits.max_samples)", param="n")

    def room(self, tokens: Sequence[int], param: str) -> int:
        """Number of tokens that can follow a prompt.

        Raises:
            ApiError: 400 if there is no room.
        """
        most = self.most
        if len(tokens) >= most:
            message = f"the prompt has {len(tokens)} tokens, which leaves no room within the engine's {most}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return most - len(tokens)

    async def encode(self, text: str, param: str) -> tuple[int, ...]:
        """A text's tokens, nothing added. Raises ApiError if there are none."""
        self.check_characters(text, param)
        encode = (self.prompts or PlainPrompts(self.renderer)).of_text(text)

        def encoded(gone: threading.Event) -> tuple[int, ...]:
            self._check_length(text, param, gone)
            return encode()

        tokens = await self._on_texts(encoded)
        if not tokens:
            raise ApiError(400, f"{param} is empty", param=param)
        return tokens

    async def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a client's tokens, special ones included. Raises ApiError for ids that cannot be any."""
        if min(tokens) < 0 or max(tokens) >= 1 << 31:
            raise ApiError(400, f"a prompt has token ids from {min(tokens)} to {max(tokens)}, which no tokenizer has", param="prompt")
        return await self._on_texts(lambda gone: self.renderer.decode(tokens))

    def check_characters(self, value: JSON, param: str) -> None:
        """Refuse texts that have more tokens than the engine can hold, judged by their characters
        alone.

        Raises:
            ApiError: 400 with the limit.
        """
        most = self.most * CHARACTERS_EACH
        if (num := num_characters(value, keys=True)) > most:
            message = f"{param} has {num} characters, over the limit of {most} ({CHARACTERS_EACH} for each of the engine's tokens)"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _check_length(self, text: str, param: str, gone: threading.Event) -> None:
        """Count the tokens of a text that may be too long in pieces, as long as somebody waits for it.

        Raises:
            ApiError: 400 if it is far too long.
        """
        most = self.most
        piece, found = max(most, 1024) * PIECE, 0
        for start in range(0, len(text) if len(text) > piece else 0, piece):
            found += len(self.renderer.encode(text[start : start + piece]))
            if found > 2 * most or gone.is_set():
                message = f"{param} has over {found} tokens, which leaves no room within the engine's {most}"
                raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def prompt(
        self, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None = None, drop_thinking: bool = False
    ) -> tuple[int, ...]:
        """A conversation's tokens, up to where the model begins.

        Args:
            messages: the conversation.
            tools: OpenAI schemas.
            thinking: have the model think or not, where the chat template has a variable for that; None: as the server was set.
            drop_thinking: leave out what the template does not write of earlier thinking, instead of refusing it.

        Raises:
            ApiError: 400 if the chat template cannot render it, or the conversation is far too long.
        """
        dicts = [message.to_dict() for message in messages]
        self.check_characters(dicts, "messages")
        self.check_characters(tools, "tools")
        contents = [{key: value for key, value in message.items() if key not in ("role", "tool_call_id")} for message in dicts]
        long = "\n".join(texts_in([tools, contents], keys=False))

        prompts = self.prompts or PlainPrompts(self.renderer)
        render = prompts.of_messages(messages, tools, thinking=thinking, drop_thinking=drop_thinking)

        def rendered(gone: threading.Event) -> tuple[int, ...]:
            if len(long) > max(self.most, 1024) * PIECE:
                self._check_length(long, "messages", gone)
            return render()

        try:
            return await self._on_texts(rendered)
        except ApiError:
            raise
        except Exception as error:  # the chat template is the model's code, and may raise anything over a client's messages
            text = str(error) if isinstance(error, ValueError) else f"the chat template failed: {type(error).__name__}: {error}"
            raise ApiError(400, text, param="messages") from None

    async def check_grammar(self, grammar: Grammar, param: str, called: str | None = None) -> None:
        """Check that a grammar can be used.

        Raises:
            ApiError: 400 if not, with the field or the name in `called`.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self.grammars, self.try_grammar, grammar)
        except ValueError as error:
            raise ApiError(400, f"{called or param}: {str(error).removeprefix(f'{param}: ')}", param=param) from None

    def decoder(self, *, keep_special: bool) -> DecodeText:
        """Token ids to text."""
        if keep_special:
            return self.renderer.decode
        return self._decode_plain

    def _decode_plain(self, tokens: Sequence[int]) -> str:
        text = self.renderer.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)

    async def _on_texts(self, work: Callable[[threading.Event], T]) -> T:
        """Run slow work off the event loop. The event is set once no caller waits for it."""
        gone = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.texts, work, gone)
        except asyncio.CancelledError:
            gone.set()
            raise
