import json
from pathlib import Path

import pytest

from whet.checkpoint.store import MANIFEST, CheckpointConfig, CheckpointStore
from whet.types import Progress


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"12345")


def store(tmp_path: Path, **settings) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**settings))


def test_gives_back_what_was_saved(tmp_path):
    checkpoints = store(tmp_path)
    assert checkpoints.newest() is None
    progress = Progress(rollout_id=3, optimizer_step=6, version=3)
    folder = checkpoints.save(progress, {"source": {"num_taken": 24}, "log_offset": 99}, write)
    saved = checkpoints.newest()
    assert saved is not None
    assert (saved.progress, saved.folder) == (progress, folder)
    assert saved.state == {"source": {"num_taken": 24}, "log_offset": 99}
    assert (saved.folder / "weights.bin").read_bytes() == b"12345"


def test_keeps_the_newest(tmp_path):
    checkpoints = store(tmp_path, keep=2)
    for i in range(1, 6):
        checkpoints.save(Progress(rollout_id=i), {}, write)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["rollout_000004", "rollout_000005"]


def test_a_save_that_breaks_off_leaves_the_one_before(tmp_path):
    checkpoints = store(tmp_path)
    checkpoints.save(Progress(rollout_id=1), {}, write)

    def breaks(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Progress(rollout_id=2), {}, breaks)
    saved = checkpoints.newest()
    assert saved is not None and saved.progress.rollout_id == 1


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    checkpoints = store(tmp_path)
    folder = checkpoints.save(Progress(rollout_id=1), {}, write)
    (folder / MANIFEST).unlink()
    assert checkpoints.newest() is None


@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_a_damaged_part_is_named(tmp_path, damage):
    checkpoints = store(tmp_path)
    folder = checkpoints.save(Progress(rollout_id=1), {}, write)
    part = folder / "weights.bin"
    if damage == "cut":
        part.write_bytes(b"123")
    else:
        part.unlink()
    with pytest.raises(ValueError, match=r"weights\.bin"):
        checkpoints.newest()


def test_another_format_is_refused(tmp_path):
    checkpoints = store(tmp_path)
    folder = checkpoints.save(Progress(rollout_id=1), {}, write)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoints.newest()


def test_due_at_the_interval_and_at_the_end(tmp_path):
    checkpoints = store(tmp_path, interval=4)
    assert [i for i in range(1, 11) if checkpoints.due(i, 10)] == [4, 8, 10]
    assert [i for i in range(1, 4) if store(tmp_path).due(i, 3)] == [3]


def test_without_resume_a_folder_with_checkpoints_is_refused(tmp_path):
    store(tmp_path).save(Progress(rollout_id=1), {}, write)
    with pytest.raises(ValueError, match=r"resume is false: choose another run_dir"):
        store(tmp_path, resume=False).newest()
    assert store(tmp_path / "empty", resume=False).newest() is None


def test_a_manifest_that_is_no_json_is_named(tmp_path):
    checkpoints = store(tmp_path)
    folder = checkpoints.save(Progress(rollout_id=1), {}, write)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is no JSON"):
        checkpoints.newest()
