"""Index of cached blocks: a chain of hashes over full blocks, and the tokens of blocks that are partly
filled.

A full block is known by the digest of everything up to its end, so every sequence with the same
beginning finds it. The chain starts from the weights' epoch: blocks computed under older weights have
other digests and are never found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a sequence's beginning."""

    blocks: list[int]
    """Full blocks, to be shared."""
    digests: list[bytes]
    """Digests of these blocks."""
    tail: int | None
    """A block whose first `num_tail` tokens are those that come next; it is to be copied, since others go on differently there."""
    num_tail: int


@dataclass(slots=True)
class _Contents:
    """A block's: what comes before it, and its tokens."""

    before: bytes
    tokens: tuple[int, ...]


class PrefixIndex:
    """Finds cached beginnings.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._full: dict[bytes, int] = {}
        self._contents: dict[int, _Contents] = {}
        self._next: dict[bytes, dict[int, tuple[int, ...]]] = {}
        """The blocks that go on from a digest, with their tokens."""
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Chains that are noted or looked for from now on belong to this epoch."""
        self.root = blake2b(b"epoch %d" % epoch, digest_size=16).digest()

    def clear(self) -> None:
        """Forget everything."""
        self._full.clear()
        self._contents.clear()
        self._next.clear()

    def knows(self, block: int) -> bool:
        return block in self._contents

    def num_tokens(self, block: int) -> int:
        """Number of tokens of a known block."""
        return len(self._contents[block].tokens)

    def note(self, block: int, before: bytes, tokens: tuple[int, ...]) -> bytes | None:
        """Add a block's contents to the index.

        Args:
            block: not known yet, or with a beginning of `tokens`.
            before: the digest of the block before it, or `root`.
            tokens: at most a block's.

        Returns:
            The digest of a full block. If another block holds the same, that one stays the one in the
                index.
        """
        self.forget(block)
        digest = _digest(before, tokens) if len(tokens) == self._size else None
        if digest is not None and self._full.setdefault(digest, block) != block:
            return digest
        self._contents[block] = _Contents(before, tokens)
        self._next.setdefault(before, {})[block] = tokens
        return digest

    def forget(self, block: int) -> None:
        """A block's contents are about to be overwritten."""
        contents = self._contents.pop(block, None)
        if contents is None:
            return
        siblings = self._next[contents.before]
        del siblings[block]
        if not siblings:
            del self._next[contents.before]
        if len(contents.tokens) == self._size:
            del self._full[_digest(contents.before, contents.tokens)]

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached beginning of `tokens`, of `limit` tokens at most."""
        blocks: list[int] = []
        digests: list[bytes] = []
        last, end = self.root, 0
        while end + self._size <= limit:
            digest = _digest(last, tokens[end : end + self._size])
            if digest not in self._full:
                break
            blocks.append(self._full[digest])
            digests.append(digest)
            last, end = digest, end + self._size
        rest = tuple(tokens[end : min(limit, end + self._size)])
        tail, num_tail = None, 0
        for block, held in self._next.get(last, {}).items():
            if held[:1] == rest[:1] and (length := _common(held, rest)) > num_tail:
                tail, num_tail = block, length
        return Match(blocks, digests, tail, num_tail)


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
