"""The description of a worker process, as it is sent to it when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.tensor_parallel import Links
from whet.engine.embedded.tokenizer import TokenizerFolder
from whet.model.shared import SharedModel


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of a copy."""

    model: SharedModel
    config: EmbeddedConfig
    device: str
    deterministic: bool
    threads: int
    """torch's, of this copy."""
    tokenizer: TokenizerFolder | None
    """The tokenizer that finds stop texts and reads grammars."""
    mapped: bool = True
    """True: new weights are put into the shared memory, from which a copy on the CPU then samples.
    False: every process has its own."""
    keeps_weights: bool = False
    """True if weights stay in memory while the copy sleeps, since new ones come as changes to them."""
    elsewhere: bool = False
    """True if the copy runs on another machine than the memory with the weights: it begins with its own
    copy of them (`first`)."""
    name: str = "engine copy 0"
    """As the sender of weights knows this process."""
    links: Links | None = None
    """Links of a rank to the others of its copy."""
