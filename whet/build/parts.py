"""Live objects from a configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from torch import Tensor

from whet.build.engine import EngineSpec, Syncing, build_engine, build_servers, engine_model, server_sites
from whet.build.session import OpenRun
from whet.build.trained import load_trained
from whet.checkpoint.random_state import RANDOM, RandomStates
from whet.checkpoint.run_state import RunState, SavedModels, Stateful
from whet.checkpoint.store import CheckpointStore
from whet.cluster.ray_engine import engine_launcher
from whet.config import code_digests, config_hash, dump_toml, resolve_callable
from whet.data.hub import resolve_model_path
from whet.data.source import load_tasks
from whet.data.template import Renderer, load_renderer
from whet.engine.base import Engine
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.grammar import Grammars
from whet.engine.embedded.room import with_cache
from whet.engine.embedded.tokenizer import EngineTokenizer
from whet.engine.pool.member import Incident, OnIncident
from whet.engine.pool.pool import EnginePool, print_incident
from whet.engine.publish import EnginePublisher
from whet.engine.scrape import PoolSource
from whet.env.build import TOOL_ENVS, EnvConfig, build_env_factory
from whet.env.resources import Resources, print_warning
from whet.evaluate.config import EvaluationSetConfig
from whet.evaluate.evaluation import EvaluationSet, set_folder
from whet.files import replace_file
from whet.loop import Observer
from whet.model.causal import CausalModel, load_causal, pick_device, torch_thread
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.observe.build_display import build_display
from whet.observe.display import Headline
from whet.observe.prometheus import PrometheusTracker
from whet.observe.records import RecordThread, RecordWriter
from whet.observe.spans import Phases
from whet.observe.trackers import JsonlTracker, build_trackers
from whet.observe.watch import WATCH
from whet.reward import GroupReward, Reward, RewardConfig, build_group_reward, build_reward
from whet.reward.model import ScorerOf
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.sampling import RolloutConfig, check_fits
from whet.runfolder.failures import FailureFiles
from whet.runfolder.journal import LoggedDisplay
from whet.serve.service import Service
from whet.serve.settings import ServeConfig
from whet.settings.rl import BaseRunConfig, EngineConfig, RunConfig, evaluation_env, evaluation_reward, evaluation_rows
from whet.train.build import build_backend
from whet.train.controller import LOCAL, Controller
from whet.train.learners import Models
from whet.train.torch_native.config import TrainConfig
from whet.types import JSON, Proof, Task

CHUNK_TOKENS = 32
"""Tokens per chunk of the engine, if checkpoints may hold trajectories in the middle of a turn."""


@dataclass(slots=True)
class Parts:
    """Objects that training, evaluation and generation share."""

    folder: Path
    model: CausalModel
    engine: Engine
    runner: TrajectoryRunner
    rewards: list[Reward | GroupReward]
    """Rewards to close."""
    scorer_of: ScorerOf
    thread: ThreadPoolExecutor
    publisher: EnginePublisher | None = None
    """Publishes a model that does not train to servers; None: it trains, or the engine samples from it itself."""

    async def publish(self) -> None:
        """Bring the weights of a model that does not train to the engine, which plays after that.

        Raises:
            SyncError: if servers do not hold them.
        """
        if self.publisher is not None:
            await self.publisher.publish(0)

    @property
    def proofs(self) -> dict[int, Proof]:
        """Proof that the engine holds the weights of a model that does not train, by version; servers that came back are within it."""
        return {self.engine.version: Proof()} if self.publisher is None else self.publisher.proofs


def length_of_run(num_units: int, per_step: int, count: int | None, epochs: float | None, name: str) -> int:
    """Steps of a run, from its own count or its epochs.

    Raises:
        ValueError: unless exactly one of the two is given.
    """
    if count is not None and epochs is None:
        return count
    if epochs is not None and count is None:
        return max(1, int(epochs * num_units // per_step))
    raise ValueError(f"set exactly one of {name} (here {count}) and num_epochs (here {epochs})")


@dataclass(frozen=True, slots=True)
class Texts:
    """Contents of a model's folder, without the weights."""

    folder: Path
    renderer: Renderer


