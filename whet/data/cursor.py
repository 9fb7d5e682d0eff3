"""A place in an endless stream of epochs: seeded orders over the same items, with a position that can be restored."""

from __future__ import annotations

import random
from collections.abc import Mapping

from whet.types import JSON


class Cursor:
    """Walks over `length` items, epoch after epoch. Epoch e has the order `Random(seed + e).shuffle`, or the items' own.

    Args:
        name: of the source, for errors.
        length: number of items, at least 1.
        digest: of what the items say; a position means nothing over other items.
        shuffle: whether every epoch has an order of its own.
        seed: of the shuffles.
    """

    def __init__(self, name: str, length: int, digest: str, *, shuffle: bool, seed: int) -> None:
        self._name = name
        self._length = length
        self._shuffle = shuffle
        self._seed = seed
        self._identity = {"length": length, "digest": digest, "shuffle": shuffle, "seed": seed if shuffle else None}
        self._num_taken = 0
        self._order: tuple[int, list[int]] | None = None

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
        return {"num_taken": self._num_taken, **self._identity}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: it was taken from other items, or under other settings.
        """
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                what = "over other rows (as many, but not the same)" if key == "digest" else f"with {key} {state.get(key)!r}, not {mine!r}"
                advice = "go on with the data and settings of that run, or start afresh in another run_dir"
                raise ValueError(f"the saved position of source {self._name!r} was taken {what}: {advice}")
        num_taken = state.get("num_taken")
        if not isinstance(num_taken, int) or num_taken < 0:
            raise ValueError(f"the saved position of source {self._name!r} is {num_taken!r}, expected a count")
        self._num_taken = num_taken

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
