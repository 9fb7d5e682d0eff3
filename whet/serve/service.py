"""The state that all routes share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from whet.data.parsers import ToolSchemas
from whet.data.template import Renderer
from whet.engine.base import Engine
from whet.serve.bodies import BodyMemory
from whet.serve.bounds import CHARACTERS_EACH, num_characters, texts_in
from whet.serve.calls import Calls
from whet.serve.control import Control, LoadWeights
from whet.serve.errors import ApiError
from whet.serve.gate import Gate
from whet.serve.settings import ServeConfig
from whet.serve.text import DecodeText
from whet.types import JSON, Grammar, Message, Task

PIECE = 4
"""Characters for each token that the engine can hold, which are counted at a time."""
T = TypeVar("T")


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
    began: int = field(default_factory=lambda: int(time.time()))
    grammars: Executor = field(init=False)
    """Thread that reads grammars: a large one delays other grammars only. It is made for the first
    grammar."""
    bodies: BodyMemory = field(init=False)
    gate: Gate = field(init=False)
    calls: Calls = field(init=False)
    control: Control = field(init=False)
    health: asyncio.Task[None] | None = field(init=False, default=None)
    """The newest look at the engine's health, which all who ask meanwhile wait for."""

    def __post_init__(self) -> None:
        limits = self.config.limits
        self.grammars = ThreadPoolExecutor(1, "grammars")
        self.bodies = BodyMemory(limits.max_body_bytes)
        self.gate = Gate(limits.max_running, limits.max_waiting)
        self.calls = Calls(self.engine, self.gate, limits.timeout_s)
        self.control = Control(self.engine, self.calls, self.load, self.config.weight_version)

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.config.name or self.config.model.path

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model. None is accepted.

        Raises:
            ApiError: 404 for another model than the one that is served.
        """
        if name is not None and name != self.name:
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
        most = self.engine.capabilities.max_tokens
        if len(tokens) >= most:
            message = f"the prompt has {len(tokens)} tokens, which leaves no room within the engine's {most}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return most - len(tokens)

    async def encode(self, text: str, param: str) -> tuple[int, ...]:
        """A text's tokens, nothing added. Raises ApiError if there are none."""
        self.check_characters(text, param)
        tokens = await self._on_texts(lambda gone: self._encode(text, param, gone))
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
        most = self.engine.capabilities.max_tokens * CHARACTERS_EACH
        if (num := num_characters(value, keys=True)) > most:
            message = f"{param} has {num} characters, over the limit of {most} ({CHARACTERS_EACH} for each of the engine's tokens)"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _encode(self, text: str, param: str, gone: threading.Event) -> tuple[int, ...]:
        """A text's tokens. One that may be too long is counted in pieces first, as long as somebody waits for it.

        Raises:
            ApiError: 400 if it is far too long.
        """
        most = self.engine.capabilities.max_tokens
        piece, found = max(most, 1024) * PIECE, 0
        for start in range(0, len(text) if len(text) > piece else 0, piece):
            found += len(self.renderer.encode(text[start : start + piece]))
            if found > 2 * most or gone.is_set():
                message = f"{param} has over {found} tokens, which leaves no room within the engine's {most}"
                raise ApiError(400, message, param=param, code="context_length_exceeded")
        return self.renderer.encode(text)

    async def prompt(self, messages: tuple[Message, ...], tools: ToolSchemas) -> tuple[int, ...]:
        """A conversation's tokens, up to where the model begins.

        Raises:
            ApiError: 400 if the chat template cannot render it, or the conversation is far too long.
        """
        dicts = [message.to_dict() for message in messages]
        self.check_characters(dicts, "messages")
        self.check_characters(tools, "tools")
        contents = [{key: value for key, value in message.items() if key not in ("role", "tool_call_id")} for message in dicts]
        long = "\n".join(texts_in([tools, contents], keys=False))

        def rendered(gone: threading.Event) -> tuple[int, ...]:
            if len(long) > max(self.engine.capabilities.max_tokens, 1024) * PIECE:
                self._encode(long, "messages", gone)
            return self.renderer.prompt(Task("serve", messages), tools)

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