def read_texts(config: RunConfig) -> Texts:
    """Read the model's folder, its tokenizer and chat template."""
    folder = resolve_model_path(config.model.path)
    renderer = load_renderer(folder, config.data, config.env.parser, trust_remote_code=config.model.trust_remote_code)
    renderer = renderer.with_parser(config.env.parser, answers=config.env.answers or config.rollout.play is not None)
    return Texts(folder, renderer.stripping() if config.data.chat == "strip" else renderer)


@contextmanager
def build_parts(
    config: RunConfig,
    texts: Texts,
    *,
    trainable: bool,
    on_incident: OnIncident = print_incident,
    scorer_of: ScorerOf = lambda _: None,
    weights: Path | None = None,
    owns_run_dir: bool = True,
    warn: Callable[[str], None] = print_warning,
) -> Iterator[Parts]:
    """Build model, engine, environment and reward, which are closed at the end. The process is prepared
    already.

    Args:
        config: the run's settings.
        texts: tokenizer and chat template.
        trainable: true if the model trains.
        on_incident: called when an engine dies.
        scorer_of: returns the shared scorer of a reward that uses a spread model; None: the reward has its own.
        weights: trained weights of the run, to load into a model that does not train further.
        owns_run_dir: true if no other process writes into `config.run_dir`.
        warn: shows a warning to the user.
    """
    folder = texts.folder
    apart = trainable and config.num_engines_apart > 0
    held_as = engine_model(config.model, config.engine_sizes, apart=apart)
    servers = config.engine.num_servers
    if servers and not trainable and config.sync.transport != "broadcast":
        held_as = config.model.model_copy(update={"device": "cpu"})  # GPUs are for the servers
    own = trainable and not servers and (config.engine_sizes.has_own_weights or config.train.spreads or apart)
    overlaps = trainable and config.control.overlaps
    rewards: list[Reward | GroupReward] = []
    device, engine_device = pick_device((config.model if trainable else held_as).device), pick_device(held_as.device)
    with torch_thread("torch", device) as thread, torch_thread("engine", engine_device) as engine_thread, ExitStack() as ends:
        ends.callback(lambda: close_all(rewards))
        launcher = ends.enter_context(engine_launcher(config.cluster)) if apart else None
        placed = server_sites(config.engine, device, config.cluster if trainable else None)
        sites = ends.enter_context(placed) if servers else None
        scoring = _scoring(config.reward, folder, rewards, scorer_of)  # before the weights, which take long
        spread = trainable and config.train.spreads
        model = load_causal(folder, config.model if trainable else held_as, trainable=trainable, spread=spread)
        if weights is not None:
            load_trained(model, weights, config.train.lora)
        held = load_causal(folder, held_as, trainable=False) if own else model
        sync = Syncing(config.sync, Path(config.run_dir) / "sync")
        if servers and not (trainable and owns_run_dir):
            sync = ends.enter_context(own_versions(sync))
        sizes = config.engine_sizes if servers else sized(config, held)
        routes = trainable and config.train.routing_replay == "rollout"
        spec = EngineSpec(config.model, sizes, config.engine.pool, folder, config.deterministic, sync, routes)
        tokenizer, steps_on = EngineTokenizer.of(texts.renderer, held.vocab_size), engine_thread if overlaps else thread
        building = (
            build_servers(spec, config.engine, sites, model, texts.renderer.decode, on_incident, config.train.lora if trainable else None)
            if sites is not None
            else build_engine(spec, held, tokenizer, steps_on, shares_weights=not own, launcher=launcher, on_incident=on_incident)
        )
        with building as engine:
            runner = build_runner(config, config.rollout, config.env, scoring, engine, texts.renderer)
            runner = replace(runner, resources=Resources(warn))
            if trainable:  # the trainer computes log-probs over what each token was drawn from, through the experts that it went to
                runner = replace(runner, sampling=replace(runner.sampling, nucleus=runner.sampling.narrows, routes=routes))
            if overlaps or config.control.partial:
                runner = replace(runner, chunk_tokens=CHUNK_TOKENS)
            publisher: EnginePublisher | None = None
            if servers and not trainable:
                backend = thread.submit(build_backend, TrainConfig(), model, None).result()
                publisher = EnginePublisher(backend, model, engine, thread)
            yield Parts(folder, model, engine, runner, rewards, scorer_of, thread, publisher)


