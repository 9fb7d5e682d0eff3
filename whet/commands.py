"""What the command line's commands do, as functions of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from whet.algo import StepPlan, build_algorithm
from whet.build import (
    RL_HEADLINES,
    SFT_HEADLINES,
    Parts,
    build_evaluations,
    build_observer,
    build_parts,
    export_model,
    free_folder,
    open_run,
    prepare_process,
    prompt_length,
    saving,
    write_summary,
)
from whet.build import length_of_run as length
from whet.checkpoint.store import CheckpointStore
from whet.core.weights import REDUCERS
from whet.data.hub import resolve_model_path
from whet.data.source import TaskSource
from whet.data.supervised import supervised_source
from whet.data.template import Renderer, load_tokenizer
from whet.engine.base import Engine, EngineFailed
from whet.loop import Run, SupervisedRun, train_rl, train_sft
from whet.model.causal import load_causal
from whet.observe import Display, Metrics, RecordWriter, build_display, flatten, merge_metrics
from whet.rollout.collect import check_trainable
from whet.rollout.report import RolloutFailed, new_failures, require_valid, rollout_metrics
from whet.rollout.samples import samples_of_groups
from whet.settings import RunConfig, SupervisedRunConfig, training_rows
from whet.sync.base import SyncError
from whet.sync.shared import SharedPublisher
from whet.train.base import NonFinite
from whet.train.batching import plan_batch
from whet.train.learners import Learners
from whet.train.torch_native.backend import TorchBackend
from whet.types import Group

T = TypeVar("T")

STOPS = (ValueError, OSError, RolloutFailed, NonFinite, SyncError, EngineFailed)
"""What ends a command with words instead of a traceback."""


def train(config: RunConfig) -> Mapping[str, float]:
    """`whet train`: reinforcement learning to its end, and the model exported to `<run_dir>/model`.

    Returns:
        The last evaluation's `eval/<set>/<metric>`; nothing if there is no set.
    """
    check_trainable(config.rollout)
    plan = plan_batch(config.batch)
    algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt))
    run_dir, notes = open_run(config)
    with build_parts(config, trainable=True) as parts:
        source = training_source(config, parts)
        num_rollouts = length(len(source), plan.prompts_per_rollout, config.num_rollouts, config.num_epochs, "num_rollouts")
        backend = TorchBackend(parts.model, config.train, num_rollouts * plan.optimizer_steps)
        reference = None
        if "ref_logprobs" in algorithm.needs:
            reference = TorchBackend(load_causal(parts.folder, config.model, trainable=False), config.train, None)
        evaluations = build_evaluations(config, parts, run_dir)
        facts = run_facts(config, parts, source)
        observer = build_observer(config, run_dir, RL_HEADLINES)
        store = CheckpointStore(run_dir / "checkpoints", config.checkpoint)
        resume, save = saving(store, backend, observer, source)
        run = Run(
            num_rollouts=num_rollouts,
            seed=config.seed,
            samples_per_prompt=plan.samples_per_prompt,
            prompts_per_rollout=plan.prompts_per_rollout,
            source=source,
            player=parts.player,
            learners=Learners(backend, reference, algorithm, plan, config.seed),
            publisher=SharedPublisher(backend, parts.model, parts.engine, parts.thread),
            evaluations=evaluations,
            evaluate_every=config.evaluate.interval,
            evaluate_first=config.evaluate.before_training,
            checkpoint=store,
            observer=observer,
            thread=parts.thread,
            resume=resume,
            save=save,
        )
        try:
            observer.display.start(f"whet train: {run_dir}", num_rollouts, facts)
            warn_all(observer.display, notes)
            evaluated = asyncio.run(with_engine(train_rl(run), parts.engine))
            export_model(backend, config.model, parts.folder, run_dir / "model")
            observer.display.note(f"the model is in {run_dir / 'model'}, metrics in {run_dir / 'metrics.jsonl'}")
        finally:
            observer.close()
    return evaluated


def sft(config: SupervisedRunConfig) -> Path:
    """`whet sft`: supervised fine-tuning to its end. Returns the folder of the exported model."""
    run_dir, notes = open_run(config)
    prepare_process(config)
    folder = resolve_model_path(config.model.path)
    renderer = Renderer(load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code))
    source = supervised_source(config.data, renderer, run_seed=config.seed)
    num_steps = length(len(source), config.samples_per_step, config.num_steps, config.num_epochs, "num_steps")
    model = load_causal(folder, config.model, trainable=True)
    backend = TorchBackend(model, config.train, num_steps)
    observer = build_observer(config, run_dir, SFT_HEADLINES)
    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint)
    resume, save = saving(store, backend, observer, source)
    run = SupervisedRun(
        num_steps, config.samples_per_step, source, backend, REDUCERS[config.reducer], store, observer, resume, save
    )
    facts = {"model": str(folder), "conversations": str(len(source)), "device": str(model.device)}
    try:
        observer.display.start(f"whet sft: {run_dir}", num_steps, facts)
        warn_all(observer.display, notes)
        train_sft(run)
        export_model(backend, config.model, folder, run_dir / "model")
        observer.display.note(f"the model is in {run_dir / 'model'}, metrics in {run_dir / 'metrics.jsonl'}")
    finally:
        observer.close()
    return run_dir / "model"


def evaluate(config: RunConfig) -> Mapping[str, float]:
    """`whet evaluate`: play the evaluation sets once, into a folder of their own, `<run_dir>/evaluate_<n>`.

    Returns:
        `eval/<set>/<metric>`, also in the folder's results.json.
    """
    if not config.evaluate.sets:
        raise ValueError("there are no evaluation sets; give one, for example evaluate.sets.NAME.path=FILE.jsonl")
    folder = free_folder(Path(config.run_dir), "evaluate")
    open_run(config.model_copy(update={"run_dir": str(folder)}))
    values: dict[str, float] = {}
    with build_parts(config, trainable=False) as parts, closing(build_display(config.observe.display, RL_HEADLINES)) as display:
        sets = build_evaluations(config, parts, folder)

        async def work() -> None:
            for chosen in sets:
                display.phase(f"{chosen.name}: {len(chosen.tasks)} tasks x {chosen.samples_per_prompt}")
                metrics, groups = await chosen.run(0, config.seed)
                warn_failures(display, groups)
                values.update(flatten(metrics))

        display.start(f"whet evaluate: {folder}", len(sets), {"model": config.model.path})
        asyncio.run(with_engine(work(), parts.engine))
        write_summary(folder / "results.json", values)
        display.table(f"evaluation of {config.model.path}", ("metric", "value"), list(values.items()))
    return values


def generate(config: RunConfig, output: Path, num_prompts: int) -> int:
    """`whet generate`: rollouts of the next prompts, with rewards, to `output/rollouts/*.parquet`.

    Returns:
        Trajectories written.
    """
    plan = plan_batch(config.batch)
    with build_parts(config, trainable=False) as parts, closing(build_display(config.observe.display, RL_HEADLINES)) as display:
        tasks = training_source(config, parts).next(num_prompts)
        writer = RecordWriter(output)

        async def work() -> Metrics:
            metrics: Metrics = {}
            for i, start in enumerate(range(0, num_prompts, plan.prompts_per_rollout)):
                some = tasks[start : start + plan.prompts_per_rollout]
                groups = await parts.player.play(some, plan.samples_per_prompt, config.seed)
                warn_failures(display, groups)
                require_valid(groups, f"prompts {start} to {start + len(some) - 1}")
                writer.write(i, groups, samples_of_groups(groups))
                metrics = merge_metrics(metrics, rollout_metrics(groups))
            return metrics

        total = asyncio.run(with_engine(work(), parts.engine))
        title = f"{num_prompts} prompts x {plan.samples_per_prompt}, in {output / 'rollouts'}"
        display.table(title, ("metric", "value"), list(flatten(total).items()))
    return num_prompts * plan.samples_per_prompt


def warn_failures(display: Display, groups: Sequence[Group]) -> None:
    """Show the first failure of each kind."""
    for name, error in new_failures(groups, set()):
        display.warn(f"trajectory {name} failed in {error.where}: {error.kind}: {error.message}\n{error.traceback}")


def warn_all(display: Display, notes: Sequence[str]) -> None:
    """Show what the person who started the run should know."""
    for note in notes:
        display.warn(note)


def training_source(config: RunConfig, parts: Parts) -> TaskSource:
    """The training prompts."""
    return TaskSource(training_rows(config), length=prompt_length(parts, config.env))


def run_facts(config: RunConfig, parts: Parts, source: TaskSource) -> dict[str, str]:
    """What is good to know before a run."""
    plan = plan_batch(config.batch)
    parameters = sum(p.numel() for p in parts.model.hf.parameters())
    facts = {
        "model": f"{parts.folder} ({parameters / 1e6:.1f}M parameters, {config.model.dtype}, {parts.model.device})",
        "prompts": f"{len(source)}" + (f" ({source.num_dropped} over-long ones dropped)" if source.num_dropped else ""),
        "batch": f"{plan.prompts_per_rollout} prompts x {plan.samples_per_prompt} samples = "
        f"{plan.samples_per_step} samples x {plan.steps_per_rollout} steps, {plan.epochs} epoch(s)",
        "algorithm": config.algo.name,
    }
    return facts


async def with_engine(work: Coroutine[Any, Any, T], engine: Engine) -> T:
    """Run `work` and close the engine whatever happens."""
    try:
        return await work
    finally:
        await engine.close()


