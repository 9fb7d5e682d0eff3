"""A trained model on the Hugging Face hub, with a card that says what it was trained on, how, and what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from whet.data.hub import HUB_NAME

ENDS = 10
"""Steps at each end of a run over which the card's figures are means."""
FIGURES = ("reward/total", "response/tokens/mean", "policy/entropy", "sft/loss", "dpo/loss", "dpo/accuracy", "rm/loss", "rm/accuracy")
KINDS = {"algo": "reinforcement learning", "dpo": "direct preference optimization", "rm": "a reward model from preference pairs"}
"""Kinds of run by a table that only they have."""


class TrainedRun(Protocol):
    """A run with its model (`whet.Run`)."""

    folder: Path

    @property
    def model_path(self) -> Path: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def rows(self) -> list[dict[str, Any]]: ...

    @property
    def results(self) -> dict[str, Any]: ...


def push(run: TrainedRun, name: str, *, private: bool, token: str | None) -> str:
    """Upload a run's model and its card. Arguments as for `Run.push_to_hub`.

    Raises:
        ValueError: the name is none of the hub's, the run has no model, or the hub refuses.
    """
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"push_to_hub: {name!r} is not of the form owner/name")
    folder = run.model_path
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as draft:
            page = Path(draft) / "README.md"
            page.write_text(card(run, name), encoding="utf-8")
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Model of {run.folder.name}", ignore_patterns=["README.md"])
            info = api.upload_file(path_or_fileobj=page, path_in_repo="README.md", repo_id=name, commit_message="Model card")
    except OSError as error:  # the hub's errors and the network's are all OSErrors
        raise ValueError(f"push_to_hub: {name} was not uploaded: {error}; log in with `hf auth login`, or give a token") from error
    return str(info).partition("/blob/")[0]


def card(run: TrainedRun, name: str) -> str:
    """The model card, in Markdown with the hub's header."""
    settings, rows = run.settings, run.rows
    base = str(settings["model"]["path"])
    header = ["---", "library_name: transformers", "tags: [whet, reinforcement-learning]", *_base_model(base), "---"]
    kind = next((what for table, what in KINDS.items() if table in settings), "supervised fine-tuning")
    trained = [f"# {name}", "", f"Trained by whet {version('whet')}: {kind}, from {_shown(base)}.", "", "## Data", ""]
    data = settings.get("data", {})
    files = data.get("train") or data.get("path") or data.get("source")
    trained += [f"- training: {', '.join(map(_shown, files if isinstance(files, list) else [files]))}"]
    sets = settings.get("evaluate", {}).get("sets", {})
    trained += [f"- evaluation {set_name}: {_shown(chosen['path'])}" for set_name, chosen in sets.items()]
    return "\n".join([*header, "", *trained, "", "## Figures", "", *_figures(rows, run), "", "## Settings", "", *_settings(run)]) + "\n"


def _base_model(base: str) -> list[str]:
    return [f"base_model: {base}"] if HUB_NAME.fullmatch(base) and not Path(base).exists() else []


def _shown(path: Any) -> str:
    """A path without the folders of this machine; a name of the hub as it is."""
    text = str(path)
    return text if HUB_NAME.fullmatch(text) and not Path(text).exists() else Path(text).name


def _figures(rows: list[dict[str, Any]], run: TrainedRun) -> list[str]:
    lines = [f"| metric | first {ENDS} steps | last {ENDS} steps |", "|---|---|---|"]
    for metric in FIGURES:
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if values:
            first, last = values[:ENDS], values[-ENDS:]
            lines.append(f"| {metric} | {sum(first) / len(first):.4g} | {sum(last) / len(last):.4g} |")
    evaluated = {name: [row[name] for row in rows if row.get(name) is not None] for name in run.results}
    if any(evaluated.values()):
        lines += ["", "| evaluation | first | last |", "|---|---|---|"]
        lines += [f"| {name} | {values[0]:.4g} | {values[-1]:.4g} |" for name, values in evaluated.items() if values]
    return lines


def _settings(run: TrainedRun) -> list[str]:
    """The settings, as TOML; paths without the folders of this machine."""
    from whet.config.dump import dump_toml

    return ["```toml", dump_toml(_without_folders(run.settings)).rstrip(), "```"]


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