@contextmanager
def own_versions(sync: Syncing) -> Iterator[Syncing]:
    """Context in which versions are in a folder that no other process has, next to that of the settings. It is removed at the end."""
    name = f"sync_{uuid4().hex}"
    folder = sync.folder.with_name(name) if sync.config.folder is None else Path(sync.config.folder) / name
    config = sync.config if sync.config.folder is None else sync.config.model_copy(update={"folder": str(folder)})
    with removed_after(folder):
        yield Syncing(config, folder)


@contextmanager
def removed_after(folder: Path) -> Iterator[None]:
    """Context that removes a folder at its end, and those above it that were not there before, unless they hold anything else."""
    made = [path for path in folder.parents if not path.exists()]
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()


Scoring = tuple[Reward | None, GroupReward | None]
"""Reward of single trajectories, and of siblings together."""


def _scoring(config: RewardConfig, folder: Path, rewards: list[Reward | GroupReward], scorer_of: ScorerOf) -> Scoring:
    """Build the rewards of a configuration, and append them to `rewards`, which are closed at the end."""
    each = build_reward(config, folder, scorer_of) if config.scores_each else None
    rewards.extend([] if each is None else [each])
    together = build_group_reward(config)
    rewards.extend([] if together is None else [together])
    return each, together


def close_all(rewards: Iterable[Reward | GroupReward]) -> None:
    """Close all, even if some fail to close."""
    with ExitStack() as ends:
        for reward in rewards:
            ends.callback(reward.close)


@contextmanager
def build_service(config: ServeConfig) -> Iterator[Service]:
    """Build a model and its engine for serving; its threads end with it. The caller closes the engine."""
    folder = resolve_model_path(config.model.path)
    renderer = load_renderer(folder, config, config.parser, trust_remote_code=config.model.trust_remote_code)
    sizes = config.engine.embedded
    model = load_causal(folder, engine_model(config.model, sizes), trainable=False)
    spec = EngineSpec(config.model, with_cache(sizes, model, device=pick_device(config.model.device)), config.engine.pool, folder)
    grammars = Grammars(renderer, model.vocab_size)
    on_cpu = config.model.model_copy(update={"device": "cpu"})  # new weights are copied over: the device need not hold both
    with (
        torch_thread("torch", model.device) as thread,
        ThreadPoolExecutor(1, "texts") as texts,
        build_engine(spec, model, EngineTokenizer(renderer.decode, grammars), thread, shares_weights=False) as engine,
    ):
        yield Service(
            engine=engine,
            renderer=renderer,
            config=config,
            texts=texts,
            load=lambda source: load_causal(source, on_cpu, trainable=False).named_weights(),
            try_grammar=grammars.check,
            files=ModelFiles(Naming(without_contents(model))),
            digests=engine.digests if isinstance(engine, EmbeddedEngine) else None,
        )


