"""whet: reinforcement learning for language models, from a laptop to a cluster, with every token accounted for."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # transformers loads torchao where it is installed, which then speaks of GPUs' libraries
    logging.getLogger(_name).setLevel(logging.ERROR)
