"""The command from its start to its end, by signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.serve.serve_setup import DEADLINE_S, events_of, live

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def command(model, *overrides, **environment):
    """`whet serve` as a process: it, and a connection to it once it says where it listens."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    line = [sys.executable, "-m", "whet", "serve", str(model), "port=0", "name=tiny", "model.device=cpu", *overrides]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        told = process.stdout.readline()
        found = re.fullmatch(r"whet serve: tiny at http://(127\.0\.0\.1:\d+) \(keys: (.*)\); Ctrl-C ends it\n", told)
        assert found, told + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def send(address, method, path, body=None, **headers):
    """A request whose answer is still to be read."""
    connection = HTTPConnection(address, timeout=DEADLINE_S)
    connection.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json", **headers})
    return connection


def answer_of(connection):
    with connection.getresponse() as answer:
        return json.load(answer)


def held_request(address, **headers):
    """A request that the paused engine keeps."""
    assert answer_of(send(address, "POST", "/pause_generation", **headers))["status"] == "ok"
    connection = send(address, "POST", "/generate", {"input_ids": [5]}, **headers)
    for _ in range(1000):
        state = answer_of(send(address, "GET", "/server_info", **headers))
        if state["internal_states"][0]["num_running_reqs"] == 1:
            return connection, state
        time.sleep(0.01)
    raise AssertionError("the request never arrived")


def ended(process):
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def test_open_requests_finish_and_new_ones_are_refused(models):
    with command(models[0]) as (process, address):
        idle = send(address, "GET", "/health")
        assert idle.getresponse().read() == b""
        body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
        events = events_of(send(address, "POST", "/generate", body).getresponse())
        next(events)
        process.send_signal(signal.SIGTERM)
        assert list(events)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 500}
        code, out, err = ended(process)
        assert (code, out) == (0, "whet serve: ended\n") and "open requests are finished first" in err and "Traceback" not in err
        with pytest.raises(OSError):
            send(address, "GET", "/health")


def test_what_does_not_finish_in_time_is_aborted_and_told(models):
    with live(models[0], limits={"shutdown_s": 0.2}) as server:
        connection, _ = held_request(server.url.removeprefix("http://"))
        server.closing.ask()
        assert answer_of(connection)["meta_info"]["finish_reason"] == {"type": "abort", "message": "the server is shutting down"}


def test_a_second_signal_ends_it_at_once(models, tmp_path):
    """With settings from a file and a key from the environment."""
    (tmp_path / "serve.toml").write_text("weight_version = 'base'\n[limits]\nshutdown_s = 50\n")
    key = {"Authorization": "Bearer 0123456789abcdef"}
    with command(models[0], f"--config={tmp_path / 'serve.toml'}", WHET_API_KEY="0123456789abcdef") as (process, address):
        connection, state = held_request(address, **key)
        assert state["weight_version"] == "base"
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM: open requests are finished first" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(process)
        assert code == 128 + signal.SIGTERM and "left at once" in err and out == ""
        connection.close()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["host=0.0.0.0"], "WHET_API_KEY"),
        (["limits.max_runing=3"], "max_running"),
        (["model.device=cuda:99"], "CUDA devices"),
    ],
)
def test_what_cannot_be_served_is_said_in_words(models, overrides, words):
    from typer.testing import CliRunner

    from whet.cli import app

    done = CliRunner().invoke(app, ["serve", str(models[0]), "port=0", *overrides])
    assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output


def test_a_port_that_is_taken_is_said_in_words(models, server):
    from typer.testing import CliRunner

    from whet.cli import app

    done = CliRunner().invoke(app, ["serve", str(models[0]), f"port={server.url.rpartition(':')[2]}"])
    assert done.exit_code == 2 and "in use" in done.output


def test_without_the_servers_packages_it_says_what_to_install(models, monkeypatch):
    from typer.testing import CliRunner

    from whet.cli import app

    monkeypatch.delitem(sys.modules, "whet.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(app, ["serve", str(models[0]), "port=0"])
    assert done.exit_code == 2 and "serving needs the package uvicorn: pip install 'whet[serve]'" in done.output
