"""Prepare the process: seeds, threads, determinism, and a quiet transformers."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from whet.settings.rl import BaseRunConfig


def prepare_process(config: BaseRunConfig, threads: int | None = None) -> None:
    """Prepare the process for `config`. `threads` are torch's if the configuration leaves them open; None:
    torch's choice.
    """
    quiet_transformers()
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    threads = config.threads or threads
    if threads is not None:
        torch.set_num_threads(threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)


def quiet_transformers() -> None:
    """Turn off transformers' progress bars and warnings: the checks of whet cover them."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
