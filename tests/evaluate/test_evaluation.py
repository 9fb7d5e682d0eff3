import asyncio

import pytest
from pydantic import ValidationError

from whet.evaluate.config import EvaluationSetConfig
from whet.evaluate.evaluation import EvaluationSet
from whet.observe.metrics import flatten
from whet.rollout.metrics import RolloutFailed
from whet.rollout.sampling import RolloutConfig, RolloutOverrides
from whet.types import Failure, Finish, Group, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn


class Scripted:
    """A runner that gives back groups made from totals; None stands for a trajectory that failed."""

    def __init__(self, totals):
        self.totals = totals

    async def play(self, tasks, samples_per_prompt, seed):
        return [
            Group(task, tuple(self._trajectory(task, k, total) for k, total in enumerate(row)))
            for task, row in zip(tasks, self.totals, strict=True)
        ]

    def _trajectory(self, task, k, total):
        if total is None:
            return Trajectory(f"{task.id}/{k}", task, (), Outcome.REWARD_ERROR, None, Failure("KeyError", "'x'", "reward", "Traceback ..."))
        return Trajectory(f"{task.id}/{k}", task, (), Outcome.COMPLETED, Rewards(total, {"math": total}))


def run(totals, samples=2):
    tasks = [Task(str(i), "?") for i in range(len(totals))]
    chosen = EvaluationSet("x", tasks, Scripted(totals), samples, 1.0, None)
    return flatten(chosen.summarise(0, asyncio.run(chosen.play(0))))


def test_mean_and_pass_are_over_tasks():
    values = run([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], samples=3)
    assert values["eval/x/mean@3"] == pytest.approx((1 / 3 + 1) / 2)
    assert values["eval/x/pass@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert values["eval/x/pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert values["eval/x/pass@3"] == 1.0


def test_failed_trajectories_are_counted_and_not_scored_zero():
    values = run([[1.0, None], [1.0, 1.0]])
    assert values["eval/x/mean@2"] == 1.0
    assert values["eval/x/pass@2"] == 1.0, "over the one task that has two valid samples"
    assert values["eval/x/outcome/failed"] == 0.25


def test_token_rewards_count_in_mean_and_pass_as_they_do_in_training():
    said = {"context": (1,), "context_origin": (Origin.PROMPT,), "logprobs": (-1.0, -1.0), "versions": (0, 0), "finish": Finish.STOP}
    turns = tuple(Turn(tokens=(2, 3), message=Message("assistant", "x"), token_rewards=row, **said) for row in ((0.5, 0.0), (0.0, 0.25)))
    task = Task("0", "?")
    group = Group(task, tuple(Trajectory(str(k), task, turns, Outcome.COMPLETED, Rewards(total)) for k, total in enumerate((0.25, 0.0))))
    values = flatten(EvaluationSet("x", [task], Scripted([]), 2, 1.0, None).summarise(0, [group]))
    assert values["eval/x/mean@2"] == (1.0 + 0.75) / 2
    assert (values["eval/x/pass@1"], values["eval/x/pass@2"]) == (0.5, 1.0), "with its tokens' rewards the first has the 1.0 that passes"


def test_a_set_in_which_everything_failed_says_why():
    with pytest.raises(RolloutFailed, match=r"evaluation x: all 2 trajectories failed\n2 in reward: KeyError: 'x'"):
        run([[None], [None]], samples=1)


def test_overrides_keep_greedy_and_everything_else():
    base = RolloutConfig(max_turn_tokens=7, max_tokens=70, temperature=1.0)
    assert RolloutOverrides().over(base) == base.model_copy(update={"temperature": 0.0})
    assert RolloutOverrides(max_turn_tokens=9).over(base) == base.model_copy(update={"temperature": 0.0, "max_turn_tokens": 9})
    assert RolloutOverrides(temperature=0.6, top_p=0.9).over(base).top_p == 0.9


def test_greedy_samples_do_not_differ():
    with pytest.raises(ValidationError, match="greedy samples of a prompt are all the same"):
        EvaluationSetConfig(path="x.jsonl", samples_per_prompt=4)
    assert EvaluationSetConfig(path="x.jsonl", samples_per_prompt=4, rollout=RolloutOverrides(temperature=1.0)).samples_per_prompt == 4
