"""`whet dpo` from settings to an exported model: it learns what is preferred, resumes exactly, and can be checked and replayed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.tiny_pairs import make_pairs, pair_settings, write
from tests.e2e.tiny_run import metrics_of, weights_of
from whet.check.check import check
from whet.core.nonfinite import NonFinite
from whet.model import forest_check
from whet.runs.replay import replay_batch
from whet.runs.supervised import note_rate, train_on_data
from whet.settings.supervised import RUN_CONFIGS, DpoRunConfig
from whet.train.torch_native.backend import TorchBackend


def run(folder, name, **changes):
    return train_on_data(DpoRunConfig.model_validate(pair_settings(folder, name, **changes)))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("flipped", [False, True])
def test_the_preferred_reply_wins_on_a_question_never_trained_and_loses_when_flipped(tmp_path, loss, flipped):
    make_pairs(tmp_path, flipped=flipped)
    values = run(tmp_path, "run", dpo={"loss": loss})
    rows = metrics_of(tmp_path / "run")
    assert (rows[0]["step"], rows[0]["eval/dpo/margin"]) == (0, 0.0), "policy and reference begin alike"
    assert [row["step"] for row in rows if "eval/dpo/margin" in row] == [0, 4, 8]
    assert values["eval/dpo/accuracy"] == (0.0 if flipped else 1.0)
    assert (values["eval/dpo/margin"] < 0) == flipped
    assert rows[-1]["dpo/loss"] < rows[1]["dpo/loss"] and rows[-1]["dpo/accuracy"] == 1.0
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_a_second_start_gives_the_bits_of_one_long_run(tmp_path):
    make_pairs(tmp_path)
    run(tmp_path, "whole")
    run(tmp_path, "parts", num_steps=5)
    run(tmp_path, "parts")
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parts")
    trained = [[row for row in metrics_of(tmp_path / name) if row["step"] > 5] for name in ("whole", "parts")]
    assert trained[0] == trained[1]


def test_a_finished_run_that_is_started_again_gives_its_held_out_values(tmp_path):
    make_pairs(tmp_path)
    values = run(tmp_path, "run")
    lines = metrics_of(tmp_path / "run")
    assert values.keys() == {name for name in lines[-1] if name.startswith("eval/")} and len(values) == 6
    assert run(tmp_path, "run") == values
    assert metrics_of(tmp_path / "run") == lines, "nothing was measured again"


def test_the_reference_is_what_a_run_begins_with_where_that_was_restored_and_it_resumes_to_the_bit(tmp_path):
    make_pairs(tmp_path)
    run(tmp_path, "first")
    begin = {"checkpoint": {"interval": 3, "keep": 9, "restore": {"path": str(tmp_path / "first")}}}
    run(tmp_path, "whole", **begin)
    rows = metrics_of(tmp_path / "whole")
    assert (rows[0]["step"], rows[0]["eval/dpo/margin"]) == (0, 0.0), "policy and reference begin alike"
    run(tmp_path, "parts", num_steps=5, **begin)
    run(tmp_path, "parts")
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parts")
    assert [row for row in metrics_of(tmp_path / "parts") if row["step"] > 5] == [row for row in rows if row["step"] > 5]
    found, expected = (load_file(tmp_path / name) for name in ("parts/checkpoints/rollout_000008/reference/weights.safetensors",
                                                              "first/checkpoints/rollout_000008/weights.safetensors"))  # fmt: skip
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_references_notes_say_that_they_are_its(tmp_path, monkeypatch):
    def nowhere(segments, device, dtype):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(forest_check, "forest_row", nowhere)
    make_pairs(tmp_path)
    run(tmp_path, "run", num_steps=1)
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("train.rows: chains, since") == 2 and log.count("reference: train.rows: chains, since") == 1


def test_ipo_refuses_the_margins_that_it_would_not_read(tmp_path):
    settings = pair_settings(tmp_path, "run", dpo={"loss": "ipo"})
    settings["data"] = {**settings["data"], "margin_key": "gap"}
    with pytest.raises(ValueError, match=r"data\.margin_key is 'gap', but dpo\.loss is ipo, whose loss has no margin; use"):
        DpoRunConfig.model_validate(settings)
    (tmp_path / "dpo.toml").write_text("\n".join(["run_dir = 'run'", "num_steps = 1", "model = {path = 'model'}",
                                                  "data = {path = 'x.jsonl', margin_key = 'gap'}", "dpo = {loss = 'ipo'}"]))  # fmt: skip
    found = check(tmp_path / "dpo.toml", [], lambda finding: None)
    assert any(f.status == "FAIL" and "dpo.loss is ipo, whose loss has no margin" in f.text for f in found.findings)
    assert DpoRunConfig.model_validate({**settings, "dpo": {"loss": "sigmoid"}}).data.margin_key == "gap"


def test_the_best_checkpoint_is_kept_by_what_held_out_pairs_say(tmp_path):
    make_pairs(tmp_path)
    run(tmp_path, "run", checkpoint={"interval": None, "best": "eval/dpo/margin", "keep": 1})
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("run/checkpoints/*/manifest.json")]
    assert max(m["metrics"]["eval/dpo/margin"] for m in manifests) > 0


def test_check_knows_the_file_and_shows_both_replies(tmp_path):
    from whet.config import dump_toml

    make_pairs(tmp_path)
    write(tmp_path / "broken.jsonl", [{"prompt": "q", "chosen": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}])
    path = tmp_path / "dpo.toml"
    path.write_text(dump_toml(DpoRunConfig.model_validate(pair_settings(tmp_path, "run"))))
    found = check(path, [], lambda finding: None)
    assert (found.command, found.failed) == ("dpo", 0)
    assert found.memory["reference model"] == found.memory["parameters"] > 0
    texts = "\n".join("\n".join((f.text, *f.lines)) for f in found.findings)
    assert "pair 1, chosen: " in texts and "TRAINS  Yes, thank you.<|im_end|>" in texts and "held out: 1 pairs" in texts
    assert "8 steps of 3 pairs" in texts
    broken = check(path, [f"data.path={tmp_path / 'broken.jsonl'}"], lambda finding: None)
    (fault,) = [f.text for f in broken.findings if f.status == "FAIL"]
    assert "broken.jsonl:1: there is no column 'rejected'" in fault
    with pytest.raises(ValueError, match="--for=sfft names no command"):
        check(path, [], lambda finding: None, "sfft")


def test_a_step_that_gave_nan_is_done_again(tmp_path, monkeypatch):
    make_pairs(tmp_path)
    step = TorchBackend.optim_step

    def spoil(backend):
        for parameter in backend.model.hf.parameters():
            parameter.grad.fill_(torch.nan)
        return step(backend)

    monkeypatch.setattr(TorchBackend, "optim_step", spoil)
    with pytest.raises(NonFinite, match="whet replay-batch"):
        run(tmp_path, "run")
    kept = Path(tmp_path / "run/nonfinite/batch_1")
    columns = load_file(kept / "batch.safetensors")
    assert columns["unit"].tolist() == [0, 0, 1, 1, 2, 2] and "ref_logprobs" in columns
    monkeypatch.undo()
    found = replay_batch(kept)
    assert found.message is None and found.loss == pytest.approx(0.6931, abs=1e-3), "log 2: the policy is still the reference"


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_a_learning_rate_that_nobody_chose_is_told_where_it_is_low(kind):
    settings = {"model": {"path": "x"}, "data": {"path": "x.jsonl"}, "num_steps": 1}
    found = note_rate(RUN_CONFIGS[kind].model_validate(settings))
    assert found == ([] if kind == "dpo" else [f"train.optim.lr is not set, so it is 1e-06, as for reinforcement learning; whet {kind} "
                                               "usually takes 1e-5 or more"])  # fmt: skip
    assert note_rate(RUN_CONFIGS[kind].model_validate({**settings, "train": {"optim": {"lr": 1e-6}}})) == []
