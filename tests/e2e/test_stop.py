"""Ctrl-C and SIGTERM: the run ends where its state is whole, is saved, and goes on as if nothing had been."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.config import dump_toml
from whet.data.template import load_tokenizer
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.reward.model_reward import OneScorer
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.supervised import SupervisedRunConfig
from whet.stop import Stop, Stopped, on_signals

pytestmark = pytest.mark.long

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stop")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    """One evaluation set, four rollouts, nobody stops it."""
    train(run_config(folder, "undisturbed", evaluate=evaluation(folder)))
    return folder / "undisturbed"


def evaluation(folder):
    return {"interval": 2, "sets": {"same": {"path": str(folder / "train.jsonl")}}}


def ask_at(monkeypatch, owner, name, stop, count):
    """Ask for the stop at the `count`-th call."""
    inner, calls = getattr(owner, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            stop.ask(signal.SIGTERM)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("module", "owner", "name", "count", "saved"),
    [
        ("whet.engine.embedded.core", "EngineCore", "step", 3, []),
        ("whet.engine.embedded.core", "EngineCore", "step", 12, ["rollout_000001"]),
        ("whet.train.torch_native.backend", "TorchBackend", "forward_backward", 2, ["rollout_000002"]),
        ("whet.evaluate.evaluation", "EvaluationSet", "play", 1, ["rollout_000002"]),
        ("whet.evaluate.evaluation", "EvaluationSet", "play", 2, ["rollout_000004"]),
        ("whet.engine.publish", "EnginePublisher", "publish", 4, ["rollout_000003"]),
        ("whet.rollout.scheduler", "Rollouts", "take", 3, ["rollout_000002"]),
    ],
    ids=["first-rollout", "second-rollout", "update", "evaluation", "last-evaluation", "publication", "after-an-evaluation"],
)
def test_stopped_anywhere_it_goes_on_bit_for_bit(tmp_path, folder, undisturbed, monkeypatch, stop, module, owner, name, count, saved):
    config = run_config(folder, f"{name}-{count}-{tmp_path.name}", evaluate=evaluation(folder))
    with monkeypatch.context() as patch:
        ask_at(patch, getattr(sys.modules[module], owner), name, stop, count)
        with pytest.raises(Stopped):
            train(config)
    run_dir = Path(config.run_dir)
    assert checkpoints_of(run_dir) == saved
    end = json.loads((run_dir / "end.json").read_text())
    assert end["status"] == "stopped"
    stop._number = None
    train(config)
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert json.loads((run_dir / "end.json").read_text())["status"] == "finished"


def test_user_code_that_draws_goes_on_bit_for_bit(tmp_path, folder, monkeypatch, stop):
    """A reward draws from Python's global generator; the run is stopped after half of a rollout's draws, and killed never."""
    (tmp_path / "drawn.py").write_text("import random\nasync def score(trajectory):\n    return random.random()\n")
    reward = {"name": f"{tmp_path / 'drawn.py'}:score"}
    train(run_config(folder, "drawn-whole", reward=reward))
    config = run_config(folder, "drawn-parts", reward=reward)
    from whet.reward.function import AsyncFunction

    inner, calls = AsyncFunction.__call__, []

    async def counted(self, trajectory):
        calls.append(1)
        if len(calls) == 9:
            stop.ask(signal.SIGTERM)
        return await inner(self, trajectory)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncFunction, "__call__", counted)
        with pytest.raises(Stopped):
            train(config)
    assert 6 < len(calls) < 24
    stop._number = None
    train(config)
    assert metrics_of(folder / "drawn-parts") == metrics_of(folder / "drawn-whole")
    assert weights_of(folder / "drawn-parts") == weights_of(folder / "drawn-whole")


def test_a_tracker_that_raises_loses_no_rollout(tmp_path, folder):
    """What fails after an update was logged: the update is saved, and its line is there once."""
    (tmp_path / "tracker.py").write_text(
        "from pathlib import Path\n"
        "class Tracker:\n"
        "    def __init__(self, run_dir, config):\n"
        "        pass\n"
        "    def log(self, step, values):\n"
        f"        if step == 3 and not Path({str(tmp_path / 'mended')!r}).exists():\n"
        "            raise KeyError('no such metric')\n"
        "    def close(self):\n"
        "        pass\n"
    )
    config = run_config(folder, "tracked", observe={"trackers": [f"{tmp_path / 'tracker.py'}:Tracker"]})
    with pytest.raises(KeyError):
        train(config)
    assert checkpoints_of(folder / "tracked") == ["rollout_000003"]
    (tmp_path / "mended").touch()
    train(config)
    assert [row["step"] for row in metrics_of(folder / "tracked")] == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "played"), [("grpo", 6), ("remax", 8)])
def test_a_rollout_that_is_half_done_is_not_played_twice(tmp_path, folder, monkeypatch, stop, name, played):
    """Outside deterministic mode, what has ended by the stop is kept with the checkpoint, greedy trajectories too, and only the rest is
    played."""
    calls = tmp_path / "calls"
    (tmp_path / "counted.py").write_text(
        "import asyncio\n"
        "async def score(trajectory):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n"
        "        file.write(trajectory.id + '\\n')\n"
        "    if trajectory.id.endswith('/2'):\n"
        "        await asyncio.sleep(0.5)\n"
        "    return len(trajectory.response) % 5\n"
    )
    reward = {"name": f"{tmp_path / 'counted.py'}:score"}
    config = run_config(folder, f"half-{name}", deterministic=False, num_rollouts=2, reward=reward, algo={"name": name})
    asked = []

    async def ask_when_all_but_two_have_ended():
        while not calls.exists() or len(calls.read_text().splitlines()) < 2 * played - 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        stop.ask(signal.SIGINT)

    from whet.rollout.scheduler import Rollouts

    inner = Rollouts.take

    async def take(self, *args):
        asked.append(asyncio.ensure_future(ask_when_all_but_two_have_ended()))
        return await inner(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "take", take)
        with pytest.raises(Stopped):
            train(config)
    run_dir = Path(config.run_dir)
    assert checkpoints_of(run_dir) == ["rollout_000001"]
    state = json.loads((run_dir / "checkpoints/rollout_000001/state.json").read_text())
    plays = state["others"]["rollouts"]["group_runs"]
    kept = {trajectory["id"] for play in plays for trajectory in play["ended"]}
    assert len(kept) >= played - 2 and not any(name.endswith("/2") for name in kept)
    assert sum(name.endswith("/greedy") for name in kept) == played - 6
    before = calls.read_text().splitlines()
    stop._number = None
    train(config)
    after = calls.read_text().splitlines()[len(before) :]
    assert not kept & set(after), "what was kept is not played again"
    assert len(kept) + len(after) == played, "every trajectory of the rollout was scored exactly once for training"


def test_a_stop_while_a_reward_model_scores_is_a_stop(tmp_path, folder, monkeypatch, stop):
    held = load_scalar(folder / "model", ModelConfig(path="", device="cpu"), trainable=False, new_head="normal")
    held.hf.save_pretrained(tmp_path / "scores")
    load_tokenizer(folder / "model").save_pretrained(tmp_path / "scores")

    def slowly(scorer, sequences):
        stop.ask(signal.SIGTERM)
        time.sleep(0.3)
        return [0.0] * len(sequences)

    monkeypatch.setattr(OneScorer, "scores", slowly)
    reward = {"name": "model", "options": {"path": str(tmp_path / "scores"), "device": "cpu"}}
    with pytest.raises(Stopped):
        train(run_config(folder, "scoring", reward=reward, deterministic=False))


def test_a_supervised_run_stops_after_its_step(folder, monkeypatch, stop):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]} for word in ("Yes.", "No.", "12")]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(name):
        settings = {
            "run_dir": str(folder / name),
            "deterministic": True,
            "model": {"path": str(folder / "model"), "device": "cpu"},
            "data": {"path": str(folder / "sft.jsonl")},
            "num_steps": 6,
            "samples_per_step": 2,
            "train": {"optim": {"lr": 1e-2}},
            "observe": {"display": "none"},
        }
        return SupervisedRunConfig.model_validate(settings)

    train_on_data(config("sft-whole"))
    from whet.train.torch_native.backend import TorchBackend

    with monkeypatch.context() as patch:
        ask_at(patch, TorchBackend, "forward_backward", stop, 3)
        with pytest.raises(Stopped):
            train_on_data(config("sft-parts"))
    assert checkpoints_of(folder / "sft-parts") == ["rollout_000003"]
    stop._number = None
    train_on_data(config("sft-parts"))
    assert metrics_of(folder / "sft-parts") == metrics_of(folder / "sft-whole")
    assert weights_of(folder / "sft-parts") == weights_of(folder / "sft-whole")


def begin(config, folder, log) -> subprocess.Popen:
    """`whet train` in a process of its own, once it has logged a step."""
    path = folder / f"{Path(config.run_dir).name}.toml"
    path.write_text(dump_toml(config))
    process = subprocess.Popen([sys.executable, "-m", "whet", "train", path], stderr=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_saves_and_says_how_to_go_on(folder, number):
    config = run_config(folder, f"real-{number.name}", num_rollouts=100_000)
    run_dir = Path(config.run_dir)
    process = begin(config, folder, run_dir / "metrics.jsonl")
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"{number.name}: the run saves and ends as soon as its state is whole" in said
    command = said.strip().splitlines()[-1].strip()
    assert shlex.split(command)[:2] == ["whet", "train"]
    saved = checkpoints_of(run_dir)
    assert len(saved) == 1 and int(saved[0].removeprefix("rollout_")) == len(metrics_of(run_dir)) >= 1
    end = json.loads((run_dir / "end.json").read_text())
    assert (end["status"], end["resume_command"]) == ("stopped", command)


def test_a_reader_that_goes_away_with_the_same_key_costs_nothing(folder):
    """Ctrl-C in a shell ends `tee`, too: the run is saved all the same."""
    config = run_config(folder, "piped", num_rollouts=100_000, observe={"display": "plain"})
    path = folder / "piped.toml"
    path.write_text(dump_toml(config))
    command = f"{sys.executable} -m whet train {path} 2>&1 | head -n 12 >/dev/null"
    process = subprocess.Popen(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], cwd=HERE.parents[1], start_new_session=True)
    log = Path(config.run_dir) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) > 20):
        assert process.poll() is None and time.monotonic() < deadline, "it goes on after its reader went away"
        time.sleep(0.05)
    (owner,) = [json.loads((Path(config.run_dir) / ".owner.json").read_text())["pid"]]
    os.kill(owner, signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    assert len(checkpoints_of(Path(config.run_dir))) == 1


def test_a_second_signal_leaves_at_once(tmp_path, folder):
    """The update hangs, so the first signal cannot end the run; the second does."""
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from whet.algo.config import GRPOConfig\n"
        "from whet.algo.grpo import grpo\n"
        "def build(options, plan):\n"
        "    algorithm = grpo(GRPOConfig(), plan)\n"
        "    inner, calls = algorithm.loss, []\n"
        "    def loss(batch, out):\n"
        "        calls.append(1)\n"
        "        if len(calls) == 2:\n"
        "            Path(options['hangs']).touch()\n"
        "            time.sleep(300)\n"
        "        return inner(batch, out)\n"
        "    algorithm.loss = loss\n"
        "    return algorithm\n"
    )
    algo = {"name": f"{tmp_path / 'hanging.py'}:build", "options": {"hangs": str(tmp_path / "hangs")}}
    config = run_config(folder, "second-signal", algo=algo)
    process = begin(config, folder, Path(config.run_dir) / "metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (tmp_path / "hangs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM again: left at once" in said


def test_signals_that_come_together_are_one():
    """As `timeout` sends them: to the run, and to the group of processes that it is in."""
    code = (
        "import os, signal, time\nfrom whet.stop import TOGETHER_S, on_signals\n"
        "with on_signals() as stop:\n"
        "    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):\n"
        "        os.kill(os.getpid(), number)\n"
        "    assert stop.asked\n"
        "    os.write(2, b'still here')\n"
        "    time.sleep(TOGETHER_S)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + signal.SIGTERM
    before, after = done.stderr.split("still here")
    assert "SIGTERM: the run saves and ends" in before and "again" not in before and "SIGTERM again: left at once" in after


def test_what_is_inside_shares_the_stop_of_what_is_around_it():
    """A quickstart is several runs: a signal in one of them ends all."""
    with on_signals() as outer:
        with on_signals() as inner:
            os.kill(os.getpid(), signal.SIGINT)
            assert inner.asked
        with pytest.raises(Stopped):
            outer.check()
    with on_signals() as later:
        assert not later.asked


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.check()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_work_that_is_done_first_is_not_lost():
    async def main():
        stop = Stop()
        assert await stop.unless(asyncio.sleep(0, "done")) == "done"
        cancelled = []

        async def never():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cancelled.append(True)

        asyncio.get_running_loop().call_later(0.01, stop.ask, signal.SIGINT)
        with pytest.raises(Stopped):
            await stop.unless(never())
        assert cancelled == [True], "it has ended before the stop is told"
        with pytest.raises(Stopped):
            await stop.unless(never())

    asyncio.run(asyncio.wait_for(main(), 30))
