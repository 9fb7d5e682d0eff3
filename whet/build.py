"""From a configuration to live objects."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from whet.checkpoint.store import CheckpointStore
from whet.config import config_hash, dump_toml
from whet.data.hub import resolve_model_path
from whet.data.parsers import build_parser
from whet.data.rows import RowConfig
from whet.data.source import SourceConfig, load_tasks
from whet.data.template import Renderer, load_tokenizer
from whet.engine.embedded.engine import EmbeddedEngine
from whet.env.build import EnvConfig, build_env_factory
from whet.evaluate.evaluation import EvaluationSet, EvaluationSetConfig, set_folder
from whet.loop import Observer
from whet.model.causal import CausalModel, ModelConfig, load_causal
from whet.observe import Headline, Phases, RecordWriter, build_display, build_trackers
from whet.observe.trackers import JsonlTracker
from whet.reward import Reward, build_reward
from whet.rollout.collect import Player, RolloutConfig
from whet.settings import BaseRunConfig, RunConfig
from whet.train.base import Backend
from whet.train.torch_native.backend import TorchBackend
from whet.types import JSON, Progress, Task

RL_HEADLINES = (
    Headline("reward/total", "reward", ".3f"),
    Headline("response/tokens/mean", "len", ".1f"),
    Headline("policy/entropy", "entropy", ".3f"),
    Headline("policy/kl_ref", "kl", ".2g"),
    Headline("policy/clip_fraction", "clip", ".3f"),
    Headline("optim/grad_norm", "grad", ".3f"),
    Headline("groups/zero_variance", "flat groups", ".2f"),
    Headline("outcome/truncated", "cut", ".2f"),
    Headline("mismatch/logprob_max", "mismatch", ".1e"),
    Headline("tokens_per_second/rollout", "tok/s", ".0f"),
)
SFT_HEADLINES = (
    Headline("sft/loss", "loss", ".4f"),
    Headline("optim/grad_norm", "grad", ".3f"),
    Headline("optim/lr", "lr", ".2g"),
    Headline("tokens_per_second/update", "tok/s", ".0f"),
)


class Cursor(Protocol):
    """A source of data whose place can be saved."""

    def state(self) -> dict[str, JSON]: ...

    def restore(self, state: Mapping[str, JSON]) -> None: ...


@dataclass(slots=True)
class Parts:
    """What training, evaluation and generation have in common."""

    folder: Path
    model: CausalModel
    renderer: Renderer
    engine: EmbeddedEngine
    player: Player
    rewards: list[Reward]
    thread: ThreadPoolExecutor


def prepare_process(config: BaseRunConfig) -> None:
    """Process-wide settings: seeds, threads, determinism, and a quiet transformers."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)


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


@contextmanager
def build_parts(config: RunConfig, *, trainable: bool) -> Iterator[Parts]:
    """Model, engine, environment and reward; closed at the end."""
    prepare_process(config)
    folder = resolve_model_path(config.model.path)
    tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    renderer = Renderer(tokenizer, build_parser(config.env.parser))
    model = load_causal(folder, config.model, trainable=trainable)
    thread = ThreadPoolExecutor(1, "torch")
    rewards: list[Reward] = []
    try:
        engine = EmbeddedEngine(
            model, config.engine.embedded, thread, shares_weights=True, deterministic=config.deterministic
        )
        rewards.append(build_reward(config.reward))
        player = _player(config, config.rollout, config.env, rewards[0], engine, renderer)
        yield Parts(folder, model, renderer, engine, player, rewards, thread)
    finally:
        for reward in rewards:
            reward.close()
        thread.shutdown()


def _player(
    config: RunConfig, rollout: RolloutConfig, env: EnvConfig, reward: Reward, engine: EmbeddedEngine, renderer: Renderer
) -> Player:
    longest = engine.capabilities.max_tokens
    if rollout.max_tokens > longest:
        raise ValueError(
            f"rollout.max_tokens is {rollout.max_tokens}, but the engine runs sequences of {longest} tokens at most "
            "(the model's positions or engine.embedded.cache_tokens): lower the one or raise the other"
        )
    if config.deterministic:  # what is sampled must not depend on how long anything took
        rollout = rollout.model_copy(update={"timeout_s": None})
        env = env.model_copy(update={"tool_timeout_s": None})
    return Player(
        engine,
        renderer,
        build_env_factory(env),
        reward,
        rollout.sampling(renderer.stop_token_ids),
        rollout.limits(),
        rollout.timeout_s,
    )


