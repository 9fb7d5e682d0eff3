"""whet: reinforcement learning for language models, from a laptop to a cluster, with every token accounted for.

Example:
    import whet

    run = whet.train("Qwen/Qwen3-0.6B", "train.jsonl", reward="math", num_rollouts=100)
    run.show()

The names below are loaded when they are first used: `import whet` loads nothing else.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.api.calls import dpo, reward_model, sft, train
    from whet.api.evaluation import evaluate, generate
    from whet.api.policy import Policy, batch_of
    from whet.api.run import Run
    from whet.view.notebook import show

__all__ = ["Policy", "Run", "batch_of", "dpo", "evaluate", "generate", "reward_model", "sft", "show", "train"]

_PLACES = {
    **dict.fromkeys(("sft", "dpo", "reward_model"), "whet.api.calls"),
    "generate": "whet.api.evaluation",
    **dict.fromkeys(("Policy", "batch_of"), "whet.api.policy"),
    "Run": "whet.api.run",
    "show": "whet.view.notebook",
}
"""Modules of the names above. `train` and `evaluate` are folders of the package, too, which are called like them (`whet.calling`)."""

for _name in ("torchao", "torch.utils._pytree"):  # transformers loads torchao where it is installed, which then speaks of GPUs' libraries
    logging.getLogger(_name).setLevel(logging.ERROR)

# Read when torch is loaded: its threads sleep while they wait for each other. With the default they spin, and next to another busy process
# each of the thousands of waits in a step then lasts until the scheduler's next turn (benchmarks/thread_waiting.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("train", "evaluate"):
        return import_module(f"whet.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'whet' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
