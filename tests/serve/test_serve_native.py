"""SGLang's routes, asked as its clients ask them."""

import math
import threading

import pytest

from tests.serve.serve_setup import assert_all_free, is_idle, live, model_folder
from whet.quickstart.model import SmallModelConfig

IDS = [5, 60, 7, 88, 9]
LONG = {"max_new_tokens": 400, "ignore_eos": True}


def in_thread(work):
    """Runs `work` beside the test; returns where its result will be, and the thread."""
    out = []
    thread = threading.Thread(target=lambda: out.append(work()), daemon=True)
    thread.start()
    return out, thread


def test_token_ids_in_and_out_with_the_log_probs_of_a_score(server):
    answer = server.generate(input_ids=IDS, return_logprob=True, rid="mine", sampling_params={"max_new_tokens": 12, "sampling_seed": 4})
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == ("mine", 5, 12, "default")
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    logprobs, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(ids) == answer["output_ids"] and set(texts) == {None}
    scores = server.do(server.service.engine.score((*IDS, *ids))).logprobs
    assert list(logprobs) == pytest.approx(scores[len(IDS) - 1 :], abs=1e-4)
    assert meta["output_token_weight_versions"] == ["default"] * 12


def test_log_probs_are_those_sampled_from_and_at_temperature_0_the_models_own(server):
    warm = server.generate(
        input_ids=IDS, return_logprob=True, sampling_params={"max_new_tokens": 8, "temperature": 0.5, "sampling_seed": 1}
    )
    ids = warm["output_ids"]
    scores = server.do(server.service.engine.score((*IDS, *ids), 0.5)).logprobs[len(IDS) - 1 :]
    assert [entry[0] for entry in warm["meta_info"]["output_token_logprobs"]] == pytest.approx(scores, abs=1e-4)
    greedy = server.generate(input_ids=IDS, return_logprob=True, sampling_params={"max_new_tokens": 8, "temperature": 0})
    scores = server.do(server.service.engine.score((*IDS, *greedy["output_ids"]))).logprobs[len(IDS) - 1 :]
    assert [entry[0] for entry in greedy["meta_info"]["output_token_logprobs"]] == pytest.approx(scores, abs=1e-4)


