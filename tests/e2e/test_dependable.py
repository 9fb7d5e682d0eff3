"""What a checkpoint gives back, which one is kept, and that nothing is sampled from unproven weights: whole runs, in seconds."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.algo.policy import PolicyGradient
from whet.cli import app
from whet.core.nonfinite import NonFinite
from whet.engine.embedded import engine as engine_module
from whet.engine.embedded.core import EngineCore
from whet.engine.publish import EnginePublisher, SyncError
from whet.observe.records import read_records
from whet.rollout.metrics import RolloutFailed
from whet.runs.commands import evaluate, train

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dependable")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """Four rollouts over shared weights, with a checkpoint after each."""
    train(run_config(folder, "trained", checkpoint={"interval": 1, "keep": 4}))
    return folder / "trained"


def test_an_engine_with_weights_of_its_own_gives_the_same_bits(folder, trained):
    train(run_config(folder, "own", engine={"embedded": {"own_weights": True}}))
    assert weights_of(folder / "own") == weights_of(trained)
    assert metrics_of(folder / "own") == metrics_of(trained)


def test_a_fault_in_the_engines_weights_stops_the_run_before_a_token_is_sampled(folder, monkeypatch):
    """The third update leaves one element as it was not sent."""
    take_over, step = engine_module.copy_weights, EngineCore.step
    updates, sampled_under = [], []

    def spoiled(own, wire):
        arrived = take_over(own, wire)
        updates.append(1)
        if len(updates) == 3:
            with torch.no_grad():
                own["model.norm.weight"][3] += 1e-6
        return arrived

    def watched(core):
        sampled_under.append(len(updates))
        return step(core)

    monkeypatch.setattr(engine_module, "copy_weights", spoiled)
    monkeypatch.setattr(EngineCore, "step", watched)
    with pytest.raises(SyncError, match=r"version 2: the engine holds other weights than the trainer's: model\.norm\.weight$"):
        train(run_config(folder, "fault", engine={"embedded": {"own_weights": True}}))
    assert set(sampled_under) == {1, 2}, "nothing was sampled after the third update"
    assert json.loads((folder / "fault/end.json").read_text())["status"] == "failed"


def test_a_new_run_begins_with_the_weights_of_another(folder, trained):
    rows = [{"prompt": "Say something.", "label": "x"}, {"prompt": "Say more.", "label": "y"}]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    restore = {"path": str(trained)}
    changes = {"data": {"train": str(folder / "new.jsonl")}, "checkpoint": {"restore": restore}, "train": {"optim": {"lr": 0.0}}}
    config = run_config(folder, "begun", num_rollouts=1, **changes)
    train(config)
    assert weights_of(folder / "begun") == weights_of(trained), "a learning rate of 0 leaves the weights that it began with"
    assert [row["step"] for row in metrics_of(folder / "begun")] == [1], "the counters begin afresh"
    state = json.loads((folder / "begun/checkpoints/rollout_000001/optimizer.json").read_text())
    assert state["steps"] == 1, "and so does the schedule"


def test_weights_alone_are_taken_over_in_bfloat16_too(folder):
    """The float32 masters are made anew from them: those of the run's own model would undo it at the first step."""
    model = {"path": str(folder / "model"), "device": "cpu", "dtype": "bfloat16"}
    train(run_config(folder, "half-precision", num_rollouts=2, model=model, train={"optim": {"lr": 0.05}}))
    changes = {"checkpoint": {"restore": {"path": str(folder / "half-precision")}}, "train": {"optim": {"lr": 0.0}}}
    train(run_config(folder, "half-begun", num_rollouts=1, model=model, **changes))
    assert weights_of(folder / "half-begun") == weights_of(folder / "half-precision")


def test_a_run_in_float16_trains_and_goes_on_bit_for_bit(folder):
    settings = {"model": {"path": str(folder / "model"), "device": "cpu", "dtype": "float16"}}
    train(run_config(folder, "float16", num_rollouts=3, **settings))
    train(run_config(folder, "float16-twice", num_rollouts=2, **settings))
    train(run_config(folder, "float16-twice", num_rollouts=3, **settings))
    assert weights_of(folder / "float16") == weights_of(folder / "float16-twice")
    rows = metrics_of(folder / "float16")
    assert [row["optim/repeated_steps"] > 0 for row in rows] == [True, False, False] and rows[-1]["optim/loss_scale"] > 1
    assert rows == metrics_of(folder / "float16-twice")


