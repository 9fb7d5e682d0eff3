"""What a run's checkpoints hold, in bytes by model: for the disk, and for the copies that they are written from."""

from __future__ import annotations

from pathlib import Path

from whet.algo.base import Need
from whet.build.learners import critic_train, train_beside
from whet.check.context import Scene
from whet.checkpoint.store import CheckpointStore
from whet.model.decoder import DecoderModel
from whet.plan.memory import ALWAYS, Part, checkpoint_bytes
from whet.settings.rl import BaseRunConfig
from whet.train.config import CriticConfig


def checkpoint_sizes(scene: Scene, model: DecoderModel, *, spread: bool) -> dict[str, int]:
    """Bytes of the tensors of each model that a checkpoint holds; `model` is the policy, and `spread` says whether the run is on a mesh,
    where bfloat16 models that train keep float32 parameters."""
    sizes = {"policy": checkpoint_bytes(model, scene.config.train, spread=spread)}
    if scene.beside is not None and scene.beside.critic is not None:
        sizes["critic"] = checkpoint_bytes(scene.beside.critic, critic_train(scene.rl, scene.rl.critic or CriticConfig()), spread=spread)
    reference = _kept_reference(scene, model)
    if reference is not None:
        sizes["reference"] = sum(p.nbytes for _, p in reference.named_weights())
    return sizes


def _kept_reference(scene: Scene, model: DecoderModel) -> DecoderModel | None:
    """The reference, where no folder has its weights: it is refreshed, or is what the policy began with and that was restored."""
    config = scene.config
    if scene.program.unit == "rollout":
        chosen = scene.rl.reference
        if chosen is not None and chosen.refresh_every is not None:
            return None if scene.beside is None else scene.beside.frozen.get("reference")
        needed = scene.algorithm is not None and Need.REF_LOGPROBS in scene.algorithm.needs
        begins = needed and (chosen is None or chosen.path is None)
    else:
        begins = scene.program.has_reference
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", config.checkpoint)
    return model if begins and model.adapter is None and store.keeps_reference() else None


def copy_part(sizes: dict[str, int], config: BaseRunConfig) -> Part:
    """What a process copies into its machine's memory before a checkpoint of such sizes is written beside computation: of each model what
    its layout gives to a rank."""
    copied = 0
    for name, size in sizes.items():
        degrees = train_beside(config, config.beside.get(name)).degrees
        copied += size if degrees is None else size * degrees.replicate // degrees.num_ranks
    estimate = config.train.degrees is not None
    return Part("copy of a checkpoint", copied, ALWAYS, "set checkpoint.async_save=false", estimate=estimate)