def test_a_prompt_is_scored_without_sampling(server):
    """What a teacher is asked for."""
    asked = {"input_ids": IDS, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    meta = server.generate(**asked, logprob_start_len=0)["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    scores = server.do(server.service.engine.score(tuple(IDS))).logprobs
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(scores)
    assert meta["output_token_logprobs"] == [] and meta["completion_tokens"] == 0
    later = server.generate(**asked, logprob_start_len=3)["meta_info"]["input_token_logprobs"]
    assert later == [[None, 88, None], meta["input_token_logprobs"][4]]
    assert "input_token_logprobs" not in server.generate(**asked)["meta_info"]
    cool = {**asked, "sampling_params": {"max_new_tokens": 0, "temperature": 0.5}}
    assert server.generate(**cool, logprob_start_len=0)["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]
    assert server.send("/generate", {**asked, "logprob_start_len": 5})[0] == 400


def test_a_prompts_most_likely_tokens_are_told_place_by_place(server):
    asked = {"input_ids": [IDS, IDS], "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3}
    answers = server.generate(**asked, sampling_params={"max_new_tokens": 2, "n": 2, "sampling_seed": 1})
    scored = server.do(server.service.engine.score(tuple(IDS), 1.0, 3))
    for answer in answers:
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS[2:]
        first, *tops = meta["input_top_logprobs"]
        found = [tuple((token, logprob) for logprob, token, _ in top) for top in tops]
        assert first is None and found == list(scored.top_logprobs[2:])
        assert all(top[0][0] >= entry[0] for top, entry in zip(tops, meta["input_token_logprobs"][1:], strict=True))
        assert [len(top) for top in meta["output_top_logprobs"]] == [3, 3]


def test_what_was_cached_of_a_prompt_is_told(server):
    server.send("/flush_cache")
    prompt = {"input_ids": [7, 9, 11, 13, 15, 17, 19, 21, 23], "sampling_params": {"max_new_tokens": 2}}
    cached = [server.generate(**prompt)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 8]
    with server.stream("/generate", {**prompt, "stream": True}) as events:
        assert [event["meta_info"]["cached_tokens"] for event in events] == [8, 8]
    body = {"prompt": [prompt["input_ids"], [3, 4]], "n": 2, "max_tokens": 2, "ignore_eos": True}
    usage = server.send("/v1/completions", body)[1]["usage"]
    assert usage["prompt_tokens"] == 11 and usage["prompt_tokens_details"] == {"cached_tokens": 8} and usage["completion_tokens"] == 8


def test_a_request_says_how_often_its_stream_speaks(server):
    asked = {"input_ids": IDS, "stream": True, "sampling_params": {"max_new_tokens": 8, "stream_interval": 4, "ignore_eos": True}}
    with server.stream("/generate", asked) as events:
        assert [len(event["output_ids"]) for event in events] == [4, 8]


def test_text_in_and_texts_beside_log_probs(server):
    answer = server.generate(
        text="Ann has", return_logprob=True, return_text_in_logprobs=True, top_logprobs_num=2, sampling_params={"max_new_tokens": 4}
    )
    meta, renderer = answer["meta_info"], server.service.renderer
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [renderer.decode([token]) for token in answer["output_ids"]]
    assert answer["text"] == server.service.decoder(keep_special=False)(answer["output_ids"])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4


def test_batches_and_n_come_as_a_list_prompt_by_prompt(server):
    params = {"max_new_tokens": 3, "sampling_seed": 2, "n": 2}
    answers = server.generate(input_ids=[IDS, [3, 4]], rid=["a", "b"], sampling_params=params)
    assert [answer["meta_info"]["id"] for answer in answers] == ["a_0", "a_1", "b_0", "b_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [5, 5, 2, 2]
    alone = server.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 3, "sampling_seed": 3})
    assert answers[3]["output_ids"] == alone["output_ids"]
    each = server.generate(input_ids=[IDS, IDS], sampling_params=[{"max_new_tokens": n, "ignore_eos": True} for n in (1, 2)])
    assert [answer["meta_info"]["completion_tokens"] for answer in each] == [1, 2]


def test_a_stream_holds_everything_so_far(server):
    asked = {"input_ids": IDS, "return_logprob": True, "sampling_params": {"max_new_tokens": 10, "sampling_seed": 8}}
    whole = server.generate(**asked)
    with server.stream("/generate", {**asked, "stream": True}) as events:
        seen = list(events)
    assert [len(event["output_ids"]) for event in seen] == list(range(1, 11))
    assert all(event["output_ids"] == whole["output_ids"][: i + 1] for i, event in enumerate(seen))
    assert [event["meta_info"]["finish_reason"] for event in seen[:-1]] == [None] * 9
    assert seen[-1]["text"] == whole["text"]
    assert seen[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    with server.stream("/generate", {**asked, "input_ids": [IDS, [3]], "stream": True}) as events:
        assert {event["index"] for event in events} == {0, 1}


def test_what_stopped_it_is_told_and_trimmed_unless_asked_for(server):
    params = {"max_new_tokens": 20, "sampling_seed": 6}
    free = server.generate(input_ids=IDS, sampling_params={**params, "ignore_eos": True})
    token = free["output_ids"][4]
    first = free["output_ids"].index(token)
    by_token = server.generate(input_ids=IDS, sampling_params={**params, "stop_token_ids": [token]})
    assert by_token["output_ids"] == free["output_ids"][: first + 1]
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    decode = server.service.decoder(keep_special=False)
    assert by_token["text"] == decode(free["output_ids"][:first])
    kept = server.generate(input_ids=IDS, sampling_params={**params, "stop_token_ids": [token], "no_stop_trim": True})
    assert kept["text"] == decode(free["output_ids"][: first + 1])
    piece = next(c for c in free["text"] if c != "\ufffd")
    by_text = server.generate(input_ids=IDS, sampling_params={**params, "stop": piece})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": piece}
    assert by_text["text"] == free["text"][: free["text"].index(piece)]


def test_abort_hands_over_what_was_sampled(server):
    with server.stream("/generate", {"input_ids": IDS, "rid": "long", "stream": True, "sampling_params": LONG}) as events:
        next(events)
        assert server.send("/generate", {"input_ids": IDS, "rid": "long"})[0] == 400  # the id is taken
        assert server.send("/abort_request", {"rid": "unknown"})[0] == 200
        assert server.send("/abort_request", {"rid": "long"})[0] == 200
        last = list(events)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by /abort_request"}
    assert 1 <= len(last["output_ids"]) < 400
    assert_all_free(server)


def test_abort_all_ends_waiting_requests_too(models):
    with live(models[0], limits={"max_running": 1}) as server:
        with server.stream("/generate", {"input_ids": IDS, "stream": True, "sampling_params": LONG}) as events:
            next(events)
            waits, thread = in_thread(lambda: server.generate(input_ids=IDS))
            server.until(lambda: server.service.gate.num_waiting == 1)
            server.send("/abort_request", {"abort_all": True})
            assert list(events)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        thread.join(30)
        assert waits[0]["output_ids"] == [] and waits[0]["meta_info"]["finish_reason"]["type"] == "abort"
        assert is_idle(server)


def test_pause_aborts_what_runs_and_lets_what_comes_wait(server):
    with server.stream("/generate", {"input_ids": IDS, "stream": True, "sampling_params": LONG}) as events:
        next(events)
        assert server.send("/pause_generation", {}) == (200, {"message": "Generation paused successfully.", "status": "ok"})
        assert list(events)[-1]["meta_info"]["finish_reason"] == {"type": "abort", "message": "generation was paused"}
    waits, thread = in_thread(lambda: server.generate(input_ids=IDS, sampling_params={"max_new_tokens": 2}))
    server.until(lambda: server.service.calls.num_open == 1)
    assert server.get("/health_generate") == (200, "paused")
    assert server.get("/flush_cache")[0] == 200
    assert not waits
    server.send("/continue_generation", {})
    thread.join(30)
    assert waits[0]["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_may_keep_what_runs(server, mode):
    alone = server.generate(input_ids=IDS, sampling_params={"max_new_tokens": 60, "sampling_seed": 3, "ignore_eos": True})
    asked = {"input_ids": IDS, "stream": True, "sampling_params": {"max_new_tokens": 60, "sampling_seed": 3, "ignore_eos": True}}
    with server.stream("/generate", asked) as events:
        next(events)
        server.send("/pause_generation", {"mode": mode})
        computed = server.service.engine.core.num_computed
        server.send("/flush_cache")
        assert server.service.engine.core.num_computed == computed and server.service.calls.num_open == 1
        server.send("/continue_generation", {})
        assert list(events)[-1]["output_ids"] == alone["output_ids"]


def test_new_weights_change_what_is_said_and_what_it_is_called(models):
    greedy = {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    with live(models[1]) as other:
        theirs = other.generate(**greedy)["output_ids"]
    with live(models[0], weight_version="first") as server:
        assert server.generate(**greedy)["output_ids"] != theirs
        asked = {"input_ids": IDS, "return_logprob": True, "stream": True, "sampling_params": LONG}
        with server.stream("/generate", asked) as events:
            next(events)
            status, said = server.send("/update_weights_from_disk", {"model_path": str(models[1]), "weight_version": "step-7"})
            assert status == 200 and said["success"] and said["num_paused_requests"] == 1, said
            meta = list(events)[-1]["meta_info"]
        versions = meta["output_token_weight_versions"]
        turn = versions.index("step-7")
        assert 0 < turn < 400 and versions == ["first"] * turn + ["step-7"] * (400 - turn) and meta["weight_version"] == "step-7"
        answer = server.generate(**greedy)
        assert answer["output_ids"] == theirs and answer["meta_info"]["weight_version"] == "step-7"
        assert server.get("/model_info")[1]["weight_version"] == server.get("/get_server_info")[1]["weight_version"] == "step-7"
        assert server.send("/update_weights_from_disk", {"model_path": str(models[0]), "keep_pause": True})[0] == 200
        assert server.get("/get_weight_version")[1] == {"weight_version": "2"} and server.service.control.paused


def test_wrong_weights_are_refused_and_the_old_ones_stay(server, tmp_path):
    greedy = {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    before = server.generate(**greedy)["output_ids"]
    wider = model_folder(tmp_path / "wider", 0, SmallModelConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16))
    (tmp_path / "empty").mkdir()
    for path, words in ((wider, "another shape"), (tmp_path / "empty", "config.json"), (tmp_path / "none", "there is no folder")):
        status, said = server.send("/update_weights_from_disk", {"model_path": str(path), "weight_version": "bad"})
        assert status == 400 and not said["success"] and words in said["message"], said
    after = server.generate(**greedy)
    assert after["output_ids"] == before and after["meta_info"]["weight_version"] == "default"


def test_health_and_information(server):
    assert server.get("/health")[0] == server.get("/health_generate")[0] == 200
    info = server.get("/server_info")[1]
    assert info["context_length"] == 512 and info["internal_states"][0]["is_paused"] is False
    assert server.get("/get_model_info")[1]["is_generation"] is True
    assert server.get("/health")[1] == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"), ({"input_ids": [1], "text": "x"}, "input_ids"), ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"), ({"input_ids": [1], "lora_path": "x"}, "lora_path"), ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [[1], [2]], "rid": ["x", "x"]}, "rid"), ({"input_ids": [[1], [2]], "rid": ["x"]}, "rid"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_name(server, body, param):
    status, answer = server.send("/generate", body)
    assert status == 400
    assert answer["error"]["param"].split(".")[0] == param


def test_ids_that_the_model_does_not_know_are_refused(server):
    for ids in ([-1], [10**6], [10**30]):
        assert server.send("/generate", {"input_ids": ids})[0] == 400
    assert server.send("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 512}})[0] == 400
    assert math.isfinite(server.generate(input_ids=[1], sampling_params={"max_new_tokens": None})["meta_info"]["e2e_latency"])
