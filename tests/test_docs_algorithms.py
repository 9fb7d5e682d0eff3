"""docs/algorithms.md, computed again: its numbers, its defaults, the places in the code, and that nothing of it is left unchecked."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import pytest
import torch

from tests.algorithms_page import NUMERAL, PATH, Page
from tests.algorithms_told import OWN, SOURCE, SUPERVISED, TOLD, policy_config
from tests.algorithms_worked import WORKED, algorithm, outputs, reply
from whet.algo.dpo import dpo_loss
from whet.algo.policy_config import PolicyConfig
from whet.algo.preference_config import DpoConfig, RewardModelConfig
from whet.algo.reward_model import reward_model_loss
from whet.algo.sft import sft_loss
from whet.algo.table import ALGORITHMS
from whet.core.batch import batch_of
from whet.core.preference import pair_batch
from whet.core.weights import REDUCERS
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Pair

PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
CREDIT, LOSSES = "Credit", "Policy losses"


def page() -> Page:
    return Page(PATH.read_text())


def names_in(rows, column) -> set[str]:
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[column].text)}


CHECKS = (*WORKED, *TOLD)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_page_is_right_and_a_changed_digit_is_found(check):
    """Of the numerals that a check looks at, every third is changed in its last digit, and the check must notice."""
    right = page()
    check(right)
    looked = bytearray(len(right.text))
    for start, end in right.seen:
        looked[start:end] = b"\1" * (end - start)
    numerals = [m for m in NUMERAL.finditer(right.text) if all(looked[m.start() : m.end()])]
    assert numerals
    for found in numerals[::3]:
        at = found.end() - 1
        wrong = right.text[:at] + str((int(right.text[at]) + 1) % 10) + right.text[at + 1 :]
        try:
            check(Page(wrong))
        except (AssertionError, ValueError, IndexError, RuntimeError):
            continue
        raise AssertionError(f"nothing noticed a wrong digit in {wrong[max(at - 60, 0) : at + 20]!r}")


def test_no_number_of_the_page_is_left_unchecked():
    here = page()
    for check in CHECKS:
        check(here)
    assert here.unseen() == []


def places(text: str) -> set[tuple[str, str]]:
    return set(PLACE.findall(text))


def test_every_place_in_the_code_exists():
    found = places(page().text)
    assert len(found) > 40
    for path, name in found:
        target: Any = importlib.import_module(f"whet.{path.removesuffix('.py').replace('/', '.')}")
        for part in name.split("."):
            target = getattr(target, part)
        assert inspect.getsourcefile(inspect.unwrap(target.fget if isinstance(target, property) else target)) == str(SOURCE / path)


def called(work) -> set[tuple[str, str]]:
    """Which functions of whet some work runs, by file and name."""
    found: set[tuple[str, str]] = set()

    def see(frame, event, arg):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            found.add((path.removeprefix(f"{SOURCE}/"), frame.f_code.co_qualname))

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def group():
    batch = batch_of([reply(n, str(i), reward=r, baseline=0.5) for i, (n, r) in enumerate(((2, 1.0), (3, 0.0), (1, 2.0)))])
    zeros = torch.zeros(batch.num_tokens)
    return batch.with_(values=zeros, old_logprobs=zeros - 1, squared_probs=zeros + 0.5)


def step(name: str, **given: Any) -> None:
    made = algorithm(name, num_steps=2, **given)
    batch, _ = made.assign_credit(group())
    made.reducer(batch)
    made.loss(made.prepare(batch.with_(weights=made.reducer(batch))), outputs(torch.full((batch.num_tokens,), -1.1)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_runs_where_the_page_says(name):
    (row,) = [row for row in page().table(CREDIT, "name") if row["name"].text == f"`{name}`"]
    assert places(row["code"].text) and places(row["code"].text) <= called(lambda: step(name))
    assert row["advantage"].text and re.fullmatch(r"arXiv [\d.]+|verl", row["source"].text)


def test_a_loss_runs_where_the_page_says():
    known = PolicyConfig.model_fields["loss"].annotation
    rows = page().table(LOSSES, "`loss.name`")
    assert len(rows) == 8
    for row in rows:
        name = row["loss.name"].text.strip("`")
        assert row["slime"].text and row["verl"].text
        assert places(row["code"].text) <= called(lambda name=name: step("grpo", loss=known(name=name))), name


def test_what_learns_from_data_runs_where_the_page_says():
    pair = pair_batch([Pair(reply(2, "c"), reply(1, "r"))]).with_(ref_logprobs=torch.zeros(5))
    both = (DpoConfig(), DpoConfig(loss="ipo"))

    def work(name: str) -> None:
        out = outputs(torch.zeros(5), torch.zeros(5))
        if name == "dpo":
            for config in both:
                dpo_loss(config)(pair, out)
        elif name == "rm":
            reward_model_loss(RewardModelConfig())(pair, out)
        else:
            REDUCERS[SupervisedRunConfig.model_fields["reducer"].default](pair)
            sft_loss(pair, out)

    for name, (_, heading) in SUPERVISED.items():
        (row,) = [row for row in page().table(heading, "name") if row["name"].text == f"`{name}`"]
        assert all(cell.text for cell in row.values())
        assert places(row["code"].text) <= called(lambda name=name: work(name)), name


def test_the_tables_name_what_there_is():
    here = page()
    assert names_in(here.table(CREDIT, "name"), "name") == set(ALGORITHMS)
    peers = here.table(OWN, "name")
    assert [row["name"].text for row in peers] == [row["name"].text for row in here.table(CREDIT, "name")]
    assert all(cell.text for row in peers for cell in row.values())
    assert names_in(here.table("Reducers", "`reducer`"), "reducer") == {*REDUCERS, "constant", "constant_length"}


def test_the_reducers_are_those_that_it_gives():
    page().says("`sample_mean` is the default, except `token_mean` for `ppo`, `cispo` and `gpg`, and `constant_length` for `dr_grpo`")
    others = {"ppo": "token_mean", "cispo": "token_mean", "gpg": "token_mean", "dr_grpo": "constant_length"}
    for name in ALGORITHMS:
        assert policy_config(name).reducer == others.get(name, "sample_mean"), name
