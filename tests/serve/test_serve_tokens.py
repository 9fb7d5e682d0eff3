"""vLLM's route of token ids, asked as its clients ask it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.engine.engine_setup import reply_to
from tests.serve.serve_setup import is_idle, live, model_folder
from whet.engine.servers.http import HttpServer
from whet.engine.servers.wire import Served
from whet.engine.vllm.routes import VllmWire
from whet.engine.vllm.wire import sampled_of
from whet.serve.access import Keys
from whet.types import Request, SamplingParams
from whet.types.columns import Ints

IDS = [5, 60, 7, 88, 9]
ROUTE = "/inference/v1/generate"


def asked(server, stream=False, **sampling):
    body = {"token_ids": IDS, "model": "tiny", "sampling_params": {"max_tokens": 12, "seed": 4, **sampling}}
    if stream:
        with server.stream(ROUTE, {**body, "stream": True}) as events:
            return list(events)
    status, answer = server.send(ROUTE, body)
    assert status == 200, answer
    return answer


def test_token_ids_in_and_out_with_their_log_probs_and_versions(server):
    answer = asked(server, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None) and len(choice["token_ids"]) == 12
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"] and all(entry["top_logprobs"] == [] for entry in content)
    scores = server.do(server.service.engine.score((*IDS, *choice["token_ids"]))).logprobs[len(IDS) - 1 :]
    assert [entry["logprob"] for entry in content] == pytest.approx(list(scores), abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 12 and asked(server)["choices"][0]["logprobs"] is None
    assert asked(server, logprobs=0, temperature=0)["choices"][0]["logprobs"]["content"][0]["logprob"] < 0, "the model's own"


def test_a_stream_has_what_is_new_and_its_last_event_the_versions(server):
    whole = asked(server, logprobs=2)["choices"][0]
    events = asked(server, stream=True, logprobs=2)
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"]["content"])
    assert [choice["finish_reason"] for choice in choices][-1] == "length" and choices[-1]["weight_versions"] == whole["weight_versions"]
    assert all(choice["finish_reason"] is None and choice["weight_versions"] is None for choice in choices[:-1])


def test_a_prompt_is_scored_and_several_choices_differ(server):
    answer = asked(server, n=3, prompt_logprobs=1)
    first, *others = answer["prompt_logprobs"]
    scores = server.do(server.service.engine.score(tuple(IDS))).logprobs
    found = [place[str(token)]["logprob"] for token, place in zip(IDS[1:], others, strict=True)]
    assert first is None and found == pytest.approx(list(scores)) and all(len(place) in (1, 2) for place in others)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3


def test_stops_and_forms_of_a_reply(server):
    token = asked(server)["choices"][0]["token_ids"][5]
    choice = asked(server, stop_token_ids=[token])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == token == choice["token_ids"][-1]
    picked = asked(server, structured_outputs={"choice": ["3 pens", "4"]}, max_tokens=40)["choices"][0]["token_ids"]
    assert server.service.renderer.decode(picked).removesuffix("<|im_end|>").strip() in ("3 pens", "4")
    number = asked(server, structured_outputs={"regex": "[0-9]{3}"}, max_tokens=40)["choices"][0]["token_ids"]
    assert server.service.renderer.decode(number).removesuffix("<|im_end|>").strip().isdecimal()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": IDS, "sampling_params": {"max_token": 3}}, "max_token"),
        ({"token_ids": IDS, "sampling_params": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs.choice"),
        ({"token_ids": IDS, "model": "another"}, "model"),
        ({"token_ids": IDS, "output_mode": "text"}, "output_mode"),
        ({"token_ids": IDS, "sampling_params": {"logprobs": -1}}, "logprobs"),
        ({"token_ids": [1 << 40]}, None),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, body, param):
    status, answer = server.send(ROUTE, body)
    assert status in (400, 404) and (param is None or param in str(answer["error"])), answer


@pytest.mark.parametrize("prefix", ["", "generate-tokens-"])
def test_an_abort_keeps_what_was_sampled(server, prefix):
    body = {"request_id": "long", "token_ids": IDS, "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    out = []
    thread = threading.Thread(target=lambda: out.append(server.send(ROUTE, body)), daemon=True)
    thread.start()
    server.until(lambda: server.service.gate.num_running == 1)
    assert server.send("/inference/v1/abort_requests", {"request_ids": [prefix + "long"]})[0] == 200
    thread.join(30)
    ((status, answer),) = out
    assert status == 200 and answer["choices"][0]["finish_reason"] == "abort" and answer["request_id"] == "long"
    server.until(lambda: is_idle(server))


def test_aborts_are_a_route_of_control(tmp_path):
    with live(model_folder(tmp_path / "model"), Keys("open", "sesame")) as server:
        body = {"request_ids": []}
        assert server.send("/inference/v1/abort_requests", body, Authorization="Bearer open")[0] in (401, 403)
        assert server.send("/inference/v1/abort_requests", body, Authorization="Bearer sesame")[0] == 200


def test_whets_own_client_of_vllm_reads_it(server):
    """Ids, log-probs, finish and labels of a stream, and a score, as from vLLM."""

    async def play():
        http = HttpServer("whet", server.url)
        wire = VllmWire(http, Served(4096, ("a",), "default"), "tiny", has_plugin=False)
        request = Request("r", Ints(IDS), SamplingParams(12, temperature=0.0), chunk_tokens=1)
        found = [each async for each in wire.stream(request, "x", "default")]
        score = await wire.score(Ints(IDS), 0, "y")
        http.cut("done")
        return found, score

    found, score = asyncio.run(play())
    tokens = [token for each in found for token in each.tokens]
    assert len(tokens) == 12 and found[-1].finish == "length" and found[-1].labels == ["default"]
    assert list(score.logprobs) == pytest.approx(list(server.do(server.service.engine.score(tuple(IDS))).logprobs))
    mine = server.do(reply_to(server.service.engine, Request("z", Ints(IDS), SamplingParams(12, temperature=0.0))))
    assert tokens == list(mine.tokens)
    whole = asked(server, logprobs=0, temperature=0)
    assert sampled_of(whole, Request("r", Ints(IDS), SamplingParams(12))).tokens == tokens
