"""Settings of the models other than the policy: the critic, and the reference and the teacher, which do
not learn."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread
from whet.train.torch_native.config import OptimConfig, ParallelConfig


class CriticOptimConfig(OptimConfig):
    """AdamW for the critic, and its schedule over the critic's own steps."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""


class CriticConfig(Config):
    """The critic of an algorithm that needs values (`ppo`). Type, device and row budget are the
    policy's.
    The whole critic is trained, even if the policy is an adapter.
    """

    path: str | None = None
    """A folder or a name on the hub: a language model, whose scores then begin at 0, or a reward model, whose head is kept. Unset: the
    policy's model."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    """The critic's own optimizer."""
    parallel: ParallelConfig | None = None
    """Layout of the critic over the job's processes. It must use as many of them as `train.parallel`
    does; unset: the policy's layout."""
    warmup_rollouts: int = Field(default=0, ge=0)
    """Number of rollouts at the start in which only the critic learns, and the policy stays unchanged."""


class ReferenceConfig(Config):
    """The frozen policy that a KL is measured to. An algorithm keeps one if its KL has a weight, or with `reference = true`."""

    path: str | None = None
    """A folder or a name on the hub; unset: the policy's first weights, also where `checkpoint.restore` gave them. Of a policy that is an
    adapter: its base."""
    refresh_every: int | None = Field(default=None, gt=0)
    """Rollouts after which the reference becomes a copy of the policy, each time; unset: the reference
    never changes."""
    offload: bool = False
    """Keep its weights in the CPU's memory, and on the device only while its log-probs are computed; on a mesh, one layer after
    another."""
    parallel: ParallelConfig | None = None
    """Layout of the reference over the job's processes. It must use as many of them as `train.parallel`
    does; unset: the policy's layout."""


class TeacherConfig(Config):
    """The frozen model that on-policy distillation pulls the policy to (`distill_coef`)."""

    path: str
    """A folder or a name on the hub; its tokenizer must be the policy's. With `urls` nothing else of it is read."""
    urls: list[str] = Field(default_factory=list)
    """Servers that run already with this model (`http://HOST:PORT`, of vLLM, SGLang or `whet serve`) and compute its log-probs; their key
    is read from WHET_ENGINE_KEY. Empty: the trainer's processes compute them."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a server may take for the log-probs of a sample."""
    parallel: ParallelConfig | None = None
    """Layout of the teacher over the job's processes. It must use as many of them as `train.parallel`
    does; unset: the policy's layout."""

    @model_validator(mode="after")
    def _servers_are_read(self) -> TeacherConfig:
        if self.urls:
            refuse_unread(self, ["parallel"], "(teacher) with teacher.urls", "leave it out")
        else:
            refuse_unread(self, ["timeout_s"], "(teacher) without teacher.urls", "leave it out")
        return self
