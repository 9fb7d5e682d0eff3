"""`[engine.embedded]`: the embedded engine's sizes, and the processes that it has."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config


class EmbeddedConfig(Config):
    """The engine in the trainer's own process, or in several processes of its own."""

    cache_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the KV cache holds, over all sequences. Unset: as many as the sequences that run
    together may have, within a fifth of the device's memory."""
    block_size: int = Field(default=16, gt=0)
    """Tokens per cache block."""
    max_running: int = Field(default=128, gt=0)
    """Sequences that run at a time; more wait."""
    max_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens that one step computes at most: long prompts are prefilled in chunks, mixed with decoding."""
    compiled: bool = True
    """Decode on CPUs with code that is compiled on first use (by the installed C compiler, in about a
    second): Llama, Mistral, Qwen2 and Qwen3 in float32. Other models, and machines without a compiler,
    decode with torch, and a warning says why."""
    static_decode: bool = False
    """Decode in steps of fixed shapes, padded to powers of two. On CUDA each is captured as a graph and replayed; that was never run
    on a GPU, so compare before you rely on it. On a CPU the same steps are computed, slower than others."""
    own_weights: bool = False
    """Keep a copy of the weights in memory of the engine's own, brought up to date at every version; false: read the trainer's."""
    copies: int = Field(default=1, ge=1)
    """Copies of the engine. 1: it runs in the trainer's process; more: each copy runs in a process of
    its own with the sizes above, and all share one copy of the weights in shared memory."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes of each copy: the model's layers are cut over them by the model's own plan, the cache
    by its heads of keys and values; they decode with torch. 1: a copy is one process."""
    copy_devices: list[str] = Field(default_factory=list)
    """Device of each copy, or of each of its processes (`cuda:1`; each then has its own weights there).
    Empty: the CPU for all, or, if the model is on a GPU, one GPU after the other."""

    @model_validator(mode="after")
    def _one_device_each(self) -> EmbeddedConfig:
        if self.copy_devices and len(self.copy_devices) != self.num_processes:
            wanted = f"{self.copies} copies" + (f" of {self.tensor_parallel} processes" if self.tensor_parallel > 1 else "")
            raise ValueError(f"copy_devices names {len(self.copy_devices)} devices for {wanted}; name one for each, or none")
        return self

    @model_validator(mode="after")
    def _static_alone(self) -> EmbeddedConfig:
        if self.static_decode and self.tensor_parallel > 1:
            raise ValueError(f"static_decode is for copies of one process, and tensor_parallel is {self.tensor_parallel}; set one of them")
        return self

    @property
    def num_processes(self) -> int:
        """Number of the engine's processes; 1: the engine runs in the process that calls it."""
        return self.copies * self.tensor_parallel

    @property
    def has_own_weights(self) -> bool:
        return self.own_weights or self.num_processes > 1
