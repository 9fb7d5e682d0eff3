"""Text to token ids: unchanged, going on from earlier tokens, and with special tokens that others spelled left as plain text.

Text of others goes through `mark`, which puts another character in the place of one character of each special token that is spelled in
it: half of a surrogate pair, which no text has. What is then left of special tokens in a rendered conversation is the chat template's own.
Text with marks is encoded by a copy of the tokenizer that knows its special tokens under names which the text does not have: the template's
own are written by these names, and the marks are turned back, so that what others spelled is text like any other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from whet.types import JSON

MARKS = range(0xDC00, 0xE000)
"""Second halves of surrogate pairs, which stand for one of a special token's characters."""
NAMES = (range(0x100000, 0x10FFFE), range(0xF0000, 0xFFFFE))
"""Private-use characters that special tokens are named by in a copy: the first stretch of them that the text has none of."""
MAX_COPIES = 6
"""Copies of the tokenizer that are kept."""

_MARKED = re.compile(f"[{chr(MARKS[0])}-{chr(MARKS[-1])}]")
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"(?<![uU][dD][89abAB][0-9a-fA-F]{2})(?<!\\)\\+u([dD][c-fC-F][0-9a-fA-F]{2})")
"""A mark as JSON in ASCII writes it; no second half of a pair."""
_SPLITS = "\u2581\u0120"
"""First characters of a word after a space, in tokenizers of the two kinds."""


