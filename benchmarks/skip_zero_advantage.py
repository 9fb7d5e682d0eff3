"""What leaving out samples without a gradient saves: updates of the quickstart's last 80 rollouts.

    python benchmarks/skip_zero_advantage.py [SEED]

Repeats the reinforcement learning of `runs/quickstart-seed<SEED>` (made by `whet quickstart --seed SEED`) from its warmed-up model.
In each of the last 80 rollouts the passes are made three times: with all samples and without those whose advantages are all 0, in
alternating order, gradients thrown away; then as the run makes them. Both times share the step of the optimizer.

Figures go to benchmarks/results/skip_zero_advantage.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import ClassVar

from machine import RESULTS, machine

import whet.build.learners as build
from whet.core.batch import TrainBatch
from whet.quickstart.run import QuickstartConfig, rl_config
from whet.runs.commands import train
from whet.train.learners import Learners, Update
from whet.train.token_uses import UseTable
from whet.train.torch_native.backend import TorchBackend
from whet.types import Progress

LAST = 80


class Measured(Learners):
    """Times the passes of each policy update both ways."""

    passes_s: ClassVar = {True: 0.0, False: 0.0}
    tokens: ClassVar = {True: 0, False: 0}
    step_s = 0.0
    first = 0

    def _update_policy(self, batch: TrainBatch, progress: Progress, done: Update, uses: UseTable | None) -> Update:
        if progress.rollout_id < Measured.first:
            return super()._update_policy(batch, progress, done, uses)
        backend, plan = self.policy, self.plan
        assert isinstance(backend, TorchBackend) and backend.optimizer is not None
        ((_, step),) = self._steps(batch, progress)
        step = self.algorithm.prepare(step)
        for skip in (True, False) if progress.rollout_id % 2 else (False, True):
            self.plan = plan.model_copy(update={"skip_zero_advantage": skip})
            begin = time.perf_counter()
            computed = self._computed(step)
            part = step if computed is None else step.select(computed)
            found = backend.forward_backward(part, self.algorithm.loss, per_token=uses is not None)
            Measured.passes_s[skip] += time.perf_counter() - begin
            Measured.tokens[skip] += found.num_tokens
            backend.optimizer.zero_grad()
        self.plan = plan
        plain = backend.optim_step

        def timed():
            begin = time.perf_counter()
            try:
                return plain()
            finally:
                Measured.step_s += time.perf_counter() - begin

        backend.optim_step = timed
        try:
            return super()._update_policy(batch, progress, done, uses)
        finally:
            del backend.optim_step


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    config = QuickstartConfig(seed=seed, run_dir=f"runs/quickstart-seed{seed}")
    run_dir = Path(config.run_dir)
    shutil.rmtree(run_dir / "skip_zero_advantage", ignore_errors=True)
    Measured.first = config.num_rollouts - LAST
    build.Learners = Measured
    train(rl_config(config, run_dir / "warmup/model", "skip_zero_advantage"))
    passes, step, tokens = Measured.passes_s, Measured.step_s, Measured.tokens
    figures = {
        "share_of_tokens_skipped": 1 - tokens[True] / tokens[False],
        "passes_s": {"all": passes[False], "without": passes[True]},
        "optimizer_step_s": step,
        "passes_fall_by": 1 - passes[True] / passes[False],
        "update_falls_by": 1 - (passes[True] + step) / (passes[False] + step),
    }
    out = {"command": f"python benchmarks/skip_zero_advantage.py {seed}", "machine": machine(), "rollouts": LAST, **figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "skip_zero_advantage.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
