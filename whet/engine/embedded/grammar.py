"""Replies that must match a grammar: which tokens may come next, through llguidance (`pip install 'whet[grammar]'`).

What may come next is a function of a reply's own tokens, so neither preemption, nor new weights, nor the batch change it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.data.template import Renderer
from whet.engine.embedded import grammar_trial
from whet.runfolder.child_environment import child_environment
from whet.types import JSON, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NEEDED = "grammars need llguidance: pip install 'whet[grammar]'"
MAX_KEPT = 64
"""Compiled grammars that are kept for the next request, those that were refused included."""
MAX_CHARACTERS = 128 * 1024
"""Size limit of a grammar's text."""
LIMITS = {"max_items_in_row": 1000, "step_max_items": 10_000, "max_grammar_size": 50_000, "verbose_errors": False}
"""llguidance's own, lower than by default: the work of a step grows with the square of some of them."""
MAX_CPU_S = 2.0
"""Seconds of a processor that one step of a grammar may take. llguidance releases the interpreter meanwhile, but a step of the engine
waits for it."""
TRIAL_LIMIT_S = 60.0
"""Wall time to build a grammar, in seconds, for a machine busy with other things; the effective limit
is `grammar_trial.CPU_LIMIT_S`."""
MAX_LOOKED_AT = 256
"""Parts of a schema that are looked at to say which one is at fault."""
NO_EXTENSION = "NoExtensionBias"
"""llguidance's word for a grammar that nothing can go on with."""
JSON_FORM = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\r\\n]{0,40}"}
"""Any layout, but no endless white space: a model that is made to write JSON against its will tends to that."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a JSON schema that hold schemas by name."""
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
ALONE = ("items", "additionalProperties")


class Matching:
    """State of a reply in its grammar.

    Args:
        matcher: at the beginning of the grammar; not shared.
        ends: the tokens that end a reply, which are no part of it.
        own_ends: those of the tokenizer, which the matcher knows.
        vocab_size: the model's.
    """

    def __init__(self, matcher: LLMatcher, ends: Collection[int], own_ends: Collection[int], vocab_size: int) -> None:
        self._matcher, self._ends = matcher, list(ends)
        self._own_ends, self._vocab_size = list(own_ends), vocab_size
        self.failure: str | None = None
        """Why it cannot go on: the grammar is too much for the machinery's limits, or no token of the model continues it."""
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
        began = time.thread_time()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        took_s = time.thread_time() - began
        if self._matcher.is_error() and (error := _first_line(self._matcher.get_error())) != NO_EXTENSION:
            self.failure = error
        elif took_s > MAX_CPU_S:
            self.failure = f"a step of it takes {took_s:.1f} s of a processor, over the limit of {MAX_CPU_S:g} s"
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        known = min(len(bits), self._vocab_size)
        allowed[:known] = bits[:known]
        allowed[[token for token in self._own_ends if token < self._vocab_size]] = False
        accepts = self._matcher.is_accepting()
        if self.failure is None and not (accepts or allowed.any()):
            self.failure = "no token of the model goes on with it, and it is not at its end"
        if accepts:
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
        self._kept: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        """Compiled grammars; for a refused one, the text of its error."""
        self._made: LLTokenizer | None = None
        self._making = Lock()
        self._lock = Lock()
        """Lock of the compiled grammars; it is not held during compilation."""

    def check(self, grammar: Grammar) -> None:
        """Check that a grammar can be used.

        Raises:
            ValueError: if it cannot; the text says where and why.
        """
        self._compiled(grammar)

    def begin(self, grammar: Grammar, ends: Collection[int]) -> Matching:
        """The beginning of a reply, which the tokens `ends` may end. It may take seconds: not on an event loop.

        Raises:
            ValueError: as `check`; or the grammar lets nothing but the end follow, and no token ends a reply.
        """
        compiled = self._compiled(grammar)
        with self._lock:
            mine = compiled.deep_copy()
        matching = Matching(mine, ends, self._tokens().eos_tokens, self._vocab_size)
        if matching.failure is not None or matching.over:
            raise ValueError(f"{grammar.kind}: no reply can begin with it: {matching.failure or 'it is empty, and no token ends a reply'}")
        return matching

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
        if found is None:
            try:
                found = self._compile(grammar)
            except ValueError as error:
                found = str(error)
        with self._lock:
            self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MAX_CHARACTERS:
            raise ValueError(f"{grammar.kind}: it has {len(grammar.text)} characters, over the limit of {MAX_CHARACTERS}")
        tokens = self._tokens()
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise ValueError(NEEDED) from error
        with _refused_as(grammar.kind):
            text = written(grammar)
        fits = _can_be_built(text)
        with _refused_as(grammar.kind):
            if not fits:
                limits = f"{grammar_trial.CPU_LIMIT_S} s of a processor or {grammar_trial.MEMORY_LIMIT_BYTES >> 20} MiB"
                raise ValueError(f"it takes over {limits} to build: are its numbers too large?")
            limits = LLParserLimits(**LIMITS)  # pyright: ignore[reportArgumentType]
            matcher = LLMatcher(tokens, text, log_level=0, limits=limits)
            if matcher.is_error() and (wrong := _fault(text)):
                if grammar.kind == "json_schema":
                    wrong = _place_of_fault(_read(grammar.text))
                raise ValueError(f"{grammar.kind}: {wrong}")
            if matcher.is_error():
                raise ValueError(f"{grammar.kind}: {_first_line(matcher.get_error())}")
            beginning = Matching(matcher.deep_copy(), (), tokens.eos_tokens, self._vocab_size)
        if beginning.failure is not None:
            raise ValueError(f"{grammar.kind}: no reply can begin with it: {beginning.failure}")
        return matcher

    def _tokens(self) -> LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(NEEDED) from error
        with self._making:
            if self._made is None:
                self._made = from_tokenizer(self._tokenizer)
            return self._made


@contextmanager
def _refused_as(kind: str) -> Iterator[None]:
    """Turn every error of llguidance about a client's text, its panics included, into an error of the
    text.

    Raises:
        ValueError: naming the kind of grammar.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # another package's code over anybody's text: a panic of Rust code is no Exception
        text = str(error) if isinstance(error, ValueError) and not isinstance(error, UnicodeError) else f"it cannot be read: {error}"
        raise ValueError(text if text.startswith(f"{kind}:") else f"{kind}: {text}") from None


def _can_be_built(text: str) -> bool:
    """Tell whether a grammar can be built within bounds: tried in another process, which can be stopped.

    Raises:
        RuntimeError: that process did not come so far as to try.
    """
    command = (sys.executable, "-P", grammar_trial.__file__)
    request = json.dumps({"text": text, "limits": LIMITS}).encode()
    try:
        ended = subprocess.run(
            command, input=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment(), timeout=TRIAL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    if ended.stdout != grammar_trial.BEGUN:
        how = f"ended with status {ended.returncode} before it began: {shlex.join(command)}"
        raise RuntimeError(f"the process that tries grammars out {how}")
    return ended.returncode == 0


def _first_line(text: str) -> str:
    """First line of an llguidance error; the others are the state of its parser."""
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
            except (GbnfToLarkError, IndexError) as error:
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
    """The fault of a grammar in llguidance's form; empty: it has none."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(text)


def _place_of_fault(schema: JSON) -> str:
    """Place and reason of a schema's fault: those of the innermost part that is wrong by itself."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    where, part, left, began = "", schema, MAX_LOOKED_AT, time.thread_time()
    while True:
        for name, inner in islice(_parts_of(part), left):
            left = left - 1 if time.thread_time() - began < MAX_CPU_S else 0
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
