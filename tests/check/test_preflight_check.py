"""The whole report: every area, whatever fails, for both kinds of files."""

import json

import pytest

from tests.check.small_run import RL, SFT, module, of, write_rows
from whet.check.check import CHECKS, Check, check, notes_of
from whet.check.findings import Finding, Missing, Note, line, ok, summary
from whet.check.reading import AREAS
from whet.config import read_tree
from whet.plan.text import several
from whet.settings.rl import RunConfig
from whet.settings.supervised import RUN_CONFIGS, DpoRunConfig, SupervisedRunConfig, command_of

SUPERVISED = ("configuration", *(one.area for one in CHECKS if one.supervised))


def report(path, *overrides):
    shown = []
    found = check(path, overrides, shown.append)
    assert tuple(shown) == found.findings, "everything is shown as it is found"
    return found


def areas(found):
    return list(dict.fromkeys(finding.area for finding in found.findings))


def test_a_sound_run_has_every_area_in_order(here):
    found = report(here / "run.toml")
    assert areas(found) == list(AREAS)
    assert {finding.status for finding in found.findings} == {"ok"}, [f for f in found.findings if f.status != "ok"]
    assert (found.command, found.failed) == ("train", 0)
    assert found.memory["parameters"] > 0 and found.memory["KV cache"] > 0
    assert not (here / "run").exists(), "looking leaves nothing behind"
    assert json.loads(json.dumps(found.to_dict()))["findings"][0]["area"] == "configuration"


def test_a_sound_supervised_run_has_its_areas(here):
    found = report(here / "sft.toml")
    assert areas(found) == list(SUPERVISED)
    assert {finding.status for finding in found.findings} == {"ok"}
    assert found.command == "sft" and "KV cache" not in found.memory


def test_one_report_names_every_fault_and_what_could_not_be_looked_at(here):
    write_rows(here / "train.jsonl", [{"prompt": "q", "label": "1"}, {"label": "2"}, "{", {"prompt": "never read"}])
    (here / "test.jsonl").unlink()
    rewards = module(here, "rewards.py", "def score(trajectory):\n    return trajectory.task.metadata['no_such_key']\n")
    found = report(
        here / "run.toml", "model.path=nowhere", "batch.samples_per_step=3", "rollout.min_p=0.5", f"reward.name={rewards}:score",
        "env.tools=['calculator','calculator']", "observe.trackers=['no_such_module:Tracker']", "model.device=cuda:9", "run_dir=run.toml/x",
    )  # fmt: skip
    assert areas(found) == list(AREAS)
    failed = {finding.area for finding in found.findings if finding.status == "FAIL"}
    assert failed == {"batch", "algorithm", "device", "model", "environment", "data", "evaluation", "disk", "packages"}
    assert of(found.findings, "data", "FAIL")[0].startswith("train.jsonl:2: there is no column 'prompt'")
    assert of(found.findings, "data", "FAIL")[1].startswith("train.jsonl:3: not valid JSON")
    waiting = {finding.area: finding.text for finding in found.findings if finding.status == "skip"}
    assert waiting["algorithm"] == "not checked: needs the batch sizes"
    assert waiting["tokenizer"] == "not checked: needs the model's folder"
    assert waiting["attention"] == waiting["limits"] == waiting["memory"] == "not checked: needs the model's config.json"
    assert "needs the rows" in waiting["reward"] and "needs the training rows" in waiting["length"]
    assert found.failed == sum(finding.status == "FAIL" for finding in found.findings) >= 10


def test_a_file_that_is_no_configuration_fails_with_every_problem(here):
    (here / "run.toml").write_text(RL + "sede = 1\n[algo]\nclip_hihg = 0.3\n")
    found = report(here / "run.toml")
    problems = sorted(of(found.findings, "configuration", "FAIL"), key=lambda text: "sede" not in text)
    assert len(problems) == 2 and "sede" in problems[0] and "clip_high" in problems[1]
    (rest,) = [finding for finding in found.findings if finding.status == "skip"]
    assert (rest.area, rest.text) == ("all else", "not checked: everything else needs the configuration")
    (here / "named.toml").write_text(RL + '[algo]\nname = "ppoo"\n')
    (unknown,) = of(report(here / "named.toml").findings, "configuration", "FAIL")
    assert 'algo.name = "ppoo": expected one of grpo, dr_grpo, ' in unknown and unknown.endswith("did you mean ppo?")
    assert of(report(here / "none.toml").findings, "configuration", "FAIL")[0].startswith("there is no configuration file")


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (RL, RunConfig),
        (SFT, SupervisedRunConfig),
        ('[data]\npath = "x"\nmessages_key = "m"\n', SupervisedRunConfig),
        ('[data]\ntrain = "x"\n', RunConfig),
        ('pairs_per_step = 4\n[data]\npath = "x"\n', DpoRunConfig),
        ('[data]\npath = "x"\nchosen_key = "c"\n', DpoRunConfig),
        ('[model]\npath = "x"\n', RunConfig),
        ('num_epochs = 1\nsamples_per_step = 4\n[data]\nprompt_key = "p"\nresponse_key = "r"\n', SupervisedRunConfig),
    ],
)
def test_the_keys_tell_which_command_a_file_is_for(tmp_path, text, model):
    (tmp_path / "x.toml").write_text(text)
    assert RUN_CONFIGS[command_of(read_tree(tmp_path / "x.toml"))] is model


def test_overrides_count(here):
    assert "2 rollouts" in of(report(here / "run.toml", "num_rollouts=2").findings, "length")[0]


def test_a_check_that_raises_keeps_what_it_found_before():
    def stops(error):
        def run(context):
            yield ok("first")
            raise error

        return [(note.status, note.text) for note in notes_of(Check("x", run), None)]

    assert stops(Missing("the moon")) == [("ok", "first"), ("skip", "not checked: needs the moon")]
    assert stops(OSError("disk")) == [("ok", "first"), ("FAIL", "disk")]
    with pytest.raises(ZeroDivisionError):
        stops(ZeroDivisionError())


def test_lines_are_one_line_each_and_details_stand_below():
    finding = Note("FAIL", "first\n  second", ("third",)).of("data")
    assert finding == Finding("data", "FAIL", "first", ("  second", "third"))
    assert line(finding, ("data", "longer")) == "data    FAIL  first\n                second\n              third"
    assert summary([finding, ok("x").of("y"), ok("x").of("y")]) == "1 failed, 2 in order"
    assert (several(1, "step"), several(2, "step"), several(0, "step")) == ("1 step", "2 steps", "0 steps")
