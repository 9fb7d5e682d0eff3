"""`whet doctor URL`: examine a server that is to sample for a run, by asking it what a run would ask."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from whet.check.findings import Finding, Note, fail, ok, warn
from whet.engine.base import EngineFailed
from whet.engine.layout import NOTHING
from whet.engine.servers.http import KEY
from whet.engine.servers.kinds import kind_at
from whet.engine.servers.start import ask
from whet.engine.sglang.checksums import ROUTE as CHECKSUMS
from whet.engine.sglang.checksums import checksums_of
from whet.engine.sglang.start import SIZES, no_broadcast
from whet.engine.vllm.start import NEEDED, has_plugin
from whet.types import JSON

PROMPT = (1, 2, 3)
AREAS = ("server", "routes", "model", "log-probs", "mask", "experts", "weights", "proof", "access")
CLOSE = 1e-2
"""Nats that two log-probs of one distribution may be apart, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address and kind."""

    url: str
    key: str | None
    kind: str
    """As in `engine.name`."""
    title: str
    """Name and version."""
    paths: frozenset[str]
    """Its routes, where it lists them."""

    def get(self, path: str) -> dict[str, Any]:
        return ask("", self.url + path, self.key)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return ask("", self.url + path, self.key, body)

    def has_route(self, path: str) -> bool:
        """True if the server knows a route that is called by POST; it is not."""
        try:
            self.get(path)
        except EngineFailed as error:
            return "HTTP Error 404" not in str(error)
        return True

    def sample(self, *, experts: bool = False, **options: Any) -> FirstToken:
        """The first token of a reply, with the two most likely ones; `experts`: with those of the prompt's tokens.

        Raises:
            EngineFailed: if the server does not answer.
        """
        if self.kind == "vllm":
            params = {"max_tokens": 1, "logprobs": 2, **options}
            body = {"token_ids": list(PROMPT), "model": self.model, "sampling_params": params}
            choice = self.post("/inference/v1/generate", body)["choices"][0]
            entries = (choice.get("logprobs") or {}).get("content") or [{}]
            top = {int(each["token_id"]): float(each["logprob"]) for each in entries[0].get("top_logprobs") or ()}
            return FirstToken(top, choice.get("sampling_mask"), choice.get("routed_experts"))
        params = {"max_new_tokens": 1, **options}
        body = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
        asked = {"return_sampling_mask": True} if options.get("top_p", 1.0) < 1 else {}
        asked |= {"return_routed_experts": True} if experts else {}
        meta = self.post("/generate", body | asked)["meta_info"]
        top = {int(each[1]): float(each[0]) for each in (meta.get("output_top_logprobs") or [[]])[0]}
        return FirstToken(top, meta.get("output_token_sampling_mask"), meta.get("routed_experts"))

    @property
    def model(self) -> str:
        return str((self.get("/v1/models").get("data") or [{}])[0].get("id"))


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An answer to a request for one token."""

    top: dict[int, float]
    """Log-probs of the most likely tokens."""
    mask: Any
    experts: Any


def doctor_server(url: str, show: Callable[[Finding], None]) -> dict[str, JSON]:
    """Examine a server.

    Args:
        url: its address; its key is read from the environment variable WHET_ENGINE_KEY.
        show: called with each finding.

    Returns:
        `findings`; `failed`, how many of them are failures.
    """
    findings: list[Finding] = []
    for area, note in _examined(url.rstrip("/")):
        findings.append(note.of(area))
        show(findings[-1])
    failed = sum(finding.status == "FAIL" for finding in findings)
    return {"findings": [finding.to_dict() for finding in findings], "failed": failed}


def _examined(url: str) -> Iterator[tuple[str, Note]]:
    key = os.environ.get(KEY)
    try:
        server = identify(url, key)
    except EngineFailed as error:
        yield "server", fail(str(error).removeprefix(": "))
        return
    yield "server", ok(f"{server.title} at {url}: engine.name={server.kind}, engine.urls=['{url}']")
    for area, check in CHECKS.items():
        try:
            for note in check(server):
                yield area, note
        except EngineFailed as error:
            yield area, fail(str(error).removeprefix(": "))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            yield area, fail(f"the answer lacks what was asked for ({error!r}): a router in between may have dropped it")


def identify(url: str, key: str | None) -> Server:
    """The kind of a server.

    Raises:
        EngineFailed: if nobody answers, or it is neither vLLM's nor SGLang's.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise EngineFailed(f"{url!r} is not the address of a server; write http://HOST:PORT")
    kind, facts = kind_at("", url, key)
    version = str(facts.get("version", "of an unknown version"))
    paths = frozenset(ask("", url + "/openapi.json", key).get("paths", {})) if kind.name == "vllm" else frozenset[str]()
    return Server(url, key, kind.name, version if version.startswith("whet ") else f"{kind.title} {version}", paths)


def check_routes(server: Server) -> Iterator[Note]:
    """Check that the routes which whet calls are there."""
    missing = [f"{path}: {remedy}" for path, remedy in NEEDED.items() if path not in server.paths] if server.kind == "vllm" else []
    for text in missing:
        yield fail(text)
    if not missing:
        yield ok("all that whet calls" if server.paths else "SGLang's; the checks below call them")


def check_model(server: Server) -> Iterator[Note]:
    """Report the model, its longest sequence and the server's size."""
    card = (server.get("/v1/models").get("data") or [{}])[0]
    if server.kind == "vllm":
        size = server.get("/get_world_size")["world_size"]
    else:
        facts = server.get("/server_info")
        size = int(facts.get("tp_size") or 1) * int(facts.get("dp_size") or 1) * int(facts.get("pp_size") or 1)
    yield ok(f"{card['id']}, sequences of {card['max_model_len']} tokens, {size} processes")


