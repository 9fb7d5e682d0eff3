"""`whet plan --rollouts`: the scheduler, buffer, engine pool and training loop of a run on a simulated clock, and what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from whet.checkpoint.run_state import RunState
from whet.core.batch import TrainBatch
from whet.data.template import Renderer
from whet.engine.pool.breaker import Breaker
from whet.engine.pool.config import Supervision
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool
from whet.engine.pool.weights import UpdateMember, WeightSync
from whet.engine.publish import Publisher
from whet.env.base import EnvFactory
from whet.env.limits import Limits
from whet.evaluate.evaluation import EvaluationSet
from whet.loop import Evaluated, Observer, RolloutRun, train_rl
from whet.observe.metrics import Metrics
from whet.observe.spans import Phases
from whet.plan.rollouts.clock import SimulatedThread, run_simulated
from whet.plan.rollouts.config import SimulationConfig
from whet.plan.rollouts.engine import SimulatedMember
from whet.plan.rollouts.world import Driver, SimulatedEnv, SimulatedRenderer, SimulatedReward, SimulatedSource, World
from whet.rollout.constant import RewardGuard
from whet.rollout.filters import build_selection
from whet.rollout.recipe import Recipe
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.stop import Stop
from whet.train.batching import BatchPlan, plan_batch
from whet.train.learners import Learners, Update
from whet.transport.base import Ticket
from whet.types import JSON, Group, Progress, Proof, Receipt, Sample, SamplingParams

EVER = 1e9
"""Seconds that a simulated member may take for anything."""
NO_FOLDER = Path("simulated")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Means over the rollouts of a simulation, without the first ones."""

    step_s: float
    """Seconds from one update to the next."""
    engine_idle: float
    """Share of the engines' time in which they had no request to work on."""
    trainer_idle: float
    """Share of the trainer's time outside of updates."""
    tokens_per_s: float
    """Sampled tokens that were trained on, per second."""
    dropped_tokens: float
    """Sampled tokens of a rollout that were thrown away: cut off, too old, filtered."""
    masked_tokens: float
    """Sampled tokens of a rollout that were too old to train."""
    mean_age: float
    """Age of the trained tokens: versions that the policy is newer than theirs."""
    max_age: float
    """Age of the oldest."""
    rollouts: int
    """Rollouts that were counted."""
    real_s: float
    """Seconds that the simulation itself took."""

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"step             {self.step_s:.4g} s",
            f"engines idle     {self.engine_idle:.1%}",
            f"trainer idle     {self.trainer_idle:.1%}",
            f"trained tokens   {self.tokens_per_s:,.0f} per second",
            f"dropped tokens   {self.dropped_tokens:,.0f} per rollout",
            f"too old to train {self.masked_tokens:,.0f} tokens per rollout",
            f"age of tokens    {self.mean_age:.2f} versions on average, {self.max_age:.0f} at most",
            f"simulated        {self.rollouts} rollouts in {self.real_s:.1f} s",
        ]

    def to_dict(self) -> dict[str, JSON]:
        """For a file."""
        return asdict(self)


def simulate(config: SimulationConfig) -> Predicted:
    """Play a run on a simulated clock.

    Raises:
        ValueError: if the sizes of a rollout contradict each other, or there is no record to draw replies from.
    """
    plan = plan_batch(config.batch)
    began = time.perf_counter()
    steps = run_simulated(lambda: _train(config, plan))
    return _summary(config, steps[config.skip :], time.perf_counter() - began)


