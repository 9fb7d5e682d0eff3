"""Errors of a run under way: weights that diverge, rewards that never vary, disks that are full, folders that are taken."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
from safetensors import SafetensorError

import whet.model.tensor_files as tensor_files
from tests.errors.error_bench import Bench, Case, Told, together, with_message
from whet.runfolder.journal import STARTS
from whet.runfolder.lock import claim
from whet.train.kept import read_kept

ALGORITHM = '''\
"""GRPO with a term of my own in its loss."""

from whet.algo.base import LossTerms
from whet.algo.config import GRPOConfig
from whet.algo.grpo import grpo


def with_bonus(bonus, plan):
    algorithm = grpo(GRPOConfig(), plan)
    inner = algorithm.loss

    def loss(batch, out):
        found = inner(batch, out)
        return LossTerms(found.terms - bonus(out.logprobs), found.metrics)

    algorithm.loss = loss
    return algorithm


def log_of_surprise(options, plan):
    return with_bonus(lambda logprobs: (logprobs + 1).log(), plan)


def root_of_change(options, plan):
    return with_bonus(lambda logprobs: (logprobs - logprobs.detach()).abs().sqrt(), plan)
'''
NEWEST = "checkpoints/rollout_000001"


def not_finite(bench: Bench, name: str) -> Told:
    """The run, and then the step again."""
    bench.file("my_algorithm.py", ALGORITHM)
    told = bench.refused(f"algo.name=my_algorithm.py:{name}", "num_rollouts=2")
    kept = bench.earlier() / "nonfinite/batch_1"
    assert read_kept(kept).batch.num_samples == 8
    status, out, err = bench.start("replay-batch", kept)
    assert (status, err.strip()) == (0, ""), err
    return with_message(told, f"{told.message}\n$ whet replay-batch {kept}\n{out}")


def mended_algorithm(bench: Bench, name: str) -> tuple[str, ...]:
    bench.rewrite("my_algorithm.py", "found.terms - bonus(out.logprobs)", "found.terms")
    return f"algo.name=my_algorithm.py:{name}", "num_rollouts=2"


def constant(bench: Bench) -> Told:
    bench.file("my_reward.py", "def score(trajectory):\n    return 1.0\n")
    status, _, err = bench.start("train", "run.toml", "reward.name=my_reward.py:score", "num_rollouts=9", "stop_after_constant_rewards=4")
    warning, error, text = err.partition("error: ")
    assert warning.startswith("warning: every valid trajectory"), err

    def check() -> None:
        assert (bench.folder / "runs/demo/checkpoints/rollout_000004/manifest.json").is_file(), "what was done until then is saved"

    return Told(status, f"{error}{text}\n(after three rollouts)\n{warning}", check)


def mended_constant(bench: Bench) -> tuple[str, ...]:
    bench.file("my_reward.py", "def score(trajectory):\n    return trajectory.turns[0].tokens[0] % 7 / 7\n")
    return "reward.name=my_reward.py:score", "num_rollouts=9", "stop_after_constant_rewards=4"


def disk_full(bench: Bench) -> Told:
    """As the safetensors library fails on a full disk: after some of the file is there."""
    save = tensor_files.save_file

    def fills(tensors: dict, path: Path, metadata: dict | None) -> None:
        if path.name == "optimizer.safetensors":
            path.write_bytes(b"half of it")
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})")
        save(tensors, path, metadata)

    log = (bench.earlier() / "metrics.jsonl").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "save_file", fills)
        status, _, err = bench.start("train", "run.toml", "num_rollouts=2")
    warning, error, text = err.partition("error: ")
    assert warning.startswith("warning: settings changed"), err
    assert [path.name for path in (bench.earlier() / "checkpoints").iterdir()] == ["rollout_000001"]

    def check() -> None:
        again, _, err = bench.start("train", "run.toml", "num_rollouts=2")
        assert again == 0, err
        lines = (bench.earlier() / "metrics.jsonl").read_bytes()
        assert lines.startswith(log) and [json.loads(line)["step"] for line in lines.splitlines()] == [1, 2]

    return Told(status, error + text, check)


def taken(bench: Bench) -> Told:
    with claim(bench.earlier(), "whet train run.toml"):
        told = bench.refused("num_rollouts=2")
        told.check()
    return Told(told.status, told.message, lambda: None)  # its own note of who holds it went with the claim


def damaged(bench: Bench) -> Told:
    """Cut at a random byte, and one bit changed at another."""
    draw = random.Random(0)
    folder = bench.earlier() / NEWEST
    messages: list[str] = []
    for name in ("optimizer.safetensors", "state.json", "manifest.json"):
        whole = (folder / name).read_bytes()
        place = draw.randrange(len(whole) // 2, len(whole) - 2)
        for broken in (whole[: draw.randrange(len(whole))], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            (folder / name).write_bytes(broken)
            told = bench.refused("num_rollouts=2")
            told.check()
            assert told.status == 2 and "is damaged" in told.message and name in told.message
            messages.append(told.message)
        (folder / name).write_bytes(whole)

    def check() -> None:
        assert bench.start("train", "run.toml", "num_rollouts=2")[0] == 0, "restored, it serves"

    return Told(2, messages[1] + messages[2], check)


def clock_set_back(bench: Bench) -> Told:
    path = bench.earlier() / STARTS
    start = json.loads(path.read_text().splitlines()[-1])
    start["time"] = 4_102_444_800.0
    path.write_text(json.dumps(start) + "\n")
    status, _, err = bench.start("train", "run.toml", "num_rollouts=2")
    assert "2100-01-01" in err or "2099-12-31" in err
    steps = [json.loads(line)["step"] for line in (bench.earlier() / "metrics.jsonl").read_text().splitlines()]
    told = next(line for line in err.splitlines() if "clock" in line)
    return Told(status, f"{told}\n", lambda: _nothing_doubled(steps))


def _nothing_doubled(steps: list[int]) -> None:
    assert steps == [1, 2], "the log went on where it was"


WEATHER = ('env.tools=["my_code.py:weather"]', "env.parser=my_code.py:asks_weather", "env.tool_timeout_s=0.2")


def hangs_when_deterministic(bench: Bench) -> Told:
    told = bench.refused(*WEATHER, "deterministic=true", "num_rollouts=2", config="tools.toml")
    assert "weather" in (bench.earlier() / "stacks.txt").read_text(), "it says where the tool hangs"
    return told


def mended_weather(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("my_code.py", 'time.sleep(60 if city == "Atlantis" else 0)', "pass")
    return (*WEATHER, "deterministic=true", "num_rollouts=2")


def best_of_nothing(bench: Bench) -> Told:
    return bench.refused("checkpoint.best=eval/tset/reward/total", "evaluate.sets.test.path=train.jsonl")


def restored_from_nowhere(bench: Bench) -> Told:
    return together(
        bench.refused("run_dir=runs/new", "checkpoint.restore={path='runs/dmeo'}"),
        bench.refused("run_dir=runs/new", "checkpoint.restore={path='runs/demo', parts=['optimizer']}"),
    )


DEPENDABLE = (
    Case(
        id="nan-loss",
        title="A loss that is NaN or infinite",
        cause="A term of the loss is no number: a loss of your own, an advantage or a log-prob that is not finite, or weights that have diverged.",
        remedy="`whet replay-batch` does the step again and shows where it first goes wrong. Mend that, or lower `train.optim.lr`, and start "
        "the run again: it goes on from its newest checkpoint.",
        words=("the loss of a micro-batch is nan", "samples [0, 1", "This step changed no weight", "nonfinite/batch_1", "now:  the loss", "it is the loss"),
        provoke=lambda bench: not_finite(bench, "log_of_surprise"),
        seen_by_check=False,  # needs training
        mend=lambda bench: mended_algorithm(bench, "log_of_surprise"),
    ),
    Case(
        id="nan-gradient",
        title="A gradient that is NaN or infinite",
        cause="The loss is a number, but its derivative is not: a root or a logarithm at 0, a division that overflows.",
        remedy="As for the loss. The module nearest to the loss with such a gradient tells which part of the loss to look at.",
        words=("the gradient norm is nan", "parameters with such gradients: model.embed_tokens.weight", "module nearest to the loss"),
        provoke=lambda bench: not_finite(bench, "root_of_change"),
        seen_by_check=False,  # needs training
        mend=lambda bench: mended_algorithm(bench, "root_of_change"),
    ),
    Case(
        id="constant-reward",
        title="A reward that never varies",
        cause="Since the run's start every trajectory was given one and the same reward: the reward is a constant, the answer is never found in "
        "the replies, or the model solves none of the tasks.",
        remedy="Try the reward on a good and on a bad reply (`whet check CONFIG` does). If the tasks are only hard, raise "
        "`stop_after_constant_rewards`, or set it to `none`. Started again, the run goes on and counts anew. A run in which rewards have varied once is never stopped.",
        words=("all 4 rollouts so far was given the reward 1", "stop_after_constant_rewards", "warning: every valid trajectory of all 3"),
        provoke=constant,
        seen_by_check=False,  # no fault in itself: check warns
        mend=mended_constant,
        goes_wrong_at_once=False,
    ),
    Case(
        id="disk-full",
        title="A disk that is full while a checkpoint is saved",
        cause="There is no room for another checkpoint. What was written of it is removed again.",
        remedy="Make room, or lower `checkpoint.keep`, and start the run again: it goes on from the checkpoint before. `whet check CONFIG` "
        "compares what checkpoints need with what is free.",
        words=("No space left on device", "the newest whole checkpoint is runs/demo/checkpoints/rollout_000001", "make room"),
        provoke=disk_full,
        seen_by_check=False,  # fills up while it is written; what is free is compared beforehand
        mend=lambda bench: ("num_rollouts=2",),  # there is room again
        goes_wrong_at_once=False,
    ),
    Case(
        id="folder-taken",
        title="A second run in the same folder",
        cause="Another process works in the run's folder. Its lock goes with it, however it ends: what is left of a crashed run is in nobody's way.",
        remedy="Wait until it has ended, stop it, or choose another `run_dir`.",
        words=("runs/demo is in use by process", "whet train run.toml", "choose another folder"),
        provoke=taken,
        seen_by_check=True,
    ),
    Case(
        id="corrupt-checkpoint",
        title="A checkpoint that was cut short or changed",
        cause="A part of the checkpoint is not what was written, to the byte: each one's size and sha256 are in its manifest.",
        remedy="Restore the file, or remove the checkpoint's folder; the one before it is used then.",
        words=("optimizer.safetensors has other contents than were written", "state.json has ", "remove the folder to use the one before"),
        provoke=damaged,
        seen_by_check=True,
    ),
    Case(
        id="clock-set-back",
        title="A clock that was set back",
        cause="The last start in this folder is noted at a later time than it is now.",
        remedy="Nothing, unless you go by the times in the logs: checkpoints, the log's place and deadlines do not depend on the clock.",
        words=("the clock was set back", "nothing else goes by the clock"),
        provoke=clock_set_back,
        status=0,
        seen_by_check=False,  # no fault
    ),
    Case(
        id="hangs-when-deterministic",
        title="A tool that hangs, in deterministic mode",
        cause="With `deterministic = true` no outcome may depend on how long something took, so what takes longer than its limit stops the run "
        "(elsewhere the trajectory is a timeout). `stacks.txt` in the run's folder shows where every thread was.",
        remedy="Mend what hangs, raise its limit, or set `deterministic=false`. Nothing of the run is lost: it goes on with that rollout.",
        words=("was too slow in env.step: tool weather took longer than 0.2 s", "deterministic=true", "env.tool_timeout_s"),
        provoke=hangs_when_deterministic,
        seen_by_check=False,  # check calls no tool of the user's
        mend=mended_weather,
    ),
    Case(
        id="best-of-nothing",
        title="A best checkpoint by a metric that nobody measures",
        cause="`checkpoint.best` names a metric that is none of an evaluation set of this run. Only evaluations measure the weights that are saved.",
        remedy="Name one of a set that there is, such as `eval/test/reward/total`.",
        words=("checkpoint.best is 'eval/tset/reward/total'", "eval/test/..."),
        provoke=best_of_nothing,
        seen_by_check=True,
    ),
    Case(
        id="restore-from-nowhere",
        title="Parts of a checkpoint that cannot be taken over",
        cause="`checkpoint.restore` names no checkpoint, or parts that do not go alone.",
        remedy="Give the folder of a run that has a checkpoint, or a checkpoint's own, and parts that belong together.",
        words=("runs/dmeo is no checkpoint, nor the folder of a run that has one", "add weights to parts"),
        provoke=restored_from_nowhere,
        seen_by_check=True,
    ),
)
