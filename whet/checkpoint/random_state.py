"""The states of every random generator, of this process and of all of a job, as JSON."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from whet.types import JSON

RANDOM = "random"
"""Target of calls for the generators of all ranks."""


class RandomState:
    """Python's, numpy's and torch's global generators. whet's own draws come from seeds of their own; a user's code may use these."""

    def state(self) -> JSON:
        kind, words, gauss = random.getstate()
        name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [kind, list(words), gauss],
            "numpy": [name, [int(key) for key in keys], place, has_gauss, cached],
            "torch": _to_text(torch.get_rng_state()),
            "cuda": [_to_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        }

    def restore(self, state: JSON) -> None:
        """Take over what `state` gave. GPUs that were not there then, or are not there now, keep the states that they have."""
        kind, words, gauss = state["python"]
        random.setstate((kind, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(_from_text(state["torch"]))
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, text in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(_from_text(text), device)


class RandomStates:
    """The generators of every rank of a job. All ranks make each call. A job of more ranks than there were
    leaves the generators of the further ones as they are."""

    def state(self) -> JSON:
        own = RandomState().state()
        states: list[JSON] = [own]
        if dist.is_initialized():
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, own)
        return states

    def restore(self, state: JSON) -> None:
        """Take over what `state` gave."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank < len(state):
            RandomState().restore(state[rank])


def _to_text(state: Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
