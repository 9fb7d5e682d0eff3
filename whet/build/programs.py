"""The commands that train, in one table: which model each trains, on which data, by which loss. A new command
is a class of settings in `whet.settings.supervised.RUN_CONFIGS`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from whet.algo.base import LossFunction, Need
from whet.algo.dpo import dpo_loss
from whet.algo.reward_model import reward_model_loss
from whet.algo.sft import sft_loss
from whet.build.learners import algorithm_of, build_reference, meter_of
from whet.build.step_data import StepData, conversations, pairs
from whet.data.template import Renderer
from whet.model.causal import CausalModel, load_causal
from whet.model.config import ModelConfig
from whet.model.meta import read_meta, read_meta_scalar
from whet.model.scalar import ScalarModel, load_scalar
from whet.observe.display import Headline
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import DpoRunConfig, PairRunConfig, RewardModelRunConfig, SupervisedRunConfig, kind_of
from whet.train.build import build_backend
from whet.train.controller import LOCAL, LOSSES, Controller
from whet.train.learners import Models, Refresh
from whet.train.supervised import SupervisedLearner

Settings = TypeVar("Settings", contravariant=True)
StepUnit = Literal["rollout", "step"]


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of model that trains."""

    load: Callable[..., CausalModel | ScalarModel]
    """Loads the model that trains, given the settings and its folder; `check=False` as for `load_causal`."""
    load_frozen: Callable[[Path, ModelConfig], CausalModel | ScalarModel]
    """Loads the same kind of model from a folder, to be read and not trained."""
    read_meta: Callable[[Path, ModelConfig], CausalModel | ScalarModel]
    """Makes the same model without contents, by its config.json alone."""
    measured_by: Need
    """Output of the model that a loss's metrics are computed from, on data that do not train."""


LANGUAGE = ModelKind(
    lambda config, folder, *, check=True: load_causal(folder, config.model, trainable=True, check=check, spread=config.train.spreads),
    partial(load_causal, trainable=False),
    read_meta,
    Need.OLD_LOGPROBS,
)
SCALAR = ModelKind(
    lambda config, folder, *, check=True: load_scalar(
        folder, config.model, trainable=True, new_head="normal", seed=config.seed, check=check, spread=config.train.spreads
    ),
    partial(load_scalar, trainable=False),
    read_meta_scalar,
    Need.SCORES,
)


@dataclass(frozen=True)
class Rows(Generic[Settings]):
    """A kind of data that a command learns from as they are."""

    name: Literal["conversations", "pairs"]
    per_step: Callable[[Settings], int]
    """Number of rows that one optimizer step takes."""
    read: Callable[[Settings, Renderer], StepData]
    samples_per_row: int = 1


CONVERSATIONS = Rows[SupervisedRunConfig]("conversations", lambda config: config.samples_per_step, conversations)
PAIRS = Rows[PairRunConfig]("pairs", lambda config: config.pairs_per_step, pairs, samples_per_row=2)


class Objective(NamedTuple):
    """The loss of an optimizer step."""

    loss: LossFunction
    entropy_grad: bool = False
    """True where the loss differentiates the entropy."""


@dataclass(frozen=True)
class Program(Generic[Settings]):
    """A command that trains."""

    headlines: tuple[Headline, ...]
    """Metrics that the display shows."""
    objective: Callable[[Settings], Objective]
    rows: Rows[Settings] | None = None
    """Data that it learns from as they are; None: it plays rollouts of prompts."""
    model: ModelKind = LANGUAGE
    has_reference: bool = False
    """True where the loss compares with the model that the run begins with; of a run with rollouts, its
    algorithm says.
    """

    @property
    def unit(self) -> StepUnit:
        """The unit that the run's length is counted in."""
        return "rollout" if self.rows is None else "step"


RL_HEADLINES = (
    Headline("reward/total", "reward", ".3f"),
    Headline("response/tokens/mean", "len", ".1f"),
    Headline("policy/entropy", "entropy", ".3f"),
    Headline("policy/kl_ref", "kl", ".2g"),
    Headline("policy/clip_fraction", "clip", ".3f"),
    Headline("optim/grad_norm", "grad", ".3f"),
    Headline("groups/zero_variance", "flat groups", ".2f"),
    Headline("outcome/truncated", "cut", ".2f"),
    Headline("outcome/failed", "failed", ".2f"),
    Headline("mismatch/logprob_max", "mismatch", ".1e"),
    Headline("tokens/sampled", "sampled", ",.0f"),
    Headline("tokens/trained", "trained", ",.0f"),
    Headline("tokens/dropped", "dropped", ",.0f"),
    Headline("tokens_per_second/rollout", "tok/s", ".0f"),
)


def step_headlines(name: str, *own: str) -> tuple[Headline, ...]:
    """The loss `name/loss`, a command's own metrics, and what every run that learns from data as they are
    shows.
    """
    return (
        Headline(f"{name}/loss", "loss", ".4f"),
        *(Headline(f"{name}/{metric}", metric, ".3f") for metric in own),
        Headline("optim/grad_norm", "grad", ".3f"),
        Headline("optim/lr", "lr", ".2g"),
        Headline("tokens_per_second/update", "tok/s", ".0f"),
    )


def policy_objective(config: RunConfig) -> Objective:
    """The policy's loss, as the algorithm has it."""
    algorithm = algorithm_of(config)
    return Objective(algorithm.loss, algorithm.entropy_grad)


PROGRAMS: dict[str, Program[Any]] = {
    "train": Program[RunConfig](RL_HEADLINES, policy_objective),
    "sft": Program[SupervisedRunConfig](step_headlines("sft"), lambda config: Objective(sft_loss), CONVERSATIONS),
    "dpo": Program[DpoRunConfig](
        step_headlines("dpo", "accuracy", "margin"), lambda config: Objective(dpo_loss(config.dpo)), PAIRS, has_reference=True
    ),
    "rm": Program[RewardModelRunConfig](
        step_headlines("rm", "accuracy", "margin"), lambda config: Objective(reward_model_loss(config.rm)), PAIRS, SCALAR
    ),
}
"""By the command."""


def program_of(config: BaseRunConfig) -> Program[Any]:
    """The program that the settings are for."""
    return PROGRAMS[kind_of(config)]


def build_supervised(
    config: BaseRunConfig, folder: Path, model: CausalModel | ScalarModel, num_steps: int, controller: Controller = LOCAL
) -> SupervisedLearner:
    """Build what takes steps with a model.

    Args:
        config: settings of a command that learns from data as they are.
        folder: the model's.
        model: loaded from it, trained in place.
        num_steps: of the run.
        controller: broadcasts calls of the models to the other ranks.
    """
    program = program_of(config)
    backend = build_backend(config.train, model, num_steps)
    reference, kept = build_reference(config, folder, backend) if program.has_reference else (None, None)
    loss, measured_by = program.objective(config).loss, program.model.measured_by
    controller.share(LOSSES, loss)
    models = Models(backend, reference, None if kept is None else Refresh(kept, None))
    return SupervisedLearner(models.controlled(controller), loss, meter_of(config, backend), measured_by)
