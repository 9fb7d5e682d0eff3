"""The backend that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.train.torch_native.config import TrainConfig

if TYPE_CHECKING:
    from whet.model.causal import CausalModel
    from whet.model.scalar import ScalarModel
    from whet.train.base import Mirror


def build_backend(
    config: TrainConfig, model: CausalModel | ScalarModel, total_steps: int | None, key: str = "train.parallel", *, rests: bool = False
) -> Mirror:
    """Build what computes and trains a model. Every process of a job builds one, of the same model.

    Args:
        config: budget, optimizer and layout.
        model: trained in place.
        total_steps: optimizer steps of the run, for the schedule. None: a frozen model without an optimizer.
        key: the setting that `config.parallel` comes from, for error messages.
        rests: True if the weights of a frozen model lie in the CPU's memory between passes.

    Raises:
        ValueError: if the model cannot be computed as the settings say.
    """
    from whet.train.torch_native.backend import TorchBackend

    return TorchBackend(model, config, total_steps, key, rests=rests)
