"""Loops of one's own: the page's GRPO is `whet train`'s step, and a saved policy goes on."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import whet
from tests.api.small import ROWS, SMALL, score
from whet.config import ConfigError
from whet.data.source import TaskSource
from whet.settings.rl import RunConfig, training_rows

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"
SETTINGS = {key: SMALL[key] for key in ("deterministic", "rollout", "train__optim__lr")}


def page():
    """The page's loop, as a module's names."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "whet.Policy" in block)
    assert len(code.splitlines()) <= 42
    names = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def test_grpo_of_the_page_is_the_step_of_whet_train(here):
    run = whet.train("model", "train.jsonl", reward=score, **{**SMALL, "num_rollouts": 1})
    config = RunConfig.model_validate(run.settings)
    tasks = TaskSource(training_rows(config)).next(2)
    with whet.Policy("model", reward=score, **SETTINGS) as policy:
        before = {name: tensor.clone() for name, tensor in weights("model").items()}
        _, metrics = page()["grpo_step"](policy, tasks, 3)
        after = weights(policy.export("exported"))
    own = weights(run.model_path)
    (played,) = (row for row in run.rows if "optim/grad_norm" in row)
    assert metrics["optim/grad_norm"] == pytest.approx(played["optim/grad_norm"], rel=1e-5)
    assert max(float((own[name] - before[name]).abs().max()) for name in own) > 1e-3, "the step is no step"
    for name, tensor in own.items():
        torch.testing.assert_close(after[name], tensor, atol=2e-5, rtol=0)


def test_the_loop_of_the_page_runs(here):
    page()["main"]("model", ROWS, "mine", num_steps=2)
    assert Path("mine/model/config.json").is_file()
    with whet.Policy("mine/model", reward=score, **SETTINGS) as policy:
        policy.load("mine/state")
        assert policy.optimizer_step == 2


@pytest.mark.parametrize("page", [PAGE, PAGE.parents[1] / "README.md"], ids=lambda page: page.name)
def test_the_first_lines_of_a_page_run(here, capsys, page):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "whet.train(" in block)
    small = "num_rollouts=1, rollout__max_tokens=400, rollout__max_turn_tokens=8, observe__display='none'"
    code = code.replace("Qwen/Qwen3-0.6B", "model").replace("num_rollouts=100", small)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    assert "worst: " in capsys.readouterr().out


def test_a_policy_that_is_loaded_goes_on_as_the_one_that_was_saved(here):
    def step(policy):
        batch = whet.batch_of(policy.sample(ROWS, 3))
        policy.forward_backward(batch)
        return policy.optim_step()["optim/grad_norm"]

    with whet.Policy("model", reward=score, **SETTINGS) as policy:
        step(policy)
        policy.save("saved")
        expected = step(policy), step(policy)
    with whet.Policy("model", reward=score, **SETTINGS) as policy:
        policy.load("saved")
        assert (step(policy), step(policy)) == expected
        policy.load("saved")
        assert (step(policy), step(policy)) == expected, "a loop may go back, on the engine that has newer weights"
        with pytest.raises(ValueError, match="is there already"):
            policy.save("saved")
        with pytest.raises(ValueError, match=r"no folder that Policy.save wrote"):
            policy.load("model")


def test_losses(here):
    with whet.Policy("model", reward=score, **SETTINGS) as policy:
        batch = whet.batch_of(policy.sample(ROWS, 3))
        mine = policy.forward_backward(batch, lambda logprobs, part: -logprobs)
        assert mine.loss == pytest.approx(-float(mine.logprobs.sum() / batch.loss_mask.sum()), rel=1e-5)
        assert policy.forward_backward(batch, {"name": "cispo", "clip_high": 3.0}).loss != mine.loss
        with pytest.raises(ConfigError, match="needs ref_logprobs, which this policy was not built with"):
            policy.forward_backward(batch, {"name": "grpo", "kl_coef": 0.1})
        with pytest.raises(ValueError, match=r"expected \d+ terms, one for each token"):
            policy.forward_backward(batch, lambda logprobs, part: logprobs.sum())
    with pytest.raises(ConfigError, match="no critic"):
        whet.Policy("model", reward=score, algo="ppo", **SETTINGS)
