"""Search by meaning: vectors of a sentence-transformers model, compared by their cosine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.env.search.index import FORM, Documents, best_of, made_once

if TYPE_CHECKING:
    import numpy as np

MISSING = "searching by meaning needs the package sentence-transformers: pip install sentence-transformers"
BATCH = 64
Encode = Callable[[Sequence[str]], "np.ndarray"]
"""Vectors of texts, a row each."""


def load_encoder(model: str) -> Encode:
    """The model of a folder, which nothing is downloaded for.

    Raises:
        ValueError: there is no such folder, or the package is missing.
    """
    if not Path(model).is_dir():
        raise ValueError(f"there is no model folder {model!r}; a search by meaning needs one of sentence-transformers")
    try:
        from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(MISSING) from error
    loaded: Any = SentenceTransformer(model, device="cpu", local_files_only=True, trust_remote_code=False)
    return lambda texts: loaded.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)


def digest_of_model(folder: str) -> str:
    """A digest of a model's files."""
    total = hashlib.sha256()
    for file in sorted(Path(folder).rglob("*")):
        if file.is_file():
            with open(file, "rb") as opened:
                total.update(json.dumps([file.relative_to(folder).as_posix(), hashlib.file_digest(opened, "sha256").hexdigest()]).encode())
    return total.hexdigest()


class VectorIndex:
    """Vectors of all documents, memory-mapped; each search compares with every one of them.

    Args:
        folder: made by `open_vectors`.
        encode: the model that made them.
    """

    def __init__(self, folder: Path, encode: Encode) -> None:
        import numpy as np

        self._vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        self._encode = encode

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Places and cosines of the nearest documents; of equal ones the first in the corpus."""
        (vector,) = _unit(self._encode([query]))
        return best_of(self._vectors @ vector, top_k, least=-2.0)


def open_vectors(documents: Documents, digest: str, encode: Encode, cache: Path) -> VectorIndex:
    """The vectors of documents, which are computed if the cache does not have them.

    Args:
        documents: of the corpus' index.
        digest: of the corpus and the model.
        encode: the model.
        cache: folder of all indexes.
    """

    def build(folder: Path) -> None:
        import numpy as np

        parts: list[Any] = []
        for begin in range(0, len(documents), BATCH):
            texts = [documents[place].text for place in range(begin, min(begin + BATCH, len(documents)))]
            parts.append(_unit(encode(texts)))
        np.save(folder / "vectors.npy", np.concatenate(parts), allow_pickle=False)

    return VectorIndex(made_once(cache / f"vectors-{FORM}-{digest[:32]}", build), encode)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1 (a row of zeros stays), in float32."""
    import numpy as np

    rows = np.asarray(vectors, np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
