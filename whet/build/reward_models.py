"""Reward models that are spread over the processes of a job."""

from __future__ import annotations

from collections.abc import Sequence

from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.core.preference import last_tokens
from whet.data.hub import resolve_model_path
from whet.model.scalar import load_scalar
from whet.reward.build import reward_models
from whet.reward.model import ModelRewardOptions, Scorer
from whet.reward.model_reward import KEY, model_config
from whet.settings.rl import RunConfig, reward_tables
from whet.train.base import Backend
from whet.train.build import build_backend
from whet.train.controller import LOCAL, Controller
from whet.train.torch_native.config import TrainConfig
from whet.types import Sample
from whet.types.columns import Ints, Runs
from whet.types.records import unsampled


class SpreadScorer:
    """A reward model of which each process holds a part.

    Args:
        name: in calls.
        options: of the reward.
        controller: broadcasts calls to the other ranks.
    """

    def __init__(self, name: str, options: ModelRewardOptions, controller: Controller) -> None:
        self.name, self.options, self._controller = name, options, controller
        self._backend: Backend | None = None
        self.max_positions: int | None = None

    def load(self, train: TrainConfig) -> Backend:
        """Make the model; every process does so."""
        model = load_scalar(resolve_model_path(self.options.path), model_config(self.options), trainable=False, key=KEY, spread=True)
        self.max_positions = model.max_positions
        backend = build_backend(train.model_copy(update={"lora": None}), model, None)
        self._backend = self._controller.control(self.name, backend, Backend)
        return backend

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        assert self._backend is not None, "it is loaded as the run begins"
        batch = batch_of([_as_sample(tokens) for tokens in sequences])
        found = self._backend.annotate(batch, Need.SCORES).scores
        assert found is not None
        return found[last_tokens(batch)].tolist()


class SpreadScores:
    """The reward models of a run whose options say `spread`; the same in every process of the job.

    Args:
        config: the run's settings. With one process there are none: a model is whole there.
        controller: broadcasts calls to the other ranks.
    """

    def __init__(self, config: RunConfig, controller: Controller = LOCAL) -> None:
        tables = reward_tables(config) if config.train.spreads else []
        chosen = [options for table in tables for options in reward_models(table) if options.spread]
        self._train = config.train
        self._scorers = [SpreadScorer(f"reward {i}", options, controller) for i, options in enumerate(dict.fromkeys(chosen), 1)]

    def of(self, options: ModelRewardOptions) -> Scorer | None:
        """Scorer of a reward with these options; None: the reward has a model of its own."""
        return next((scorer for scorer in self._scorers if scorer.options == options), None)

    def load(self) -> dict[str, Backend]:
        """Make the models; every process does so. Returns them by the names in calls."""
        return {scorer.name: scorer.load(self._train) for scorer in self._scorers}


def _as_sample(tokens: Sequence[int]) -> Sample:
    return unsampled(Ints.of(tokens), Runs[bool].repeat(False, len(tokens)))
