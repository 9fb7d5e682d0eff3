"""The kinds of servers, and which of them answers at an address."""

from __future__ import annotations

from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.servers.start import ServerKind, ask
from whet.engine.sglang.start import Sglang
from whet.engine.vllm.start import Vllm

KINDS: dict[str, ServerKind] = {"vllm": Vllm(), "sglang": Sglang()}


def kind_at(name: str, url: str, key: str | None) -> tuple[ServerKind, dict[str, Any]]:
    """The kind of a server that answers, and the facts by which it is known.

    Args:
        name: the server's, in errors.
        url: its address.
        key: its key; None: none.

    Raises:
        EngineFailed: if it is neither vLLM's nor SGLang's; `whet serve` counts as the latter.
    """
    problems: list[str] = []
    for kind, path in (("sglang", "/server_info"), ("vllm", "/version")):
        try:
            facts = ask(name, url + path, key)
        except EngineFailed as error:
            problems.append(str(error).removeprefix(f"{name}: "))
            continue
        if kind == "vllm" or "tp_size" in facts:
            return KINDS[kind], facts
    raise EngineFailed(f"{name}: neither vLLM nor SGLang answers: {'; '.join(problems) or 'its facts are of neither'}")
