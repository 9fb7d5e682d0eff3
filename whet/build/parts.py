"""From a configuration to live objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from whet.build.engine import Syncing, engine_model, engine_of
from whet.build.session import OpenRun
from whet.build.trained import load_trained
from whet.checkpoint.random_state import RandomStates
from whet.checkpoint.run_state import RunState, Stateful
from whet.checkpoint.store import CheckpointStore
from whet.cluster.ray_engine import engine_launcher
from whet.config import code_digests, config_hash, dump_toml, resolve_callable
from whet.data.hub import resolve_model_path
from whet.data.parsers import build_parser
from whet.data.source import load_tasks
from whet.data.template import Renderer, load_renderer, load_tokenizer
from whet.engine.base import Engine
from whet.engine.embedded.grammar import Grammars
from whet.engine.pool.member import Incident, Tell
from whet.engine.pool.pool import to_errors
from whet.env.build import EnvConfig, build_env_factory
from whet.evaluate.config import EvaluationSetConfig
from whet.evaluate.evaluation import EvaluationSet, set_folder
from whet.files import replace_file
from whet.loop import Observer
from whet.model.causal import CausalModel, load_causal, pick_device, torch_thread
from whet.model.config import ModelConfig
from whet.model.lora import FILE as ADAPTER_FILE
from whet.model.scalar import ScalarModel, load_scalar
from whet.observe.build_display import build_display
from whet.observe.display import Headline
from whet.observe.records import RecordWriter
from whet.observe.spans import Phases
from whet.observe.trackers import JsonlTracker, build_trackers
from whet.reward import GroupReward, Reward, RewardConfig, build_group_reward, build_reward
from whet.reward.model import ScorerOf
from whet.rollout.player import Player
from whet.rollout.sampling import RolloutConfig
from whet.runfolder.failures import FailureFiles
from whet.runfolder.journal import LoggedDisplay
from whet.serve.service import Service
from whet.serve.settings import ServeConfig
from whet.settings.rl import BaseRunConfig, RunConfig, evaluation_env, evaluation_rows
from whet.train.base import Backend
from whet.train.lead import ALONE, Lead
from whet.train.learners import Learners
from whet.train.supervised import SupervisedLearner
from whet.train.torch_native.backend import TorchBackend
from whet.types import JSON, Task

CHUNK_TOKENS = 32
"""Sampled before the engine hands them over, where a checkpoint may hold trajectories in the middle of a turn."""


@dataclass(slots=True)
class Parts:
    """What training, evaluation and generation have in common."""

    folder: Path
    model: CausalModel
    engine: Engine
    player: Player
    rewards: list[Reward | GroupReward]
    """All that are to be closed."""
    scorer_of: ScorerOf
    thread: ThreadPoolExecutor


def length_of_run(num_units: int, per_step: int, count: int | None, epochs: float | None, name: str) -> int:
    """Steps of a run from its own count or its epochs.

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
    """What a model's folder says before its weights are read."""

    folder: Path
    renderer: Renderer


def read_texts(config: RunConfig) -> Texts:
    """The model's folder, its tokenizer and chat template."""
    folder = resolve_model_path(config.model.path)
    parser = build_parser(config.env.parser)
    return Texts(folder, load_renderer(folder, config.data, parser, trust_remote_code=config.model.trust_remote_code))


@contextmanager
def build_parts(
    config: RunConfig,
    texts: Texts,
    *,
    trainable: bool,
    tell: Tell = to_errors,
    scorer_of: ScorerOf = lambda _: None,
    weights: Path | None = None,
) -> Iterator[Parts]:
    """Model, engine, environment and reward; closed at the end. The process is prepared already; `tell` hears of engines that are lost,
    `scorer_of` says who scores for a reward with a model that is no model of its own, and `weights` are what the run has trained already,
    to be put into a model that is not trained further."""
    folder = texts.folder
    sizes = config.engine_sizes
    apart = trainable and config.num_engines_apart > 0
    held_as = engine_model(config.model, sizes, apart=apart)
    own = trainable and (sizes.has_own_weights or config.train.spreads or apart)
    overlaps = trainable and config.control.overlaps
    rewards: list[Reward | GroupReward] = []
    device, engine_device = pick_device(config.model.device), pick_device(held_as.device)
    with torch_thread("torch", device) as thread, torch_thread("engine", engine_device) as beside, ExitStack() as ends:
        ends.callback(lambda: close_all(rewards))
        launcher = ends.enter_context(engine_launcher(config.cluster)) if apart else None
        scoring = _scoring(config.reward, folder, rewards, scorer_of)  # before the weights, which take long
        spread = trainable and config.train.spreads
        model = load_causal(folder, config.model if trainable else held_as, trainable=trainable, spread=spread)
        if weights is not None:
            load_trained(model, weights, config.train.lora)
        held = load_causal(folder, held_as, trainable=False) if own else model
        grammars = Grammars(texts.renderer, held.vocab_size)
        steps_on, how = beside if overlaps else thread, Syncing(config.sync, Path(config.run_dir) / "sync")
        settings = {"shares_weights": not own, "deterministic": config.deterministic, "launcher": launcher}
        settings |= {"pool": config.engine.pool, "tell": tell}
        with engine_of(held, config.model, sizes, folder, steps_on, texts.renderer.decode, grammars, how, **settings) as engine:
            player = _player(config, config.rollout, config.env, scoring, engine, texts.renderer)
            if trainable:  # the trainer computes log-probs over what each token was drawn from
                player = replace(player, sampling=replace(player.sampling, nucleus=player.sampling.narrows))
            if overlaps or config.control.partial:
                player = replace(player, chunk_tokens=CHUNK_TOKENS)
            yield Parts(folder, model, engine, player, rewards, scorer_of, thread)


