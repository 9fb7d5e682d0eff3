"""A teacher at servers: its log-probs are those of a teacher in the trainer, and what fails is named."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.serve.serve_setup import live, model_folder
from tests.train.tiny_policy import rollout_samples, trajectory
from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.engine.base import EngineFailed
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.rollout.sampling import RolloutConfig
from whet.train import remote_teacher
from whet.train.remote_teacher import RemoteTeacher
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(remote_teacher, "RETRY_S", 0.01)


def batch():
    return batch_of([replace(sample, temperature=1.0) for sample in rollout_samples()])


def test_the_log_probs_are_those_of_the_same_model_in_the_trainer(folder):
    model = load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=False)
    expected = TorchBackend(model, TrainConfig(), None).annotate(batch(), Need.TEACHER_LOGPROBS).teacher_logprobs
    with live(folder) as one, live(folder) as other:
        teacher = RemoteTeacher([one.url, other.url], 30.0)
        teacher.connect()
        for _ in range(2):
            found = teacher.annotate(batch(), Need.TEACHER_LOGPROBS).teacher_logprobs
            assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-4)
    assert float(expected.abs().max()) > 1 and (expected != 0).sum() == batch().loss_mask.sum()


def test_a_server_that_is_lost_costs_nothing_while_another_one_is_there(folder):
    with live(folder) as one:
        with live(folder) as other:
            teacher = RemoteTeacher([one.url, other.url], 30.0)
            teacher.connect()
            expected = teacher.annotate(batch(), Need.TEACHER_LOGPROBS).teacher_logprobs
        found = teacher.annotate(batch(), Need.TEACHER_LOGPROBS).teacher_logprobs
        assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(EngineFailed, match=r"sample \d of \d+ tokens was not scored in 4 attempts: teacher at http"):
        teacher.annotate(batch(), Need.TEACHER_LOGPROBS)


def test_a_sample_that_is_too_long_is_named_and_not_tried_again(folder):
    with live(folder) as one:
        teacher = RemoteTeacher([one.url], 30.0)
        teacher.connect()
        long = list(trajectory("a", 0, ["." + "#" * 4999], reward=0.0))
        with pytest.raises(EngineFailed, match=r"sample 0 of 5000 tokens: teacher at .*400"):
            teacher.annotate(batch_of(long), Need.TEACHER_LOGPROBS)


def test_samples_that_may_be_too_long_are_refused_before_the_run_begins(folder):
    with live(folder) as one:
        longest = one.get("/v1/models")[1]["data"][0]["max_model_len"]
        RemoteTeacher([one.url], 30.0).connect(RolloutConfig(max_tokens=longest - 1).fixed_max_tokens)
        RemoteTeacher([one.url], 30.0).connect(RolloutConfig().fixed_max_tokens)
        with pytest.raises(ValueError, match=rf"rollout\.max_tokens is {longest}, but teacher at .* scores samples of {longest - 1} "):
            RemoteTeacher([one.url], 30.0).connect(longest)


class Silent(BaseHTTPRequestHandler):
    """Tells facts, and answers nothing else."""

    def do_GET(self):
        answers = {"/server_info": b'{"tp_size": 1}', "/model_info": b'{"weight_version": "0"}', "/health": b"{}"}
        found = answers.get(self.path, b"{}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def do_POST(self):
        self.server.over.wait(20)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("place", ["prompt", "reply"])
def test_a_log_prob_that_is_not_finite_is_an_error_where_the_token_trains_and_nothing_elsewhere(monkeypatch, place):
    wanted = batch()
    trained = int(wanted.loss_mask.nonzero()[0])
    odd = trained if place == "reply" else int((~wanted.loss_mask).nonzero()[1])
    flat = torch.full((wanted.num_tokens,), -1.0)
    flat[odd] = float("-inf")

    async def score_all(self, rows):
        return [part.tolist()[1:] for part in flat.split(wanted.lengths.tolist())]

    monkeypatch.setattr(RemoteTeacher, "_score_all", score_all)
    teacher = RemoteTeacher(["http://127.0.0.1:9"], 1.0)
    if place == "reply":
        with pytest.raises(EngineFailed, match=r"sample 0: the teacher at http://127\.0\.0\.1:9 answered log-probs of trained tokens that"):
            teacher.annotate(wanted, Need.TEACHER_LOGPROBS)
    else:
        found = teacher.annotate(wanted, Need.TEACHER_LOGPROBS).teacher_logprobs
        assert torch.equal(found, -wanted.loss_mask.float())


def test_samples_of_another_temperature_are_refused(folder):
    with pytest.raises(ValueError, match=r"set rollout\.temperature=1"):
        RemoteTeacher(["http://127.0.0.1:9"], 1.0).annotate(batch_of(rollout_samples()), Need.TEACHER_LOGPROBS)


def test_a_server_that_does_not_answer_in_time_is_named():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.over = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        teacher = RemoteTeacher([f"http://127.0.0.1:{server.server_port}"], 0.2)
        teacher.connect()
        with pytest.raises(EngineFailed, match=r"did not answer within 0\.2 s \(teacher\.timeout_s\)"):
            teacher.annotate(batch(), Need.TEACHER_LOGPROBS)
    finally:
        server.over.set()
        server.shutdown()


def test_where_no_server_is_the_run_does_not_begin(monkeypatch):
    monkeypatch.setattr(remote_teacher, "START_S", 0.1)
    with pytest.raises(EngineFailed, match=r"http://127\.0\.0\.1:9 \(teacher\.urls\) did not answer"):
        RemoteTeacher(["http://127.0.0.1:9"], 1.0).connect()
