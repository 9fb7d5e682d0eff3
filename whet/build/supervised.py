"""The models of the runs that learn from data as they are."""

from __future__ import annotations

from pathlib import Path

from whet.algo.base import Need
from whet.algo.dpo import dpo_loss
from whet.algo.reward_model import reward_model_loss
from whet.algo.sft import sft_loss
from whet.build.learners import build_reference, meter_of
from whet.model.causal import load_causal
from whet.model.scalar import load_scalar
from whet.settings.rl import BaseRunConfig
from whet.settings.supervised import DpoRunConfig, RewardModelRunConfig
from whet.train.lead import ALONE, Lead
from whet.train.supervised import SupervisedLearner
from whet.train.torch_native.backend import TorchBackend


def build_supervised(config: BaseRunConfig, folder: Path, num_steps: int, lead: Lead = ALONE) -> tuple[TorchBackend, SupervisedLearner]:
    """What trains, and what learns with it.

    Args:
        config: settings of `whet sft`, `dpo` or `rm`.
        folder: the model's.
        num_steps: of the run.
        lead: tells the other processes of the job what all of them do.
    """
    if isinstance(config, RewardModelRunConfig):
        scores = load_scalar(folder, config.model, trainable=True, new_head="normal", seed=config.seed, spread=config.train.spreads)
        backend = TorchBackend(scores, config.train, num_steps)
        loss = reward_model_loss(config.rm)
        return backend, SupervisedLearner(backend, loss, meter_of(config, backend), Need.SCORES, lead=lead)
    backend = TorchBackend(load_causal(folder, config.model, trainable=True, spread=config.train.spreads), config.train, num_steps)
    if not isinstance(config, DpoRunConfig):
        return backend, SupervisedLearner(backend, sft_loss, meter_of(config, backend), lead=lead)
    reference, kept = build_reference(config, folder, backend)
    loss = dpo_loss(config.dpo)
    return backend, SupervisedLearner(backend, loss, meter_of(config, backend), reference=reference, kept=kept, lead=lead)
