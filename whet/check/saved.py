"""Bytes of a run's checkpoints by model, on the disk and in the copies that they are written from."""

from __future__ import annotations

from pathlib import Path

from whet.algo.base import Need
from whet.build.learners import auxiliary_train, critic_train
from whet.check.context import CheckContext
from whet.checkpoint.store import CheckpointStore
from whet.model.decoder import DecoderModel
from whet.plan.memory import ALWAYS, Part, checkpoint_bytes
from whet.settings.rl import BaseRunConfig
from whet.train.config import CriticConfig


def checkpoint_sizes(context: CheckContext, model: DecoderModel, *, spread: bool) -> dict[str, int]:
    """Bytes of each model's tensors in a checkpoint.

    Args:
        context: results of the checks.
        model: the policy.
        spread: true on a mesh, where bfloat16 models that train keep float32 parameters.
    """
    sizes = {"policy": checkpoint_bytes(model, context.config.train, spread=spread)}
    if context.auxiliary is not None and context.auxiliary.critic is not None:
        train = critic_train(context.rl, context.rl.critic or CriticConfig())
        sizes["critic"] = checkpoint_bytes(context.auxiliary.critic, train, spread=spread)
    reference = _kept_reference(context, model)
    if reference is not None:
        sizes["reference"] = sum(p.nbytes for _, p in reference.named_weights())
    return sizes


def _kept_reference(context: CheckContext, model: DecoderModel) -> DecoderModel | None:
    """The reference if checkpoints hold it, as no folder has its weights: it is refreshed, or was restored as
    the policy's first weights.
    """
    config = context.config
    if context.program.unit == "rollout":
        chosen = context.rl.reference
        if chosen is not None and chosen.refresh_every is not None:
            return None if context.auxiliary is None else context.auxiliary.frozen.get("reference")
        needed = context.algorithm is not None and Need.REF_LOGPROBS in context.algorithm.needs
        begins = needed and (chosen is None or chosen.path is None)
    else:
        begins = context.program.has_reference
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", config.checkpoint)
    return model if begins and model.adapter is None and store.keeps_reference() else None


def copy_part(sizes: dict[str, int], config: BaseRunConfig) -> Part:
    """Memory of a process's copy of a checkpoint while `checkpoint.async_save` writes it: a rank's share of
    each model in `sizes`.
    """
    copied = 0
    for name, size in sizes.items():
        degrees = auxiliary_train(config, config.auxiliary.get(name)).degrees
        copied += size if degrees is None else size * degrees.replicate // degrees.num_ranks
    estimate = config.train.degrees is not None
    return Part("copy of a checkpoint", copied, ALWAYS, "set checkpoint.async_save=false", estimate=estimate)
