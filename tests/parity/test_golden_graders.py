"""The graders' golden cases, where their folder lies beside the checkout."""

import json
import os
from pathlib import Path

import pytest

from tests.parity.golden_graders import ADAPTERS, dapo_overlong
from tests.parity.golden_masks import ADAPTERS as MASK_ADAPTERS

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden cases are kept outside the repository")


def failures(path, adapter, keep=lambda case: True):
    found = []
    cases = [case for case in json.loads(path.read_text()) if keep(case)]
    assert cases, f"{path} has no cases"
    for case in cases:
        try:
            adapter(case)
        except AssertionError as error:
            found.append(f"{case['name']}: {error}")
    return found


@pytest.mark.parametrize("file", ADAPTERS)
def test_every_case(file):
    assert failures(GOLDEN / f"{file}.json", ADAPTERS[file]) == []


@pytest.mark.skipif("WHET_TRL_WHEEL" not in os.environ, reason="WHET_TRL_WHEEL names no wheel (pip download trl==1.16.0 --no-deps)")
@pytest.mark.parametrize("file", MASK_ADAPTERS)
def test_every_case_of_masks(file):
    assert failures(GOLDEN / f"{file}.json", MASK_ADAPTERS[file]) == []


def test_the_penalty_for_overlong_replies():
    assert failures(GOLDEN / "verl_misc.json", dapo_overlong, lambda case: "max_resp_len" in case["params"]) == []


@pytest.mark.parametrize(("file", "output"), [("slime_rm_math", "reward"), ("slime_rm_f1", "reward"), ("slime_rm_gpqa", "reward")])
def test_an_adapter_notices_a_wrong_answer(file, output):
    cases = [case for case in json.loads((GOLDEN / f"{file}.json").read_text()) if output in case["outputs"]]
    for case in cases:
        right = case["outputs"][output]
        wrong = {**case, "outputs": {**case["outputs"], output: 1 - right if right in (0, 1) else 0.123}}
        with pytest.raises(AssertionError):
            ADAPTERS[file](wrong)
