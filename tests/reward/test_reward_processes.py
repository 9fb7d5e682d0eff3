"""What a reward's processes leave behind, and what they are told of the trainer's environment."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.calls import keeper
from whet.reward import RewardConfig, RewardError, RewardTimeout, build_group_reward, build_reward
from whet.reward.pool import WorkerPool
from whet.runfolder.child_environment import child_environment, passes

pytestmark = pytest.mark.long

CODE = '''
import os, signal, subprocess, sys, threading, time

HELPER = subprocess.Popen(["sleep", "1000"], start_new_session=True)

def note(file, pid):
    with open(file, "a") as out:
        out.write(f"{pid}\\n")

def daemon(file):
    """A process in a session of its own, whose parent has ended, that lets no signal but SIGKILL end it."""
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            note(file, os.getpid())
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not os.path.exists(file) or not open(file).read().endswith("\\n"):
        time.sleep(0.005)

def child(file):
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    note(file, started.pid)

def many(file):
    """Sessions, one after the other."""
    if os.fork() == 0:
        os.setsid()
        for _ in range(100):
            if os.fork() == 0:
                os.setsid()
                note(file, os.getpid())
                time.sleep(1000)
            time.sleep(0.01)
        os._exit(0)
    time.sleep(0.2)

def threads(file):
    """Many, and much memory: a process whose threads end one after the other."""
    for _ in range(30):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    globals()["held"] = bytearray(200_000_000)
    note(file, os.getpid())

def start(way, file, then=""):
    globals()[way](file)
    if then == "hang":
        time.sleep(1000)
    if then == "die":
        os._exit(3)
    return [os.getpid(), HELPER.pid]

def variables():
    return dict(os.environ)
'''
WAYS = ("daemon", "child", "many")


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "starts.py"
    file.write_text(CODE)
    return file


def pool_of(code, **settings):
    return WorkerPool(1, **{"timeout_s": 20.0, "preload": [f"{code}:start"], **settings})


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def noted(file):
    return [int(line) for line in file.read_text().split()]


def until(there, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.01)


def start(pool, code, way, file, then=""):
    return asyncio.run(pool.call(f"{code}:start", {"way": way, "file": str(file), "then": then}, "it"))


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("way", WAYS)
def test_what_a_call_leaves_behind_ends_with_the_call_and_its_worker_stays(code, tmp_path, way):
    pool = pool_of(code)
    worker, helper = start(pool, code, way, tmp_path / "first")
    assert not any(map(runs, noted(tmp_path / "first")))
    assert start(pool, code, way, tmp_path / "second") == [worker, helper]
    assert not any(map(runs, noted(tmp_path / "second")))
    assert runs(helper), "what its module started as it was imported belongs to the worker"
    pool.close()
    assert not runs(worker) and not runs(helper)


@linux
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", ["hang", "die"])
def test_what_a_call_that_is_killed_or_dies_started_ends_with_it(code, tmp_path, way, then):
    pool = pool_of(code, timeout_s=1.0)
    with pytest.raises(RewardTimeout if then == "hang" else RewardError):
        start(pool, code, way, tmp_path / "pids", then)
    left = [pid for pid in noted(tmp_path / "pids") if runs(pid)]
    pool.close()
    assert noted(tmp_path / "pids") and not left


@linux
def test_a_closed_pool_leaves_no_zombie(code, tmp_path):
    for _ in range(10):
        pool = WorkerPool(1, 30.0)
        asyncio.run(pool.call(f"{code}:start", {"way": "threads", "file": str(tmp_path / "pids")}, "it"))
        pool.close()
        assert not [pid for pid in noted(tmp_path / "pids") if Path(f"/proc/{pid}").exists()]


@linux
def test_nothing_outlives_a_trainer_that_is_killed(code, tmp_path):
    file = tmp_path / "pids"
    program = (
        "import asyncio, sys; from whet.reward.pool import WorkerPool; pool = WorkerPool(1, 100.0, preload=[f'{sys.argv[1]}:start']);"
        "asyncio.run(pool.call(f'{sys.argv[1]}:start', {'way': 'daemon', 'file': sys.argv[2], 'then': 'hang'}, 'it'))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program, str(code), str(file)])
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    before = children_of(trainer.pid)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until(lambda: not any(map(runs, [*noted(file), *before])))
    assert len(before) >= 3, "a keeper, a worker and what that started"


def children_of(root):
    found = [int(pid) for task in Path(f"/proc/{root}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [*found, *(below for pid in found for below in children_of(pid))]


@linux
@pytest.mark.parametrize("adopts", [True, False])
def test_where_children_are_not_listed_or_adopted_the_tree_of_processes_is_noted(code, tmp_path, monkeypatch, adopts):
    """As on other systems than Linux: what ended before it was seen once can hide; what runs for a while cannot."""
    changed = tmp_path / "keeper.py"
    source = Path(keeper.__file__).read_text().replace("LISTED = ", "LISTED = False and ").replace("LOOK_S = 0.5", "LOOK_S = 0.02")
    if not adopts:
        source = source.replace('if sys.platform != "linux":', "if option == PR_SET_CHILD_SUBREAPER:")
    changed.write_text(source)
    monkeypatch.setattr(keeper, "__file__", str(changed))
    pool = pool_of(code)
    worker, helper = start(pool, code, "child", tmp_path / "pids")
    assert not any(map(runs, noted(tmp_path / "pids")))
    if adopts:
        start(pool, code, "daemon", tmp_path / "more")
        assert not any(map(runs, noted(tmp_path / "more")))
    pool.close()
    assert not runs(worker) and not runs(helper)


SECRETS = {
    "HF_TOKEN": "hf_x",
    "WANDB_API_KEY": "k",
    "OPENAI_API_KEY": "k",
    "AWS_SECRET_ACCESS_KEY": "k",
    "AWS_SESSION_TOKEN": "k",
    "WHET_API_KEY": "k",
    "CUDA_SECRET": "k",
    "TORCH_HUB_TOKEN": "k",
    "SSH_AUTH_SOCK": "/run/agent",
    "DATABASE_URL": "postgres://user:password@host",
    "HTTPS_PROXY": "http://user:password@host",
    "GITHUB_TOKEN": "ghp_x",
    "ANY_VARIABLE": "x",
}
PLAIN = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "MKL_DYNAMIC": "FALSE",
    "LC_ALL": "C.UTF-8",
    "HF_HOME": "/x",
}


def test_workers_get_named_variables_and_none_of_the_trainers_tokens(code, monkeypatch):
    for name, value in {**SECRETS, **PLAIN}.items():
        monkeypatch.setenv(name, value)
    pool = pool_of(code)
    seen = asyncio.run(pool.call(f"{code}:variables", {}, "it"))
    pool.close()
    assert not SECRETS.keys() & seen.keys()
    assert {**PLAIN, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}.items() <= seen.items()
    assert all(passes(name) or name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "LC_CTYPE") for name in seen)


def test_a_function_that_needs_a_key_has_it_named_in_the_settings(code, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    scores = code.parent / "scores.py"
    scores.write_text("import os\ndef has_key(trajectory):\n    return float(os.environ.get('JUDGE_KEY') == 'secret')\n")
    from tests.reward.reward_samples import make_trajectory

    for environment, total in (([], 0.0), (["JUDGE_KEY"], 1.0)):
        reward = build_reward(RewardConfig.model_validate({"name": f"{scores}:has_key", "environment": environment}))
        assert asyncio.run(reward(make_trajectory("x"))).total == total
        reward.close()
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="the environment variable JUDGE_KEY is not set"):
        build_reward(RewardConfig.model_validate({"name": f"{scores}:has_key", "environment": ["JUDGE_KEY"]}))
    with pytest.raises(ValueError, match="the environment variable JUDGE_KEY is not set"):
        build_group_reward(RewardConfig.model_validate({"group": {"name": f"{scores}:has_key"}, "environment": ["JUDGE_KEY"]}))


def test_a_process_that_is_told_more_gets_that_too(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    told = child_environment({"OMP_NUM_THREADS": "3"}, ["HF_TOKEN"])
    assert told["OMP_NUM_THREADS"] == "3" and told["HF_TOKEN"] == "hf_x" and json.dumps(told)
