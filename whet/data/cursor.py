"""A place in an endless stream of epochs: seeded orders over the same items, with a position that can be restored."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from itertools import islice

from whet.types import JSON


class Cursor:
    """Cursor over items, epoch after epoch. Epoch e has the order `Random(seed + e).shuffle`, or the
    items' own.

    A position can be restored over the same number of items in the same order, if the items taken so
    far have the same digests. Items not yet taken may be corrected, and a position from which nothing
    was taken can be restored over any items.

    Args:
        name: name of the source, for errors.
        items: digest of each item's unchangeable content; at least one.
        shuffle: give every epoch its own order.
        seed: seed of the shuffles.
    """

    def __init__(self, name: str, items: Sequence[bytes], *, shuffle: bool, seed: int) -> None:
        self._name = name
        self._items = items
        self._length = len(items)
        self._shuffle = shuffle
        self._seed = seed
        self._num_taken = 0
        self._order: tuple[int, list[int]] | None = None
        self._taken = 0, hashlib.sha256()
        """The items whose digests are hashed, and the hash."""

    @property
    def epoch(self) -> int:
        """The epoch that the next item belongs to, from 0 on."""
        return self._num_taken // self._length

    def take(self, n: int) -> list[tuple[int, int]]:
        """The next `n` items, each as its index and its epoch. What runs over an epoch's end continues in the next."""
        if n < 1:
            raise ValueError(f"cannot take {n} tasks from source {self._name!r}, expected at least 1")
        return [self._take() for _ in range(n)]

    def state(self) -> dict[str, JSON]:
        """The position, as JSON."""
        return {"num_taken": self._num_taken, **self._order_state(), "digest": self._digest_of(self._num_taken)}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: it was taken from other items, or under other settings.
        """
        num_taken = state.get("num_taken")
        if not isinstance(num_taken, int) or num_taken < 0:
            raise ValueError(f"the saved position of source {self._name!r} is {num_taken!r}, expected a count")
        if num_taken > 0:
            for key, mine in self._order_state().items():
                if state.get(key) != mine:
                    raise self._of_others(f"with {key} {state.get(key)!r}, not {mine!r}")
            if state.get("digest") != self._digest_of(num_taken):
                raise self._of_others("over other rows (as many, but those that were taken are not the same)")
        self._num_taken = num_taken

    def _order_state(self) -> dict[str, JSON]:
        return {"length": self._length, "shuffle": self._shuffle, "seed": self._seed if self._shuffle else None}

    def _of_others(self, what: str) -> ValueError:
        advice = "go on with the data and settings of that run, or start afresh in another run_dir"
        return ValueError(f"the saved position of source {self._name!r} was taken {what}: {advice}")

    def _digest_of(self, num_taken: int) -> str:
        """Digest of the first `num_taken` items, in the order of the first epoch."""
        wanted = min(num_taken, self._length)
        done, digest = self._taken if self._taken[0] <= wanted else (0, hashlib.sha256())
        if done < wanted:
            order = self._order[1] if self._order is not None and self._order[0] == 0 else self._permutation(0)
            for index in islice(order, done, wanted):
                digest.update(self._items[index])
        self._taken = wanted, digest
        return digest.hexdigest()

    def _take(self) -> tuple[int, int]:
        epoch, place = divmod(self._num_taken, self._length)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        self._num_taken += 1
        return self._order[1][place], epoch

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self._length))
        if self._shuffle:
            random.Random(self._seed + epoch).shuffle(order)
        return order


class EpochSource:
    """A source of items that come epoch after epoch, in a cursor's order."""

    _cursor: Cursor

    @property
    def epoch(self) -> int:
        """The epoch that the next item belongs to, from 0 on."""
        return self._cursor.epoch

    def state(self) -> dict[str, JSON]:
        """The position, as JSON."""
        return self._cursor.state()

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: it was taken over other items. Rows that train are others under another tokenizer.
        """
        self._cursor.restore(state)
