"""whet: reinforcement learning for language models, from a laptop to a cluster, with every token accounted for."""
