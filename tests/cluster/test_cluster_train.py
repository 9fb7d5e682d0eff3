"""`whet train` starts the processes that the degrees ask for: here, and as Ray places them."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.cluster.cluster_run import (
    begin,
    config_of,
    ended,
    family_of,
    folder_with_one_process,
    metrics_of,
    rank_of,
    wait_for_lines,
)
from tests.e2e.tiny_pairs import make_pairs, pair_settings
from whet.settings.rl import RunConfig
from whet.settings.supervised import RewardModelRunConfig

RAY = {"cluster": {"backend": "ray"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_one_process(tmp_path_factory.mktemp("train"))


def test_what_a_process_is_told_is_the_whole_configuration(folder):
    """What was set stays distinct from what was not: evaluation sets take over what they leave out."""
    sets = {"evaluate": {"sets": {"x": {"path": "x.jsonl", "rollout": {"temperature": 0.0}}}}}
    config = config_of(folder, "told", stop_after_constant_rewards=None, **sets, **RAY)
    again = RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json", exclude_unset=True))))
    assert again == config and again.model_fields_set == config.model_fields_set
    assert again.evaluate.sets["x"].rollout.model_fields_set == {"temperature"}


@pytest.mark.long
@pytest.mark.parametrize("where", [{}, pytest.param(RAY, marks=pytest.mark.slow)], ids=["local", "ray"])
def test_a_job_is_started_and_trains_as_one_process_does(folder, where):
    name = "ray" if where else "local"
    run = begin(config_of(folder, name, train={"parallel": {"shard": 2}}, **where))
    status, out, err = ended(run)
    assert status == 0, err
    assert "step 3/3" in out
    for mine, theirs in zip(metrics_of(folder, name), metrics_of(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5)
    assert not (folder / name / "processes.log").exists(), "nothing was said"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, RAY], ids=["local", "ray"])
def test_a_job_without_rollouts_is_started_likewise(tmp_path, where):
    make_pairs(tmp_path)
    settings = pair_settings(tmp_path, "pairs", observe={"display": "plain"}, **where)
    settings["train"]["parallel"] = {"shard": 2}
    status, out, err = ended(begin(RewardModelRunConfig.model_validate(settings)))
    assert status == 0, err
    assert "step 8/8" in out and (tmp_path / "pairs/model/model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.slow
def test_ray_runs_a_single_process_too(folder):
    status, _, err = ended(begin(config_of(folder, "ray_one", **RAY)))
    assert status == 0, err
    assert metrics_of(folder, "ray_one") == metrics_of(folder, "alone")


@pytest.mark.long
@pytest.mark.parametrize("where", [{}, pytest.param(RAY, marks=pytest.mark.slow)], ids=["local", "ray"])
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_the_others_end(folder, where, victim):
    name = f"killed{victim}{len(where)}"
    run = begin(config_of(folder, name, num_rollouts=2000, train={"parallel": {"shard": 2}}, **where))
    wait_for_lines(folder / name / "metrics.jsonl", 2, run)
    family = family_of(run.pid)
    rank_of(family, victim).kill()
    began = time.monotonic()
    status, _, err = ended(run)
    assert status == 2 and time.monotonic() - began < 40, err
    assert f"rank {victim} of 2" in err and "was killed by SIGKILL, so the job has ended" in err
    assert "was killed by SIGKILL" in (folder / name / "processes.log").read_text()
    assert not [p for p in family if p.is_running() and p.status() != "zombie"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, RAY], ids=["local", "ray"])
def test_a_stopped_job_saves_and_goes_on(folder, where):
    name = f"stopped{len(where)}"
    config = config_of(folder, name, num_rollouts=2000, train={"parallel": {"shard": 2}}, **where)
    run = begin(config)
    wait_for_lines(folder / name / "metrics.jsonl", 2, run)
    run.send_signal(signal.SIGTERM)
    status, _, err = ended(run)
    assert status == 143, err
    assert "stopped by SIGTERM" in err and "go on with:\n  whet train" in err
    done = len(metrics_of(folder, name))
    assert list((folder / name / "checkpoints").glob(f"rollout_{done:06d}/manifest.json"))
    status, _, err = ended(begin(config.model_copy(update={"num_rollouts": done + 1})))
    assert status == 0, err
    assert [row["step"] for row in metrics_of(folder, name)] == list(range(1, done + 2))


@pytest.mark.long
@pytest.mark.slow
def test_the_controllers_words_and_status_are_the_jobs(folder):
    run = begin(config_of(folder, "refused", train={"parallel": {"shard": 2}}, reward={"name": "no_such_reward_anywhere"}))
    status, _, err = ended(run)
    assert status == 2 and err.count("error:") == 1 and "no_such_reward_anywhere" in err