Scoring = tuple[Reward | None, GroupReward | None]
"""Of single trajectories, and of siblings together."""


def _scoring(config: RewardConfig, folder: Path, rewards: list[Reward | GroupReward], scorer_of: ScorerOf) -> Scoring:
    """What a configuration asks for; `rewards` is told of what is to be closed."""
    each = build_reward(config, folder, scorer_of) if config.scores_each else None
    rewards.extend([] if each is None else [each])
    together = build_group_reward(config)
    rewards.extend([] if together is None else [together])
    return each, together


def close_all(rewards: Iterable[Reward | GroupReward]) -> None:
    """Close every one, whichever of them fails to."""
    with ExitStack() as ends:
        for reward in rewards:
            ends.callback(reward.close)


@contextmanager
def build_service(config: ServeConfig) -> Iterator[Service]:
    """A model behind an engine of its own, to be served; its threads end with it. Whoever runs the engine closes it."""
    folder = resolve_model_path(config.model.path)
    parser = build_parser(config.parser)
    renderer = load_renderer(folder, config, parser, trust_remote_code=config.model.trust_remote_code)
    sizes = config.engine.embedded
    model = load_causal(folder, engine_model(config.model, sizes), trainable=False)
    grammars = Grammars(renderer, model.vocab_size)
    beside = config.model.model_copy(update={"device": "cpu"})  # new weights are copied over: the device need not hold both
    with (
        torch_thread("torch", model.device) as thread,
        ThreadPoolExecutor(1, "texts") as texts,
        engine_of(
            model,
            config.model,
            sizes,
            folder,
            thread,
            renderer.decode,
            grammars,
            shares_weights=False,
            deterministic=False,
            pool=config.engine.pool,
        ) as engine,
    ):
        yield Service(
            engine=engine,
            renderer=renderer,
            parse=parser,
            config=config,
            texts=texts,
            load=lambda source: load_causal(source, beside, trainable=False).named_weights(),
            try_grammar=grammars.check,
        )


def check_fits(rollout: RolloutConfig, longest: int) -> None:
    """Refuse trajectories that the engine could not run to their end.

    Raises:
        ValueError: if they may have more than `longest` tokens.
    """
    if rollout.max_tokens > longest:
        raise ValueError(
            f"rollout.max_tokens is {rollout.max_tokens}, but the engine runs sequences of {longest} tokens at most "
            "(the model's positions or engine.embedded.cache_tokens): lower the one or raise the other"
        )


def _player(
    config: RunConfig,
    rollout: RolloutConfig,
    env: EnvConfig,
    scoring: Scoring,
    engine: Engine,
    renderer: Renderer,
) -> Player:
    check_fits(rollout, engine.capabilities.max_tokens)
    renderer = renderer.with_parser(build_parser(env.parser))
    sampling = rollout.sampling(renderer.stop_token_ids)
    if sampling.grammar is not None:
        try:
            Grammars(renderer, len(renderer.tokenizer)).check(sampling.grammar)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from None
    return Player(
        engine=engine,
        renderer=renderer,
        make_env=build_env_factory(env),
        reward=scoring[0],
        group_reward=scoring[1],
        sampling=sampling,
        limits=rollout.limits(),
        timeout_s=rollout.timeout_s,
        max_in_flight=None if config.deterministic else config.engine.embedded.max_running * config.engine.embedded.copies,
        deterministic=config.deterministic,
        play_by=None if rollout.play is None else resolve_callable(rollout.play, kind="rollout.play", given=["run", "env"]),
    )


def prompt_length(texts: Texts, env: EnvConfig) -> Callable[[Task], int]:
    """Counts a task's prompt tokens, the environment's tools included."""
    tools = build_env_factory(env)().tools
    check_answers(texts, env)
    return lambda task: len(texts.renderer.prompt(task, tools))


def check_answers(texts: Texts, env: EnvConfig) -> None:
    """See that the chat template shows what the run's tools answer; an environment of a user's own may answer in any way.

    Raises:
        ValueError: it leaves that out.
    """
    if env.name == "tools":
        texts.renderer.check_answers([tool["function"]["name"] for tool in build_env_factory(env)().tools])


def evaluation_tasks(config: RunConfig, texts: Texts) -> dict[str, list[Task]]:
    """The tasks of every configured evaluation set, by its name."""
    out: dict[str, list[Task]] = {}
    for name, chosen in config.evaluate.sets.items():
        length = prompt_length(texts, evaluation_env(config, chosen))  # shows now, not after hours, that its prompts can be rendered
        out[name] = load_tasks(evaluation_rows(config, chosen), name=name, length=length)[: chosen.limit]
    return out


