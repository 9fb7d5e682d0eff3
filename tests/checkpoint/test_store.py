import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.checkpoint.config import CheckpointConfig, RestoreConfig
from whet.checkpoint.store import FORMAT, MANIFEST, CheckpointStore, _digest_of, find_checkpoint
from whet.types import Progress


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"12345")
    (folder / "deeper").mkdir()
    (folder / "deeper/more.bin").write_bytes(b"678")


def store(tmp_path: Path, **settings) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**settings))


def save(checkpoints: CheckpointStore, rollout_id: int, metrics=None, writes=write) -> Path:
    return checkpoints.save(Progress(rollout_id=rollout_id), metrics or {}, {}, writes)


def names(checkpoints: CheckpointStore) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_gives_back_what_was_saved(tmp_path):
    checkpoints = store(tmp_path)
    assert checkpoints.newest() is None
    progress = Progress(rollout_id=3, optimizer_step=6, version=3)
    folder = checkpoints.save(progress, {"eval/a/reward/total": 0.5, "b": float("nan")}, {"config_hash": "x"}, write)
    saved = checkpoints.newest()
    assert saved is not None
    assert (saved.progress, saved.folder) == (progress, folder)
    assert (saved.metrics, saved.facts) == ({"eval/a/reward/total": 0.5}, {"config_hash": "x"})
    assert (saved.folder / "weights.bin").read_bytes() == b"12345"


def test_keeps_the_newest(tmp_path):
    checkpoints = store(tmp_path, keep=2)
    for i in (1, 2, 3, 9, 10, 1_000_000):
        save(checkpoints, i)
    assert names(checkpoints) == ["rollout_000010", "rollout_1000000"]
    assert checkpoints.newest().progress.rollout_id == 1_000_000


def test_keeps_the_best_as_well(tmp_path):
    checkpoints = store(tmp_path, keep=1, best="eval/a/reward/total")
    for i, value in enumerate([0.1, 0.7, 0.3, None, 0.7, 0.2], start=1):
        save(checkpoints, i, {} if value is None else {"eval/a/reward/total": value})
    assert names(checkpoints) == ["rollout_000005", "rollout_000006"], "of equals the later one"
    lowest = store(tmp_path / "lowest", keep=1, best="loss", best_mode="min")
    for i, value in enumerate([0.3, 0.1, 0.2], start=1):
        save(lowest, i, {"loss": value})
    assert names(lowest) == ["rollout_000002", "rollout_000003"]


def test_due_at_the_interval_at_the_end_and_at_a_new_best(tmp_path):
    checkpoints = store(tmp_path, interval=4)
    assert [i for i in range(11) if checkpoints.due(i, 10, {})] == [4, 8, 10]
    assert [i for i in range(1, 4) if store(tmp_path, interval=None).due(i, 3, {})] == [3]
    checkpoints = store(tmp_path, interval=None, best="score")
    save(checkpoints, 1, {"score": 0.5})
    assert checkpoints.due(2, 10, {"score": 0.6})
    assert not checkpoints.due(2, 10, {"score": 0.5})
    assert not checkpoints.due(2, 10, {"another": 9.0})


def test_two_of_one_rollout_stand_side_by_side(tmp_path):
    """A run that is stopped in a rollout saves again what it saved before that rollout, and more."""
    checkpoints = store(tmp_path, keep=2)
    for _ in range(3):
        save(checkpoints, 5)
    assert names(checkpoints) == ["rollout_000005.1", "rollout_000005.2"]
    assert checkpoints.newest().folder.name == "rollout_000005.2"
    save(checkpoints, 6)
    assert checkpoints.newest().progress.rollout_id == 6