class ModelFiles:
    """The `FileTensors` of a model.

    Args:
        naming: names of the model's tensors in files.
    """

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        parts = (part for name, tensor in naming.parameters.items() for part in naming.to_files(name, tensor))
        self.shapes = {file: tensor.shape for file, tensor in parts}

    def own(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """As `FileTensors.own`."""
        return [(name, self._naming.from_files(name, tensors.__getitem__)) for name in self._naming.parameters]


def sized(config: RunConfig, model: CausalModel) -> EmbeddedConfig:
    """The embedded engine's sizes with room for the run's trajectories; `model` is the one that it samples from, with or without
    contents.
    """
    sets = (chosen.rollout.over(config.rollout) for chosen in config.evaluate.sets.values())
    longest = max(rollout.max_tokens for rollout in (config.rollout, *sets))
    return with_cache(config.engine_sizes, model, longest, pick_device(config.model.device))


def build_runner(
    config: RunConfig,
    rollout: RolloutConfig,
    env: EnvConfig,
    scoring: Scoring,
    engine: Engine,
    renderer: Renderer,
) -> TrajectoryRunner:
    """Build what plays trajectories on an engine.

    Raises:
        ValueError: they may be longer than the engine can run, or their grammar cannot be understood.
    """
    rollout = rollout.within(engine.capabilities.max_tokens)
    check_fits(rollout, engine.capabilities.max_tokens)
    renderer = renderer.with_parser(env.parser, answers=env.answers or rollout.play is not None)
    make_env = build_env_factory(env)
    sampling = rollout.sampling(renderer.stop_token_ids)
    if renderer.format.stop_texts is not None:
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *renderer.format.stop_texts(make_env().tools)))))
    if sampling.grammar is not None:
        try:
            Grammars(renderer, len(renderer.tokenizer)).check(sampling.grammar)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from None
    return TrajectoryRunner(
        engine=engine,
        renderer=renderer,
        make_env=make_env,
        reward=scoring[0],
        group_reward=scoring[1],
        sampling=sampling,
        limits=rollout.limits(),
        timeout_s=rollout.timeout_s,
        max_in_flight=None if config.deterministic else max_in_flight(config.engine),
        deterministic=config.deterministic,
        play_by=None if rollout.play is None else resolve_callable(rollout.play, kind="rollout.play", given=["run", "env"]),
    )


def max_in_flight(engine: EngineConfig) -> int:
    """Requests that an engine runs at a time."""
    if engine.num_servers:
        return engine.max_running
    return engine.embedded.max_running * engine.embedded.copies


def prompt_length(texts: Texts, env: EnvConfig) -> Callable[[Task], int]:
    """Function that counts a task's prompt tokens, including the environment's tools."""
    tools = build_env_factory(env)().tools
    check_answers(texts, env)
    return lambda task: len(texts.renderer.prompt(task, tools))


def check_answers(texts: Texts, env: EnvConfig) -> None:
    """Check that the chat template shows the answers of the run's tools. An environment of the user's own may
    answer in any way.

    Raises:
        ValueError: it leaves that out.
    """
    if env.name in TOOL_ENVS:
        texts.renderer.check_answers([tool["function"]["name"] for tool in build_env_factory(env)().tools])


def evaluation_tasks(config: RunConfig, texts: Texts) -> dict[str, list[Task]]:
    """Tasks of every evaluation set, by its name."""
    out: dict[str, list[Task]] = {}
    for name, chosen in config.evaluate.sets.items():
        length = prompt_length(texts, evaluation_env(config, chosen))  # shows now, not after hours, that its prompts can be rendered
        out[name] = load_tasks(evaluation_rows(config, chosen), name=name, length=length)[: chosen.limit]
        check_roles(texts.renderer, out[name])
    return out


def check_roles(renderer: Renderer, tasks: Iterable[Task]) -> None:
    """Refuse the first prompt with a role that nobody knows: a chat template writes it as it is, or leaves its message out.

    Raises:
        ValueError: with the row (`file:line`) and the roles that there are.
    """
    for task in tasks:
        if not isinstance(task.prompt, str) and (odd := renderer.odd_role(task.prompt)):
            raise ValueError(f"{task.origin}: {odd}")