def test_threads_are_kept_from_start_to_start(folder):
    config = run_config(folder, "threads", num_rollouts=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        train(config)
        torch.set_num_threads(before)
        train(config.model_copy(update={"num_rollouts": 2}))
        assert torch.get_num_threads() == before + 1, "another count would add in another order"
    finally:
        torch.set_num_threads(before)


def test_what_a_start_left_without_a_checkpoint_is_set_aside(folder, monkeypatch):
    """A draft with its manifest is no checkpoint: its rename never came."""
    run_dir = folder / "afresh"
    (run_dir / "checkpoints/.writing_000002").mkdir(parents=True)
    (run_dir / "checkpoints/.writing_000002/manifest.json").write_text("{}")
    (run_dir / "rollouts").mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    train(run_config(folder, "afresh", num_rollouts=1))
    assert [row["step"] for row in metrics_of(run_dir)] == [1]
    assert (run_dir / "metrics.1.jsonl").is_file() and (run_dir / "rollouts.1").is_dir()


def test_records_that_a_resumed_run_plays_again_are_gone_until_it_does(folder, monkeypatch):
    """Those of rollouts and of evaluations, like the lines of metrics.jsonl."""
    sets = {"interval": 1, "before_training": True, "sets": {"same": {"path": str(folder / "train.jsonl")}}}
    config = run_config(folder, "records", evaluate=sets, checkpoint={"interval": 2, "keep": 9})
    train(config)
    run_dir = folder / "records"
    for name in checkpoints_of(run_dir):
        if name != "rollout_000002":
            shutil.rmtree(run_dir / "checkpoints" / name)

    def found(where):
        files, index = (sorted(path.stem for path in (run_dir / where / below).glob("*.*")) for below in ("rollouts", "rollouts/index"))
        assert files == index, "a file of the index for each record file"
        return files

    before = found("."), found("evaluations/same")
    assert before == ([f"rollout_{i:06d}" for i in range(4)], [f"rollout_{i:06d}" for i in range(5)])
    seen = []
    publish = EnginePublisher.publish

    async def watched(self, version):
        seen.append((found("."), found("evaluations/same"), [row["step"] for row in metrics_of(run_dir)][-1]))
        return await publish(self, version)

    with monkeypatch.context() as patch:
        patch.setattr(EnginePublisher, "publish", watched)
        train(config)
    assert seen[0] == (before[0][:2], before[1][:3], 2), "what the checkpoint after two rollouts counts"
    assert (found("."), found("evaluations/same")) == before


def test_a_start_that_is_refused_leaves_the_folder_as_it_was(folder):
    run_dir = folder / "refused"
    train(run_config(folder, "refused", num_rollouts=1))

    def contents():
        return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises(ValueError, match=r"checkpoint\.resume is false"):
        train(run_config(folder, "refused", num_rollouts=2, checkpoint={"resume": False}))
    assert contents() == before
    train(run_config(folder, "new-folder", num_rollouts=1, checkpoint={"resume": False}))


def test_an_evaluation_that_fails_whole_is_among_the_failures(folder):
    (folder / "breaks.py").write_text("def score(trajectory):\n    raise KeyError('level')\n")
    sets = {"same": {"path": str(folder / "train.jsonl"), "reward": {"name": f"{folder / 'breaks.py'}:score"}}}
    config = run_config(folder, "failing-evaluation", evaluate={"before_training": True, "sets": sets})
    with pytest.raises(RolloutFailed, match="evaluation same: all 4 trajectories failed"):
        train(config)
    with pytest.raises(RolloutFailed, match="evaluation same: all 4 trajectories failed"):
        evaluate(config)
    for run_dir in (folder / "failing-evaluation", folder / "failing-evaluation/evaluate_1"):
        (row,) = [json.loads(line) for line in (run_dir / "failures.jsonl").read_text().splitlines()]
        assert (row["kind"], row["where"]) == ("RewardError", "reward") and "KeyError: 'level'" in row["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"prompt_key": "question"}}, "question"),
        ({"evaluate": {"sets": {"x": {"path": "nowhere.jsonl"}}}}, "nowhere.jsonl"),
        ({"observe": {"trackers": ["nowhere:Tracker"]}}, "nowhere"),
        ({"reward": {"name": "nowhere:score"}}, "nowhere"),
    ],
)
def test_what_is_cheap_to_read_is_read_before_the_weights(folder, monkeypatch, changes, words):
    monkeypatch.setattr("whet.build.parts.load_causal", lambda *args, **kwargs: pytest.fail("the weights were read first"))
    with pytest.raises(ValueError, match=words):
        train(run_config(folder, "cheap-first", **changes))


