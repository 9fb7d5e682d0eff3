"""The golden runner on the recorded folder, where it lies beside the checkout, and on cases that are always here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.golden import RTOL, Check, differences, load_adapters, main, run_case
from tests.parity.golden_deviations import deviation_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "shared" / "golden"

TWO_ROWS = {
    "name": "rloo/two_rows",
    "source": "verl core_algos compute_rloo_outcome_advantage",
    "inputs": {
        "token_level_rewards": [[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]],
        "response_mask": [[1, 1, 0], [1, 0, 1]],
        "index": ["a", "a"],
    },
    "params": {},
    "outputs": {name: [[-2.0, -2.0, 0.0], [2.0, 0.0, 2.0]] for name in ("advantages", "returns")},
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded numbers are not beside this checkout")
def test_every_recorded_case():
    """Of the files whose adapters answer; test_golden_graders.py has those whose adapters compare for themselves."""
    adapters = load_adapters()
    wrong = {
        f"{path.stem}: {case['name']}": problem
        for path in sorted(FOLDER.glob("*.json"))
        if not isinstance(adapters.get(path.stem), Check)
        for case in json.loads(path.read_text())
        if (problem := run_case(path.stem, case, adapters)) is not None
    }
    assert not wrong


def test_the_command_counts_and_fails(tmp_path, capsys):
    wrong = json.loads(json.dumps(TWO_ROWS))
    wrong["outputs"]["returns"][1][2] = 2.001
    (tmp_path / "verl_advantages.json").write_text(json.dumps([TWO_ROWS, wrong]))
    (tmp_path / "unheard_of.json").write_text(json.dumps([TWO_ROWS]))
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 2 failed"
    assert "  rloo/two_rows: outputs.returns[1][2]: 2.0, expected 2.001" in lines
    assert "  1 cases: no adapter for unheard_of.json" in lines


def test_the_command_as_it_is_called(tmp_path):
    (tmp_path / "verl_advantages.json").write_text(json.dumps([TWO_ROWS]))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.parity.golden", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "1 passed, 0 failed"


def test_no_cases_at_all_is_no_success(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_an_unknown_source_fails_and_an_error_must_be_whets_too():
    adapters = load_adapters()
    strange = {**TWO_ROWS, "source": "verl something else"}
    assert "no adapter for 'verl something else'" in (run_case("verl_advantages", strange, adapters) or "")
    kl = {
        "name": "kl",
        "source": "verl core_algos.kl_penalty",
        "inputs": {"logprob": [[-1.0]], "ref_logprob": [[-2.0]]},
        "params": {"kl_penalty": "full"},
        "outputs": {"error": "NotImplementedError"},
    }
    assert run_case("verl_kl", kl, adapters) is None
    assert run_case("verl_kl", {**kl, "params": {"kl_penalty": "k1"}}, adapters) is not None


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}),
        ([1.0, 2.0], [1.0]),
        (1.0, 1.0002),
        (float("nan"), 0.0),
        ("zero", "none"),
        (None, 0.0),
        ([1.0], {"a": 1.0}),
    ],
)
def test_differences_are_found(expected, found):
    assert list(differences(expected, found, RTOL))
    assert not list(differences(expected, expected, RTOL))


def test_adapters_that_compare_for_themselves():
    def check(case):
        assert case["outputs"] == 1, "it is one"

    adapters = {"graders": Check(check)}
    assert run_case("graders", {"name": "a", "outputs": 1}, adapters) is None
    assert "it is one" in (run_case("graders", {"name": "a", "outputs": 2}, adapters) or "")


def plus_plus_case(masks, outputs):
    return {
        "name": "reinforce_pp_returns",
        "source": "slime.utils.ppo_utils.get_reinforce_plus_plus_returns",
        "inputs": {"rewards": [1.0, 2.0], "kl": [[0.5, 0.5], [0.25, 0.5]], "loss_masks": masks},
        "params": {"gamma": 0.5, "kl_coef": 1.0},
        "outputs": outputs,
    }


def test_what_whet_answers_differently():
    """slime stops at a sample without a trained token; the answer in the table is whet's, and is worked out without whet."""
    adapters = load_adapters()
    stopped = plus_plus_case([[0, 0], [1, 1]], {"error": "AssertionError"})
    assert run_case("slime_returns_gae", stopped, adapters) is None
    deviation = deviation_of("slime_returns_gae", stopped)
    assert deviation is not None and deviation.answer(stopped) == {"returns": [[0.0, 0.0], [0.5, 1.5]]}
    assert run_case("slime_returns_gae", plus_plus_case([[1, 0], [1, 1]], {"error": "AssertionError"}), adapters) is not None
    nothing = {
        "name": "agg_loss",
        "source": "verl core_algos.agg_loss",
        "inputs": {"loss_mat": [[1.0, 2.0]], "loss_mask": [[0, 0]]},
        "params": {"loss_agg_mode": "token-mean"},
        "outputs": {"loss": float("nan"), "grad": [[float("nan"), 0.0]]},
    }
    assert run_case("verl_agg_loss", nothing, adapters) is None
    assert run_case("verl_agg_loss", {**nothing, "inputs": {"loss_mat": [[1.0]], "loss_mask": [[1]]}}, adapters) is not None


def preset_case(name, source, outputs=None, **params):
    """A case of three tokens that names a preset of verl's; the outputs are those of the tokens' weights and of what is kept."""
    inputs = {"old_log_prob": [[-1.0, -0.5, -2.0]], "rollout_log_prob": [[-1.5, -0.5, -1.9]], "response_mask": [[1, 1, 1]]}
    return {"name": name, "source": source, "inputs": {} if outputs else inputs, "params": params, "outputs": outputs}


def test_presets_of_rollout_correction_by_name():
    """Named in the parameters or in the source; log-ratios of 0.5, 0 and -0.1 make the weights."""
    answer = load_adapters()["verl_rollout_correction"]
    helper = "verl rollout_corr_helper.compute_rollout_correction_and_rejection_mask"
    token = answer(preset_case("preset", helper, preset="decoupled_token_is"))
    assert token["weights"][0] == pytest.approx([math.exp(0.5), 1.0, math.exp(-0.1)])
    assert token["modified_response_mask"] == [[1, 1, 1]]
    maker = "verl algorithm.RolloutCorrectionConfig.decoupled_seq_is_rs"
    whole = answer(preset_case("preset", maker, is_threshold=1.2, rs_threshold="0.9_1.1"))
    assert whole["weights"][0] == pytest.approx([1.2] * 3) and whole["modified_response_mask"] == [[0, 0, 0]]
    assert answer(preset_case("bypass_ppo_clip_k3_rs", helper))["modified_response_mask"] == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "params", "fields"),
    [
        ("decoupled_seq_is", {}, {"rollout_is": "sequence"}),
        ("decoupled_token_is", {"threshold": 5.0}, {"rollout_is": "token", "rollout_is_threshold": 5.0}),
        ("bypass_pg_geo_rs", {}, {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", "bypass_mode": True,
                                  "loss_type": "reinforce"}),
        ("decoupled_k3_rs", {}, {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}),
        ("decoupled_token_icepop", {}, {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        ("disabled", {}, {}),
    ],
)  # fmt: skip
def test_the_fields_of_a_preset(name, params, fields):
    plain = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None}
    plain |= {"rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"}
    case = preset_case(name, "verl RolloutCorrectionConfig", plain | fields, preset=name, **params)
    assert run_case("verl_rollout_correction", case, load_adapters()) is None
