"""Runs of seconds with more models than the policy: PPO's critic, a refreshed reference, a teacher."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.e2e.tiny_run import SHAPE, checkpoints_of, make_files, metrics_of, run_config, weights_of
from tests.serve.serve_setup import live
from whet.core.nonfinite import NonFinite
from whet.model import forest_check
from whet.observe.records import read_records
from whet.quickstart.model import make_model
from whet.runs.commands import train
from whet.runs.replay import replay_batch

pytestmark = pytest.mark.long

CHANGING = {"checkpoint": {"interval": 1, "keep": 9}}
PPO = {
    "algo": {"name": "ppo"},
    "critic": {"optim": {"lr": 1e-2}},
    "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 3, "steps_per_rollout": 2},
}
REFRESHED = {"algo": {"kl_coef": 0.1}, "reference": {"refresh_every": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def ppo(folder):
    train(run_config(folder, "ppo", **CHANGING, **PPO))
    return folder / "ppo"


def tensors(run_dir, rollout, part=""):
    return load_file(run_dir / f"checkpoints/rollout_{rollout:06d}" / part / "weights.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def resumed(folder, run_dir, name, after, changes):
    """The same run, gone on with from one of its checkpoints in a folder of its own."""
    shutil.copytree(run_dir, folder / name)
    for found in checkpoints_of(folder / name):
        if found > f"rollout_{after:06d}":
            shutil.rmtree(folder / name / "checkpoints" / found)
    train(run_config(folder, name, **CHANGING, **changes))
    return folder / name


def test_a_ppo_run_trains_policy_and_critic_and_says_how_well_the_critic_predicts(ppo):
    rows = metrics_of(ppo)
    assert len(rows) == 4
    for row in rows:
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/lr", "critic/clip_fraction"} <= row.keys()
        assert row["critic/lr"] == 0.01 and row["policy/loss"] is not None
    assert rows[-1]["run/optimizer_step"] == 8
    first, last = tensors(ppo, 1, "critic"), tensors(ppo, 4, "critic")
    assert first["score.weight"].abs().max() > 0 and not same(first, last)
    assert json.loads((ppo / "checkpoints/rollout_000004/critic/optimizer.json").read_text()) == {"name": "adamw", "steps": 8}
    assert not (ppo / "model/score").exists() and "score.weight" not in load_file(ppo / "model/model.safetensors")


def test_the_first_values_of_a_new_head_are_zero(ppo):
    """With values of 0 a critic explains nothing: the error is the return itself."""
    assert metrics_of(ppo)[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)


def test_a_ppo_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(folder, ppo):
    again = resumed(folder, ppo, "ppo_again", 2, PPO)
    assert weights_of(again) == weights_of(ppo) and metrics_of(again) == metrics_of(ppo)
    for part in ("", "critic"):
        assert same(tensors(again, 4, part), tensors(ppo, 4, part))


def test_a_damaged_part_of_the_critic_is_named(folder, ppo):
    broken = folder / "broken"
    shutil.copytree(ppo, broken)
    path = broken / "checkpoints/rollout_000004/critic/weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"is damaged: critic/weights.safetensors has other contents than were written"):
        train(run_config(folder, "broken", **CHANGING, **PPO))
    path.unlink()
    with pytest.raises(ValueError, match=r"is damaged: critic/weights.safetensors is missing"):
        train(run_config(folder, "broken", **CHANGING, **PPO))


def test_a_checkpoint_without_a_critic_is_no_place_to_go_on_but_one_to_begin(folder, ppo):
    train(run_config(folder, "plain", num_rollouts=1))
    with pytest.raises(ValueError, match=r"rollout_000001 has no critic: it was saved with other settings"):
        train(run_config(folder, "plain", **PPO))
    restore = {"checkpoint": {"restore": {"path": str(folder / "plain")}}}
    train(run_config(folder, "begun", num_rollouts=1, **PPO, **restore))
    assert "has no critic: it begins as a new run's does" in (folder / "begun/log.txt").read_text()
    restore = {"checkpoint": {"restore": {"path": str(ppo)}}}
    still = {**PPO, "critic": {"optim": {"lr": 0.0}}}
    train(run_config(folder, "taken", num_rollouts=1, **still, **restore))
    assert same(tensors(folder / "taken", 1, "critic"), tensors(ppo, 4, "critic")), "a learning rate of 0 leaves what it began with"


def test_a_warm_up_leaves_the_policys_bits_alone(folder):
    warm = {**PPO, "critic": {"optim": {"lr": 1e-2}, "warmup_rollouts": 2}}
    train(run_config(folder, "warm", **CHANGING, **warm))
    begun = load_file(folder / "model/model.safetensors")
    for rollout in (1, 2):
        found = tensors(folder / "warm", rollout)
        assert all(torch.equal(found[name], begun[name]) for name in found)
        assert tensors(folder / "warm", rollout, "critic")["score.weight"].abs().max() > 0
    assert not same(tensors(folder / "warm", 3), tensors(folder / "warm", 2))
    rows = metrics_of(folder / "warm")
    assert ["policy/loss" in row for row in rows] == [False, False, True, True]
    assert [row["run/optimizer_step"] for row in rows] == [0, 0, 2, 4]
    assert "trained nothing" not in (folder / "warm/log.txt").read_text()
    with pytest.raises(ValueError, match="warmup_rollouts is 4, but the run has 4 rollouts, so the policy would never learn"):
        train(run_config(folder, "never", **{**PPO, "critic": {"warmup_rollouts": 4}}))


def test_a_schedule_ends_where_the_steps_of_each_model_end(folder):
    """Of two rollouts of two steps the critic learns in both and the policy in the second alone; a linear schedule falls by as many parts
    as there are steps."""
    linear = {"lr": 1e-2, "schedule": "linear"}
    settings = {**PPO, "critic": {"optim": {**linear, "lr": 2e-2}, "warmup_rollouts": 1}, "train": {"optim": linear}}
    train(run_config(folder, "linear", num_rollouts=2, **settings))
    first, last = metrics_of(folder / "linear")
    assert "optim/lr" not in first and first["critic/lr"] == pytest.approx(2e-2 * (1 - 1 / 4))
    assert last["run/optimizer_step"] == 2
    assert last["optim/lr"] == pytest.approx(1e-2 * (1 - 1 / 2))
    assert last["critic/lr"] == pytest.approx(2e-2 * (1 - 3 / 4))


def test_a_trajectory_that_was_cut_goes_on_with_the_critics_value_where_that_is_asked_for(folder):
    """With lambda 0 that value is in one advantage alone, that of the last trained token."""
    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.constant_(made.score.weight, 0.25)
    shutil.copytree(folder / "model", folder / "sure")
    made.save_pretrained(folder / "sure")
    batch, rows = {"prompts_per_rollout": 4, "samples_per_prompt": 8}, {}
    for bootstrap in (False, True):
        algo = {"name": "ppo", "whiten": False, "lam": 0.0, "bootstrap_truncated": bootstrap}
        name = f"cut_{bootstrap}"
        train(run_config(folder, name, num_rollouts=1, batch=batch, algo=algo, critic={"path": str(folder / "sure")}))
        rows[bootstrap] = read_records(folder / name / "rollouts")
    assert {row["outcome"] for row in rows[True]} == {"truncated", "completed"}
    for plain, cut in zip(rows[False], rows[True], strict=True):
        assert plain["tokens"] == cut["tokens"] and plain["loss_mask"][-1]
        with torch.no_grad():
            value = float(made.score(made.model(torch.tensor([cut["tokens"]])).last_hidden_state[0, -1]))
        further = [a - b for a, b in zip(cut["advantages"], plain["advantages"], strict=True)]
        assert abs(value) > 0.01 and further[:-1] == [0.0] * (len(further) - 1)
        assert further[-1] == pytest.approx(value if cut["outcome"] == "truncated" else 0.0, abs=1e-5)


def test_records_hold_what_the_critic_expected_and_learned(folder):
    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.constant_(made.score.weight, 0.25)
    shutil.copytree(folder / "model", folder / "known")
    made.save_pretrained(folder / "known")
    algo = {"name": "ppo", "whiten": False, "lam": 0.5}
    train(run_config(folder, "expects", num_rollouts=1, algo=algo, critic={"path": str(folder / "known"), "optim": {"lr": 1e-2}}))
    rows = read_records(folder / "expects/rollouts")
    assert rows
    for row in rows:
        with torch.no_grad():
            scores = made.score(made.model(torch.tensor([row["tokens"]])).last_hidden_state[0]).squeeze(-1).tolist()
        assert row["values"] == pytest.approx([0.0, *scores[:-1]], abs=1e-5), "of the critic that the rollout began with"
        expected = [a + v if m else 0.0 for a, v, m in zip(row["advantages"], row["values"], row["loss_mask"], strict=True)]
        assert row["returns"] == pytest.approx(expected, abs=1e-6)
        assert row["returns"][-1] == pytest.approx(row["reward"], abs=1e-6) and len(set(row["returns"])) > 2
    train(run_config(folder, "expects_nothing", num_rollouts=1))
    row = read_records(folder / "expects_nothing/rollouts")[0]
    assert row["values"] is None and row["returns"] is None and row["td_errors"] is None


def test_a_critic_may_begin_with_a_reward_model_of_its_own(folder):
    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.constant_(made.score.weight, 0.25)
    shutil.copytree(folder / "model", folder / "judge")
    made.save_pretrained(folder / "judge")
    train(run_config(folder, "judged", num_rollouts=1, **{**PPO, "critic": {"path": str(folder / "judge"), "optim": {"lr": 0.0}}}))
    assert same(tensors(folder / "judged", 1, "critic"), dict(made.state_dict()))


def test_nan_in_the_critics_step_keeps_its_batch_and_is_done_again(folder):
    shutil.copytree(folder / "model", folder / "nan")
    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.constant_(made.score.weight, 1e30)
    made.save_pretrained(folder / "nan")
    changes = {"critic": {"path": str(folder / "nan")}, "algo": {"name": "ppo", "whiten": False}}
    config = run_config(folder, "burst", num_rollouts=1, **{**PPO, **changes})
    with pytest.raises(NonFinite, match=r"^the critic: .*whet replay-batch .*batch_1"):
        train(config)
    kept = folder / "burst/nonfinite/batch_1"
    assert json.loads((kept / "reason.json").read_text())["learner"] == "critic"
    found = replay_batch(kept)
    assert found.reproduced and found.kept.learner == "critic" and found.message is not None


@pytest.fixture(scope="module")
def refreshed(folder):
    train(run_config(folder, "refreshed", **CHANGING, **REFRESHED))
    return folder / "refreshed"


def test_a_refreshed_reference_is_the_policy_of_that_moment(folder, refreshed):
    begun = load_file(folder / "model/model.safetensors")
    first = tensors(refreshed, 1, "reference")
    assert all(torch.equal(first[name], begun[name]) for name in first)
    for rollout, policy_of in ((2, 2), (3, 2), (4, 4)):
        assert same(tensors(refreshed, rollout, "reference"), tensors(refreshed, policy_of))
    rows = metrics_of(refreshed)
    assert rows[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and rows[1]["policy/kl_ref"] > 1e-5
    assert rows[2]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and rows[3]["policy/kl_ref"] > 1e-5


@pytest.mark.parametrize("after", [2, 3])
def test_a_run_with_a_refreshed_reference_resumes_to_the_bit(folder, refreshed, after):
    again = resumed(folder, refreshed, f"refreshed_{after}", after, REFRESHED)
    assert weights_of(again) == weights_of(refreshed) and metrics_of(again) == metrics_of(refreshed)


@pytest.fixture(scope="module")
def begun(folder, refreshed):
    """A run that begins with the weights of another, and keeps a reference without a path."""
    settings = {"algo": {"kl_coef": 0.1}, "checkpoint": {**CHANGING["checkpoint"], "restore": {"path": str(refreshed)}}}
    train(run_config(folder, "begun_there", **settings))
    return folder / "begun_there"


def test_a_reference_without_a_path_is_what_the_run_begins_with(refreshed, begun):
    rows = metrics_of(begun)
    assert rows[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and rows[1]["policy/kl_ref"] > 1e-5
    for rollout in range(1, 5):
        assert same(tensors(begun, rollout, "reference"), tensors(refreshed, 4)), "and it stays that"
    assert not same(tensors(refreshed, 4), load_file(refreshed.parent / "model/model.safetensors"))


@pytest.mark.parametrize("restore", ["kept", "dropped"])
def test_it_resumes_to_the_bit_without_the_run_that_it_came_from(folder, begun, restore):
    """What checkpoint.restore says counts for a run without a checkpoint alone."""
    settings = {"algo": {"kl_coef": 0.1}}
    if restore == "kept":
        settings["checkpoint"] = {**CHANGING["checkpoint"], "restore": {"path": str(folder / "gone")}}
    shutil.copytree(begun, folder / restore)
    for found in checkpoints_of(folder / restore)[2:]:
        shutil.rmtree(folder / restore / "checkpoints" / found)
    train(run_config(folder, restore, **{**CHANGING, **settings}))
    assert weights_of(folder / restore) == weights_of(begun) and metrics_of(folder / restore) == metrics_of(begun)
    assert same(tensors(folder / restore, 4, "reference"), tensors(begun, 4, "reference"))


def test_a_refreshed_reference_begins_as_the_restored_policy_too(folder, begun):
    changes = {**REFRESHED, "checkpoint": {"interval": 1, "restore": {"path": str(begun)}}}
    train(run_config(folder, "refreshed_there", num_rollouts=1, **changes))
    assert same(tensors(folder / "refreshed_there", 1, "reference"), tensors(begun, 4)), "not the reference of the other run"


def test_a_run_that_restores_the_counters_goes_on_with_the_other_ones_reference(folder, begun):
    parts = ["weights", "optimizer", "data", "random", "counters"]
    for name, source in (("one", run_of_its_own(folder)), ("two", begun)):
        restore = {"path": str(source / "checkpoints/rollout_000002"), "parts": parts}
        changes = {"algo": {"kl_coef": 0.1}, "checkpoint": {**CHANGING["checkpoint"], "restore": restore}}
        train(run_config(folder, f"fork_{name}", **changes))
        assert weights_of(folder / f"fork_{name}") == weights_of(source), name
        assert metrics_of(folder / f"fork_{name}") == metrics_of(source)[2:], name


def run_of_its_own(folder):
    """A run whose reference is the model's folder."""
    train(run_config(folder, "own", algo={"kl_coef": 0.1}, **CHANGING))
    assert not (folder / "own/checkpoints/rollout_000001/reference").exists()
    return folder / "own"


