"""From `[engine]` to a live engine: in this process, or in several."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

import torch

from whet.engine.base import Engine
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.grammar import Grammars
from whet.engine.embedded.stops import Decode
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Tell
from whet.engine.pool.pool import to_errors
from whet.engine.workers.copies import EngineCopies
from whet.engine.workers.launch import Launcher
from whet.model.causal import CausalModel, pick_device
from whet.model.config import ModelConfig
from whet.transport.settings import Syncing


def engine_model(config: ModelConfig, sizes: EmbeddedConfig, *, apart: bool = False) -> ModelConfig:
    """How an engine's own model is held: copies have theirs in the CPU's memory, whatever they compute on. `apart`: even a single one is a
    process of its own."""
    return config if sizes.num_processes == 1 and not apart else config.model_copy(update={"device": "cpu"})


@contextmanager
def engine_of(
    model: CausalModel,
    config: ModelConfig,
    sizes: EmbeddedConfig,
    folder: Path,
    thread: Executor,
    decode: Decode,
    grammars: Grammars,
    sync: Syncing | None = None,
    *,
    shares_weights: bool,
    deterministic: bool,
    pool: PoolConfig,
    launcher: Launcher | None = None,
    tell: Tell = to_errors,
) -> Iterator[Engine]:
    """The engine that the settings ask for; its processes end with it. Whoever runs it closes it.

    Args:
        model: whose weights it samples from; made by `engine_model`, unless it is the trainer's.
        config: of the model.
        sizes: `[engine.embedded]`.
        folder: of the tokenizer.
        thread: where an engine of this process takes its steps.
        decode: token ids to text.
        grammars: of the tokenizer.
        sync: how new weights reach an engine in processes of its own; None: through memory.
        shares_weights: whether the model is the trainer's.
        deterministic: as for the engines.
        launcher: starts its processes elsewhere, even a single one; none: here.
        pool: `[engine.pool]`.
        tell: is told of each of its processes that is lost.
    """
    if sizes.num_processes == 1 and launcher is None:
        yield EmbeddedEngine(
            model, sizes, thread, shares_weights=shares_weights, deterministic=deterministic, decode=decode, grammars=grammars
        )
        return
    devices = copy_devices(sizes, config) if launcher is None else placed_devices(sizes, config)
    trust = config.trust_remote_code
    copies = EngineCopies(
        model,
        sizes,
        devices,
        deterministic=deterministic,
        tokenizer=folder,
        trust_remote_code=trust,
        sync=sync,
        launcher=launcher,
        pool=pool,
        tell=tell,
    )
    try:
        yield copies
    finally:
        copies.end()


def copy_devices(sizes: EmbeddedConfig, config: ModelConfig) -> list[str]:
    """Where each process of the engine computes, those of the first copy first.

    Raises:
        ValueError: if a device is not there, or they are fewer than copies.
    """
    if sizes.copy_devices:
        return [str(pick_device(name, "engine.embedded.copy_devices")) for name in sizes.copy_devices]
    device = pick_device(config.device)
    if device.type != "cuda":
        return [device.type] * sizes.num_processes
    if sizes.num_processes > torch.cuda.device_count():
        wanted = f"copies is {sizes.copies}" + (f" of {sizes.tensor_parallel} (tensor_parallel)" if sizes.tensor_parallel > 1 else "")
        raise ValueError(
            f"engine.embedded.{wanted}, but torch sees {torch.cuda.device_count()} CUDA devices; lower it, or name a "
            "device for each in engine.embedded.copy_devices"
        )
    return [f"cuda:{i}" for i in range(sizes.num_processes)]


def placed_devices(sizes: EmbeddedConfig, config: ModelConfig) -> list[str]:
    """Where processes compute that are started elsewhere: each sees its own device alone.

    Raises:
        ValueError: if the settings name devices of this machine.
    """
    if sizes.copy_devices:
        raise ValueError(
            f"engine.embedded.copy_devices names {', '.join(sizes.copy_devices)}, but the cluster gives each process its device: leave it "
            "out, and set cluster.engine_gpus"
        )
    return [pick_device(config.device).type] * sizes.num_processes
