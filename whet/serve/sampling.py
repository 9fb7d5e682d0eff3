"""Sampling options of a request, and the engine's parameters made of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from whet.serve.bodies import Body
from whet.serve.bounds import Biases, Count, GrammarText, Stops, TokenIds
from whet.serve.errors import ApiError
from whet.types import SamplingParams

NO_LIMIT = 1 << 30
"""A top_k from here on means none, as -1 does."""
UNCHANGED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Options that the engine knows under the same name."""
GREEDY = 1e-6
"""Temperatures below it mean the most likely token."""


class SamplingBody(Body):
    """Sampling options that all routes have, with the extensions that vLLM and SGLang know. None: the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    json_schema: GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def params(self, stop_token_ids: Sequence[int], names: Mapping[str, str], **others: Any) -> SamplingParams:
        """The engine's parameters, with seed 0.

        Args:
            stop_token_ids: the tokenizer's.
            names: what the request calls a parameter, where that is another name.
            others: further parameters, by the names of `SamplingParams`; None: the engine's default.

        Raises:
            ApiError: 400, naming the field, for a value that is out of range.
        """
        values = {name: getattr(self, name) for name in UNCHANGED} | others
        given = {name: value for name, value in values.items() if value is not None}
        if 0 <= given.get("temperature", 1.0) < GREEDY:
            given["temperature"] = 0.0
        if given.get("top_k") == -1 or given.get("top_k", 0) >= NO_LIMIT:
            given["top_k"] = 0
        ends = (*(() if self.ignore_eos else stop_token_ids), *(self.stop_token_ids or ()))
        given |= {"logit_bias": biases(self.logit_bias), "stop": stop_texts(self.stop), "stop_token_ids": ends}
        try:
            return SamplingParams(**given)
        except ValueError as error:
            name = next((name for name in given if str(error).startswith(f"{name} ")), None)
            called = None if name is None else names.get(name, name)
            text = str(error) if name is None or called is None else str(error).replace(name, called, 1)
            raise ApiError(400, text, param=called) from None


def stop_texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One text, several or none."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def biases(value: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's logit_bias: token ids as text.

    Raises:
        ApiError: 400 if a key is no token id.
    """
    for text in value or ():
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ApiError(400, f"logit_bias has the key {text[:40]!r}, expected token ids", param="logit_bias")
    return tuple((int(text), bias) for text, bias in (value or {}).items())


def new_seed() -> int:
    """For a request that names none."""
    return secrets.randbits(63)