def build_evaluations(config: RunConfig, parts: Parts, tasks: Mapping[str, list[Task]], run_dir: Path) -> list[EvaluationSet]:
    """Build every evaluation set with its tasks; `run_dir` is the folder of their records."""
    out: list[EvaluationSet] = []
    for name, chosen in config.evaluate.sets.items():
        retention = config.observe.records
        evaluated = retention.model_copy(update={"every": 1})  # evaluations are few: each is recorded
        out.append(
            EvaluationSet(
                name=name,
                tasks=tasks[name],
                runner=_evaluation_runner(config, chosen, parts),
                samples_per_prompt=chosen.samples_per_prompt,
                pass_reward=chosen.pass_reward,
                records=RecordWriter(set_folder(run_dir, name), evaluated, config_hash(config)) if retention.every else None,
            )
        )
    return out


def _evaluation_runner(config: RunConfig, chosen: EvaluationSetConfig, parts: Parts) -> TrajectoryRunner:
    scoring = parts.runner.reward, parts.runner.group_reward
    if chosen.reward is not None:
        scoring = _scoring(evaluation_reward(config, chosen), parts.folder, parts.rewards, parts.scorer_of)
    rollout, env = chosen.rollout.over(config.rollout), evaluation_env(config, chosen)
    runner = build_runner(config, rollout, env, scoring, parts.engine, parts.runner.renderer)
    return replace(runner, resources=parts.runner.resources)


def build_observer(config: BaseRunConfig, session: OpenRun, headlines: tuple[Headline, ...]) -> Observer:
    """Build display, trackers and records of a run."""
    console = build_display(config.observe.display, headlines)
    display = LoggedDisplay(console, session.journal, headlines)
    writer = RecordWriter(session.folder, config.observe.records, config_hash(config)) if config.observe.records.every else None
    records = RecordThread(writer) if writer is not None else None
    trackers = build_trackers(config.observe, session.folder, config.model_dump(mode="json"))
    for tracker in trackers:
        if isinstance(tracker, PrometheusTracker):
            display.note(f"Prometheus reads this run's metrics at {tracker.url}")
    phases = Phases(display.phase)
    return Observer(
        display, console, session.journal, trackers, phases, records,
        threads=session.threads, watch=WATCH.get(), num_shown=config.observe.show,
    )  # fmt: skip


def expose_engine(observer: Observer, engine: Engine) -> None:
    """Have scrapes of the run's metrics show the engine's members, if it has any."""
    if not isinstance(engine, EnginePool):
        return
    for tracker in observer.trackers:
        if isinstance(tracker, PrometheusTracker):
            tracker.source = PoolSource(engine)


def build_run_state(
    config: BaseRunConfig,
    session: OpenRun,
    observer: Observer,
    data: Stateful,
    others: Mapping[str, Stateful],
    models: Models,
    controller: Controller = LOCAL,
) -> RunState:
    """Build the state that a run saves and resumes from. Arguments as for `RunState`; `models` are the
    controller's.
    """
    log = observer.trackers[0]
    assert isinstance(log, JsonlTracker), "metrics.jsonl comes first"
    renew_reference = None if has_reference_path(config) else models.renew_reference
    return RunState(
        CheckpointStore(session.folder / "checkpoints", config.checkpoint),
        SavedModels(models.policy, models.auxiliary, renew_reference),
        log,
        parts={"data": data, "random": controller.control(RANDOM, RandomStates(), RandomStates)},
        others=others,
        config=dump_toml(config),
        facts={"config_hash": config_hash(config), "code": code_digests(config), "environment": session.environment},
        note=observer.display.note,
    )


def incidents_of(session: OpenRun, observer: Observer) -> OnIncident:
    """Function that logs an engine's death in the run's folder, and shows a line of it."""
    files = FailureFiles(session.folder, lambda: observer.phases.present, observer.display.warn)

    def write(incident: Incident) -> None:
        files.write(incident.name, incident.cause, incident.then, incident.in_flight, incident.stacks)

    return write


def has_reference_path(config: BaseRunConfig) -> bool:
    """True if the reference is a model of its own."""
    reference = config.auxiliary.get("reference")
    return reference is not None and reference.path is not None


def write_summary(path: Path, values: Mapping[str, JSON]) -> None:
    """Write a small JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(values, indent=1) + "\n")