def test_random_draws_of_a_users_code_go_on_where_they_were(folder):
    """The process's generators are seeded at every start; a resume gives them back what the checkpoint holds."""
    (folder / "dice.py").write_text(
        "import random\nimport numpy\nimport torch\n"
        "class Tracker:\n"
        "    def __init__(self, run_dir, config):\n        self.path = run_dir / 'dice.txt'\n"
        "    def log(self, step, values):\n"
        "        with open(self.path, 'a') as file:\n"
        "            print(step, random.random(), numpy.random.rand(), float(torch.rand(())), file=file)\n"
        "    def close(self):\n        pass\n"
    )
    observe = {"trackers": [f"{folder / 'dice.py'}:Tracker"]}
    train(run_config(folder, "dice", observe=observe))
    train(run_config(folder, "dice-parts", observe=observe, num_rollouts=2))
    train(run_config(folder, "dice-parts", observe=observe))
    draws = (folder / "dice/dice.txt").read_text()
    assert len(set(draws.splitlines())) == 4
    assert (folder / "dice-parts/dice.txt").read_text() == draws


EVERY_PART = ["weights", "optimizer", "data", "random", "counters"]


def test_every_part_of_a_checkpoint_can_be_taken_over(folder, trained):
    """With all of them, a run in another folder goes on as the first one did after two rollouts."""
    restore = {"path": str(trained / "checkpoints/rollout_000002"), "parts": EVERY_PART}
    train(run_config(folder, "forked", checkpoint={"restore": restore}))
    assert weights_of(folder / "forked") == weights_of(trained)
    assert metrics_of(folder / "forked") == metrics_of(trained)[2:]


def test_with_every_part_come_tasks_that_were_left_over_and_a_coefficient_that_adapts(folder):
    algo = {"kl_reward": {"coef": 0.5, "target": 0.001, "horizon": 12}}
    changes = {"algo": algo, "control": {"over_sample": 1.5}}
    train(run_config(folder, "origin", **changes))
    train(run_config(folder, "half", **changes, num_rollouts=2))
    train(run_config(folder, "moved", **changes, checkpoint={"restore": {"path": str(folder / "half"), "parts": EVERY_PART}}))
    tasks = [row["task_id"] for row in read_records(folder / "origin/rollouts") if row["rollout_id"] >= 2]
    assert [row["task_id"] for row in read_records(folder / "moved/rollouts")] == tasks
    assert metrics_of(folder / "moved") == metrics_of(folder / "origin")[2:]
    assert weights_of(folder / "moved") == weights_of(folder / "origin")


def test_a_kl_coefficient_that_adapts_goes_on_from_where_it_was(folder):
    kl_reward = {"coef": 0.5, "target": 0.001, "horizon": 12}
    algo = {"kl_reward": kl_reward}
    train(run_config(folder, "adapts", algo=algo))
    train(run_config(folder, "adapts-parts", algo=algo, num_rollouts=2))
    train(run_config(folder, "adapts-parts", algo=algo))
    coefs = [row["reward_kl/coef"] for row in metrics_of(folder / "adapts")]
    assert len(set(coefs)) == 4, "it changes with every rollout"
    assert metrics_of(folder / "adapts-parts") == metrics_of(folder / "adapts")
    assert weights_of(folder / "adapts-parts") == weights_of(folder / "adapts")


def test_credit_that_fails_leaves_the_coefficient_as_it_was(folder, monkeypatch):
    algo = {"kl_reward": {"coef": 0.5, "target": 0.001, "horizon": 12}}
    train(run_config(folder, "unbroken", algo=algo))
    assign = PolicyGradient.assign_credit
    calls = []

    def fails(self, batch):
        found = assign(self, batch)
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("after the coefficient has changed")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PolicyGradient, "assign_credit", fails)
        with pytest.raises(MemoryError):
            train(run_config(folder, "failed-credit", algo=algo))
    assert checkpoints_of(folder / "failed-credit") == ["rollout_000002"]
    train(run_config(folder, "failed-credit", algo=algo))
    assert metrics_of(folder / "failed-credit") == metrics_of(folder / "unbroken")


