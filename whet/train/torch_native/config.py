"""Settings of the torch-native backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread
from whet.model.config import LoraConfig

ContextAttention = Literal["ulysses", "gather"]
RowsSetting = Literal["auto", "forest", "chains"]
RoutingReplay = Literal["off", "old", "rollout"]
LOGITS_BYTES = 256 * 2**20
"""Size of one chunk of logits that log-probs are computed from."""


class OptimConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit:
    matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by
    torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their
    orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of muon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_grad: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; unset: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a share of the peak."""

    @model_validator(mode="after")
    def _read(self) -> OptimConfig:
        if self.name != "muon":
            refuse_unread(self, ["momentum"], f"with name={self.name}", "set name=muon")
        return self


class ParallelConfig(Config):
    """Layout of a model over ranks (processes, one per device): replicate x shard x context x tensor of
    them."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    shard: int = Field(default=1, ge=1)
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    expert: int = Field(default=1, ge=1)
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    context_attention: Literal["auto"] | ContextAttention = "auto"
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather:
    each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads
    divide."""

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def num_data(self) -> int:
        """Ranks with samples of their own, those that share samples counted once."""
        return self.replicate * self.shard

    @model_validator(mode="after")
    def _divides(self) -> ParallelConfig:
        block = self.shard * self.context * self.tensor
        if self.expert > 1 and (self.expert % self.tensor or block % self.expert):
            raise ValueError(
                f"expert is {self.expert}, but it must be a multiple of tensor ({self.tensor}) that divides "
                f"shard x context x tensor ({block})"
            )
        return self


class TrainConfig(Config):
    """Training of the policy."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    offload: bool = False
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters,
    in the CPU's memory, and step there. The device then holds one copy of the weights, and every step
    waits for the transfer both ways."""
    max_tokens_per_device: int = Field(default=16_384, gt=0)
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are
    computed once. A longer sample gets its own row."""
    rows: RowsSetting = "auto"
    """Computation of shared beginnings. forest: the common beginning of samples is computed once,
    forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of
    the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of
    tokens that was saved."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    freeze: list[str] = Field(default_factory=list)
    """Parameters that do not train, by their names in the model's files: `*` is any text, and
    with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train;
    ["*", "!*.layers.27.*"]: one layer does."""
    parallel: ParallelConfig | Literal["auto"] | None = None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of
    the layouts that fit the devices' memory the one whose exchanges take the least time, printed when
    the run begins."""
    exchange_timeout_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds that a process waits for the others in an exchange, before the run ends and names the
    missing ones. It must cover the largest difference in computing time between two exchanges."""
    compile: bool = False
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in
    `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    routing_replay: RoutingReplay = "off"
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the
    choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's
    choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their
    gradient."""
    logprob_chunk_tokens: int | None = Field(default=None, gt=0)
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""

    @model_validator(mode="after")
    def _trains_weights(self) -> TrainConfig:
        if self.freeze and self.lora is not None:
            raise ValueError("freeze is set, but with lora the model's own parameters do not train at all: leave one of them out")
        return self

    @model_validator(mode="after")
    def _replays(self) -> TrainConfig:
        if self.compile and self.routing_replay != "off":
            raise ValueError(
                f"compile does not go with routing_replay={self.routing_replay}: each row has other experts, which compiled layers are not "
                "told; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> TrainConfig:
        if self.compile and self.parallel != "auto" and self.degrees is not None:
            check_compiled(self.degrees)
        return self

    @property
    def degrees(self) -> ParallelConfig | None:
        """`parallel` after `auto` was replaced by the chosen layout; None: one process.

        Raises:
            ValueError: if it was not.
        """
        if self.parallel == "auto":
            raise ValueError("train.parallel=auto is for the commands that train: write the degrees, or leave it out")
        return self.parallel if self.parallel is not None and self.parallel.num_ranks > 1 else None

    @property
    def spreads(self) -> bool:
        """True if each process holds a part of the model. Raises as `degrees`."""
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
