"""Search in a local corpus: by words, by meaning, or by both."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, Protocol

from whet.env.search.corpus import Document, digest_of
from whet.env.search.dense import Encode, digest_of_model, load_encoder, open_vectors
from whet.env.search.index import Hit, cache_folder, open_index

Ranking = Literal["bm25", "dense", "hybrid"]
FUSION = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)."""
FUSED = 100
"""Documents of each ranking that are fused, at least."""


class _Ranks(Protocol):
    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]: ...


class Searcher:
    """Finds documents of one corpus. May be used by several threads.

    Args:
        corpus: as for `read_corpus`.
        ranking: bm25: by words; dense: by meaning; hybrid: both rankings fused.
        model: folder of a sentence-transformers model, for dense and hybrid.
        cache: folder of the indexes; None: whet's own in the user's cache.
        encode: in place of the model.

    Raises:
        ValueError: the corpus or the model cannot be read, or a package is missing.
    """

    def __init__(
        self, corpus: str, ranking: Ranking = "bm25", model: str | None = None, cache: str | None = None, encode: Encode | None = None
    ) -> None:
        folder = cache_folder(cache)
        words = open_index(corpus, folder)
        self.documents = words.documents
        self._lock = threading.Lock()
        self._rankings: list[_Ranks] = [] if ranking == "dense" else [words]
        if ranking != "bm25":
            assert model is not None, "the factory asks for it"
            encode = encode or load_encoder(model)
            both = hashlib.sha256(f"{digest_of(corpus)}/{digest_of_model(model)}".encode()).hexdigest()
            self._rankings.append(open_vectors(self.documents, both, encode, folder))

    def search(self, query: str, top_k: int) -> list[Hit]:
        """The best documents for a query, the best first; equal ones in the order of the corpus."""
        with self._lock:  # the model and bm25s say nothing of threads
            if len(self._rankings) == 1:
                found = self._rankings[0].rank(query, top_k)
            else:
                found = fuse([each.rank(query, max(top_k, FUSED)) for each in self._rankings])[:top_k]
        return [Hit(self.documents[place], score) for place, score in found]

    def find(self, name: str) -> Document | None:
        """The document with an id."""
        with self._lock:
            return self.documents.find(name)


def fuse(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: the sum of 1 / (60 + rank) over the rankings that have a place."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, 1):
            scores[place] += 1 / (FUSION + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
