"""A new command that trains is a class of settings and an entry in the table: it is checked and runs, and nothing else knows of it."""

import json
from dataclasses import replace

import pytest

from tests.check.small_run import SFT, of
from whet.algo.sft import sft_loss
from whet.build.programs import CONVERSATIONS, PROGRAMS, Objective, Program, step_headlines
from whet.check.check import check
from whet.config import load_config
from whet.runs.job import train
from whet.settings.supervised import RUN_CONFIGS, SupervisedRunConfig


class FirmRunConfig(SupervisedRunConfig):
    """Supervised training that reads its reference, too."""

    firmness: float = 1.0
    """A key that no other command has."""


@pytest.fixture
def firm(here, monkeypatch):
    """A file of the new command."""

    def firm_loss(batch, out):
        return replace(sft_loss(batch, out), terms=2 * (batch.ref_logprobs - out.logprobs) * batch.loss_mask)

    monkeypatch.setitem(RUN_CONFIGS, "firm", FirmRunConfig)
    program = Program[FirmRunConfig](step_headlines("sft"), lambda config: Objective(firm_loss), CONVERSATIONS, has_reference=True)
    monkeypatch.setitem(PROGRAMS, "firm", program)
    (here / "firm.toml").write_text("firmness = 2.0\n" + SFT)
    return here / "firm.toml"


def test_a_new_command_is_checked(firm):
    found = check(firm, [], lambda finding: None)
    assert (found.command, found.failed) == ("firm", 0), [f for f in found.findings if f.status == "FAIL"]
    assert "conversations a step" in of(found.findings, "batch")[0]
    assert "reference model" in found.memory


def test_a_new_command_trains(firm):
    train(load_config(FirmRunConfig, firm, ["num_steps=2", "observe.display=plain"]))
    lines = [json.loads(line) for line in (firm.parent / "sft/metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "sft/loss" in line]) == 2
    assert (firm.parent / "sft/model/config.json").is_file()