def test_a_reference_and_a_teacher_of_their_own_are_other_models(folder):
    """The same tokenizer with other weights: the KL to them is there from the first step on, and 0 to the policy's own folder."""
    shutil.copytree(folder / "model", folder / "other")
    torch.manual_seed(3)
    path = folder / "other/model.safetensors"
    save_file({name: w + 0.3 * torch.randn_like(w) for name, w in load_file(path).items()}, path, {"format": "pt"})
    for name, kl, settings in (
        ("reference", "policy/kl_ref", {"algo": {"reference": True}}),
        ("teacher", "distill/kl", {"algo": {"distill_coef": 0.5}}),
    ):
        found = {}
        for which in ("model", "other"):
            train(run_config(folder, f"{name}_{which}", num_rollouts=1, **settings, **{name: {"path": str(folder / which)}}))
            found[which] = metrics_of(folder / f"{name}_{which}")[0][kl]
        assert found["model"] == pytest.approx(0, abs=1e-6) and found["other"] > 0.01, name
    with live(folder / "other") as server:
        teacher = {"path": str(folder / "other"), "urls": [server.url]}
        train(run_config(folder, "remote_teacher", num_rollouts=1, algo={"distill_coef": 0.5}, teacher=teacher))
    mine, theirs = (metrics_of(folder / name)[0] for name in ("remote_teacher", "teacher_other"))
    assert mine["distill/kl"] == pytest.approx(theirs["distill/kl"], abs=1e-5)
    assert mine["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-3)


def test_the_notes_of_every_model_say_whose_they_are(folder, monkeypatch):
    def nowhere(segments, device, dtype):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(forest_check, "forest_row", nowhere)
    models = {"teacher": {"path": str(folder / "model")}, "algo": {"name": "ppo", "kl_coef": 0.1, "distill_coef": 0.1}}
    train(run_config(folder, "noted", num_rollouts=1, **{**PPO, **models}))
    log = (folder / "noted/log.txt").read_text()
    for name in ("", "critic: ", "reference: ", "teacher: "):
        assert log.count(f" {name}train.rows: chains, since attention over forests fails on cpu") == (4 if name == "" else 1), name


def test_models_of_another_vocabulary_are_refused_by_name(folder):
    make_model(folder / "foreign", ["Wholly different words, zebra quartz!"] * 2, SHAPE, 0)
    foreign = {"path": str(folder / "foreign")}
    for settings, key in (
        ({"algo": {"distill_coef": 1.0}, "teacher": foreign}, "teacher.path"),
        ({"algo": {"kl_coef": 1.0}, "reference": foreign}, "reference.path"),
        ({**PPO, "critic": foreign}, "critic.path"),
    ):
        with pytest.raises(ValueError, match=rf"^{key}: the tokenizer of .*foreign is not the policy's: \d+ tokens differ \("):
            train(run_config(folder, f"foreign_{key}", **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algo": {"distill_coef": 0.5}}, "algo.name=grpo distils from a teacher .*: set teacher.path, or distill_coef=0"),
        ({"teacher": {"path": "x"}}, r"\[teacher\] is set, but algo.name=grpo does not learn from it"),
        (
            {"algo": {"distill_coef": 0.5}, "teacher": {"path": "x", "urls": ["http://h"]}, "rollout": {"temperature": 0.7}},
            r"teacher\.urls: servers have log-probs of a prompt at temperature 1 .*set rollout\.temperature=1",
        ),
        ({"reference": {"refresh_every": 2}}, r"\[reference\] is set, but algo.name=grpo keeps none"),
        ({"critic": {}}, r"\[critic\] is set, but algo.name=grpo needs no values: use ppo"),
    ],
)
def test_models_that_are_missing_or_that_nobody_asks_are_refused(folder, settings, words):
    with pytest.raises(ValueError, match=words):
        train(run_config(folder, "refused", **settings))
    assert not (folder / "refused").exists()