async def _train(config: SimulationConfig, plan: BatchPlan) -> list[dict[str, float]]:
    world = World(config)
    limit = max(2, config.max_trajectory_tokens // config.grain)
    driver = Driver(config.trainer.driver_s_per_turn)
    members = [SimulatedMember(config.engine, world, limit) for _ in range(config.engine.count)]
    pool_config = Supervision(health_every_s=EVER, health_timeout_s=EVER, step_timeout_s=EVER, update_timeout_s=EVER)
    slots = [Slot(f"engine {i}", _never, member, Breaker(1, EVER)) for i, member in enumerate(members)]
    weights = cast(WeightSync, _Weights(config.engine.update_s))
    pool = EnginePool(slots, weights, pool_config, deterministic=False)
    runner = TrajectoryRunner(
        engine=pool,
        renderer=cast(Renderer, SimulatedRenderer(world)),
        make_env=EnvFactory(lambda: SimulatedEnv(world, driver)),
        reward=SimulatedReward(world, config.replies.reward_s),
        sampling=SamplingParams(limit),
        limits=Limits(max_turns=1 << 20, max_tokens=limit, max_turn_tokens=limit),
        timeout_s=None,
        max_in_flight=config.max_in_flight,
    )
    spec = RolloutSpec(plan.prompts_per_rollout, plan.samples_per_prompt)
    selection = build_selection(config.control)
    rollouts = Rollouts(SimulatedSource(), runner, config.control, spec, config.num_rollouts, config.seed, selection)
    trainer, steps = _Trainer(config, [*members, driver]), _Steps()
    run = RolloutRun(
        num_rollouts=config.num_rollouts,
        seed=config.seed,
        rollouts=rollouts,
        recipe=cast(Recipe, trainer),
        learners=cast(Learners, trainer),
        publisher=cast(Publisher, _Publisher(pool)),
        evaluations=cast(Sequence[EvaluationSet], ()),
        evaluate_every=None,
        evaluate_first=False,
        evaluated=Evaluated(),
        guard=RewardGuard(None, rewards_teach=False),
        checkpoint=cast(RunState, _NoCheckpoint()),
        observer=cast(Observer, _observer(steps)),
        stop=Stop(),
        thread=cast(Executor, SimulatedThread(trainer.take_seconds, trainer.pace, trainer.end)),
    )
    await train_rl(run)
    await rollouts.close()
    return steps.found


def _summary(config: SimulationConfig, steps: Sequence[Mapping[str, float]], real_s: float) -> Predicted:
    whole = sum(step["time/step_s"] for step in steps)
    busy = sum(step["time/engine_busy_s"] for step in steps)
    updating = sum(step.get("time/annotate_s", 0.0) + step["time/update_s"] for step in steps)
    masked = fmean(step["staleness/masked_tokens"] for step in steps) * config.grain
    trained = sum(step["rollout/tokens"] - step["staleness/masked_tokens"] for step in steps) * config.grain
    return Predicted(
        step_s=whole / len(steps),
        engine_idle=1 - busy / (whole * config.engine.count),
        trainer_idle=1 - updating / whole,
        tokens_per_s=trained / whole,
        dropped_tokens=fmean(step["rollout/dropped_tokens"] for step in steps) * config.grain,
        masked_tokens=masked,
        mean_age=fmean(step.get("staleness/mean", 0.0) for step in steps),
        max_age=max(step.get("staleness/max", 0.0) for step in steps),
        rollouts=len(steps),
        real_s=real_s,
    )


def _never(given_up: object) -> SimulatedMember:
    raise AssertionError("simulated engines are not lost")


class _Steps:
    """A tracker that keeps each step's values."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.found.append(dict(values))

    def close(self) -> None:
        pass


class _Silent:
    """A display that shows nothing, and a journal that keeps nothing."""

    folder = NO_FOLDER

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _observer(steps: _Steps) -> Observer:
    silent: Any = _Silent()
    phases = Phases(clock=asyncio.get_running_loop().time)
    return Observer(display=silent, display_without_log=silent, journal=silent, trackers=[steps], phases=phases)


class _Weights:
    """Weights without a content."""

    simultaneous = False

    def __init__(self, update_s: float) -> None:
        self._update_s = update_s

    async def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, receivers: Mapping[str, Sequence[str]], update: UpdateMember
    ) -> Receipt:
        await asyncio.sleep(self._update_s)
        receipts = [await update(name, cast(Ticket, None)) for name in receivers]
        return receipts[0]

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Published:
    """A publication without proof."""

    def metrics(self) -> Metrics:
        return {}


class _Publisher:
    """Brings versions without weights to the engines."""

    def __init__(self, pool: EnginePool[SimulatedMember]) -> None:
        self._pool = pool

    proofs: Mapping[int, Proof] = MappingProxyType({})
    """Empty: nothing is compared."""

    async def publish(self, version: int) -> _Published:
        if not self._pool.members or version > 0:
            await self._pool.update((), version)
        return _Published()


class _NoCheckpoint:
    """Begins afresh, and is never due."""

    best = None

    def resume(self) -> Progress:
        return Progress()

    def due(self, progress: Progress, total: int, metrics: Mapping[str, float]) -> bool:
        return False


class _Trainer:
    """Learners that take their time; their own algorithm, and the recipe of their samples."""

    needs = frozenset[str]()

    def __init__(self, config: SimulationConfig, others: Sequence[SimulatedMember | Driver]) -> None:
        self._times, self._grain, self._others = config.trainer, config.grain, others
        self._others_slowdown = config.engine.shared_slowdown
        self._recipe = Recipe(max_staleness=config.control.max_staleness, too_old=config.control.too_old)
        self._seconds = 0.0
        self.algorithm = self

    def take_seconds(self) -> float:
        """Seconds of the last piece of work."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def pace(self) -> float:
        """Seconds that a second of work takes at present."""
        return 1 + self._times.shared_slowdown if any(other.busy for other in self._others) else 1.0

    def end(self) -> None:
        """Engines and controller have the processors for themselves."""
        self._slow_down(0.0)

    def _slow_down(self, by: float) -> None:
        if self._others_slowdown:
            for other in self._others:
                other.slow_down(by)

    def samples(self, groups: Sequence[Group], version: int) -> tuple[list[Sample], Metrics]:
        self._seconds = self._times.other_s
        return self._recipe.samples(groups, version)

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        return batch, {}

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def update(self, batch: TrainBatch, progress: Progress, *, per_token: bool = False) -> Update:
        num_tokens = batch.num_tokens * self._grain
        self._seconds = self._times.step_s + num_tokens / self._times.tokens_per_s
        self._slow_down(self._others_slowdown)
        progress.optimizer_step += 1
        return Update({}, None, num_tokens)