class Encoder:
    """Token ids of text, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        """Text of the tokens that are found in text before it is split."""
        self._kinds = {added.content: added for added in tokenizer.added_tokens_decoder.values()}
        named = {str(text) for text in tokenizer.all_special_tokens}
        self.special = frozenset(text for text, added in self._kinds.items() if added.special or text in named)
        """Added tokens that the tokenizer calls special."""
        self._greedy = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.rstrip)
        self._protected: tuple[str, ...] = ()
        self._adds_prefix = self._finds_prefix()
        self._copies: dict[tuple[int | None, bool], Tokenizer] = {}
        self._ids = lru_cache(maxsize=4096)(self._encode)

    def protect(self, texts: Iterable[str]) -> None:
        """Name the special tokens that text of others is kept from becoming; the marks of an earlier choice mean nothing any more."""
        self._protected = tuple(sorted(texts, key=lambda text: (-len(text), text)))
        for name in ("_mark_of", "_unmark", "_protected_ids"):
            self.__dict__.pop(name, None)
        self._copies.clear()
        self._ids.cache_clear()

    def encode(self, text: str, after: int | None = None) -> tuple[int, ...]:
        """The ids of a text, marked or not, without anything added.

        Args:
            after: the token that comes before the text; None: nothing does. A tokenizer that puts a space before a text does not do so
                in the middle of one, and some tokens take the spaces behind them.
        """
        return self._ids(text, after if self._adds_prefix or after in self._greedy else None)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, marked or not, and the start and end of each token in it."""
        if _MARKED.search(text):
            encoding = self._renamed(text, prefixed=True)
            return encoding.ids, encoding.offsets
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return cast("list[int]", encoded["input_ids"]), cast("list[tuple[int, int]]", encoded["offset_mapping"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def added_in(self, text: str) -> list[str]:
        """The texts of the added tokens that stand in a text, in order."""
        return [self.added[token] for token in self.encode(text) if token in self.added]

    def normal(self, text: str) -> str:
        """A text as the tokenizer normalises it, where it does more than put spaces or their signs in."""
        normalizer = None if text.isascii() or self._backend is None else self._backend.normalizer
        if normalizer is None:
            return text
        return cast(str, normalizer.normalize_str(text)).replace("\u2581", " ").removeprefix(" " if not text.startswith(" ") else "")

    def _encode(self, text: str, after: int | None) -> tuple[int, ...]:
        encode = self._whole if not _MARKED.search(text) else lambda text: self._renamed(text, prefixed=True).ids
        if after is None or not text:
            return tuple(encode(text))
        if after in self.added:
            ids = encode(self.added[after] + text)
            return tuple(ids[ids.index(after) + 1 :])
        if _MARKED.search(text):
            return tuple(self._renamed(text, prefixed=False).ids)
        return tuple(self._copy(None, prefixed=False).encode(text, add_special_tokens=False).ids)

    def _whole(self, text: str) -> list[int]:
        return cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def _backend(self) -> Tokenizer | None:
        return self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None

    def _finds_prefix(self) -> bool:
        """True if the tokenizer splits a text that begins with a letter as if a space came before it."""
        if self._backend is None:
            return False
        text = "x"
        if self._backend.normalizer is not None:
            text = cast(str, self._backend.normalizer.normalize_str(text))
        if self._backend.pre_tokenizer is not None:
            text = "".join(piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(text))
        return text[:1] in _SPLITS or text[:1] == " "

    def mark(self, text: str, pattern: re.Pattern[str]) -> tuple[str, int]:
        """A text of others in which no special token is spelled any more, and how many were.

        Args:
            pattern: finds those that it must not spell; all of them are protected.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        if not text.isascii() and (half := _HALF.search(text)):
            raise ValueError(f"{half[0].encode('unicode_escape').decode()} is half of a surrogate pair, which is no character")
        normal = self.normal(text)
        if normal != text and pattern.search(normal) and not pattern.search(text):
            text = normal  # wide letters, say, that only the tokenizer makes a special token of
        return pattern.subn(lambda match: self._mark_of[match[0][0]] + match[0][1:], text)

    def mark_at(self, text: str, place: int) -> str:
        """The text with the character at a place marked, if it is one of a protected token's."""
        mark = self._mark_of.get(text[place], text[place])
        return text[:place] + mark + text[place + 1 :]

    def unmark(self, text: str) -> str:
        """The text with what the marks stand for."""
        return text.translate(self._unmark)

    @cached_property
    def _mark_of(self) -> Mapping[str, str]:
        """By character."""
        letters = sorted({letter for text in self._protected for letter in text})
        if len(letters) > len(MARKS):
            raise ValueError(f"the special tokens have {len(letters)} different characters, over the limit of {len(MARKS)}")
        return {letter: chr(mark) for letter, mark in zip(letters, MARKS, strict=False)}

    @cached_property
    def _unmark(self) -> Mapping[int, str]:
        return {ord(mark): letter for letter, mark in self._mark_of.items()}

    @cached_property
    def _protected_ids(self) -> frozenset[int]:
        """Ids of the protected tokens, without the unknown token, which also represents other texts."""
        texts = set(self._protected) - {str(self.tokenizer.unk_token)}
        return frozenset(token for token, content in self.added.items() if content in texts)

    def _renamed(self, text: str, *, prefixed: bool) -> Encoding:
        """A marked text, encoded by a copy; what that knows as special tokens is what was not marked.

        Raises:
            ValueError: a text would have become a special token all the same.
        """
        begin = self._free_names(text)
        names_of, num_own = self._names(begin), 0
        # First those that are found before a text is normalised, as the tokenizer does; a name is as long as the token, so places stay.
        for late in (False, True):
            texts = [each for each in self._protected if self._kinds[each].normalized is late]
            pattern = spelled(texts, {each for each in texts if self._kinds[each].single_word})
            num_own += sum(match[0] != self.tokenizer.unk_token for match in pattern.finditer(text))
            text = pattern.sub(lambda match: names_of[match[0]], text)
        encoding = self._copy(begin, prefixed=prefixed).encode(self.unmark(text), add_special_tokens=False)
        if sum(token in self._protected_ids for token in encoding.ids) != num_own:
            raise ValueError(_CANNOT)
        return encoding

    def _free_names(self, text: str) -> int:
        """First character of a range of names that the text does not contain.

        Raises:
            ValueError: every range is used.
        """
        used = sorted({ord(letter) for letter in text if ord(letter) >= NAMES[-1][0]})
        for letters in NAMES:
            for begin in range(letters[0], letters[-1] + 2 - len(self._protected), max(len(self._protected), 1)):
                after = bisect_left(used, begin)
                if after == len(used) or used[after] >= begin + len(self._protected):
                    return begin
        raise ValueError(_CANNOT)

    def _names(self, begin: int) -> dict[str, str]:
        """The protected tokens' names in letters from one on."""
        return {text: chr(begin + i) * len(text) for i, text in enumerate(self._protected)}

    def _copy(self, names: int | None, *, prefixed: bool) -> Tokenizer:
        """A copy of the tokenizer: with its protected tokens under names from one letter on, or without the space before a text."""
        if (names, prefixed) in self._copies:
            return self._copies[names, prefixed]
        if len(self._copies) >= MAX_COPIES:
            del self._copies[next(iter(self._copies))]
        if self._backend is None:
            raise ValueError(_CANNOT)
        tree = cast("dict[str, Any]", json.loads(self._backend.to_str()))
        tree |= {"truncation": None, "padding": None, "post_processor": None}
        if not prefixed:
            tree["normalizer"] = _without_prefix(tree["normalizer"])
            tree["pre_tokenizer"] = _without_prefix(tree["pre_tokenizer"])
        names_of = {} if names is None else self._names(names)
        copy = Tokenizer.from_str(json.dumps(rename_tokens(tree, names_of)))
        ids = {content: token for token, content in self.added.items()}
        if any(ids[text] not in copy.encode(f"a {name} b", add_special_tokens=False).ids for text, name in names_of.items()):
            raise ValueError(_CANNOT)
        self._copies[names, prefixed] = copy
        return copy


_CANNOT = (
    "a text spells a special token, and this tokenizer has no way to encode it as plain text: take it out of the text, or set "
    "special_tokens_in_text=true if it is meant"
)


def mend(text: str, parts: JSON) -> str:
    """A rendered text in which marks of its parts that became JSON's escapes are marks again."""
    if not _ESCAPED.search(text) or not _holds_marks(parts):
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


def _holds_marks(value: JSON) -> bool:
    if isinstance(value, str):
        return _MARKED.search(value) is not None
    if isinstance(value, Mapping):
        return any(_holds_marks(key) or _holds_marks(item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(map(_holds_marks, value))


def spelled(texts: Sequence[str], whole_words: Iterable[str] = ()) -> re.Pattern[str]:
    """A pattern that finds any of the texts, the longest of those that begin at one place."""
    words = set(whole_words)
    escaped = [rf"(?<!\w){re.escape(text)}(?!\w)" if text in words else re.escape(text) for text in sorted(texts, key=len, reverse=True)]
    return re.compile("|".join(escaped) if escaped else r"(?!)")


def rename_tokens(tree: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer's description in which tokens have other texts; their ids stay."""
    if not names:
        return tree
    model = dict(tree["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token for text, token in cast("dict[str, int]", vocab).items()}
    else:  # Unigram: pieces with scores
        model["vocab"] = [[names.get(text, text), score] for text, score in cast("list[tuple[str, float]]", vocab)]
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in tree["added_tokens"]]
    return {**tree, "model": model, "added_tokens": added}


def _without_prefix(part: JSON) -> JSON:
    """A normalizer or a pre-tokenizer that puts no space before a text."""
    if not isinstance(part, dict):
        return part
    kind = part["type"]
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        parts = [kept for each in part[key] if (kept := _without_prefix(each)) is not None]
        return {**part, key: parts} if parts else None
    return part
