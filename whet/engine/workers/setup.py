"""The description of a worker process, as it is sent to it when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.tensor_parallel import Links
from whet.model.shared import SharedModel


@dataclass(frozen=True, slots=True)
class Setup:
    """What a copy is made of."""

    model: SharedModel
    config: EmbeddedConfig
    device: str
    deterministic: bool
    threads: int
    """torch's, of this copy."""
    tokenizer: Path | None
    """Folder of the tokenizer that finds stop texts and reads grammars."""
    trust_remote_code: bool
    mapped: bool = True
    """Whether new weights are put into the shared memory, from which a copy on the CPU then samples; else every process has its own."""
    keeps_weights: bool = False
    """Whether they stay in memory while it sleeps: new ones come as changes to them."""
    elsewhere: bool = False
    """Whether it runs on another machine than the memory with the weights: it begins with a copy of them (`first`)."""
    name: str = "engine copy 0"
    """As the sender of weights knows this process."""
    links: Links | None = None
    """Where a rank of several finds the others."""
