"""Commands as functions of a configuration."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from whet.algo.base import Need
from whet.build.export import export_model
from whet.build.labels import TRAINING, check_labels
from whet.build.learners import algorithm_of, build_learners, check_models, check_warmup, uncorrected
from whet.build.parts import (
    Parts,
    Texts,
    build_evaluations,
    build_observer,
    build_parts,
    build_run_state,
    build_service,
    check_answers,
    check_roles,
    evaluation_tasks,
    expose_engine,
    incidents_of,
    length_of_run,
    prompt_length,
    read_texts,
    write_summary,
)
from whet.build.process import prepare_process, quiet_transformers
from whet.build.programs import RL_HEADLINES
from whet.build.reward_models import SpreadScores
from whet.build.rollouts import build_hooks, build_rollouts
from whet.build.session import OpenRun, free_folder, open_run
from whet.build.trained import is_whole_model, newest_weights
from whet.checkpoint.run_state import PROOFS, Stateful
from whet.config import dump_toml
from whet.core.nonfinite import Learner, NonFinite
from whet.data.own import own_source
from whet.data.source import Source, TaskSource
from whet.engine.pool.pool import EnginePool
from whet.engine.publish import EnginePublisher
from whet.env.mcp.listed import record_tools
from whet.env.sandbox.open import record_isolation
from whet.evaluate.evaluation import EvaluationSet, set_folder
from whet.loop import Evaluated, Observer, RolloutRun, note_failures, train_rl
from whet.observe.build_display import build_display
from whet.observe.display import Display
from whet.observe.metrics import Metric, Metrics, flatten, merge_metrics
from whet.observe.records import ROLLOUTS, RecordWriter, RolloutNumbers
from whet.rollout.constant import RewardGuard
from whet.rollout.metrics import new_failures, require_valid, rollout_metrics
from whet.rollout.samples import samples_of_groups
from whet.rollout.scheduler import RolloutSpec
from whet.runfolder.journal import LoggedDisplay
from whet.runfolder.lock import owner_of
from whet.runs.closing import figures, next_commands, replies
from whet.serve.settings import ServeConfig
from whet.settings.rl import BaseRunConfig, RunConfig, check_together, training_rows
from whet.settings.supervised import chat_of, kind_of
from whet.train.base import Backend
from whet.train.batching import plan_batch
from whet.train.build import build_backend
from whet.train.controller import LOCAL, Controller, begin_call
from whet.train.kept import keep_batch
from whet.train.watchdog import RunStatus
from whet.types import Group, Task

T = TypeVar("T")


def train(
    config: RunConfig, command: str = "whet train", controller: Controller = LOCAL, notes: Sequence[str] = ()
) -> Mapping[str, float]:
    """`whet train`: reinforcement learning to its end. Exports the model to `<run_dir>/model`.

    Args:
        config: the run's settings.
        command: the typed command line, which also resumes the run.
        controller: broadcasts calls to the other ranks.
        notes: notes of the start, shown first.

    Returns:
        The last evaluation's `eval/<set>/<metric>`; empty without evaluation sets.
    """
    check_together(config)
    plan = plan_batch(config.batch)
    algorithm = algorithm_of(config)
    check_models(config, algorithm)
    hooks = build_hooks(config)
    with open_run(config, command) as session, closing(build_observer(config, session, RL_HEADLINES)) as observer:
        texts = read_texts(config)
        source, held_out = training_source(config, texts), evaluation_tasks(config, texts)
        num_rollouts = length_of_run(len(source), plan.prompts_per_rollout, config.num_rollouts, config.num_epochs, "num_rollouts")
        num_learning = check_warmup(config, num_rollouts)
        check_labels(config, {**rows_of(source), **held_out})
        on_incident = incidents_of(session, observer)
        scores = SpreadScores(config, controller)
        # Everything else is checked before the weights, which take long.
        with build_parts(
            config, texts, trainable=True, on_incident=on_incident, scorer_of=scores.of, warn=observer.display.warn
        ) as parts:
            with controller.broadcast(begin_call(num_rollouts)):
                backend = build_backend(config.train, parts.model, num_learning * plan.optimizer_steps)
                learners = build_learners(config, backend, parts.folder, algorithm, plan, num_rollouts, controller)
                scores.load()
            evaluations = build_evaluations(config, parts, held_out, session.folder)
            makes = parts.runner.make_env, *(each.runner.make_env for each in evaluations)
            record_isolation(session.folder, *makes)
            for changed in record_tools(session.folder, *makes):
                observer.display.warn(changed)
            policy = learners.policy
            expose_engine(observer, parts.engine)
            rewards_teach = Need.TEACHER_LOGPROBS not in algorithm.needs
            evaluated, guard = Evaluated(), RewardGuard(config.stop_after_constant_rewards, rewards_teach=rewards_teach)
            wanted = RolloutSpec(plan.prompts_per_rollout, plan.samples_per_prompt, Need.BASELINE in algorithm.needs)
            rollouts = build_rollouts(config, hooks, source, parts.runner, wanted, num_rollouts)
            controller.report_status(lambda: RunStatus(observer.phases.present, rollouts.in_flight))
            publisher = EnginePublisher(policy, parts.model, parts.engine, parts.thread)
            others: dict[str, Stateful] = {"evaluated": evaluated, "rewards": guard, "rollouts": rollouts, PROOFS: publisher}
            if isinstance(algorithm, Stateful):
                others["algorithm"] = algorithm
            run = RolloutRun(
                num_rollouts=num_rollouts,
                seed=config.seed,
                rollouts=rollouts,
                recipe=hooks.recipe,
                learners=learners,
                publisher=publisher,
                evaluations=evaluations,
                evaluate_every=config.evaluate.interval,
                evaluate_first=config.evaluate.before_training,
                evaluated=evaluated,
                guard=guard,
                checkpoint=build_run_state(config, session, observer, source, others, learners.models, controller),
                observer=observer,
                stop=session.stop,
                thread=parts.thread,
                on_rollout=hooks.on_rollout,
                sleep=parts.engine.sleep if config.engine_sleeps else None,
                engine_metrics=parts.engine.metrics if isinstance(parts.engine, EnginePool) else dict[str, Metric],
            )
            for note in notes:
                observer.display.note(note)
            if config.env.answers:
                observer.display.note(f"tool calls are read as {texts.renderer.format.name}: {texts.renderer.chosen.why}")
            observer.display.start(f"whet train: {session.folder}", num_rollouts, run_facts(config, parts, source))
            stale = uncorrected(config, algorithm)
            warn_all(observer.display, [*session.notes, *learners.notes, *([] if stale is None else [stale])])
            with keep_failed_batch(config, session, learners.learner), run.checkpoint.whole():
                values = asyncio.run(with_parts(ending(train_rl(run), rollouts.close), parts))
            finish(config, observer, policy, parts.folder, session.folder)
    return values


@contextmanager
def keep_failed_batch(config: BaseRunConfig, session: OpenRun, learner: Callable[[Learner], Backend]) -> Iterator[None]:
    """Keep the batch of a step that gave NaN or infinity on disk, and name its folder in the error.

    Raises:
        NonFinite: the same error, with the folder.
    """
    try:
        yield
    except NonFinite as error:
        if error.batch is None:
            raise
        kept = free_folder(session.folder / "nonfinite", "batch")
        whose = "" if error.learner == "policy" else f"the {error.learner}: "
        try:
            keep_batch(kept, error, learner(error.learner), dump_toml(config))
        except OSError as fault:
            raise NonFinite(f"{whose}{error}. This step changed no weight. The batch cannot be kept: {fault}") from error
        raise NonFinite(
            f"{whose}{error}. This step changed no weight. The batch and the weights are kept: `whet replay-batch {kept}` does the step "
            "again and shows where it first goes wrong; a checkpoint to go on from, with a lower learning rate say, is in "
            f"{session.folder / 'checkpoints'}, if one was due by now (checkpoint.interval)"
        ) from error


def finish(config: BaseRunConfig, observer: Observer, policy: Backend, source: Path, run_dir: Path) -> None:
    """Export the model of a run that has come to its end."""
    export_model(policy, config, source, run_dir / "model", chat_of(config).template_text)
    observer.display.note(f"the model is in {run_dir / 'model'}, metrics in {run_dir / 'metrics.jsonl'}")
    for line in figures(run_dir):
        observer.display.note(line)
    for line in [*replies(run_dir), *next_commands(run_dir, scores=kind_of(config) == "rm")]:
        observer.display_without_log.note(line)  # the log holds no replies


def evaluate(
    config: RunConfig, command: str = "whet evaluate", *, base: bool = False, notes: Sequence[str] = ()
) -> Mapping[str, float]:
    """`whet evaluate`: play the evaluation sets once, into a folder of their own, `<run_dir>/evaluate_<n>`.

    Args:
        config: the run's settings.
        command: the typed command line.
        base: measure the model at `model.path`, not the one that the run trained.
        notes: notes of the start, shown once everything is loaded.

    Returns:
        `eval/<set>/<metric>`. The folder's results.json has them, too, and the name of the weights.
    """
    if not config.evaluate.sets:
        raise ValueError("there are no evaluation sets; give one, for example evaluate.sets.NAME.path=FILE.jsonl")
    check_idle(config)
    weights = None if base else newest_weights(Path(config.run_dir))
    measured = config.model.path if weights is None else str(weights)
    folder = free_folder(Path(config.run_dir), "evaluate")
    if weights is not None and is_whole_model(weights):
        model, weights = config.model.model_copy(update={"path": str(weights)}), None
        config = config.model_copy(update={"model": model})
    with (
        open_run(config.model_copy(update={"run_dir": str(folder)}), command) as session,
        closing(build_display(config.observe.display, RL_HEADLINES)) as console,
    ):
        texts = read_texts(config)
        tasks = evaluation_tasks(config, texts)
        check_labels(config, tasks)
        playing = config.model_copy(update={"run_dir": str(folder)})
        with build_parts(playing, texts, trainable=False, weights=weights, warn=console.warn) as parts:
            for note in notes:
                console.note(note)
            evaluations = build_evaluations(config, parts, tasks, folder)
            record_isolation(folder, *(each.runner.make_env for each in evaluations))
            values = play_evaluations(config, parts, evaluations, session, console, measured)
        write_summary(folder / "results.json", {"weights": measured, **values})
    return values


def check_idle(config: RunConfig) -> None:
    """Refuse to load weights into servers while a run trains in `config.run_dir`.

    Raises:
        ValueError: a process works in the run's folder, and the servers may be its own.
    """
    if config.engine.urls and (owner := owner_of(Path(config.run_dir))) is not None:
        raise ValueError(
            f"engine.urls: {owner} works in {config.run_dir}, and this command would load other weights into its servers: wait for its "
            "end, or name other servers"
        )


def play_evaluations(
    config: RunConfig, parts: Parts, sets: Sequence[EvaluationSet], session: OpenRun, console: Display, measured: str
) -> Mapping[str, float]:
    """Play evaluation sets once, and show the results; `measured` names the weights."""
    values: dict[str, float] = {}
    display = LoggedDisplay(console, session.journal)

    async def work() -> None:
        await parts.publish()
        for chosen in sets:
            display.phase(f"{chosen.name}: {len(chosen.tasks)} tasks x {chosen.samples_per_prompt}")
            groups = await session.stop.unless(chosen.play(config.seed))
            note_failures(session.journal, groups)
            warn_failures(console, groups)
            values.update(flatten(chosen.summarise(0, groups, parts.proofs)))

    display.start(f"whet evaluate: {session.folder}", len(sets), {"model": measured})
    asyncio.run(with_parts(work(), parts))
    display.table(f"evaluation of {measured}", ("metric", "value"), list(values.items()))
    for chosen in sets:
        for line in replies(set_folder(session.folder, chosen.name)):
            console.note(line)
    return values


def generate(config: RunConfig, output: Path, num_prompts: int) -> int:
    """`whet generate`: rollouts of the next prompts, with rewards, to `output/rollouts/*.parquet`.

    Returns:
        Trajectories written.

    Raises:
        ValueError: if there are records already, or a run has the servers.
    """
    if any((output / ROLLOUTS).glob("*.parquet")):
        raise ValueError(f"{output / ROLLOUTS} holds records already; remove it, or choose another folder with --output")
    check_idle(config)
    plan = plan_batch(config.batch)
    prepare_process(config)
    texts = read_texts(config)
    source = training_source(config, texts)
    check_labels(config, rows_of(source))
    tasks = source.next(num_prompts)
    with (
        closing(build_display(config.observe.display, RL_HEADLINES)) as display,
        build_parts(config.model_copy(update={"run_dir": str(output)}), texts, trainable=False, warn=display.warn) as parts,
    ):
        writer = RecordWriter(output)
        record_isolation(output, parts.runner.make_env)

        async def work() -> Metrics:
            metrics: Metrics = {}
            await parts.publish()
            for i, start in enumerate(range(0, num_prompts, plan.prompts_per_rollout)):
                some = tasks[start : start + plan.prompts_per_rollout]
                groups = await parts.runner.play(some, plan.samples_per_prompt, config.seed)
                warn_failures(display, groups)
                require_valid(groups, f"prompts {start} to {start + len(some) - 1}")
                writer.write(i, groups, samples_of_groups(groups), RolloutNumbers(proofs=parts.proofs))
                metrics = merge_metrics(metrics, rollout_metrics(groups))
            return metrics

        total = asyncio.run(with_parts(work(), parts))
        title = f"{num_prompts} prompts x {plan.samples_per_prompt}, in {output / 'rollouts'}"
        display.table(title, ("metric", "value"), list(flatten(total).items()))
        for line in [*replies(output), f"next:\n  whet show {output}"]:
            display.note(line)
    return num_prompts * plan.samples_per_prompt


def serve(config: ServeConfig) -> None:
    """`whet serve`: answer requests over HTTP until asked to end."""
    _serve("serve", config, None)


def record(config: ServeConfig, folder: Path) -> None:
    """`whet record`: answer requests as `whet serve` does, and write every call into a folder."""
    _serve("record", config, folder)


def _serve(command: str, config: ServeConfig, folder: Path | None) -> None:
    """Answer requests until asked to end; with a folder their calls are recorded in it."""
    try:
        from whet.record.app import RecorderApp
        from whet.record.folder import SessionFolder, claim_sessions
        from whet.serve.access import Keys
        from whet.serve.server import address_of, bind, run_server
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs the package {error.name}: pip install 'whet[serve]'") from error
    keys = Keys.from_environment(os.environ)
    quiet_transformers()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with (
        nullcontext() if folder is None else claim_sessions(folder) as claimed,
        bind(config.host, config.port, keys) as bound,
        build_service(config) as service,
        closing(build_display("plain", ())) as display,
    ):
        sessions = None if claimed is None else SessionFolder(service, claimed)
        # The header has the server's key, if there is one; else it names the session.
        app = None if sessions is None else RecorderApp(sessions.find, by_header=keys.api is None)
        where = address_of(bound) if folder is None else f"{address_of(bound)}/s/SESSION/v1, into {folder}"

        def ready(_: object) -> None:
            display.note(f"whet {command}: {service.name} at {where} (keys: {keys.words()}); Ctrl-C ends it")

        async def close() -> None:
            if sessions is not None:
                await sessions.close()
            await service.engine.close()

        answering = service if sessions is None else sessions.service
        asyncio.run(ending(run_server(answering, bound, keys, ready, app), close))
        display.note(f"whet {command}: ended")


def warn_failures(display: Display, groups: Sequence[Group]) -> None:
    """Show the first failure of each kind."""
    for name, error in new_failures(groups, set()):
        display.warn(f"trajectory {name} failed in {error.where}: {error.kind}: {error.message}\n{error.traceback}")


def warn_all(display: Display, notes: Sequence[str]) -> None:
    """Show each note as a warning."""
    for note in notes:
        display.warn(note)


def training_source(config: RunConfig, texts: Texts) -> Source:
    """Source of the training prompts."""
    if config.data.source is not None:
        check_answers(texts, config.env)
        return own_source(config.data.source, config.data.source_options, config.seed, config.data.source_timeout_s)
    source = TaskSource(training_rows(config), length=prompt_length(texts, config.env))
    check_roles(texts.renderer, source.tasks)
    return source


def rows_of(source: Source) -> dict[str, Sequence[Task]]:
    """Training rows by `TRAINING`; none of a source of the user's."""
    return {TRAINING: source.tasks} if isinstance(source, TaskSource) else {}


