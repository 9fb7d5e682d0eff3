"""Models and data sets by their Hugging Face hub names: from the local cache, else downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`owner/name`"""

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")

CONFIG = ("config.json",)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
TO_RUN = (TOKENIZER, CONFIG)
"""Files of a model's folder without which no run starts: of each group one."""
TO_PLAN = (CONFIG,)
"""Those that `whet plan` reads."""

# Weights in other formats than safetensors would double the download and are never read.
_MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_METADATA = {"dataset_infos.json", "dataset_info.json", "state.json"}
"""JSON files in a data set's folder that hold no rows."""

_SPLITS = ("train", "validation", "valid", "val", "dev", "test")


def resolve_model_path(name: str) -> Path:
    """The folder of a model: `name` itself if it is a folder, else the hub model `owner/name`.

    Raises:
        ValueError: it is neither, or the hub model is not in the cache and cannot be downloaded.
    """
    check_model_path(name)
    path = Path(name).expanduser()
    return path if path.is_dir() else _snapshot(name, "model", (".safetensors",), _MODEL_FILES)


def check_model_path(name: str) -> None:
    """Refuse what is neither a folder nor a hub name.

    Raises:
        ValueError: with the reason.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ValueError(f"model.path: {name!r} is a file; give the folder that holds its config.json")
    if not path.exists() and not HUB_NAME.fullmatch(name):
        raise ValueError(f"model.path: there is no model folder {name!r} (nor is it a hub name, which reads owner/name)")


def check_model_folder(name: str, needed: Sequence[Sequence[str]] = TO_RUN) -> None:
    """Refuse what is no model's folder, and a folder on this machine that lacks files.

    Args:
        name: value of `model.path`.
        needed: of each of these groups one file has to be there.

    Raises:
        ValueError: with the reason.
    """
    check_model_path(name)
    path = Path(name).expanduser()
    for files in needed if path.is_dir() else ():
        if any((path / each).is_file() for each in files):
            continue
        if files == CONFIG:
            raise ValueError(f"model.path: {name} has no config.json; it must be a model folder in Hugging Face format")
        raise ValueError(f"model.path: {name} has no tokenizer.json or tokenizer_config.json; {_where_one_is(path)}")


def _where_one_is(folder: Path) -> str:
    """Advice for a folder without a tokenizer: a model's folder in it, if there is one."""
    inside = next((path.parent for path in sorted(folder.glob("*/config.json")) if (path.parent / "tokenizer.json").exists()), None)
    return "copy the model's own there" if inside is None else f"did you mean {inside}?"


def dataset_files(name: str, split: str | None) -> list[Path]:
    """The data files of one split of the hub data set `owner/name`, sorted.

    A file belongs to a split if a folder or the start of its name says so (`main/train-00000-of-00002.parquet`).
    `split` may name the folder too (`main/train`); without it, the split is train, or everything if no file's name
    tells a split.

    Raises:
        ValueError: it is not available, has no such split, or the split is in several configurations.
    """
    root = _snapshot(name, "dataset", DATA_SUFFIXES, [f"*{suffix}" for suffix in DATA_SUFFIXES])
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if _holds_rows(path.relative_to(root))]
    known = sorted({label for path in files if (label := _split_of(path))})
    if split is None and not known:
        return [root / path for path in files]
    folder, _, wanted = (split or "train").rpartition("/")
    chosen = [path for path in files if _in_split(path, wanted) and (not folder or folder in path.parts[:-1])]
    if not chosen:
        have = f"its splits are {', '.join(known)}" if known else f"its files are {', '.join(map(str, files))}"
        raise ValueError(f"the data set {name} has no split {split or 'train'!r}; {have} (write {name}:split)")
    configurations = sorted({_configuration(path, wanted) for path in chosen})
    if len(configurations) > 1:
        choices = ", ".join(f"{name}:{configuration}/{wanted}" for configuration in configurations)
        raise ValueError(f"the data set {name} has several configurations with the split {wanted!r}: write {choices}")
    return [root / path for path in chosen]


def _holds_rows(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in DATA_SUFFIXES and path.name not in _METADATA and not hidden


def _in_split(path: Path, split: str) -> bool:
    return split in path.parts[:-1] or re.split(r"[-_.]", path.name)[0] == split


def _split_of(path: Path) -> str | None:
    return next((split for split in _SPLITS if _in_split(path, split)), None)


def _configuration(path: Path, split: str) -> str:
    """The folder that tells a file's configuration: what is left of its folders without the split's and `data`."""
    return "/".join(part for part in path.parts[:-1] if part not in (split, "data"))


def _snapshot(name: str, kind: str, needed: tuple[str, ...], patterns: list[str]) -> Path:
    """The local folder of a hub repository: the cached one if it has a file that ends in one of `needed`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
        if any(path.name.endswith(needed) for path in folder.rglob("*")):
            return folder
    except LocalEntryNotFoundError:
        pass  # not in the cache: downloaded below
    flag = " --repo-type dataset" if kind == "dataset" else ""
    what = "data set" if kind == "dataset" else "model"
    command = f"`hf download{flag} {name}`"
    missing = f"the {what} {name!r} is neither a local path nor in the Hugging Face cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{missing}, and HF_HUB_OFFLINE is set: unset it, or run {command} where there is a network")
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except OSError as error:  # the hub's errors and the network's are all OSErrors
        advice = f"run {command} where there is a network (and set HF_HUB_OFFLINE=1 where there is none)"
        raise ValueError(f"{missing}, and downloading it failed; {advice}: {error}") from error