def check_logprobs(server: Server) -> Iterator[Note]:
    """Check by two requests that log-probs are of the distribution sampled from: their differences grow as the temperature falls."""
    if server.title.startswith("whet "):
        yield ok("of the distribution sampled from: whet serve has no others")
        return
    warm, cool = server.sample(temperature=1.0).top, server.sample(temperature=0.5).top
    both = sorted(warm.keys() & cool.keys())
    if len(both) < 2:
        raise KeyError("log-probs of the most likely tokens")
    before, after = warm[both[0]] - warm[both[1]], cool[both[0]] - cool[both[1]]
    if abs(after - 2 * before) <= CLOSE * max(1.0, abs(before)):
        yield ok("of the distribution sampled from: half the temperature doubles the differences")
    elif server.kind == "vllm":
        yield fail("of the model's own distribution, whatever the temperature: start the server with --logprobs-mode processed_logprobs")
    else:
        yield fail("of the model's own distribution, whatever the temperature: start the server without SGLANG_RETURN_ORIGINAL_LOGPROB")


def check_mask(server: Server) -> Iterator[Note]:
    """Check whether the ids that a token was drawn from come along, which training with top_p, top_k or min_p needs."""
    try:
        mask = server.sample(top_p=0.5).mask
    except EngineFailed:  # a server that does not know the field
        mask = None
    if mask:
        yield ok("the ids that a token was drawn from come along: rollout.top_p, top_k and min_p may be set")
    else:
        remedy = "start it with --return-sampling-mask (a GPU, model runner V2)" if server.kind == "vllm" else "SGLang 0.5.23 has them"
        yield warn(f"the ids that a token was drawn from do not come along: train with top_p=1, top_k=0, min_p=0, or {remedy}")


def check_experts(server: Server) -> Iterator[Note]:
    """Report whether a mixture's chosen experts come along."""
    try:
        sent = server.sample(experts=True).experts is not None
    except EngineFailed:  # a server that refuses them, or that has a model without experts
        sent = False
    remedy = "start it with --enable-return-routed-experts for a mixture of experts"
    use = "train.routing_replay=rollout"
    yield ok(f"chosen experts come along: {use} may be set" if sent else f"chosen experts do not come along, which {use} needs: {remedy}")


def check_weights(server: Server) -> Iterator[Note]:
    """Report the label of the weights, and the ways that new ones can come."""
    if server.kind == "sglang":
        yield _sglang_weights(server)
        return
    label, plugin = server.get("/weight_info")["weight_version"], has_plugin(server.url, server.key)
    if plugin:
        yield ok(f"version {label!r}; whet-vllm is there: sync.transport=disk or broadcast, with digests of what arrived")
    else:
        yield warn(
            f"version {label!r}; new ones from a folder alone, without digests of what arrived: install whet-vllm in the server's "
            "environment and start it as whet-vllm's README says"
        )


def _sglang_weights(server: Server) -> Note:
    """The ways that new weights can come to a server of SGLang's routes."""
    label, facts = server.get("/model_info")["weight_version"], server.get("/server_info")
    folder = "from a folder (sync.transport=disk), which the server must see under the same path"
    sizes = {size: int(facts.get(size) or 1) for size in SIZES}
    why = no_broadcast(sizes, dp_attention=bool(facts.get("enable_dp_attention")))
    if not why and not server.has_route("/begin_weight_update"):
        why = "it has no route /begin_weight_update, which newer versions of SGLang have"
    if why:
        return ok(f"version {label!r}; new ones {folder}, and not by a broadcast: {why}")
    return ok(f"version {label!r}; new ones {folder}, or by a broadcast (sync.transport=broadcast)")


def check_proof(server: Server) -> Iterator[Note]:
    """Report how much of the weights in the server's memory can be compared."""
    if server.kind == "sglang":
        prompt = "by the log-probs of a fixed prompt"
        try:
            found = checksums_of("", server.post(CHECKSUMS, {"action": "checksum"}))
        except EngineFailed as error:
            yield warn(f"{prompt} alone: {str(error).removeprefix(': ')}")
            return
        yield ok(f"{prompt}, and {len(found)} checksums: servers agree on them, and they change with the weights; the trainer has none")
        return
    sums = server.post("/weight_checker", {"action": "checksum"})["checksums"]
    packed = sum(digest == NOTHING for digest in sums.values())
    text = f"{len(sums) - packed} of {len(sums)} parameters have digests, and a fixed prompt has log-probs"
    yield ok(text) if not packed else ok(f"{text}; the others are packed (vLLM on CPUs)")


def check_access(server: Server) -> Iterator[Note]:
    """Check who may change weights: vLLM's key does not protect the routes that do."""
    route = "/weight_info" if server.kind == "vllm" else "/model_info"
    try:
        ask("", server.url + route, None)
    except EngineFailed:
        yield ok(f"its routes of weights ask for a key ({KEY})")
        return
    if _is_loopback(urlsplit(server.url).hostname or ""):
        yield ok("its routes of weights are open, on this machine alone as far as its address says")
    else:
        more = "; vLLM's --api-key does not protect them" if server.kind == "vllm" else "; --admin-api-key closes them"
        yield warn(f"whoever reaches {server.url} may change its weights: let trusted machines alone reach it{more}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


CHECKS: dict[str, Callable[[Server], Iterator[Note]]] = {
    "routes": check_routes,
    "model": check_model,
    "log-probs": check_logprobs,
    "mask": check_mask,
    "experts": check_experts,
    "weights": check_weights,
    "proof": check_proof,
    "access": check_access,
}
"""Checks by the area of their findings."""
