"""The quickstart: make a model, warm it up, teach it by reinforcement, and show what that did.

Everything goes through the same functions as `whet sft`, `whet train` and `whet evaluate`, on files in the
run's folder, so each phase can be run again by hand from the config.toml that it left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from whet.build.parts import write_summary
from whet.config import Config, dump_toml
from whet.data.template import load_tokenizer
from whet.env.calculator import calculator
from whet.env.tools import Tool
from whet.files import replace_file
from whet.observe.build_display import build_display
from whet.observe.records import read_records
from whet.quickstart.demonstrations import demonstrations
from whet.quickstart.model import SmallModelConfig, make_model
from whet.quickstart.problems import Problem, draw_many
from whet.runfolder.lock import claim
from whet.runs.commands import evaluate, train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig
from whet.settings.supervised import SupervisedRunConfig
from whet.stop import Stop, on_signals
from whet.types import JSON, Message, Origin


class QuickstartConfig(Config):
    """The quickstart's sizes. The defaults are the ones whose figures docs/quickstart.md gives."""

    seed: int = 0
    """Seed of the model, the problems and the training."""
    run_dir: str = "runs/quickstart-seed0"
    """Folder of everything that the quickstart writes."""
    num_demonstrations: int = 8000
    """Conversations to warm up on."""
    mistake_rate: float = 0.6
    """Probability that a demonstrator makes a sloppy template's mistake."""
    warmup_steps: int = 600
    """Optimizer steps of the warm-up, 16 conversations each."""
    num_rollouts: int = 160
    """Rollouts of the reinforcement learning."""
    prompts_per_rollout: int = 8
    """Problems in each rollout."""
    samples_per_prompt: int = 8
    """Trajectories for each problem."""
    num_held_out: int = 600
    """Problems of the evaluation; none of them, with its operands, is in training."""
    save_every: int = 20
    """Rollouts between checkpoints; five times as many steps of the warm-up."""
    shape: SmallModelConfig = SmallModelConfig()
    """The model's shape."""


def run_quickstart(
    config: QuickstartConfig, summary: Path | None = None, command: str = "whet quickstart"
) -> dict[str, JSON]:
    """Run it all and print the table. `command` is what was typed; the same goes on with a run that was
    stopped.

    Returns:
        accuracy_before, accuracy_warmup, accuracy_rl, tool_call_validity_warmup, tool_call_validity_rl,
        seconds, seconds_by_phase, tokens_per_second, run_dir, resumed (then the seconds are those since the
        last start). Also in `summary`, if given, and in `<run_dir>/summary.json`.
    """
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with claim(run_dir, command), on_signals() as stop:
        return _run_all(config, run_dir, summary, command, stop)


def _run_all(config: QuickstartConfig, run_dir: Path, summary: Path | None, command: str, stop: Stop) -> dict[str, JSON]:
    began = time.perf_counter()
    resumed = note_settings(run_dir, config)
    if summary is not None:
        write_summary(summary, {})  # a path that cannot be written fails now, not after minutes
    clock = _Clock(stop)
    with clock.phase("make"):
        make_files(config, run_dir)
    with clock.phase("evaluate"):
        before = _evaluate_once(config, run_dir / "base", "evaluation_before", command)
    with clock.phase("warmup"):
        train_on_data(warmup_config(config), command)
        warm = run_dir / "warmup/model"
    with clock.phase("evaluate"):
        warmed = _evaluate_once(config, warm, "evaluation_warmup", command)
    with clock.phase("rl"):
        after = train(rl_config(config, warm, "rl"), command)
    results: dict[str, JSON] = {
        "seed": config.seed,
        "accuracy_before": before["eval/held_out/reward/total"],
        "accuracy_warmup": warmed["eval/held_out/reward/total"],
        "accuracy_rl": after["eval/held_out/reward/total"],
        "tool_call_validity_warmup": warmed.get("eval/held_out/tools/validity"),
        "tool_call_validity_rl": after.get("eval/held_out/tools/validity"),
        "seconds": time.perf_counter() - began,
        "seconds_by_phase": clock.seconds,
        "tokens_per_second": _speeds(run_dir),
        "run_dir": str(run_dir),
        "resumed": resumed,
    }
    write_summary(run_dir / "summary.json", results)
    if summary is not None:
        write_summary(summary, results)
    show(results, run_dir)
    return results


def note_settings(run_dir: Path, config: Config) -> bool:
    """Write the settings into the folder; a quickstart that was started with the same settings continues
    from its newest checkpoint.

    Returns:
        True if it was started before.

    Raises:
        ValueError: if the folder holds a quickstart with other settings.
    """
    path, text = run_dir / "quickstart.toml", dump_toml(config)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{run_dir} holds a quickstart with other settings ({path}); remove it or choose another folder with --run-dir")
    resumed = path.exists()
    if not resumed:
        replace_file(path, text)
    return resumed


def _evaluate_once(config: QuickstartConfig, model: Path, name: str, command: str) -> Mapping[str, float]:
    """Evaluate a model, unless an earlier start has done so: what it would play is the same, to the last bit."""
    done = next((Path(config.run_dir) / name).glob("evaluate_*/results.json"), None)
    return evaluate(rl_config(config, model, name), command) if done is None else json.loads(done.read_text())


