"""whet: reinforcement learning for language models, from a laptop to a cluster, with every token accounted for."""

import logging
import os

for _name in ("torchao", "torch.utils._pytree"):  # transformers loads torchao where it is installed, which then speaks of GPUs' libraries
    logging.getLogger(_name).setLevel(logging.ERROR)

# Read when torch is loaded: its threads sleep while they wait for each other. With the default they spin, and next to another busy process
# each of the thousands of waits in a step then lasts until the scheduler's next turn (benchmarks/thread_waiting.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
