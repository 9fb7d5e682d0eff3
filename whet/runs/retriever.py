"""`whet retriever`: search in a corpus over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from whet.env.search.searcher import Ranking, Searcher
from whet.env.search.tool import check_options


def serve_corpus(
    corpus: str, host: str, port: int, ranking: Ranking, model: str | None, cache: str | None, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C.

    Args:
        corpus: a data file or a folder, as for `read_corpus`.
        host: to listen on; one that other machines reach needs WHET_API_KEY.
        port: 0: one that is free.
        ranking: bm25, dense or hybrid.
        model: folder of a sentence-transformers model, for dense and hybrid.
        cache: folder of the indexes; None: whet's own.
        say: prints a line.

    Raises:
        ValueError: the corpus cannot be read, the address is not to be had, or a package is missing.
    """
    try:
        from whet.serve.access import Keys
        from whet.serve.retriever import Retriever, RetrieverServer
        from whet.serve.server import address_of, bind
    except ModuleNotFoundError as error:
        raise ValueError(f"the retriever needs the package {error.name}: pip install 'whet[search,serve]'") from error
    check_options(corpus, None, ranking, model)
    keys = Keys.from_environment(os.environ)
    with bind(host, port, keys) as bound:
        searcher = Searcher(corpus, ranking, model, cache)
        documents = f"{len(searcher.documents)} documents of {corpus}"
        words = f"whet retriever: {documents} at {address_of(bound)}/retrieve (keys: {keys.words()}); Ctrl-C ends it"
        with closing(Retriever(searcher)) as retriever:
            RetrieverServer(retriever, host, keys, lambda: say(words)).run(sockets=[bound])
