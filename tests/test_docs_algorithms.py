"""The numbers of docs/algorithms.md, computed again; and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from whet.algo import ALGORITHMS, AlgorithmConfig, StepPlan, build_algorithm
from whet.algo.policy import PolicyConfig
from whet.core.batch import TokenOutputs, batch_of
from whet.core.weights import REDUCERS
from whet.types import Origin, Sample

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "algorithms.md").read_text()
NEAR = {"abs": 6e-5}


def table(heading: str) -> list[dict[str, str]]:
    """The first table of a section, a dict per row."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in lines[0]]
    return [dict(zip(names, (cell.strip() for cell in line), strict=True)) for line in lines[2:]]


def names_in(rows, column) -> set[str]:
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[column])}


def algorithm(name, **settings):
    return build_algorithm(AlgorithmConfig.model_validate({"name": name, name: settings}), StepPlan(1, max_tokens=8))


def reply(index, num_tokens, reward):
    mask = (False, *(True,) * num_tokens)
    origin = (Origin.PROMPT, *(Origin.MODEL,) * num_tokens)
    return Sample((0,) * len(mask), origin, mask, (0.0,) * len(mask), (0,) * len(mask), "g", str(index), reward=reward)


def test_a_tool_call_token_by_token():
    rows = table("A tool call, token by token")
    who = {"model": Origin.MODEL, "tool": Origin.ENVIRONMENT}
    origin = (Origin.PROMPT, Origin.PROMPT, *(who[row["who"]] for row in rows))
    mask = (False, False, *(row["m"] == "1" for row in rows))
    sample = Sample(tuple(range(9)), origin, mask, (0.0,) * 9, (0,) * 9, "g", "t", reward=1.0)
    batch = batch_of([sample]).with_(values=torch.tensor([0.0, 0.0, *(float(row["V"]) for row in rows)]))
    for column, settings in {
        "actions": {"whiten": False},
        "all": {"whiten": False, "credit_over": "all"},
        "whitened": {},
    }.items():
        found, _ = algorithm("ppo", gamma=0.9, lam=0.8, **settings).assign_credit(batch)
        assert found.advantages[2:].tolist() == pytest.approx([float(row[column]) for row in rows], **NEAR), column


def test_a_group_of_five():
    rows = table("A group of five")
    batch = batch_of([reply(i, int(row["tokens"]), float(row["r"])) for i, row in enumerate(rows)])
    last = batch.starts + batch.lengths - 1
    for name in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk"):
        found, _ = algorithm(name).assign_credit(batch)
        assert found.advantages[last].tolist() == pytest.approx([float(row[name]) for row in rows], **NEAR), name
    for name in ("sample_mean", "token_mean"):
        weights = REDUCERS[name](batch)[last].tolist()
        assert weights == pytest.approx([float(row[f"w, {name}"]) for row in rows], **NEAR)


def test_the_gradients_it_gives():
    rows = table("A group of five")
    batch = batch_of([reply(i, int(row["tokens"]), float(row["r"])) for i, row in enumerate(rows)])
    grpo = algorithm("grpo")
    batch, _ = grpo.assign_credit(batch)
    logprobs = torch.full((batch.num_tokens,), -1.0, requires_grad=True)
    terms = grpo.loss(batch, TokenOutputs(logprobs, torch.zeros(batch.num_tokens))).terms
    (grpo.reducer(batch) * terms).sum().backward()
    last = (batch.starts + batch.lengths - 1).tolist()
    told = re.search(r"is −w·A: −([\d.]+) for reply 3's token by `sample_mean`, ([\d.]+) for each of reply 5's four", TEXT)
    assert told is not None
    assert -logprobs.grad[last[2]].item() == pytest.approx(float(told[1]), **NEAR)
    assert logprobs.grad[last[4]].item() == pytest.approx(float(told[2]), **NEAR)


def test_the_tables_name_what_there_is():
    assert names_in(table("Credit"), "name") == set(ALGORITHMS)
    assert names_in(table("Reducers"), "`reducer`") == {*REDUCERS, "constant", "constant_length"}
    known = PolicyConfig.model_fields["loss"].annotation
    losses = names_in(table("Policy losses"), "`loss.name`")
    assert len(losses) == 8
    for name in losses:
        algorithm("grpo", loss=known(name=name))


def test_the_reducers_are_those_that_it_gives():
    others = {"ppo": "token_mean", "cispo": "token_mean", "gpg": "token_mean", "dr_grpo": "constant_length"}
    for name in ALGORITHMS:
        config = build_algorithm(AlgorithmConfig(name=name), StepPlan(1, max_tokens=8)).config
        assert config.reducer == others.get(name, "sample_mean"), name
