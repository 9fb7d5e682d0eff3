"""Files of tensors, whose failures are the operating system's own errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Args:
        tensors: by name.
        path: of the file.
        metadata: for its header; transformers wants to read `format` there.

    Raises:
        OSError: if it cannot be written, with the system's reason.
    """
    with system_errors(path):
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """The safetensors library wraps the system's errors into its own; inside here they are the system's again."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
