"""How a model trains: the settings of the torch-native backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config
from whet.model.config import LoraConfig
from whet.train.torch_native.layout import Rows
from whet.train.torch_native.mesh import ParallelConfig
from whet.train.torch_native.optim_config import OptimConfig

LOGITS_BYTES = 256 * 2**20
"""Size of one chunk of logits that log-probs are computed from."""


class TrainConfig(Config):
    """How the policy is trained."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    offload: bool = False
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there:
    the device keeps one copy of the weights, and every step waits for its way there and back."""
    max_tokens_per_device: int = Field(default=16_384, gt=0)
    """Tokens of a row (a micro-batch); those that samples share count once where they are computed once. A longer sample sits alone."""
    rows: Rows = "auto"
    """forest: what samples begin with alike is computed once, forward and backward; chains: every sample whole; auto: forests where they
    save a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` tells what share was saved."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    parallel: ParallelConfig | Literal["auto"] | None = None
    """How the model is spread over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices'
    memory the one whose exchanges take the least time, told as the run begins."""
    exchange_timeout_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """With several processes: how long one waits for the others in an exchange, before the run ends and names who did not come. It has to
    cover the most that one computes between two exchanges beyond another."""
    compile: bool = False
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in
    `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    logprob_chunk_tokens: int | None = Field(default=None, gt=0)
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""

    @model_validator(mode="after")
    def _compiles(self) -> TrainConfig:
        if self.compile and self.parallel != "auto" and self.degrees is not None:
            check_compiled(self.degrees)
        return self

    @property
    def degrees(self) -> ParallelConfig | None:
        """`parallel`, once `auto` was replaced by what it stands for; None: one process.

        Raises:
            ValueError: if it was not.
        """
        if self.parallel == "auto":
            raise ValueError("train.parallel=auto is for the commands that train: write the degrees, or leave it out")
        return self.parallel if self.parallel is not None and self.parallel.num_ranks > 1 else None

    @property
    def spreads(self) -> bool:
        """Whether each process holds a part of the model. Raises as `degrees`."""
        return self.degrees is not None


def check_compiled(degrees: ParallelConfig, key: str = "train.parallel") -> None:
    """Refuse compiled layers where torch cannot compile them; `key` is the setting that the degrees come from.

    Raises:
        ValueError: naming the degree.
    """
    seen = {
        "tensor": "the compiler recurses without end over weights that ranks share",
        "expert": "a tiny model's layers were not compiled after a minute",
    }
    for name, size in (("tensor", degrees.tensor), ("expert", degrees.expert)):
        if size > 1:
            raise ValueError(
                f"train.compile does not go with {key}.{name} ({size}) in torch 2.13: {seen[name]}; leave train.compile out, or "
                f"use shard, replicate or context in place of {name}"
            )


def rows_per_chunk(config: TrainConfig, vocab_size: int) -> int:
    """Rows of logits that log-probs are computed from at a time."""
    return config.logprob_chunk_tokens or max(LOGITS_BYTES // (4 * vocab_size), 64)
