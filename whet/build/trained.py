"""Weights that a run has trained, and how to load them into the model that it began with."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from whet.checkpoint.store import MANIFEST, CheckpointConfig, CheckpointStore
from whet.model.causal import CausalModel
from whet.model.config import LoraConfig
from whet.model.lora import FILE as ADAPTER_FILE
from whet.model.lora import add_adapter
from whet.runfolder.journal import END
from whet.train.torch_native.saving import BASE, BUFFERS, WEIGHTS, check_base, check_buffers, read_tensors


def newest_weights(run_dir: Path) -> Path | None:
    """Find the newest weights that a run has trained.

    Returns:
        The model folder of a run that came to its end (`run_dir/model`), else the newest checkpoint; None if
        nothing has been trained.

    Raises:
        ValueError: if the newest checkpoint is damaged.
    """
    model = run_dir / "model"
    exported = (model / "config.json").is_file() or (model / ADAPTER_FILE).is_file()
    if exported and _finished(run_dir):
        return model
    saved = CheckpointStore(run_dir / "checkpoints", CheckpointConfig()).newest()
    if saved is not None and saved.progress.optimizer_step > 0:
        return saved.folder
    return model if exported else None


def _finished(run_dir: Path) -> bool:
    """Tell whether the last start came to its end: it wrote the model after every checkpoint."""
    try:
        return json.loads((run_dir / END).read_text()).get("status") == "finished"
    except FileNotFoundError:
        return False  # it runs, or was killed


def is_whole_model(weights: Path) -> bool:
    """Tell whether a path of `newest_weights` is a model folder of its own, which needs no base."""
    return (weights / "config.json").is_file() and not (weights / MANIFEST).is_file()


def load_trained(model: CausalModel, weights: Path, lora: LoraConfig | None) -> None:
    """Put what a run has trained into the model that it began with; an adapter is added to the weights.

    Args:
        model: with the weights of `model.path`, whole and on one device.
        weights: a checkpoint, or the folder of an adapter (`newest_weights`).
        lora: the run's adapter; None: the run trains the model whole.

    Raises:
        ValueError: if the weights are of another kind, of another base or of another model.
    """
    adapter_file = weights / ADAPTER_FILE
    is_adapter = adapter_file.is_file() or (weights / BASE).is_file()
    if is_adapter and lora is None:
        raise ValueError(f"{weights} holds an adapter: name the settings that trained it (train.lora)")
    if not is_adapter and lora is not None:
        raise ValueError(f"{weights} holds a model that was trained whole, not an adapter: leave train.lora out")
    if lora is not None:
        adapter = add_adapter(model, lora)
        if adapter_file.is_file():
            adapter.read(adapter_file)
        else:
            check_base(weights / BASE, adapter)
            _copy(adapter.tensors(), weights)
        adapter.merge()
    else:
        check_buffers(weights / BUFFERS, model.saved_buffers())
        _copy(dict(model.named_weights()), weights)


def _copy(own: dict[str, torch.Tensor], weights: Path) -> None:
    """Copy a checkpoint's tensors over those of a model."""
    found = read_tensors(weights / WEIGHTS, own)
    odd = sorted(name for name in own.keys() | found.keys() if name not in own or name not in found or own[name].shape != found[name].shape)
    if odd:
        raise ValueError(f"{weights} is of another model than model.path: {len(odd)} tensors differ, among them {', '.join(odd[:3])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[name])
