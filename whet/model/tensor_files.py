"""Files of tensors, whose failures are the operating system's own errors."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Args:
        tensors: by name.
        path: path of the file.
        metadata: for its header; transformers wants to read `format` there.

    Raises:
        OSError: if it cannot be written, with the system's reason.
    """
    with system_errors(path):
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    follow_umask([path])


def save_model(hf: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model's folder in Hugging Face format: safetensors files and config.json.

    Args:
        hf: the model.
        folder: folder of the files; it is made where it is missing.
        tensors: by name, in place of the model's own.

    Raises:
        OSError: if it cannot be written, with the system's reason.
    """
    with system_errors(folder), no_progress_bar():
        hf.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
    follow_umask(folder.glob("*.safetensors"))


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Context in which transformers shows no progress bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def follow_umask(files: Iterable[Path]) -> None:
    """Give files the mode that the umask gives to any new file: the safetensors library lets nobody but the owner read what it writes."""
    for path in files:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            new = Path(scratch) / "new"
            new.touch()
            path.chmod(new.stat().st_mode)


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """The safetensors library wraps the system's errors into its own; inside here they are the system's again."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
