"""`whet doctor URL`, on `whet serve` and on answers as vLLM gives them."""

from __future__ import annotations

import math

import pytest

from tests.serve.serve_setup import live, model_folder
from whet.check.server import doctor_server
from whet.engine.base import EngineFailed
from whet.engine.layout import NOTHING
from whet.serve.access import Keys

URL = "http://10.0.0.1:8000"


def found_by(url):
    found = doctor_server(url, lambda finding: None)
    return {finding["area"]: (finding["status"], finding["text"]) for finding in found["findings"]}, found["failed"]


def test_what_a_server_of_sglangs_routes_offers(tmp_path, monkeypatch):
    with live(model_folder(tmp_path / "model")) as server:
        areas, failed = found_by(server.url)
    assert areas["server"][1].startswith("whet ") and "engine.name=sglang" in areas["server"][1]
    assert areas["model"] == ("ok", "tiny, sequences of 512 tokens, 1 processes") and areas["access"][0] == "ok"
    assert areas["mask"][0] == "ok" and failed == 0
    assert areas["weights"][1].startswith("version 'default'") and "sync.transport=disk" in areas["weights"][1]
    assert areas["weights"][1].endswith("or by a broadcast (sync.transport=broadcast)")
    assert areas["proof"][0] == "ok" and "checksums: servers agree on them" in areas["proof"][1]


class FakeSglangFacts:
    """Answers of an SGLang server, as far as weights are asked about."""

    def __init__(self, **changes):
        self.changes = changes

    def __call__(self, _, url, key, body=None):
        match url.removeprefix(URL):
            case "/server_info":
                return {"tp_size": 2, "dp_size": 1, "pp_size": 1, "version": "0.5.23"} | self.changes.get("facts", {})
            case "/model_info":
                return {"weight_version": "default"}
            case "/begin_weight_update":
                raise EngineFailed(f": {url}: HTTP Error {self.changes.get('status', 405)}: no")
            case "/weights_checker" if not self.changes.get("unchecked"):
                place = {f"{size}_{what}": 0 for size in ("tp", "pp", "dp") for what in ("rank", "size")}
                return {"success": True, "message": "", "ranks": [{"checksums": {"w": "ab"}, "parallelism_info": place}]}
            case _:
                raise EngineFailed(f": {url}: HTTP Error 404: Not Found")


@pytest.mark.parametrize(
    ("changes", "area", "status", "words"),
    [
        ({}, "weights", "ok", "or by a broadcast (sync.transport=broadcast)"),
        ({"status": 404}, "weights", "ok", "not by a broadcast: it has no route /begin_weight_update"),
        ({"facts": {"pp_size": 2}}, "weights", "ok", "not by a broadcast: SGLang takes no broadcast with 2 stages of a pipeline"),
        ({}, "proof", "ok", "and 1 checksums"),
        ({"unchecked": True}, "proof", "warn", "by the log-probs of a fixed prompt alone"),
    ],
)
def test_how_weights_reach_a_server_of_sglang(monkeypatch, changes, area, status, words):
    monkeypatch.setattr("whet.check.server.ask", FakeSglangFacts(**changes))
    monkeypatch.setattr("whet.engine.servers.kinds.ask", FakeSglangFacts(**changes))
    areas, _ = found_by(URL)
    assert areas[area][0] == status and words in areas[area][1], areas[area]


def test_a_key_is_asked_for_by_name(tmp_path, monkeypatch):
    with live(model_folder(tmp_path / "model"), Keys("open", "sesame")) as server:
        areas, failed = found_by(server.url)
        assert failed == 1 and "WHET_ENGINE_KEY" in areas["server"][1]
        monkeypatch.setenv("WHET_ENGINE_KEY", "sesame")
        areas, _ = found_by(server.url)
        assert areas["access"] == ("ok", "its routes of weights ask for a key (WHET_ENGINE_KEY)")


@pytest.mark.parametrize(
    ("url", "words"), [("127.0.0.1:1", "not the address of a server"), ("http://127.0.0.1:1", "neither vLLM nor SGLang answers")]
)
def test_an_address_without_a_server_is_named(url, words):
    areas, failed = found_by(url)
    assert failed == 1 and words in areas["server"][1]


