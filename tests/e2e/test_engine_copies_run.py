"""A run whose engine is two processes: it trains, resumes to the bit, and leaves no process behind."""

from __future__ import annotations

import subprocess

from tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of

from whet.commands import train

COPIES = {"embedded": {"copies": 2, "cache_tokens": 2048}}


def test_two_copies_train_and_resume_to_the_bit(tmp_path):
    make_files(tmp_path)
    train(run_config(tmp_path, "whole", engine=COPIES))
    train(run_config(tmp_path, "parts", engine=COPIES, num_rollouts=2))
    train(run_config(tmp_path, "parts", engine=COPIES))
    assert checkpoints_of(tmp_path / "parts")
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole") != weights_of_start(tmp_path)
    one, two = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert [line for line in one if "policy/loss" in line] == [line for line in two if "policy/loss" in line]
    assert all(line["sync/probe_nats"] < 1e-3 and line["mismatch/logprob_max"] < 1e-3 for line in one)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed


def weights_of_start(folder):
    return (folder / "model/model.safetensors").read_bytes()
