"""PPO's critic: what it is made of, and how well it predicts."""

from __future__ import annotations

from pydantic import Field

from whet.config import Config
from whet.core.batch import TrainBatch
from whet.observe.metrics import Mean, Metrics
from whet.train.torch_native.mesh import ParallelConfig
from whet.train.torch_native.optim_config import OptimConfig


class CriticOptimConfig(OptimConfig):
    """AdamW for the critic, and its schedule over the critic's own steps."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""


class CriticConfig(Config):
    """The critic of an algorithm that needs values (`ppo`). Type, device and row budget are the policy's.

    It is trained whole, also beside a policy that is an adapter."""

    path: str | None = None
    """A folder or a name on the hub: a language model, whose scores then begin at 0, or a reward model, whose head is kept. Unset: the
    policy's model."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    """The critic's own optimizer."""
    parallel: ParallelConfig | None = None
    """How it is spread over the processes of the job, which has to take as many of them as `train.parallel` does; unset: as the policy."""
    warmup_rollouts: int = Field(default=0, ge=0)
    """In so many first rollouts the critic learns alone, and the policy stays as it is."""


def fit_of(batch: TrainBatch) -> Metrics:
    """How much of the returns' variance the values explain, before the critic learns from them: 1 - Var(G - V) / Var(G).

    Over the trained tokens; 1 is perfect, 0 no better than a constant. Nothing where the returns do not vary.
    """
    assert batch.values is not None and batch.returns is not None, "values and returns come with the credit"
    mask = batch.loss_mask
    returns, values = batch.returns[mask].double(), batch.values[mask].double()
    if not len(returns) or float(returns.var(correction=0)) == 0:
        return {}
    return {"critic/explained_variance": Mean(1 - (returns - values).var(correction=0) / returns.var(correction=0), 1)}


def named_for_critic(metrics: Metrics) -> Metrics:
    """A step's metrics under names of the critic's own: `optim/lr` is `critic/lr`."""
    return {f"critic/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
