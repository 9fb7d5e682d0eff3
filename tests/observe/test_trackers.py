import contextlib
import json
import math
import sys
import types

import pytest
from pydantic import ValidationError

from whet.observe.services import TensorBoardTracker
from whet.observe.trackers import JsonlTracker, ObserveConfig, Tracker, build_trackers


def lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def jsonl(path):
    """Opens the file, as often as it is called, and closes what it opened."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(contextlib.closing(JsonlTracker(path, **settings)))


def test_a_line_per_step_is_on_disk_at_once(path, jsonl):
    tracker = jsonl(clock=lambda: 12.5)
    tracker.log(1, {"reward/mean": 0.25, "len": 3})
    assert path.read_text() == '{"step": 1, "time": 12.5, "reward/mean": 0.25, "len": 3}\n'
    tracker.log(2, {"x": 0.1})
    assert lines(path)[1] == {"step": 2, "time": 12.5, "x": 0.1}
    assert isinstance(tracker, Tracker)


def test_nonfinite_values_stay_valid_json(path, jsonl):
    jsonl(clock=lambda: 0.0).log(1, {"a": math.nan, "b": 1.0, "c": -math.inf})
    assert lines(path) == [{"step": 1, "time": 0.0, "a": None, "b": 1.0, "c": None, "nonfinite": ["a", "c"]}]


@pytest.mark.parametrize("name", ["step", "time", "nonfinite"])
def test_a_name_of_the_tracker_itself_is_refused(path, jsonl, name):
    with pytest.raises(ValueError, match=rf"has \['{name}'\] of its own"):
        jsonl().log(1, {name: 1.0})
    assert path.read_text() == ""


def test_resume_cuts_back_to_the_noted_offset_and_goes_on(path, jsonl):
    tracker = jsonl()
    assert tracker.tell() == 0
    tracker.log(1, {"x": 1.0})
    offset = tracker.tell()
    tracker.log(2, {"x": 2.0})
    tracker.close()

    resumed = jsonl()
    assert resumed.tell() > offset
    resumed.truncate(offset)
    assert resumed.tell() == offset
    resumed.log(2, {"x": 3.0})
    assert [(line["step"], line["x"]) for line in lines(path)] == [(1, 1.0), (2, 3.0)]
    resumed.truncate(0)
    assert path.read_bytes() == b"" and resumed.tell() == 0


def test_a_torn_last_line_is_cut(path, jsonl):
    jsonl().log(1, {"x": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "ti')
    tracker = jsonl()
    tracker.log(2, {"x": 2.0})
    assert [line["step"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize("offset", [-1, 5, 1000])
def test_an_offset_of_another_file_is_refused(path, jsonl, offset):
    tracker = jsonl()
    tracker.log(1, {"x": 1.0})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"cannot be cut at byte {offset}"):
        tracker.truncate(offset)
    assert path.read_bytes() == before


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_has_the_scalars_and_no_step_twice_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path, {})
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    resumed = TensorBoardTracker(tmp_path, {})
    resumed.log(3, {"reward/mean": 8.0})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(1, 0.25), (2, 0.5), (3, 8.0)]


def test_a_tensorboard_without_steps_closes(tmp_path):
    pytest.importorskip("tensorboard")
    TensorBoardTracker(tmp_path, {}).close()


def test_metrics_are_always_kept_and_own_trackers_are_built_from_references(tmp_path, monkeypatch):
    class Mine:
        def __init__(self, run_dir, config):
            self.given = (run_dir, config)

        def log(self, step, values):
            pass

        def close(self):
            pass

    module = types.ModuleType("my_trackers")
    module.Mine, module.number = Mine, lambda run_dir, config: 3
    module.lost, module.alone = lambda run_dir, config: config["key"], lambda: 3
    monkeypatch.setitem(sys.modules, "my_trackers", module)
    jsonl, mine = build_trackers(ObserveConfig(trackers=("my_trackers:Mine",)), tmp_path / "run", {"seed": 1})
    jsonl.close()
    assert isinstance(jsonl, JsonlTracker) and jsonl.path == tmp_path / "run" / "metrics.jsonl"
    assert isinstance(mine, Mine) and mine.given == (tmp_path / "run", {"seed": 1})
    with pytest.raises(ValueError, match="'my_trackers:number' made an object of type int, which has no log"):
        build_trackers(ObserveConfig(trackers=("my_trackers:number",)), tmp_path, {})
    with pytest.raises(ValueError, match=r"tracker 'my_trackers:lost': it cannot be made: KeyError: 'key' \(.*test_trackers\.py:\d+\)"):
        build_trackers(ObserveConfig(trackers=("my_trackers:lost",)), tmp_path, {})
    with pytest.raises(ValueError, match=r"tracker 'my_trackers:alone' cannot be called as f\(run_dir, config\): too many"):
        build_trackers(ObserveConfig(trackers=("my_trackers:alone",)), tmp_path, {})
    with pytest.raises(ValueError, match="Nine"):
        build_trackers(ObserveConfig(trackers=("my_trackers:Nine",)), tmp_path, {})


def test_settings_are_checked():
    with pytest.raises(ValidationError, match="every"):
        ObserveConfig(records={"every": -1})
    with pytest.raises(ValidationError, match=r"wandb is now observe\.trackers: write observe\.trackers=\[\"wandb\"\]"):
        ObserveConfig(wandb={"project": "x"})
    with pytest.raises(ValidationError, match=r"records_every is now observe\.records\.every: write observe\.records\.every=3"):
        ObserveConfig(records_every=3)
    with pytest.raises(ValidationError, match="display"):
        ObserveConfig(display="loud")
    with pytest.raises(ValidationError, match="import reference"):
        ObserveConfig(trackers=("not a reference",))
