"""The tokenizer, as far as the embedded engine uses it: to find stop texts and to read grammars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whet.data.template import Renderer, load_tokenizer
from whet.engine.embedded.grammar import Grammars
from whet.engine.embedded.stops import Decode


@dataclass(frozen=True, slots=True)
class EngineTokenizer:
    """Functions of a tokenizer."""

    decode: Decode | None = None
    """Token ids to text, special tokens included. None: requests with stop texts are refused."""
    grammars: Grammars | None = None
    """Compiles grammars. None: requests with a grammar are refused."""

    @classmethod
    def of(cls, renderer: Renderer, vocab_size: int) -> EngineTokenizer:
        """The functions of a renderer's tokenizer, for a model of `vocab_size` tokens."""
        return cls(renderer.decode, Grammars(renderer, vocab_size))


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A tokenizer that another process can load."""

    path: Path
    trust_remote_code: bool = False
    """Allow code that comes with the tokenizer to run."""

    def load(self, vocab_size: int) -> EngineTokenizer:
        return EngineTokenizer.of(Renderer(load_tokenizer(self.path, trust_remote_code=self.trust_remote_code)), vocab_size)
