"""`whet.Policy`: a model for loops of one's own, in four calls: sample, forward_backward, optim_step, save and load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whet.algo.base import Algorithm, LossTerms, Need, StepPlan
from whet.algo.table import build_algorithm
from whet.api.calls import BATCH, Named, played_tables
from whet.api.given import NO_DATA, read_given
from whet.api.player import Player
from whet.build.export import export_model
from whet.build.learners import algorithm_of, build_learners, check_models
from whet.config import ConfigError
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.batch import batch_of as batch_of_samples
from whet.core.choices import ReducerName
from whet.core.weights import build_reducer
from whet.engine.publish import EnginePublisher
from whet.files import replace_file
from whet.here import holding
from whet.observe.metrics import flatten
from whet.rollout.samples import samples_of_groups
from whet.settings.rl import RunConfig
from whet.train.base import Backward
from whet.train.batching import plan_batch
from whet.train.build import build_backend
from whet.types import Group

if TYPE_CHECKING:
    from typing import Unpack

    from whet.api.keywords import TrainSettings  # pyright: ignore[reportMissingModuleSource]

OwnLoss = Callable[[Tensor, TrainBatch], Tensor]
"""`(logprobs, batch) -> terms`: one term for each token of a part of the batch. [T], [T]"""
COUNTERS = "policy.json"


def batch_of(groups: Sequence[Group]) -> TrainBatch:
    """Turn what was played into columns: a sample of each trajectory, or several where its history was rewritten. `rewards` are per sample
    [N], `tokens`, `loss_mask` and `rollout_logprobs` per token [T].

    Raises:
        ValueError: nothing was sampled, or greedily.
    """
    return batch_of_samples(samples_of_groups(groups))


class Policy:
    """A model that samples and learns, on the engine and the trainer of `whet train`.

    Args:
        model: as for `whet.train`, and so are the others.
        reward: None: what is sampled has no reward, and `forward_backward` takes a function.
        tools: functions that the model may call.
        algo: algorithm of `forward_backward(batch)`.
        settings: those of `whet.train`. `num_rollouts` is the number of optimizer steps that a learning rate's schedule is over.

    Example:
        with whet.Policy("model", reward=score, train__optim__lr=1e-5) as policy:
            groups = policy.sample(rows, samples=8)
            policy.forward_backward(whet.batch_of(groups))
            policy.optim_step()
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        reward: Named | Sequence[Named] | None = None,
        *,
        tools: Sequence[str | Callable[..., Any]] | None = None,
        algo: Named | None = None,
        **settings: Unpack[TrainSettings],
    ) -> None:
        given = read_given(played_tables(model, None, reward, tools, algo), settings)
        given.tree.setdefault("data", {}).setdefault("train", NO_DATA)
        given.tree.setdefault("reward", {"name": "random"})
        given.tree.setdefault("batch", BATCH)
        config: RunConfig = given.config(RunConfig, Path(given.tree.get("run_dir", "runs/policy")))
        self.config, self.algorithm = config, algorithm_of(config)
        check_models(config, self.algorithm)
        if Need.VALUES in self.algorithm.needs or config.num_engines_apart or config.train.spreads:
            raise ConfigError(["a Policy has one process and no critic: use whet.train for ppo, engines apart and train.parallel"])
        self._version, self._published, self.optimizer_step = 0, -1, 0
        self._newest = -1
        """The newest version that the engine ever had; it takes no older one."""
        with holding(given.functions):
            self._player = Player(config, scored=reward is not None, trainable=True)
            try:
                self.compute = self._player.compute
                self.compute(self._build)
            except BaseException:
                self._player.close()
                raise

    def _build(self) -> None:
        config, parts, plan = self.config, self._player.parts, plan_batch(self.config.batch)
        num_steps = config.num_rollouts or 1
        self._backend = build_backend(config.train, parts.model, num_steps)
        self._learners = build_learners(config, self._backend, parts.folder, self.algorithm, plan, num_steps)
        self._publisher = EnginePublisher(self._backend, parts.model, parts.engine, parts.thread)

    def sample(self, data: Any, samples: int = 1, *, greedy: bool = False) -> list[Group]:
        """Play each task `samples` times, with the newest weights, which the engine is first proven to hold.

        Args:
            data: prompts as texts, rows as for `whet.train`, or tasks, whose ids seed what is sampled.
            samples: trajectories of each.
            greedy: True: the most likely token every time; such trajectories cannot be trained on.

        Returns:
            A group for each task, in their order. A trajectory that failed is in it, with its outcome.
        """
        if self._published != self._version:
            self._player.loop.run(self._publisher.publish(self._version))
            self._published = self._newest = self._version
        return self._player.play(data, samples, greedy=greedy)

    def forward_backward(
        self, batch: TrainBatch, loss: OwnLoss | Named | None = None, *, reducer: ReducerName = "token_mean"
    ) -> Backward:
        """Add the gradient of a loss over a batch. Several calls add up, until `optim_step`.

        Args:
            batch: of `batch_of`; columns may be set with `batch.with_(advantages=...)`.
            loss: a function `(logprobs, batch) -> terms`, which is called on parts of the batch; or an algorithm of `[algo]`, by its name
                or as a table. None: that of the policy. An algorithm assigns credit itself, unless the batch has advantages.
            reducer: weights of a function's terms, which are added up: token_mean, sample_mean ...; an algorithm has its own.

        Returns:
            The loss, and the log-probs of the trained tokens.
        """
        if callable(loss):
            return self.compute(lambda: self._backend.forward_backward(batch.with_(weights=build_reducer(reducer)(batch)), _terms_of(loss)))
        algorithm = self.algorithm if loss is None else self._algorithm(loss)

        def compute() -> Backward:
            step = self._learners.annotate(batch)
            if step.advantages is None:
                step, _ = algorithm.assign_credit(step)
            step = algorithm.prepare(step.with_(weights=algorithm.reducer(step)))
            return self._backend.forward_backward(step, algorithm.loss, entropy_grad=algorithm.entropy_grad)

        return self.compute(compute)

    def optim_step(self) -> dict[str, float]:
        """Change the weights by the gradients that were added up. The next `sample` is of the new ones.

        Returns:
            `optim/grad_norm` and `optim/lr`.
        """
        metrics = self.compute(self._backend.optim_step)
        self._version += 1
        self.optimizer_step += 1
        return flatten(metrics)

    def save(self, folder: str | Path) -> Path:
        """Write everything that `load` needs to go on: weights, optimizer, counters. Returns the folder.

        Raises:
            ValueError: the folder is there already.
        """
        target = Path(folder)
        if target.exists():
            raise ValueError(f"{target} is there already: choose another folder")
        target.mkdir(parents=True)
        self.compute(lambda: self._backend.save(target))
        counters = {"version": self._version, "optimizer_step": self.optimizer_step, "num_played": self._player.num_played}
        replace_file(target / COUNTERS, json.dumps(counters) + "\n")
        return target

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            ValueError: it is no such folder, or of another model.
        """
        source = Path(folder)
        if not (source / COUNTERS).is_file():
            raise ValueError(f"{source} is no folder that Policy.save wrote: it has no {COUNTERS}")
        counters = json.loads((source / COUNTERS).read_text())
        self.compute(lambda: self._backend.load(source))
        self._version, self.optimizer_step = max(counters["version"], self._newest + 1), counters["optimizer_step"]
        self._published = -1
        self._player.num_played = counters["num_played"]

    def export(self, folder: str | Path) -> Path:
        """Write the model in Hugging Face format, with its tokenizer. Returns the folder."""
        target, config = Path(folder), self.config
        self.compute(lambda: export_model(self._backend, config, self._player.parts.folder, target, config.data.template_text))
        return target

    def close(self) -> None:
        """End the engine, tools and rewards."""
        self._player.close()

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _algorithm(self, loss: str | Mapping[str, Any]) -> Algorithm:
        table = {"name": loss} if isinstance(loss, str) else dict(loss)
        config = RunConfig.model_validate({**self.config.model_dump(exclude_unset=True), "algo": table})
        algorithm = build_algorithm(config.algo, StepPlan(1))
        check_models(config, algorithm)
        if algorithm.needs - self.algorithm.needs:
            missing = ", ".join(sorted(algorithm.needs - self.algorithm.needs))
            raise ConfigError([f"loss {table['name']!r} needs {missing}, which this policy was not built with: give Policy algo={loss!r}"])
        return algorithm


def _terms_of(loss: OwnLoss) -> Callable[[TrainBatch, TokenOutputs], LossTerms]:
    def terms(batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        found: Any = loss(out.logprobs, batch)
        if not isinstance(found, Tensor) or found.shape != out.logprobs.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"the loss returned {shape}, expected {len(out.logprobs)} terms, one for each token")
        return LossTerms(found, {})

    return terms
