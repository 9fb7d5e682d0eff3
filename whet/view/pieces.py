"""Texts of tokens as bytes: a token of a byte-level tokenizer need not be whole UTF-8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from whet.view.folders import ViewedRun, inside

MAX_TOKENIZER_BYTES = 256 * 2**20


class Pieces:
    """The bytes of each token of a tokenizer.

    Args:
        file: a tokenizer.json.

    Raises:
        ValueError: it is no tokenizer.
    """

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            text = file.read_text(encoding="utf-8")
            self._tokenizer: Any = Tokenizer.from_str(text)
            settings = json.loads(text)
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        used = json.dumps([settings.get("decoder"), settings.get("pre_tokenizer")])
        self._level = "bytes" if '"ByteLevel"' in used else "pieces" if ('"ByteFallback"' in used or '"Metaspace"' in used) else "words"
        self._added = {int(each["id"]): str(each["content"]) for each in settings.get("added_tokens") or ()}
        self._letters = {letter: byte for byte, letter in byte_letters().items()}
        self._known: dict[int, bytes | None] = {}

    def of(self, token: int) -> bytes | None:
        """The bytes of a token. None: the tokenizer does not know it."""
        if token not in self._known:
            self._known[token] = self._spelled(token)
        return self._known[token]

    def text(self, tokens: Any) -> str:
        """The text of some tokens, with a sign in place of what is no whole letter."""
        return b"".join(self.of(token) or b"" for token in tokens.tolist()).decode("utf-8", "replace")

    def _spelled(self, token: int) -> bytes | None:
        if token in self._added:
            return self._added[token].encode("utf-8", "backslashreplace")
        piece = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if piece is None:
            return None
        if self._level == "bytes":
            if all(letter in self._letters for letter in piece):
                return bytes(self._letters[letter] for letter in piece)
        elif self._level == "pieces":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            piece = piece.replace("\u2581", " ")
        return piece.encode("utf-8", "backslashreplace")

    def columns(self, tokens: Any) -> dict[str, Any]:
        """Columns of a pack with the texts of some tokens.

        `piece` is the place of each token's text; `piece_ends` where each text ends in `piece_bytes`; `piece_known` is 0 for a token
        without a text.
        """
        unique, places = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
        found = [self.of(int(token)) for token in unique]
        ends = np.cumsum([0 if piece is None else len(piece) for piece in found], dtype=np.int64)
        return {
            "piece": places.astype(np.int32),
            "piece_ends": ends.astype(np.int32),
            "piece_bytes": np.frombuffer(b"".join(piece for piece in found if piece is not None), np.uint8),
            "piece_known": np.array([piece is not None for piece in found], np.int8),
        }


def byte_letters() -> dict[int, str]:
    """The letter with which byte-level vocabularies write each byte (GPT-2's table): printable ones stand for themselves."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def pieces_of(run: ViewedRun) -> Pieces | None:
    """The texts of the run's tokens: by the tokenizer in its folder, or in that of the model that its settings name."""
    inner = [run.settings / "model", run.settings.parent / "model"]
    candidates = [inside(run.root, folder / "tokenizer.json") for folder in inner]
    model = run.section("model").get("path")
    if isinstance(model, str) and model:
        file = Path(model) / "tokenizer.json"
        candidates.append(file if file.is_file() else None)
    for file in candidates:
        if file is not None and file.stat().st_size <= MAX_TOKENIZER_BYTES:
            try:
                return Pieces(file)
            except ValueError:
                continue
    return None
