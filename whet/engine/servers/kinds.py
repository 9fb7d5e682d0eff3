"""The kinds of servers, and which of them answers at an address."""

from __future__ import annotations

from whet.engine.base import EngineFailed
from whet.engine.servers.start import ServerKind, ask
from whet.engine.sglang.start import Sglang
from whet.engine.vllm.start import Vllm

KINDS: dict[str, ServerKind] = {"vllm": Vllm(), "sglang": Sglang()}


def kind_at(name: str, url: str, key: str | None) -> ServerKind:
    """The kind of a server that answers.

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
            problems.append(str(error))
            continue
        if kind == "vllm" or "tp_size" in facts:
            return KINDS[kind]
    raise EngineFailed(f"{name}: neither vLLM nor SGLang answers at {url}: {'; '.join(problems) or 'its facts are of neither'}")
