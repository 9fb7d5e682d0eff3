"""Starts of the quickstart, one after another, each in a process of its own that kills itself with SIGKILL at a given moment:
`python -m tests.e2e.killed_quickstart STARTS_JSON [REWARD]`, a list of [settings, moment or null]. Prints the exit status of
each. A REWARD takes the place of the quickstart's own, for a run so short that it solves nothing.

The processes are forks of this one, so that the imports are paid for once.

A moment is {"run", "step", "place", "count"}: once the run in folder `run` (warmup, rl, evaluation_warmup ...) has logged step `step` or
gone on from a later one, the `count`-th time that the process passes `place` is its last. Nothing is cleaned up: that is the point.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch

import whet.build.session
import whet.checkpoint.store
import whet.quickstart.run
import whet.runs.commands
from whet.checkpoint.run_state import RunState
from whet.engine.embedded.core import EngineCore
from whet.observe.trackers import JsonlTracker
from whet.reward import RewardConfig
from whet.train.torch_native.heads import LanguageHead

PLACES = ("rollout", "backward", "step", "log", "save", "export", "evaluation")


class Moment:
    def __init__(self, run: str, step: int, place: str, count: int) -> None:
        assert place in PLACES, place
        self.run, self.step, self.place, self.left = run, step, place, count
        self.here, self.done = "", -1
        """The run that is under way, and its last step."""

    def passed(self, place: str) -> None:
        if place == self.place and self.here == self.run and self.done >= self.step:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def plant(moment: Moment) -> None:
    """Have every place tell the moment that it is passed."""

    def around(owner: object, name: str, place: str | None, *, after=None) -> None:
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            if place is not None:
                moment.passed(place)
            result = inner(*args, **kwargs)
            if after is not None:
                after(result, *args)
            return result

        setattr(owner, name, call)

    def opened(config) -> None:
        moment.here, moment.done = config.run_dir.rstrip("/").split("/")[-1], -1
        if moment.here.startswith("evaluate_"):
            moment.here = config.run_dir.split("/")[-2]

    settle = whet.build.session._settle

    def settled(config, folder):
        opened(config)
        return settle(config, folder)

    def resumed(progress, *args) -> None:
        moment.done = progress.rollout_id

    def logged(_, tracker, step, values) -> None:
        moment.done = max(moment.done, step)
        moment.passed("log")

    def hooked(out, *args) -> None:
        if out.logprobs.requires_grad:
            out.logprobs.register_hook(lambda gradient: moment.passed("backward"))

    whet.build.session._settle = settled
    around(RunState, "resume", None, after=resumed)
    around(JsonlTracker, "log", None, after=logged)
    around(LanguageHead, "outputs", None, after=hooked)
    around(EngineCore, "step", "evaluation" if moment.run.startswith("evaluation") else "rollout")
    around(torch.optim.AdamW, "step", None, after=lambda *_: moment.passed("step"))
    around(whet.runs.commands, "export_model", "export", after=lambda *_: moment.passed("export"))
    for name in ("_describe", "write_durably", "sync_folder"):
        around(whet.checkpoint.store, name, None, after=lambda *_: moment.passed("save"))  # eight times a save


def forked(run: Callable[[], object]) -> int:
    """The exit status of a fork that runs this; less than 0: the signal that ended it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def start(settings: dict, moment: dict | None) -> None:
    if moment is not None:
        plant(Moment(**moment))
    whet.quickstart.run.run_quickstart(whet.quickstart.run.QuickstartConfig.model_validate(settings))


def main() -> None:
    if len(sys.argv) > 2:
        reward_by(sys.argv[2])
    print(json.dumps([forked(lambda each=each: start(*each)) for each in json.loads(sys.argv[1])]))


def reward_by(reference: str) -> None:
    rl_config = whet.quickstart.run.rl_config

    def with_reward(*args):
        return rl_config(*args).model_copy(update={"reward": RewardConfig(name=reference)})

    whet.quickstart.run.rl_config = with_reward


if __name__ == "__main__":
    main()
