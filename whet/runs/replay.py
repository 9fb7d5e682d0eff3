"""`whet replay-batch`: repeat an optimizer step that gave NaN or infinity, and find the first module that
did.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whet.algo.base import LearnsValues
from whet.build.learners import algorithm_of, critic_train
from whet.build.process import prepare_process
from whet.build.programs import Objective, program_of
from whet.config import load_config
from whet.core.nonfinite import NonFinite
from whet.data.hub import resolve_model_path
from whet.model.causal import CausalModel
from whet.model.lora import FILE as ADAPTER_FILE
from whet.model.lora import Adapter
from whet.model.scalar import ScalarModel, load_scalar
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import RUN_CONFIGS, command_of
from whet.train.base import Backend
from whet.train.build import build_backend
from whet.train.config import CriticConfig
from whet.train.kept import CONFIG, MODEL, Kept, odd_columns, read_kept
from whet.train.learners import optimizer_step

Settings = TypeVar("Settings", bound=BaseRunConfig)


@dataclass(slots=True)
class Replay:
    """Result of repeating a step."""

    kept: Kept
    message: str | None = None
    """Error of this time; None: no error."""
    loss: float | None = None
    odd_columns: list[str] = field(default_factory=list)
    """Columns of the batch that were not finite to begin with."""
    first_forward: str | None = None
    """The first module whose output was not finite although its inputs were."""
    first_backward: str | None = None
    """The module nearest to the loss whose output had a gradient that is not finite."""

    @property
    def reproduced(self) -> bool:
        return self.message == self.kept.message


def replay_batch(folder: Path) -> Replay:
    """Repeat a saved step as the run does it: same weights, same batch, same settings. Nothing is written.

    Raises:
        ValueError: if the folder is no kept batch.
    """
    kept = read_kept(folder)
    path = folder / CONFIG
    config = _settings(RUN_CONFIGS[command_of(tomllib.loads(path.read_text()))], path)
    prepare_process(config)
    redone = _critic(kept, _settings(RunConfig, path)) if kept.learner == "critic" else _policy(kept, config)
    loss, entropy_grad = redone.objective
    found = Replay(kept, odd_columns=odd_columns(kept.batch))
    with _watching(redone.model.hf, found):
        try:
            found.loss = optimizer_step(redone.backend, kept.batch, loss, entropy_grad=entropy_grad)[0].loss
        except NonFinite as error:
            found.message = str(error)
    return found


def _settings(kind: type[Settings], path: Path) -> Settings:
    """Settings of the run, for one process."""
    config = load_config(kind, path)
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": None})})


@dataclass(frozen=True, slots=True)
class _Learner:
    """Learner of the step."""

    model: CausalModel | ScalarModel
    backend: Backend
    objective: Objective


def _critic(kept: Kept, config: RunConfig) -> _Learner:
    """Critic of the step, and its loss."""
    algorithm = algorithm_of(config)
    assert isinstance(algorithm, LearnsValues)
    critic = load_scalar(kept.folder / MODEL, config.model, trainable=True, check=False)
    chosen = (config.critic or CriticConfig()).model_copy(update={"parallel": None})
    return _Learner(critic, build_backend(critic_train(config, chosen), critic, total_steps=1), Objective(algorithm.value_loss))


def _policy(kept: Kept, config: BaseRunConfig) -> _Learner:
    """Policy of the step, and its loss."""
    folder, program = kept.folder / MODEL, program_of(config)
    source = resolve_model_path(config.model.path) if config.train.lora is not None else folder  # then only the adapter was kept
    model = program.model.load(config, source, check=False)
    backend = build_backend(config.train, model, total_steps=1)
    if isinstance(model.adapter, Adapter):
        model.adapter.read(folder / ADAPTER_FILE)
    return _Learner(model, backend, program.objective(config))


@contextmanager
def _watching(model: nn.Module, found: Replay) -> Iterator[None]:
    """Record the first modules whose output or gradient is not finite."""

    def seen_forward(name: str, inputs: Any, output: Any) -> None:
        if found.first_forward is None and not _finite(output) and _finite(inputs):
            found.first_forward = name
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: seen_backward(name, gradient))

    def seen_backward(name: str, gradient: Tensor) -> None:
        if found.first_backward is None and not _finite(gradient):
            found.first_backward = name

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: seen_forward(name, inputs, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))
