"""The folder that `whet init` writes: files to change, and a small model that can begin with them.

The files are those of `templates`. The model is made on the spot as the quickstart's is, and has read the rows: half of the replies that
it was shown are wrong, so there is something to learn.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

from whet.config import load_config, resolve
from whet.env.tools import Tool
from whet.settings.supervised import RewardModelRunConfig, SupervisedRunConfig
from whet.types import Message, ToolCall

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = {"tools": "calculate", "search": "search"}
"""Name of the function in `tools.py`, by template."""
ROWS = {"rlhf": "pairs.jsonl"}
"""File of the rows where it is another than `rows.jsonl`, by template."""
MODEL, REWARD_MODEL = "model", "reward_model"
SHAPE = {"hidden_size": 96, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 256}
"""Sizes of the model, as of `quickstart.model.SmallModelConfig`."""
NUM_STEPS, PER_STEP = 150, 20


def write_folder(kind: str, folder: Path) -> list[Path]:
    """Write the files of a template and the model.

    Args:
        kind: name of a folder of `templates`.
        folder: is made if it is not there.

    Returns:
        What was written.

    Raises:
        ValueError: something of it is there already. Nothing is written then.
    """
    source = TEMPLATES / kind
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    names += [MODEL, REWARD_MODEL] if kind == "rlhf" else [MODEL]
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise ValueError(f"{folder} has {', '.join(taken)} already, and nothing is overwritten: whet init {kind} ANOTHER_FOLDER")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".init-", dir=folder.parent) as draft:
        for path in source.iterdir():
            if path.is_file():
                copyfile(path, Path(draft) / path.name)
        make_reader(Path(draft), kind)
        if kind == "rlhf":
            make_reward_model(Path(draft))
        folder.mkdir(exist_ok=True)
        for name in names:
            (Path(draft) / name).rename(folder / name)
    return [folder / name for name in names]


def make_reward_model(folder: Path) -> None:
    """Train the reward model of a folder by its `rm.toml`."""
    from whet.runs.supervised import train_on_data

    with tempfile.TemporaryDirectory(dir=folder) as work:
        pairs = f"{folder}/pairs.jsonl"
        places = {"run_dir": f"{work}/run", "model.path": f"{folder}/{MODEL}", "data.path": pairs, "evaluate.path": pairs}
        quiet = {"model.device": "cpu", "observe.display": "none"}
        typed = [f"{key}={json.dumps(value)}" for key, value in {**places, **quiet}.items()]
        train_on_data(load_config(RewardModelRunConfig, folder / "rm.toml", typed))
        (Path(work) / "run/model").rename(folder / REWARD_MODEL)


def make_reader(folder: Path, kind: str, num_steps: int = NUM_STEPS) -> None:
    """Make a small model that has read the rows of a folder."""
    tool = resolve(f"{folder / 'tools.py'}:{TOOLS[kind]}", kind="tool") if kind in TOOLS else None
    rows = [json.loads(line) for line in (folder / ROWS.get(kind, "rows.jsonl")).read_text().splitlines()]
    make_started(folder / MODEL, [*demonstrations(rows, tool)], [] if tool is None else [Tool(tool).schema], num_steps)


def make_started(
    model: Path, shown: Sequence[tuple[Message, ...]], schemas: Sequence[Mapping[str, Any]] = (), num_steps: int = NUM_STEPS
) -> None:
    """Make a small model that has learned from conversations.

    Args:
        model: the model's folder, in a folder that is there.
        shown: the conversations.
        schemas: tools that they have.
        num_steps: optimizer steps.
    """
    from whet.quickstart.model import SmallModelConfig, make_model
    from whet.runs.supervised import train_on_data

    with tempfile.TemporaryDirectory(dir=model.parent) as work:
        talks = Path(work) / "talks.jsonl"
        rows = ({"messages": [m.to_dict() for m in talk], "tools": list(schemas)} for talk in shown)
        talks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_model(Path(work) / "base", _texts(shown, schemas), SmallModelConfig.model_validate(SHAPE), seed=0)
        settings = {
            "run_dir": f"{work}/run",
            "deterministic": True,
            "model": {"path": f"{work}/base", "device": "cpu"},
            "data": {"path": str(talks)},
            "num_steps": num_steps,
            "samples_per_step": PER_STEP,
            "train": {"optim": {"lr": 3e-3, "warmup_steps": 10, "schedule": "cosine"}},
            "checkpoint": {"interval": None},
            "observe": {"display": "none"},
        }
        train_on_data(SupervisedRunConfig.model_validate(settings))
        (Path(work) / "run/model").rename(model)


def demonstrations(rows: Sequence[Mapping[str, Any]], tool: Callable[..., str] | None) -> Iterator[tuple[Message, ...]]:
    """Conversations about each row: as many with the reply to another row as with its own. In pairs, both replies."""
    rng = random.Random(0)
    for row in rows:
        for about in (row, row, rng.choice(rows), rng.choice(rows)):
            replies = [row["chosen"], row["rejected"]] if "chosen" in row else [about["label"]]
            called: tuple[Message, ...] = ()
            if tool is not None:
                call = ToolCall(tool.__name__, about["call"])
                called = Message("assistant", "", (call,)), Message("tool", tool(**about["call"]), name=call.name)
            for reply in replies:
                yield Message("user", row["prompt"]), *called, Message("assistant", str(reply))


def _texts(shown: Sequence[tuple[Message, ...]], schemas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Texts that the tokenizer's merges are learned from."""
    for message in (message for talk in shown for message in talk):
        yield from (message.role, message.content)
        yield from (json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls)
    for schema in schemas:
        yield from (f"system\nTools: {schema['function']['name']}({', '.join(schema['function']['parameters']['properties'])})",) * 2