def test_a_disk_that_is_full_leaves_the_one_before_and_no_rubbish(tmp_path):
    checkpoints = store(tmp_path)
    first = save(checkpoints, 1)

    def breaks(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device .*MiB free.*newest whole checkpoint is .*rollout_000001") as raised:
        save(checkpoints, 2, writes=breaks)
    assert raised.value.errno == errno.ENOSPC
    assert names(checkpoints) == ["rollout_000001"]
    assert checkpoints.newest().folder == first


def test_what_cannot_be_named_or_removed_is_told_as_well(tmp_path, monkeypatch):
    checkpoints = store(tmp_path, keep=1)
    save(checkpoints, 1)

    def refuses(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there")

    advice = r"Permission denied at there \(\d+ MiB free\); the newest whole checkpoint is .*rollout_00000{}: make room"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuses)
        with pytest.raises(OSError, match="a checkpoint cannot be written: " + advice.format(1)):
            save(checkpoints, 2)
    assert names(checkpoints) == ["rollout_000001"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        with pytest.raises(OSError, match="an old checkpoint cannot be removed: " + advice.format(2)):
            save(checkpoints, 2)
    with monkeypatch.context() as patch:
        (checkpoints.folder / ".writing_000003").mkdir()
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else refuses())
        with pytest.raises(OSError, match="a checkpoint cannot be written: " + advice.format(2)):
            save(checkpoints, 3)
    save(checkpoints, 4)
    assert names(checkpoints) == ["rollout_000004"]


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """Parts and manifest, then the lists of names of the draft's folders and its own, then the rename, then that of the folder above;
    then old ones go."""
    calls = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink
    checkpoints = store(tmp_path, keep=1)
    old = save(checkpoints, 1)
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    monkeypatch.setattr(os, "unlink", lambda path, **at: (calls.append(f"remove {path}"), unlink(path, **at)))
    save(checkpoints, 2)
    draft = checkpoints.folder / ".writing_000002"
    parts = {str(draft / name) for name in ("weights.bin", "deeper/more.bin")}
    assert set(calls[:2]) == parts
    assert calls[2:5] == [str(draft / MANIFEST), str(draft / "deeper"), str(draft)]
    assert calls[5:8] == ["rename", str(checkpoints.folder), f"remove {old / MANIFEST}"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, not even what cleans up (see tests/e2e for the real one)."""


def test_a_crash_at_any_write_leaves_the_one_before(tmp_path, monkeypatch):
    """However far a save gets, the newest checkpoint is whole and is the old one or the new one; the next save cleans up."""
    ends: set[int] = set()
    for stop_at in range(1, 40):
        checkpoints = store(tmp_path / str(stop_at), keep=1)
        save(checkpoints, 1)
        calls = 0

        def counted(function, stop_at=stop_at):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == stop_at:
                    raise Killed
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                save(checkpoints, 2)
            except Killed:
                pass
            else:
                break
        saved = store(tmp_path / str(stop_at)).newest()
        assert saved is not None
        ends.add(saved.progress.rollout_id)
        save(checkpoints, 3)
        assert names(checkpoints) == ["rollout_000003"]
    assert stop_at > 10, "every one of its writes was broken off once"
    assert ends == {1, 2}


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    checkpoints = store(tmp_path)
    folder = save(checkpoints, 1)
    (folder / MANIFEST).unlink()
    assert checkpoints.newest() is None


@pytest.mark.parametrize("part", ["weights.bin", "deeper/more.bin"])
def test_a_missing_part_is_named(tmp_path, part):
    checkpoints = store(tmp_path)
    (save(checkpoints, 1) / part).unlink()
    with pytest.raises(ValueError, match=f"rollout_000001 is damaged: {part} is missing; remove the folder to use the one before"):
        checkpoints.newest()


@given(st.randoms(use_true_random=False), st.sampled_from(["cut", "flip"]))
def test_a_part_that_was_cut_or_changed_at_any_byte_is_named(tmp_path_factory, draw: random.Random, damage):
    checkpoints = store(tmp_path_factory.mktemp("damaged"))
    folder = save(checkpoints, 1, {"score": 1.0})
    name = draw.choice(["weights.bin", "deeper/more.bin", MANIFEST])
    data = bytearray((folder / name).read_bytes())
    place = draw.randrange(len(data))
    if damage == "cut":
        del data[place:]
    else:
        data[place] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}|format") as raised:
        checkpoints.newest()
    assert str(folder) in str(raised.value)


def test_another_format_is_refused(tmp_path):
    checkpoints = store(tmp_path)
    folder = save(checkpoints, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match=f"format 99; this version of whet reads format {FORMAT}"):
        checkpoints.newest()


def test_without_resume_a_folder_with_checkpoints_is_refused(tmp_path):
    save(store(tmp_path), 1)
    with pytest.raises(ValueError, match=r"resume is false: choose another run_dir"):
        store(tmp_path, resume=False).newest()
    assert store(tmp_path / "empty", resume=False).newest() is None


def test_files_dates_do_not_decide_which_is_the_newest(tmp_path):
    """A clock that was set back makes the newest checkpoint look old."""
    checkpoints = store(tmp_path, keep=3)
    for i in (1, 2, 3):
        folder = save(checkpoints, i)
        for path in (folder, folder / MANIFEST):
            os.utime(path, (1e9 - i * 1e6,) * 2)
    assert checkpoints.newest().progress.rollout_id == 3
    save(checkpoints, 4)
    assert names(checkpoints) == ["rollout_000002", "rollout_000003", "rollout_000004"]


@pytest.mark.parametrize("name", ["rollout_000001_7", "rollout_000001-good", "rollout_best", "rollout_000001.old"])
def test_a_copy_under_another_name_is_neither_gone_on_from_nor_removed(tmp_path, name):
    checkpoints = store(tmp_path, keep=1)
    copy = shutil.copytree(save(checkpoints, 1), checkpoints.folder / name)
    emptied = shutil.copytree(copy, copy.with_name(f"{name}_emptied"))
    (emptied / MANIFEST).unlink()
    save(checkpoints, 2)
    save(checkpoints, 3)
    assert checkpoints.newest().progress.rollout_id == 3
    assert (copy / MANIFEST).is_file() and emptied.is_dir()
    assert find_checkpoint(copy).progress.rollout_id == 1


def test_a_checkpoint_is_found_by_its_own_folder_or_its_runs(tmp_path):
    checkpoints = store(tmp_path)
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    assert find_checkpoint(first).folder == first
    assert find_checkpoint(tmp_path).folder == second
    with pytest.raises(ValueError, match="is no checkpoint, nor the folder of a run that has one"):
        find_checkpoint(tmp_path / "elsewhere")


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="add weights to parts"):
        RestoreConfig(path="x", parts=["optimizer"])
    with pytest.raises(ValueError, match="set best, too"):
        CheckpointConfig(best_mode="min")


@pytest.mark.parametrize("what", ["weights.bin", "deeper", "more.txt", "deeper/more.bin", MANIFEST])
@pytest.mark.parametrize("how", ["outside", "inside", "pipe"])
def test_a_checkpoint_with_a_link_or_a_pipe_is_refused(tmp_path, what, how):
    """Also where it is no part that the manifest names."""
    folder = save(store(tmp_path), 3)
    other = tmp_path / "other" if how == "outside" else folder / "moved"
    if what != "more.txt":
        os.rename(folder / what, other)
    else:
        other.write_text("secret")
    if how == "pipe" and what not in ("deeper", MANIFEST):
        os.mkfifo(folder / what)
    else:
        (folder / what).symlink_to(other)
    with pytest.raises(ValueError, match=r"(is a link, or lies behind one, and no link in a folder is followed|is no ordinary file)"):
        find_checkpoint(folder)


@pytest.mark.parametrize("name", ["../else.bin", "/else.bin", "deeper/../../else.bin", "deeper", ""])
def test_a_manifest_names_no_file_outside(tmp_path, name):
    folder = save(store(tmp_path), 3)
    (folder.parent / "else.bin").write_bytes(b"12345")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("digest")
    manifest["parts"][name] = manifest["parts"]["weights.bin"]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": _digest_of(manifest)}))
    with pytest.raises(ValueError, match=r"which does not lie in it|is no ordinary file"):
        find_checkpoint(folder)


def test_linked_folders_of_another_run_are_not_followed(tmp_path):
    folder = save(store(tmp_path), 3)
    other = tmp_path / "others"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints/rollout_000009").symlink_to(folder)
    with pytest.raises(ValueError, match="rollout_000009 is a link, and no link in a run's folder is followed"):
        find_checkpoint(other)
    shutil.rmtree(other)
    other.mkdir()
    (other / "checkpoints").symlink_to(folder.parent)
    with pytest.raises(ValueError, match="checkpoints is a link, and no link in a run's folder is followed"):
        find_checkpoint(other)
    other.joinpath("checkpoints").unlink()
    (tmp_path / "name").symlink_to(folder)
    assert find_checkpoint(tmp_path / "name").progress.rollout_id == 3, "what the user names may be a link"
