"""The adapters of the graders' cases, on cases written here by hand from the rules that the graders have."""

import pytest

from tests.parity.golden_evaluate import ADAPTERS as GOLDEN_MISC
from tests.parity.golden_graders import ADAPTERS


def case(response, label, reward, *, params=None, **outputs):
    return {
        "name": "case",
        "source": "slime@624b824a89: slime rm_type=dapo (math_dapo_utils.compute_score)",
        "inputs": {"response": response, "label": label, "metadata": outputs.pop("metadata", {})},
        "params": params or {},
        "outputs": {"reward": reward, **outputs},
    }


def boxed(score, pred):
    return {"score": score, "acc": score > 0, "pred": pred}


STRICT = {"strict_box_verify": True}


@pytest.mark.parametrize(
    ("response", "label", "score", "pred"),
    [
        (r"so \boxed{42}", "42", 1.0, "42"),
        (r"so \boxed{42.0}", "42", -1.0, "42.0"),
        (r"so \boxed{ 42}", "42", -1.0, " 42"),
        (r"Answer: 42", "42", -1.0, None),
        (r"so \boxed{42", "42", -1.0, None),
        (r"so \boxed 42", "42", -1.0, None),
        (r"\boxed{1} so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        (r"\boxed{42}" + "x" * 100, "42", -1.0, None),
        (r"\boxed{42}" + "x" * 90, "42", 1.0, "42"),
        ("none", "[INVALID]", -1.0, None),
        (r"\boxed{x{y}", "x{y", -1.0, None),
        (r"}}\boxed{}", "", 1.0, ""),
    ],
)
def test_the_strict_form_of_dapo(response, label, score, pred):
    ADAPTERS["slime_rm_dapo"](case(response, label, boxed(score, pred), params=STRICT))
    with pytest.raises(AssertionError):
        ADAPTERS["slime_rm_dapo"](case(response, label, boxed(-score, pred), params=STRICT))
    with pytest.raises(AssertionError):
        ADAPTERS["slime_rm_dapo"](case(response, label, boxed(score, "other"), params=STRICT))


@pytest.mark.parametrize(
    ("response", "metadata", "letter"),
    [
        ("<think>The answer is A.</think>It is B.", {}, "B"),
        ("<think>The answer is A.</think>they do not know", {}, None),
        ("The answer is b", {"valid_letters": ["a", "b", "c"]}, "B"),
        ("so C", {"valid_letters": ["a", "b", "c"]}, "C"),
        ("so D", {"valid_letters": ["a", "b", "c"]}, None),
        ("so C", {"valid_letters": "abc"}, "C"),
    ],
)
def test_letters_after_a_thought_and_of_a_row(response, metadata, letter):
    reward = 1.0 if letter == "B" else 0.0
    ADAPTERS["slime_rm_gpqa"](case(response, "B", reward, extracted=letter, metadata=metadata))


def test_a_row_without_a_right_answer():
    ADAPTERS["slime_rm_gpqa"](case("The answer is A", None, 0.0))


def misc(function, inputs, outputs, **params):
    return {"name": "case", "source": f"slime@624b824a89: {function}", "inputs": inputs, "params": params, "outputs": outputs}


FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."
KEYED = [{"score": 1.0, "acc": True, "pred": "42"}, {"score": -1.0, "acc": False, "pred": None}]
PATHS = [("a.jsonl", None), ("a.jsonl@[1:3]", [1, 3]), ("a@b.parquet@[-2:]", [-2, None]), ("a.jsonl@[:]", [None, None])]


def test_a_filter_with_fallback_and_rewards_that_are_mappings():
    adapter = GOLDEN_MISC["slime_misc"]
    for name, more in (("check_reward_nonzero_std", {}), ("check_reward_nonzero_std_with_fallback", {"keep_when_insufficient": True})):
        for rewards, keep, reason in (([1, 0], True, None), ([1.0, 1.0], False, "zero_std_1.0")):
            case = misc(FILTERS + name, {"rewards": rewards}, {"keep": keep, "reason": reason, **more})
            assert adapter(case) == case["outputs"]
        case = misc(FILTERS + name, {"rewards": KEYED}, {"keep": True, "reason": None, **more}, reward_key="score")
        assert adapter(case) == case["outputs"]
        outputs = {"keep": False, "reason": "zero_std_1.0", **more}
        case = misc(FILTERS + name, {"rewards": [KEYED[0]] * 2}, outputs, reward_key="score")
        assert adapter(case) == case["outputs"]


@pytest.mark.parametrize(("path", "rows"), PATHS)
def test_the_slice_of_a_path(path, rows):
    outputs = {"path": path.partition("@[")[0] if rows else path, "slice": rows}
    case = misc("slime.utils.data._parse_generalized_path", {"path": path}, outputs)
    assert GOLDEN_MISC["slime_misc"](case) == case["outputs"]
