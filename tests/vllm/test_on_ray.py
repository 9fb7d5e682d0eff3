"""A run whose vLLM server Ray places on another node than the controller's: two nodes of this machine, of which one counts GPUs."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import psutil
import pytest

from tests.cluster.cluster_run import PRIVATE, begin, cluster_by, config_of, ended, make_files
from tests.e2e.tiny_run import metrics_of
from tests.vllm.servers import ARGS, ENVIRONMENT, START_S, python, small_model
from whet.engine.servers.start import answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def listening(folder, run):
    """The words and the environment of the server's process, once it answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()
        for process in psutil.process_iter():
            try:
                words, environment = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if words[1:3] == ["-m", "whet_vllm.serve"] and str(folder / "model") in words:
                host, port = (words[words.index(name) + 1] for name in ("--host", "--port"))
                if answers(f"http://{host}:{port}/health"):
                    return words, environment, host, port
        time.sleep(0.2)
    raise AssertionError("the server did not answer")


def test_a_server_on_another_node_listens_there_with_a_key_and_takes_broadcasts(tmp_path):
    make_files(tmp_path)
    small_model(tmp_path / "model")
    with cluster_by("gpu_nodes.py") as address:
        cluster = {"backend": "ray", "layout": "disaggregate", "address": address, "private_network": True}
        cluster |= {"trainer_gpus": 0, "engine_cpus": 2}  # the head has one processor
        engine = {"name": "vllm", "python": python(), "vllm": {"args": ARGS}}
        sync = {"transport": "broadcast"}
        config = config_of(tmp_path, "run", deterministic=False, cluster=cluster, engine=engine, sync=sync)
        run = begin(config, **PRIVATE, **ENVIRONMENT)
        words, environment, host, port = listening(tmp_path, run)
        assert host == "127.0.0.2" and environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert environment["VLLM_API_KEY"] not in words and "--api-key" not in words, "other users read command lines"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=30)
        status, _, err = ended(run)
    assert status == 0, err
    rows = [row for row in metrics_of(tmp_path / "run") if "policy/loss" in row]
    assert len(rows) == 3 and all(row["mismatch/logprob_max"] < 1e-4 for row in rows)