def build_evaluations(config: RunConfig, parts: Parts, tasks: Mapping[str, list[Task]], run_dir: Path) -> list[EvaluationSet]:
    """Every configured evaluation set with its tasks; `run_dir` is where their records go."""
    out: list[EvaluationSet] = []
    for name, chosen in config.evaluate.sets.items():
        keep = config.observe.records_every > 0
        out.append(
            EvaluationSet(
                name=name,
                tasks=tasks[name],
                player=_evaluation_player(config, chosen, parts),
                samples_per_prompt=chosen.samples_per_prompt,
                pass_reward=chosen.pass_reward,
                records=RecordWriter(set_folder(run_dir, name)) if keep else None,
            )
        )
    return out


def _evaluation_player(config: RunConfig, chosen: EvaluationSetConfig, parts: Parts) -> Player:
    scoring = parts.player.reward, parts.player.group_reward
    if chosen.reward is not None:
        scoring = _scoring(chosen.reward, parts.folder, parts.rewards, parts.scorer_of)
    rollout, env = chosen.rollout.over(config.rollout), evaluation_env(config, chosen)
    return _player(config, rollout, env, scoring, parts.engine, parts.player.renderer)


def build_observer(config: BaseRunConfig, opened: OpenRun, headlines: tuple[Headline, ...]) -> Observer:
    """Display, trackers and records of a run."""
    console = build_display(config.observe.display, headlines)
    display = LoggedDisplay(console, opened.journal, headlines)
    trackers = build_trackers(config.observe, opened.folder, config.model_dump(mode="json"))
    records = RecordWriter(opened.folder, config.observe.records_every) if config.observe.records_every else None
    return Observer(display, console, opened.journal, trackers, Phases(display.phase), records, threads=opened.threads)


def build_run_state(
    config: BaseRunConfig,
    opened: OpenRun,
    backend: Backend,
    observer: Observer,
    data: Stateful,
    others: Mapping[str, Stateful],
    learners: Learners | SupervisedLearner,
    lead: Lead = ALONE,
) -> RunState:
    """How a run saves and goes on. Arguments as for `RunState`; `learners` have the models beside the policy, and `lead` tells the other
    processes of the job what all of them do."""
    log = observer.trackers[0]
    assert isinstance(log, JsonlTracker), "metrics.jsonl comes first"
    return RunState(
        CheckpointStore(opened.folder / "checkpoints", config.checkpoint),
        backend,
        log,
        parts={"data": data, "random": RandomStates(lead)},
        others=others,
        beside=learners.beside,
        renew_reference=None if has_reference_path(config) else learners.renew_reference,
        config=dump_toml(config),
        facts={"config_hash": config_hash(config), "code": code_digests(config), "environment": opened.environment},
        note=observer.display.note,
    )


def incidents_of(opened: OpenRun, observer: Observer) -> Tell:
    """Engines that are lost, written into the run's folder, a line of each shown."""
    files = FailureFiles(opened.folder, lambda: observer.phases.present, observer.display.warn)

    def tell(incident: Incident) -> None:
        files.write(incident.name, incident.cause, incident.then, incident.in_flight, incident.stacks)

    return tell


def has_reference_path(config: BaseRunConfig) -> bool:
    """Whether the reference is a model of its own."""
    reference = config.beside.get("reference")
    return reference is not None and reference.path is not None


def export_model(
    backend: TorchBackend, config: ModelConfig, source: Path, target: Path, lead: Lead = ALONE, template: str | None = None
) -> None:
    """Write the policy in Hugging Face format, with the tokenizer of the model that it came from, and the chat template that it was trained
    with.

    Raises:
        ValueError: if what was written does not read back as what was trained.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    led = lead.led("policy", backend)
    if backend.adapter is not None:
        led.export(target, str(source))
        _read_back(target, load_file(target / ADAPTER_FILE), led.named_weights("adapter"))
        if not backend.adapter.config.export_merged:
            return
        target = target.with_name("merged")
        led.export_merged(target)
        tokenizer.save_pretrained(target)
    else:
        led.export(target)
    on_cpu = config.model_copy(update={"device": "cpu", "gradient_checkpointing": False, "gradient_checkpointing_every": 1})
    load = load_scalar if isinstance(backend.model, ScalarModel) else load_causal
    _read_back(target, dict(load(target, on_cpu, trainable=False).named_weights()), led.named_weights())


def _read_back(target: Path, found: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compare with what was trained, which is put together one tensor after another, to the last."""
    equal = {name: torch.equal(found[name], tensor.detach().cpu()) for name, tensor in own if name in found}
    for name in found:
        if not equal.get(name, False):
            raise ValueError(f"{target}: {name} does not read back as it was trained; is the disk full?")


def write_summary(path: Path, values: Mapping[str, JSON]) -> None:
    """A small JSON file of results, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(values, indent=1) + "\n")