def run_facts(config: RunConfig, parts: Parts, source: Source) -> dict[str, str]:
    """Facts that are shown before a run."""
    plan = plan_batch(config.batch)
    parameters = sum(p.numel() for p in parts.model.hf.parameters())
    num_dropped, num_cut = (source.num_dropped, source.num_cut) if isinstance(source, TaskSource) else (0, 0)
    left = f" ({num_dropped} over-long ones dropped)" if num_dropped else f" ({num_cut} cut)" if num_cut else ""
    facts = {
        "model": f"{parts.folder} ({parameters / 1e6:.1f}M parameters, {config.model.dtype}, {parts.model.device})",
        "prompts": f"{len(source)}{left}",
        "batch": f"{plan.prompts_per_rollout} prompts x {plan.samples_per_prompt} samples = "
        f"{plan.samples_per_step} samples x {plan.steps_per_rollout} steps, {plan.epochs} epoch(s)",
        "algorithm": config.algo.name,
    }
    return facts


async def ending(work: Coroutine[Any, Any, T], end: Callable[[], Coroutine[Any, Any, None]]) -> T:
    """Run `work`, and then `end`, even after an error."""
    try:
        return await work
    finally:
        await end()


async def with_parts(work: Coroutine[Any, Any, T], parts: Parts) -> T:
    """Run `work`, then close the environments' resources and the engine, even after an error."""
    return await ending(ending(work, parts.runner.resources.aclose), parts.engine.close)