def prompt_length(parts: Parts, env: EnvConfig) -> Callable[[Task], int]:
    """Counts a task's prompt tokens, the environment's tools included."""
    tools = build_env_factory(env)().tools
    return lambda task: len(parts.renderer.prompt(task, tools))


def build_evaluations(config: RunConfig, parts: Parts, run_dir: Path | None) -> list[EvaluationSet]:
    """Every configured evaluation set; `run_dir` is where their records go."""
    out: list[EvaluationSet] = []
    for name, chosen in config.evaluate.sets.items():
        rows = chosen.rows or RowConfig(**{key: getattr(config.data, key) for key in RowConfig.model_fields})
        tasks = load_tasks(SourceConfig(path=chosen.path, shuffle=False, **rows.model_dump()), name=name)
        keep = run_dir is not None and config.observe.records_every > 0
        out.append(
            EvaluationSet(
                name=name,
                tasks=tasks[: chosen.limit],
                player=_evaluation_player(config, chosen, parts),
                samples_per_prompt=chosen.samples_per_prompt,
                pass_reward=chosen.pass_reward,
                records=RecordWriter(set_folder(run_dir, name)) if keep and run_dir is not None else None,
            )
        )
    return out


def _evaluation_player(config: RunConfig, chosen: EvaluationSetConfig, parts: Parts) -> Player:
    reward = parts.rewards[0]
    if chosen.reward is not None:
        reward = build_reward(chosen.reward)
        parts.rewards.append(reward)
    rollout = chosen.rollout.over(config.rollout)
    return _player(config, rollout, chosen.env or config.env, reward, parts.engine, parts.renderer)


def open_run(config: BaseRunConfig) -> Path:
    """Make the run's folder and write the resolved configuration into it.

    Raises:
        ValueError: if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ValueError(f"run_dir: {run_dir} cannot be written: {error.strerror}; choose another with run_dir=PATH") from error
    (run_dir / "config.toml").write_text(dump_toml(config))
    (run_dir / "config.sha256").write_text(config_hash(config) + "\n")
    return run_dir


def build_observer(config: BaseRunConfig, run_dir: Path, headlines: tuple[Headline, ...]) -> Observer:
    """Display, trackers and records of a run."""
    display = build_display(config.observe.display, headlines)
    trackers = build_trackers(config.observe, run_dir, config.model_dump(mode="json"))
    records = RecordWriter(run_dir, config.observe.records_every) if config.observe.records_every else None
    return Observer(display, trackers, Phases(display.phase), records)


def saving(
    store: CheckpointStore, backend: Backend, observer: Observer, cursor: Cursor
) -> tuple[Callable[[], Progress], Callable[[Progress], None]]:
    """How a run resumes and how it saves: weights, optimizer, counters, the data cursor and the log's offset."""
    log = observer.trackers[0]
    assert isinstance(log, JsonlTracker), "metrics.jsonl comes first"

    def save(progress: Progress) -> None:
        store.save(progress, {"source": cursor.state(), "log_offset": log.tell()}, backend.save)

    def resume() -> Progress:
        saved = store.newest() if store.config.resume else None
        if saved is None:
            if log.tell() > 0:
                observer.display.note("the run's folder holds metrics of an earlier run without a checkpoint: starting afresh")
                log.truncate(0)
            return Progress()
        backend.load(saved.folder)
        cursor.restore(saved.state["source"])
        log.truncate(saved.state["log_offset"])
        observer.display.note(f"resumed from {saved.folder}")
        return saved.progress

    return resume, save


def export_model(backend: TorchBackend, source: Path, target: Path) -> None:
    """Write the policy in Hugging Face format, with the tokenizer of the model that it came from.

    Raises:
        ValueError: if what was written does not read back as what was trained.
    """
    backend.export(target)
    load_tokenizer(source).save_pretrained(target)
    written = load_causal(target, _as_held(backend), trainable=False)
    own = dict(backend.named_weights())
    for name, tensor in written.named_weights():
        if not torch.equal(tensor, own[name].detach()):
            raise ValueError(f"{target}: {name} does not read back as it was trained; is the disk full?")


def _as_held(backend: TorchBackend) -> ModelConfig:
    dtype = str(backend.model.dtype).removeprefix("torch.")
    return ModelConfig(path="", dtype=dtype, device=str(backend.model.device))  # pyright: ignore[reportArgumentType]


def write_summary(path: Path, values: Mapping[str, JSON]) -> None:
    """A small JSON file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")
