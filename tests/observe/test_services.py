"""Trackers of other packages. wandb, trackio, SwanLab and MLflow are tested as they are where they are installed; everywhere against
fakes with the calls that wandb 0.31, trackio 0.43, swanlab 0.10 and mlflow 3.17 were seen to take."""

import importlib.util
import inspect
import json
import sqlite3
import sys
import types

import pytest

from whet.observe.replies import COLUMNS, chosen_replies
from whet.observe.services import SERVICES, build_service
from whet.observe.trackers import SERVICES as NAMES
from whet.observe.trackers import ObserveConfig, ReplyTracker, Tracker, build_trackers
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Failure, Finish, Group, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

VALUES = {"reward/total": 0.5, "eval/test/mean@1": 0.25}
PROJECTS = ("WANDB_PROJECT", "TRACKIO_PROJECT", "SWANLAB_PROJECT", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in (*PROJECTS, "WANDB_MODE", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def played_group(rewards, text="<b> | more\nlines"):
    """A group with one trajectory for each reward; None: it failed."""
    task = Task("train/0#0", (Message("user", "the question"),), "42")
    played = []
    for i, reward in enumerate(rewards):
        turn = Turn((1,), (Origin.PROMPT,), (5,), (-0.5,), (0,), Message("assistant", f"reply {i}{text}"), Finish.STOP)
        error = Failure("KeyError", "no answer", "reward") if reward is None else None
        outcome, given = (Outcome.REWARD_ERROR, None) if reward is None else (Outcome.COMPLETED, Rewards(reward))
        played.append(Trajectory(f"{task.id}/{i}", task, (turn,), outcome, given, error))
    return Group(task, tuple(played))


def rows():
    return chosen_replies([played_group([1.0, 0.0, None])], 16)


class Fake(types.ModuleType):
    """A package that notes what is called on it."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return None if name == "get_experiment_by_name" else self

        return called


TAKES = {
    "wandb": {
        "init": {"project", "mode", "dir", "config"}, "log": {"step"}, "Table": {"columns", "data"}, "finish": set(),
    },
    "trackio": {
        "init": {"project", "name", "config", "embed", "auto_log_cpu", "auto_log_gpu"}, "log": {"step"},
        "Table": {"columns", "data"}, "finish": set(),
    },
    "swanlab": {"init": {"project", "name", "mode", "log_dir", "config"}, "log": {"step"}, "Table": set(), "add": set(), "finish": set()},
    "mlflow": {
        "MlflowClient": {"tracking_uri"}, "get_experiment_by_name": set(), "create_experiment": {"artifact_location"},
        "create_run": {"run_name"}, "log_dict": set(), "log_batch": {"metrics"}, "set_terminated": set(),
    },
}  # fmt: skip
"""Calls of each package, with the keywords that it was seen to take."""


@pytest.mark.parametrize("name", TAKES)
def test_a_package_is_told_values_and_replies_in_its_own_calls(name, offline, monkeypatch):
    fake = Fake(name)
    fake.info = types.SimpleNamespace(run_id="run-1")
    fake.experiment_id, fake.echarts = "7", fake
    fake.entities = types.ModuleType("mlflow.entities")
    fake.entities.Metric = lambda *given: given
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    _, tracker = build_trackers(ObserveConfig(trackers=(name,)), offline, {"seed": 1})
    assert isinstance(tracker, ReplyTracker)
    tracker.log(3, VALUES)
    tracker.replies(3, "replies", rows())
    tracker.close()
    assert {call for call, _, _ in fake.calls} == TAKES[name].keys()
    assert all(set(keywords) == TAKES[name][call] for call, _, keywords in fake.calls)
    told = repr(fake.calls)
    assert "'seed': 1" in told and "whet" in told and "0.25" in told and "reply 0" in told and "question" in told
    if name in ("wandb", "swanlab"):
        assert fake.calls[0][2]["mode"] == "offline"


@pytest.mark.parametrize("name", TAKES)
def test_the_project_is_that_of_the_environment(name, offline, monkeypatch):
    fake = Fake(name)
    fake.info, fake.entities = types.SimpleNamespace(run_id="run-1"), types.ModuleType("mlflow.entities")
    fake.experiment_id = "7"
    fake.entities.Metric = lambda *given: given
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    monkeypatch.setenv(next(each for each in PROJECTS if each.startswith(name.upper())), "algebra")
    build_service(name, offline, {})
    assert "algebra" in repr(fake.calls)


@pytest.mark.parametrize("name", NAMES)
def test_the_real_package_keeps_values_and_replies(name, offline):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    tracker = build_service(name, offline, {"seed": 1})
    assert isinstance(tracker, ReplyTracker) and isinstance(tracker, Tracker)
    for step in (1, 2):
        tracker.log(step, VALUES)
        tracker.replies(step, "replies", rows())
    tracker.close()
    SEEN[name](offline)


def seen_in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("eval/test/mean@1")] == [0.25, 0.25]
    text = events.Tensors("replies/text_summary")[-1].tensor_proto.string_val[0].decode()
    head, _, best, *_ = text.splitlines()
    assert head.split(" | ")[1:3] == ["prompt", "reply"] and "reply 0&lt;b&gt; &#124; more<br>lines" in best


def seen_in_wandb(folder):
    (table, *_) = folder.glob("wandb/offline-run-*/files/media/table/*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == list(COLUMNS) and [row[3] for row in found["data"]] == [1.0, 0.0, None]


def seen_in_trackio(folder):
    (database,) = (folder.parent / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        found = [str(row) for row in opened.execute("select * from metrics")]
    assert any("mean@1" in row for row in found) and any("reply 0" in row for row in found)


def seen_in_swanlab(folder):
    assert [*folder.glob("swanlab/run-*/*.swanlab")]
    assert any("reply 0" in path.read_text() for path in folder.glob("swanlab/run-*/media/echarts/*.json"))


def seen_in_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("whet").experiment_id])
    assert run.data.metrics == {"reward/total": 0.5, "eval/test/mean_1": 0.25} and run.info.status == "FINISHED"
    (table,) = folder.glob("mlflow/*/artifacts/replies/000002.json")
    assert json.loads(table.read_text())["columns"] == list(COLUMNS)


SEEN = {
    "tensorboard": seen_in_tensorboard,
    "wandb": seen_in_wandb,
    "trackio": seen_in_trackio,
    "swanlab": seen_in_swanlab,
    "mlflow": seen_in_mlflow,
}


def test_every_name_has_a_tracker():
    assert tuple(SERVICES) == NAMES == tuple(SEEN)
    for made in SERVICES.values():
        assert list(inspect.signature(made).parameters) == ["run_dir", "config"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_names_the_install_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError, match=rf"observe\.trackers: {name} needs .*pip install 'whet\[{name}\]', or leave {name} out"):
        build_trackers(ObserveConfig(trackers=(name,)), tmp_path, {})


def test_a_package_that_cannot_begin_is_named(tmp_path, monkeypatch):
    fake = types.ModuleType("wandb")
    fake.init = lambda **_: {}["account"]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ValueError, match=r"observe\.trackers: wandb cannot begin a run: KeyError: 'account'; or leave wandb out"):
        build_trackers(ObserveConfig(trackers=("wandb",)), tmp_path, {})


def test_replies_are_chosen_from_the_best_to_the_worst():
    groups = [played_group([float(i) for i in range(10)])]
    assert [reply.reward for reply in chosen_replies(groups, 4)] == [9.0, 6.0, 3.0, 0.0]
    assert [reply.reward for reply in chosen_replies(groups, 1)] == [9.0]
    assert [reply.reward for reply in chosen_replies([played_group([None, 1.0])], 5)] == [1.0, None]
    assert chosen_replies(groups, 0) == chosen_replies([], 3) == []


def test_a_reply_for_a_terminal_has_no_control_characters_and_loses_its_middle():
    (reply,) = chosen_replies([played_group([1.0], text="\x1b[2J" + "x" * 5000)], 1)
    text = reply.as_text()
    assert "reward 1" in text and "\\x1b" in text and "\x1b" not in text and "characters" in text and len(text) < 2000


def test_a_supervised_run_has_no_replies_to_show():
    settings = {"model": {"path": "m"}, "data": {"path": "rows.jsonl"}, "num_steps": 1}
    with pytest.raises(ValueError, match="show"):
        SupervisedRunConfig.model_validate({**settings, "observe": {"show": 2}})
