"""Real vLLM servers on CPUs: how they are started here, and the small model that they serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whet.engine.servers.start import ServerStarter
from whet.engine.vllm.start import Vllm
from whet.quickstart.model import SmallModelConfig, make_model

ARGS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
START_S = 300.0


def python() -> str:
    """Python of the environment that has vLLM and whet-vllm."""
    found = os.environ.get("WHET_TEST_VLLM")
    if found is None:
        pytest.fail("WHET_TEST_VLLM names the Python of an environment with vLLM: make test-vllm makes it")
    return found


def small_model(folder: Path) -> Path:
    """A Qwen3 of 0.8M parameters, whose output head is tied to its embeddings."""
    make_model(folder, ["What is 23 + 45? The answer is 68.", "0123456789"], SmallModelConfig(), 0)
    return folder


def starter(name: str, folder: Path, decode, direct_names=None, args=()) -> ServerStarter:
    return ServerStarter(Vllm(), name, python(), folder, "float32", ARGS | dict(args), decode, direct_names, START_S)
