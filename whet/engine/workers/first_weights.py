"""The first weights of a copy on another machine, which cannot map the memory where they lie: it asks for them piece by piece over its own
connection, and says what it then holds.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from whet.calls.messages import RemoteCall
from whet.engine.base import EngineFailed
from whet.model.causal import CausalModel
from whet.model.digest import differences, digests_of
from whet.model.shared import SharedModel, attach, made_of

PIECE_BYTES = 2**24
"""On the way at a time."""
FIRST_WEIGHTS = "first weights"
"""Target of a copy's calls of `FirstWeights`."""


class FirstWeights:
    """The initial weights, for a copy on another machine, which calls both methods.

    Args:
        shared: the model, which this machine can map.
        name: name of the copy.
    """

    def __init__(self, shared: SharedModel, name: str) -> None:
        self._shared, self._name = shared, name

    def piece(self, start: int, count: int) -> bytes:
        """Bytes of the weights, which are sent as they are."""
        with open(self._shared.path, "rb") as file:
            file.seek(start)
            return file.read(count)

    def check(self, held: dict[str, str]) -> None:
        """Compare the digests that a copy holds with the model's.

        Raises:
            EngineFailed: if a copy holds anything else.
        """
        if wrong := differences(digests_of(attach(self._shared).named_state()), held):
            raise EngineFailed(f"{self._name} began with other weights than it was sent: {', '.join(wrong[:5])}")


def fetch(shared: SharedModel, connection: Connection) -> CausalModel:
    """The model in memory of this process's own."""
    tensors = [torch.empty(place.shape, dtype=place.dtype) for place in shared.places]
    for place, tensor in zip(shared.places, tensors, strict=True):
        data = tensor.view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), PIECE_BYTES):
            part = data[start : start + PIECE_BYTES]
            connection.send(RemoteCall(FIRST_WEIGHTS, "piece", (place.start + start, len(part))))
            got = connection.recv_bytes_into(part)
            assert got == len(part), f"{got} bytes of the first weights came in place of {len(part)}"
    model = made_of(shared, tensors)
    connection.send(RemoteCall(FIRST_WEIGHTS, "check", (digests_of(model.named_state()),)))
    return model
