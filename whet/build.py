"""From a configuration to live objects."""

from __future__ import annotations

import json
import os
import random
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from whet.checkpoint.store import MANIFEST, CheckpointStore
from whet.config import dump_toml
from whet.data.hub import resolve_model_path
from whet.data.parsers import build_parser
from whet.data.source import load_tasks
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
from whet.settings import BaseRunConfig, RunConfig, evaluation_env, evaluation_rows
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


class Place(Protocol):
    """A source of data whose place can be saved."""

    def state(self) -> dict[str, JSON]: ...

    def restore(self, state: Mapping[str, JSON]) -> None: ...


@dataclass(slots=True)
class Parts:
    """What training, evaluation and generation have in common."""

    folder: Path
    model: CausalModel
    engine: EmbeddedEngine
    player: Player
    rewards: list[Reward]
    thread: ThreadPoolExecutor


def prepare_process(config: BaseRunConfig) -> None:
    """Process-wide settings: seeds, threads, determinism, and a quiet transformers."""
    quiet_transformers()
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)


def quiet_transformers() -> None:
    """No progress bars, and no warnings: what matters of them is checked here."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


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
    model = load_causal(folder, config.model, trainable=trainable)
    thread = ThreadPoolExecutor(1, "torch")
    rewards: list[Reward] = []
    try:
        engine = EmbeddedEngine(
            model, config.engine.embedded, thread, shares_weights=True, deterministic=config.deterministic
        )
        rewards.append(build_reward(config.reward))
        player = _player(config, config.rollout, config.env, rewards[0], engine, tokenizer)
        yield Parts(folder, model, engine, player, rewards, thread)
    finally:
        for reward in rewards:
            reward.close()
        thread.shutdown()


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
    reward: Reward,
    engine: EmbeddedEngine,
    tokenizer: PreTrainedTokenizerFast,
) -> Player:
    check_fits(rollout, engine.capabilities.max_tokens)
    if config.deterministic:  # what is sampled must not depend on how long anything took
        rollout = rollout.model_copy(update={"timeout_s": None})
        env = env.model_copy(update={"tool_timeout_s": None})
    renderer = Renderer(tokenizer, build_parser(env.parser))
    return Player(
        engine=engine,
        renderer=renderer,
        make_env=build_env_factory(env),
        reward=reward,
        sampling=rollout.sampling(renderer.stop_token_ids),
        limits=rollout.limits(),
        timeout_s=rollout.timeout_s,
        max_in_flight=None if config.deterministic else config.engine.embedded.max_running,
    )


def prompt_length(parts: Parts, env: EnvConfig) -> Callable[[Task], int]:
    """Counts a task's prompt tokens, the environment's tools included."""
    tools = build_env_factory(env)().tools
    return lambda task: len(parts.player.renderer.prompt(task, tools))


def build_evaluations(config: RunConfig, parts: Parts, run_dir: Path | None) -> list[EvaluationSet]:
    """Every configured evaluation set; `run_dir` is where their records go."""
    out: list[EvaluationSet] = []
    for name, chosen in config.evaluate.sets.items():
        tasks = load_tasks(evaluation_rows(config, chosen), name=name)
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
    rollout, env = chosen.rollout.over(config.rollout), evaluation_env(config, chosen)
    return _player(config, rollout, env, reward, parts.engine, parts.player.renderer.tokenizer)


def open_run(config: BaseRunConfig) -> tuple[Path, list[str]]:
    """Make the run's folder and write the resolved configuration into it. What an earlier start left is kept beside the new.

    Returns:
        The folder, and notes for the person who started the run.

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
    notes: list[str] = []
    path, text = run_dir / "config.toml", dump_toml(config)
    if path.exists() and path.read_text() != text:
        kept = _set_aside(path)
        changed = changed_settings(kept.read_text(), text)
        notes.append(f"settings changed since the last start in {run_dir}: {changed}; the old ones are in {kept.name}")
    path.write_text(text)
    log = run_dir / "metrics.jsonl"
    if log.exists() and log.stat().st_size and not any((run_dir / "checkpoints").glob(f"*/{MANIFEST}")):
        notes.append(f"an earlier start left no checkpoint: this one begins afresh, its metrics are in {_set_aside(log).name}")
    return run_dir, notes


def changed_settings(before: str, after: str) -> str:
    """What differs between two configurations in TOML, in words."""
    old, new = (_flat(tomllib.loads(text)) for text in (before, after))
    return ", ".join(f"{key} = {new.get(key)!r} (was {old.get(key)!r})" for key in sorted(old | new) if old.get(key) != new.get(key))


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name_<n>` with the first n from 1 on that is not taken."""
    return next(path for n in count(1) if not (path := parent / f"{name}_{n}").exists())


def _set_aside(path: Path) -> Path:
    """Rename a file to `stem.<n>.suffix`, the first that is free."""
    kept = next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    return path.rename(kept)


def _flat(tree: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    out: dict[str, JSON] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


def build_observer(config: BaseRunConfig, run_dir: Path, headlines: tuple[Headline, ...]) -> Observer:
    """Display, trackers and records of a run."""
    display = build_display(config.observe.display, headlines)
    trackers = build_trackers(config.observe, run_dir, config.model_dump(mode="json"))
    records = RecordWriter(run_dir, config.observe.records_every) if config.observe.records_every else None
    return Observer(display, trackers, Phases(display.phase), records)


def saving(
    store: CheckpointStore, backend: Backend, observer: Observer, cursor: Place
) -> tuple[Callable[[], tuple[Progress, dict[str, float]]], Callable[[Progress, Mapping[str, float]], None]]:
    """How a run resumes and how it saves: weights, optimizer, counters, the data cursor, the log's offset, the last evaluation."""
    log = observer.trackers[0]
    assert isinstance(log, JsonlTracker), "metrics.jsonl comes first"

    def save(progress: Progress, evaluated: Mapping[str, float]) -> None:
        state = {"source": cursor.state(), "log_offset": log.tell(), "evaluated": dict(evaluated)}
        store.save(progress, state, backend.save)

    def resume() -> tuple[Progress, dict[str, float]]:
        saved = store.newest()
        if saved is None:
            return Progress(), {}
        backend.load(saved.folder)
        cursor.restore(saved.state["source"])
        log.truncate(saved.state["log_offset"])
        observer.display.note(f"resumed from {saved.folder}")
        return saved.progress, saved.state["evaluated"]

    return resume, save


def export_model(backend: TorchBackend, config: ModelConfig, source: Path, target: Path) -> None:
    """Write the policy in Hugging Face format, with the tokenizer of the model that it came from.

    Raises:
        ValueError: if what was written does not read back as what was trained.
    """
    backend.export(target)
    load_tokenizer(source, trust_remote_code=config.trust_remote_code).save_pretrained(target)
    on_cpu = config.model_copy(update={"device": "cpu", "gradient_checkpointing": False})
    own = dict(backend.named_weights())
    for name, tensor in load_causal(target, on_cpu, trainable=False).named_weights():
        if not torch.equal(tensor, own[name].detach().cpu()):
            raise ValueError(f"{target}: {name} does not read back as it was trained; is the disk full?")


def write_summary(path: Path, values: Mapping[str, JSON]) -> None:
    """A small JSON file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")
