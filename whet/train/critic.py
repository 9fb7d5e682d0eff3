"""Quality of PPO's critic, and the names of its metrics."""

from __future__ import annotations

from whet.core.batch import TrainBatch
from whet.observe.metrics import Mean, Metrics


def fit_of(batch: TrainBatch) -> Metrics:
    """Share of the returns' variance that the values explain, before the critic learns from them: 1 -
    Var(G - V) / Var(G).

    Over the trained tokens; 1 is perfect, 0 no better than a constant. Empty if the returns do not
    vary.
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
