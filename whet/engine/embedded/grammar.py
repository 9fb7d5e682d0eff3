"""Replies that must match a grammar: which tokens may come next, through llguidance (`pip install 'whet[grammar]'`).

What may come next is a function of a reply's own tokens, so neither preemption, nor new weights, nor the batch change it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.data.template import Renderer
from whet.types import JSON, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64
"""Compiled grammars that are kept for the next request."""
MAX_LOOKED_AT = 256
"""Parts of a schema that are looked at to say which one is at fault."""
JSON_FORM = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\r\\n]{0,40}"}
"""Any layout, but no endless white space: a model that is made to write JSON against its will tends to that."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a JSON schema that hold schemas by name."""
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
ALONE = ("items", "additionalProperties")


class Matching:
    """Where a reply is in its grammar.

    Args:
        matcher: at the beginning; nobody else's.
        ends: the tokens that end a reply, which are no part of it.
        own_ends: those of the tokenizer, which the matcher knows.
        vocab_size: the model's.
    """

    def __init__(self, matcher: LLMatcher, ends: Collection[int], own_ends: Collection[int], vocab_size: int) -> None:
        self._matcher, self._ends = matcher, list(ends)
        self._own_ends, self._vocab_size = list(own_ends), vocab_size
        self.failure: str | None = None
        """Why it cannot go on: the grammar is too much for the machinery's limits."""
        self._look()

    @property
    def allowed(self) -> Tensor:
        """Which tokens may come next. [V] bool"""
        return self._allowed

    @property
    def over(self) -> bool:
        """Nothing may come next."""
        return not bool(self._allowed.any())

    def take(self, token: int) -> None:
        """Go on by a token that was allowed; a reply that ends with it goes nowhere."""
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            self.failure = _first_line(self._matcher.get_error())
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        known = min(len(bits), self._vocab_size)
        allowed[:known] = bits[:known]
        allowed[[token for token in self._own_ends if token < self._vocab_size]] = False
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        self._allowed = torch.from_numpy(allowed)


class Grammars:
    """Compiles grammars for a tokenizer. Its methods may be called from any thread.

    Args:
        renderer: with the model's tokenizer.
        vocab_size: the model's, which may be more or less than the tokenizer's.
    """

    def __init__(self, renderer: Renderer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = renderer.tokenizer, vocab_size
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def check(self, grammar: Grammar) -> None:
        """Raises:
        ValueError: the grammar cannot be used; the text says where and why.
        """
        self._compiled(grammar)

    def begin(self, grammar: Grammar, ends: Collection[int]) -> Matching:
        """The beginning of a reply, which the tokens `ends` may end.

        Raises:
            ValueError: as `check`.
        """
        compiled = self._compiled(grammar)
        assert self._made is not None, "a grammar was compiled without a tokenizer"
        with self._lock:
            mine = compiled.deep_copy()
        return Matching(mine, ends, self._made.eos_tokens, self._vocab_size)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                found = self._kept[grammar] = self._compile(grammar)
            self._kept.move_to_end(grammar)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError("grammars need llguidance: pip install 'whet[grammar]'") from error
        if self._made is None:
            self._made = from_tokenizer(self._tokenizer)
        text = written(grammar)
        if wrong := _fault(text):
            if grammar.kind == "json_schema":
                wrong = _place_of_fault(_read(grammar.text))
            raise ValueError(f"{grammar.kind}: {wrong}")
        matcher = LLMatcher(self._made, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{grammar.kind}: {_first_line(matcher.get_error())}")
        return matcher


def _first_line(text: str) -> str:
    """What follows in llguidance's errors is the state of its parser."""
    return text.partition("\n")[0]


def written(grammar: Grammar) -> str:
    """A grammar in llguidance's own form.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    match grammar.kind:
        case "json_schema":
            return _json_schema(_read(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "ebnf":
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
            except (GbnfToLarkError, ValueError, IndexError) as error:
                raise ValueError(f"ebnf: {error or 'it ends too early'}") from None


def _read(text: str) -> JSON:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: it is no valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema: it is a JSON {type(schema).__name__}, expected an object")
    return schema


def _json_schema(schema: JSON) -> str:
    from llguidance import LLMatcher

    overrides: Any = JSON_FORM
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _fault(text: str) -> str:
    """What is wrong with a grammar in llguidance's form; empty: nothing."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(text)


def _place_of_fault(schema: JSON) -> str:
    """Where a schema is at fault and why: the innermost part that is wrong by itself."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    where, part, left = "", schema, MAX_LOOKED_AT
    while True:
        for name, inner in islice(_parts_of(part), left):
            left -= 1
            if _fault(_json_schema({**shared, **inner})):
                where, part = where + name, inner
                break
        else:
            return f"at {where or 'its root'}: {_fault(_json_schema({**shared, **part}))}"


def _parts_of(schema: JSON) -> Iterator[tuple[str, JSON]]:
    """The schemas directly inside one, with where they are."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            inside = value.items()
        elif key in LISTED and isinstance(value, list):
            inside = enumerate(value)
        elif key in ALONE:
            inside = (("", value),)
        else:
            continue
        for name, inner in inside:
            if isinstance(inner, dict):
                yield f"/{key}/{name}".rstrip("/"), inner
