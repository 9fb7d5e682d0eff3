"""What the command line's commands do, as functions of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
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
    open_run,
    prepare_process,
    prompt_length,
    saving,
)
from whet.build import length_of_run as length
from whet.checkpoint.store import CheckpointStore
from whet.core.weights import REDUCERS
from whet.data.hub import resolve_model_path
from whet.data.source import SourceConfig, TaskSource
from whet.data.supervised import supervised_source
from whet.data.template import Renderer, load_tokenizer
from whet.engine.base import Engine
from whet.loop import Run, SupervisedRun, train_rl, train_sft
from whet.model.causal import load_causal
from whet.observe import RecordWriter, build_display, flatten
from whet.rollout.collect import check_trainable
from whet.rollout.report import rollout_metrics
from whet.rollout.samples import samples_of_groups
from whet.settings import RunConfig, SupervisedRunConfig
from whet.sync.shared import SharedPublisher
from whet.train.batching import plan_batch
from whet.train.learners import Learners
from whet.train.torch_native.backend import TorchBackend
from whet.types import Group

T = TypeVar("T")


def train(config: RunConfig) -> Mapping[str, float]:
    """`whet train`: reinforcement learning to its end, and the model exported to `<run_dir>/model`.

    Returns:
        The last evaluation's `eval/<set>/<metric>`; nothing if there is no set.
    """
    check_trainable(config.rollout)
    plan = plan_batch(config.batch)
    algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps))
    run_dir = open_run(config)
    with build_parts(config, trainable=True) as parts:
        source = training_source(config, parts)
        num_rollouts = length(len(source), plan.prompts_per_rollout, config.num_rollouts, config.num_epochs, "num_rollouts")
        backend = TorchBackend(parts.model, config.train, num_rollouts * plan.optimizer_steps)
        reference = None
        if "ref_logprobs" in algorithm.needs:
            reference = TorchBackend(load_causal(parts.folder, config.model, trainable=False), config.train, None)
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
            evaluations=build_evaluations(config, parts, run_dir),
            evaluate_every=config.evaluate.interval,
            evaluate_first=config.evaluate.before_training,
            checkpoint=store,
            observer=observer,
            thread=parts.thread,
            resume=resume,
            save=save,
        )
        facts = run_facts(config, parts, source)
        observer.display.start(f"whet train: {run_dir}", num_rollouts, facts)
        try:
            evaluated = asyncio.run(with_engine(train_rl(run), parts.engine))
            export_model(backend, parts.folder, run_dir / "model")
            observer.display.note(f"the model is in {run_dir / 'model'}, metrics in {run_dir / 'metrics.jsonl'}")
        finally:
            observer.close()
    return evaluated


def sft(config: SupervisedRunConfig) -> Path:
    """`whet sft`: supervised fine-tuning to its end. Returns the folder of the exported model."""
    run_dir = open_run(config)
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
    observer.display.start(f"whet sft: {run_dir}", num_steps, facts)
    try:
        train_sft(run)
        export_model(backend, folder, run_dir / "model")
        observer.display.note(f"the model is in {run_dir / 'model'}, metrics in {run_dir / 'metrics.jsonl'}")
    finally:
        observer.close()
    return run_dir / "model"


def evaluate(config: RunConfig) -> Mapping[str, float]:
    """`whet evaluate`: play the evaluation sets once. Returns `eval/<set>/<metric>`."""
    if not config.evaluate.sets:
        raise ValueError("there are no evaluation sets; give one, for example evaluate.sets.NAME.path=FILE.jsonl")
    run_dir = open_run(config)
    values: dict[str, float] = {}
    display = build_display(config.observe.display, RL_HEADLINES)
    with build_parts(config, trainable=False) as parts:
        sets = build_evaluations(config, parts, run_dir)

        async def work() -> None:
            for chosen in sets:
                metrics, _ = await chosen.run(0, config.seed)
                values.update(flatten(metrics))

        try:
            asyncio.run(with_engine(work(), parts.engine))
            display.table(f"evaluation of {config.model.path}", ("metric", "value"), list(values.items()))
        finally:
            display.close()
    return values


def generate(config: RunConfig, output: Path, num_prompts: int) -> int:
    """`whet generate`: rollouts of the first prompts, with rewards, to parquet files below `output`.

    Returns:
        Trajectories written.
    """
    plan = plan_batch(config.batch)
    display = build_display(config.observe.display, RL_HEADLINES)
    with build_parts(config, trainable=False) as parts:
        source = training_source(config, parts)
        writer = RecordWriter(output)
        tasks = source.next(num_prompts)
        parts_of_run = [tasks[i : i + plan.prompts_per_rollout] for i in range(0, num_prompts, plan.prompts_per_rollout)]
        everything: list[Group] = []

        async def work() -> None:
            for i, some in enumerate(parts_of_run):
                groups = await parts.player.play(some, plan.samples_per_prompt, config.seed)
                writer.write(i, groups, samples_of_groups(groups))
                everything.extend(groups)

        try:
            asyncio.run(with_engine(work(), parts.engine))
            rows = list(flatten(rollout_metrics(everything)).items())
            display.table(f"{num_prompts} prompts x {plan.samples_per_prompt}, in {output}", ("metric", "value"), rows)
        finally:
            display.close()
    return num_prompts * plan.samples_per_prompt


def training_source(config: RunConfig, parts: Parts) -> TaskSource:
    """The training prompts."""
    settings = config.data.model_dump(exclude={"train"})
    source = SourceConfig(path=config.data.train, seed=config.seed, **settings)
    return TaskSource(source, length=prompt_length(parts, config.env))


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


