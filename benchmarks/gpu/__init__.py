"""The sections of `check_gpu.py`, which checks whet on one GPU, or in a small form on a CPU."""