class _Clock:
    """Seconds by phase. None begins once the run was asked to stop."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Any:
        self._stop.check()
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def make_files(config: QuickstartConfig, run_dir: Path) -> None:
    """The model and the data, on disk."""
    train_problems = draw_many(config.num_demonstrations, config.seed, held_out=False)
    conversations = demonstrations(train_problems, config.seed, config.mistake_rate)
    schema = Tool(calculator).schema
    _write_jsonl(
        run_dir / "data/demonstrations.jsonl",
        ({"messages": [m.to_dict() for m in c], "tools": [schema]} for c in conversations),
    )
    _write_jsonl(run_dir / "data/train.jsonl", (_row(p) for p in train_problems))
    _write_jsonl(run_dir / "data/held_out.jsonl", (_row(p) for p in draw_many(config.num_held_out, config.seed, held_out=True)))
    make_model(run_dir / "base", _texts(conversations, schema), config.shape, config.seed)


def warmup_config(config: QuickstartConfig) -> SupervisedRunConfig:
    """The warm-up as `whet sft` reads it."""
    run_dir = Path(config.run_dir)
    return SupervisedRunConfig.model_validate(
        {
            "run_dir": str(run_dir / "warmup"),
            "seed": config.seed,
            "deterministic": True,
            "model": {"path": str(run_dir / "base")},
            "data": {"path": str(run_dir / "data/demonstrations.jsonl")},
            "num_steps": config.warmup_steps,
            "samples_per_step": 16,
            "checkpoint": {"interval": 5 * config.save_every},
            "train": {"optim": {"lr": 1.5e-3, "betas": (0.9, 0.98), "weight_decay": 0.01, "warmup_steps": 20, "schedule": "cosine"}},
        }
    )


def rl_config(config: QuickstartConfig, model: Path, name: str) -> RunConfig:
    """The reinforcement learning as `whet train` reads it; `whet evaluate` reads its evaluation set from the
    same.
    """
    run_dir = Path(config.run_dir)
    return RunConfig.model_validate(
        {
            "run_dir": str(run_dir / name),
            "seed": config.seed,
            "deterministic": True,
            "model": {"path": str(model)},
            "num_rollouts": config.num_rollouts,
            "data": {"train": str(run_dir / "data/train.jsonl")},
            "batch": {
                "prompts_per_rollout": config.prompts_per_rollout,
                "samples_per_prompt": config.samples_per_prompt,
            },
            "rollout": {"max_turns": 4, "max_turn_tokens": 48, "max_tokens": 224},
            "env": {"name": "tools", "tools": ["calculator"]},
            "reward": {"name": "math", "options": {"extract": "last_number"}},
            "algo": {"name": "grpo", "clip_high": 0.28},
            "train": {"optim": {"lr": 1e-4, "betas": (0.9, 0.95), "warmup_steps": 5}},
            "evaluate": {"sets": {"held_out": {"path": str(run_dir / "data/held_out.jsonl")}}},
            "checkpoint": {"interval": config.save_every},
        }
    )


def _row(problem: Problem) -> dict[str, JSON]:
    return {
        "prompt": problem.text,
        "label": problem.answer,
        "metadata": {"template": problem.template, "operands": list(problem.operands)},
    }


def _texts(conversations: Iterable[tuple[Message, ...]], schema: Mapping[str, JSON]) -> Iterable[str]:
    """Texts that the tokenizer's merges are learned from."""
    for conversation in conversations:
        for message in conversation:
            yield message.role
            yield message.content
            for call in message.tool_calls:
                yield json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    yield from (f"system\nTools: {schema['function']['name']}(expression)",) * 2


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, JSON]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def _speeds(run_dir: Path) -> dict[str, float]:
    """Mean tokens per second of each phase, from the runs' logs."""
    out: dict[str, float] = {}
    for name, folder in (("warmup", "warmup"), ("rl", "rl")):
        rows = [json.loads(line) for line in (run_dir / folder / "metrics.jsonl").read_text().splitlines()]
        keys = {key for row in rows for key in row if key.startswith("tokens_per_second/")}
        for key in sorted(keys):
            phase = key.removeprefix("tokens_per_second/")
            timed = [row for row in rows if key in row]
            seconds = sum(row[f"time/{phase}_s"] for row in timed)
            out[f"{name}/{phase}"] = sum(row[key] * row[f"time/{phase}_s"] for row in timed) / seconds
    return out


def _pieces(row: Mapping[str, Any], model: Path) -> Iterable[tuple[str, str]]:
    """A recorded sequence as (who wrote it, text), white space made visible."""
    tokenizer = load_tokenizer(model)
    tokens = zip(row["origin"], row["tokens"], strict=True)
    for origin, run in groupby(tokens, key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run])
        yield Origin(origin).name.lower(), str(text).replace("\n", "\u21b5")


def show(results: Mapping[str, JSON], run_dir: Path) -> None:
    """Print the results, and a trajectory of the last rollout with who wrote what."""
    display = build_display("plain", ())
    display.table(
        f"quickstart, seed {results['seed']}: greedy accuracy on held-out problems",
        ("", "accuracy", "valid tool calls"),
        [
            ("random weights", results["accuracy_before"], None),
            ("after the warm-up", results["accuracy_warmup"], results["tool_call_validity_warmup"]),
            ("after GRPO", results["accuracy_rl"], results["tool_call_validity_rl"]),
        ],
    )
    display.table("seconds", ("phase", "seconds"), [*results["seconds_by_phase"].items(), ("all", results["seconds"])])
    row = read_records(max((run_dir / "rl/rollouts").glob("*.parquet")))[0]
    display.note(f"a trajectory of the last rollout, task {row['task_id']}, label {row['label']}, reward {row['reward']:g}:")
    for origin, text in _pieces(row, run_dir / "rl/model"):
        display.note(f"  {origin:<12}{text}")
    display.note(f"data, models, metrics and every token: {run_dir}")
    display.close()