def test_settings_that_gain_a_state_begin_it_afresh(folder):
    """The first start's algorithm has no state of its own; the second start's has one."""
    (folder / "stateless.py").write_text(
        "from types import SimpleNamespace\n"
        "from whet.algo.config import GRPOConfig\n"
        "from whet.algo.grpo import grpo\n"
        "def build(options, plan):\n"
        "    inner = grpo(GRPOConfig(), plan)\n"
        "    names = ('needs', 'entropy_grad', 'reducer', 'prepare', 'assign_credit', 'loss')\n"
        "    return SimpleNamespace(**{name: getattr(inner, name) for name in names})\n"
    )
    train(run_config(folder, "gains", algo={"name": f"{folder / 'stateless.py'}:build"}, num_rollouts=1))
    train(run_config(folder, "gains", algo={"kl_reward": {"coef": 0.5, "target": 0.001}}, num_rollouts=2))
    assert metrics_of(folder / "gains")[1]["reward_kl/coef"] == 0.5


def test_a_place_among_other_data_is_not_taken_over(folder, trained):
    (folder / "more.jsonl").write_text((folder / "train.jsonl").read_text() + json.dumps({"prompt": "?", "label": "0"}) + "\n")
    restore = {"path": str(trained), "parts": ["data"]}
    with pytest.raises(ValueError, match="saved position of source 'train' was taken with length 4, not 5"):
        train(run_config(folder, "misplaced", data={"train": str(folder / "more.jsonl")}, checkpoint={"restore": restore}))


def test_the_best_checkpoint_stays(folder):
    """An evaluation after every rollout; the best one saves, and outlives the last one's."""
    evaluate = {"interval": 1, "sets": {"same": {"path": str(folder / "train.jsonl")}}}
    checkpoint = {"keep": 1, "best": "eval/same/reward/total"}
    config = run_config(folder, "best", num_rollouts=6, evaluate=evaluate, checkpoint=checkpoint, train={"optim": {"lr": 0.1}})
    train(config)
    lines = [json.loads(line) for line in (folder / "best/metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["eval/same/reward/total"] for row in lines if "eval/same/reward/total" in row}
    assert len(scores) == 6 and len(set(scores.values())) > 1
    kept = {int(name.removeprefix("rollout_")) for name in checkpoints_of(folder / "best")}
    best = max(scores.values())
    firsts = [step for step, score in scores.items() if score == best]
    assert kept <= {6, *firsts} and kept & set(firsts) and 6 in kept


def test_a_step_that_is_fine_the_second_time_is_told_apart(folder, tmp_path):
    """The kept batch has what is needed to do the step again; that this one goes well now is said, with another status.

    The algorithm divides by the token limit of a trajectory, so both commands have to tell it.
    """
    flag = tmp_path / "broken"
    flag.touch()
    (tmp_path / "moody.py").write_text(
        "from pathlib import Path\n"
        "from whet.algo.base import LossTerms\n"
        "from whet.algo.config import DrGRPOConfig\n"
        "from whet.algo.grpo import grpo\n"
        "def build(options, plan):\n"
        "    algorithm = grpo(DrGRPOConfig(), plan)\n"
        "    inner = algorithm.loss\n"
        "    def loss(batch, out):\n"
        "        found = inner(batch, out)\n"
        f"        return LossTerms(found.terms * float('inf'), found.metrics) if Path({str(flag)!r}).exists() else found\n"
        "    algorithm.loss = loss\n"
        "    return algorithm\n"
    )
    with pytest.raises(NonFinite, match="replay-batch"):
        train(run_config(folder, "moody", algo={"name": f"{tmp_path / 'moody.py'}:build"}))
    kept = folder / "moody/nonfinite/batch_1"
    again = CliRunner().invoke(app, ["replay-batch", str(kept)])
    assert again.exit_code == 0, again.output
    flag.unlink()
    fine = CliRunner().invoke(app, ["replay-batch", str(kept)])
    assert fine.exit_code == 1 and "nothing is wrong, the loss is" in fine.output
    start, exported = (load_file(Path(path) / "model.safetensors") for path in (folder / "model", kept / "model"))
    assert all(torch.equal(start[name], exported[name]) for name in exported), "the weights that the step began with"


def test_a_folder_that_is_no_kept_batch_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["replay-batch", str(tmp_path)])
    assert result.exit_code == 2 and "is no kept batch: reason.json, batch.safetensors, config.toml, model is missing" in result.output