class FakeVllmFacts:
    """Answers of vLLM 0.32, some of them changed."""

    def __init__(self, **changes):
        self.changes = changes

    def __call__(self, _, url, key, body=None):
        path = url.removeprefix(URL)
        if path in self.changes.get("missing", ()):
            raise EngineFailed(f": {url}: HTTP Error 404: Not Found")
        match path:
            case "/version":
                return {"version": "0.32.0"}
            case "/openapi.json":
                return {"paths": {each: {} for each in self.changes.get("paths", ("/inference/v1/generate", "/pause"))}}
            case "/v1/models":
                return {"data": [{"id": "tiny", "max_model_len": 64}]}
            case "/get_world_size":
                return {"world_size": 2}
            case "/weight_info":
                return {"weight_version": "default"}
            case "/weight_checker":
                return {"checksums": {"dp0:pp0:pcp0:tp0:a": "ab", "dp0:pp0:pcp0:tp0:b": NOTHING}}
            case "/collective_rpc" if self.changes.get("plugin", True):
                return {"results": [True, True]}
            case "/inference/v1/generate":
                return {"choices": [self.choice(body["sampling_params"])]}
            case _:
                raise EngineFailed(f": {url}: HTTP Error 404: Not Found")

    def choice(self, params):
        heat = 1.0 if self.changes.get("raw") else params.get("temperature", 1.0)
        logits = {7: 2.0 / heat, 9: 1.0 / heat}
        total = math.log(sum(map(math.exp, logits.values())))
        top = [{"token_id": token, "logprob": logit - total, "rank": 1} for token, logit in logits.items()]
        content = [] if self.changes.get("drops") else [{"token_id": 7, "logprob": top[0]["logprob"], "top_logprobs": top}]
        told = {"sampling_mask": self.changes.get("mask"), "routed_experts": self.changes.get("experts")}
        return {"token_ids": [7], "logprobs": {"content": content}, **told}


@pytest.mark.parametrize(
    ("changes", "area", "status", "words"),
    [
        ({}, "server", "ok", "vLLM 0.32.0 at http://10.0.0.1:8000: engine.name=vllm"),
        ({}, "log-probs", "ok", "of the distribution sampled from"),
        ({"raw": True}, "log-probs", "FAIL", "--logprobs-mode processed_logprobs"),
        ({"drops": True}, "log-probs", "FAIL", "a router in between may have dropped it"),
        ({"paths": ("/pause",)}, "routes", "FAIL", "--enable-scale-out"),
        ({"paths": ("/inference/v1/generate",)}, "routes", "FAIL", "VLLM_SERVER_DEV_MODE=1"),
        ({}, "mask", "warn", "--return-sampling-mask"),
        ({"mask": [[7]]}, "mask", "ok", "rollout.top_p"),
        ({}, "experts", "ok", "do not come along, which train.routing_replay=rollout needs: start it with --enable-return-routed-experts"),
        ({"experts": "k05V"}, "experts", "ok", "chosen experts come along: train.routing_replay=rollout may be set"),
        ({}, "model", "ok", "tiny, sequences of 64 tokens, 2 processes"),
        ({}, "weights", "ok", "whet-vllm is there"),
        ({"plugin": False}, "weights", "warn", "install whet-vllm"),
        ({}, "proof", "ok", "1 of 2 parameters have digests"),
        ({"missing": ("/weight_checker",)}, "proof", "FAIL", "404"),
        ({}, "access", "warn", "--api-key does not protect them"),
    ],
)
def test_what_a_server_of_vllm_offers_and_lacks(monkeypatch, changes, area, status, words):
    monkeypatch.setattr("whet.check.server.ask", FakeVllmFacts(**changes))
    monkeypatch.setattr("whet.engine.servers.kinds.ask", FakeVllmFacts(**changes))
    monkeypatch.setattr("whet.engine.vllm.start.ask", FakeVllmFacts(**changes))
    areas, _ = found_by(URL)
    assert areas[area][0] == status and words in areas[area][1], areas[area]
