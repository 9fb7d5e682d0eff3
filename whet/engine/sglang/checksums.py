"""SGLang's own checksums of the parameters in each of a server's processes (`/weights_checker`)."""

from __future__ import annotations

from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.sglang.broadcast import check_success

ROUTE = "/weights_checker"
SIZES = ("tp", "pp", "dp")


def checksums_of(name: str, answer: Any) -> dict[str, str]:
    """The checksums of an answer, each by its process's place and its name, `tp0/2:pp0/1:dp0/1:NAME`: servers of one layout have the same
    keys.

    Args:
        name: the server's.
        answer: of `/weights_checker` with the action `checksum`.

    Raises:
        EngineFailed: if it has none.
    """
    check_success(name, ROUTE, answer)
    out: dict[str, str] = {}
    try:
        for rank in answer["ranks"]:
            places = rank["parallelism_info"]  # of the model, or of each model where a draft model has its own
            place = places[0] if isinstance(places, list) else places
            where = ":".join(f"{each}{place[f'{each}_rank']}/{place[f'{each}_size']}" for each in SIZES)
            out |= {f"{where}:{parameter}": str(checksum) for parameter, checksum in rank["checksums"].items()}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineFailed(f"{name}: {ROUTE} answered without checksums: {error!r}") from error
    if not out:
        raise EngineFailed(f"{name}: {ROUTE} answered without checksums")
    return out
