import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import filelock
import pytest

from whet.runfolder import lock as lock_module
from whet.runfolder.lock import LOCK, OWNER, FolderInUse, Owner, claim, owner_of

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import subprocess, sys, time
from pathlib import Path
from whet.runfolder.lock import claim
held = claim(Path(sys.argv[1]), "whet train far.toml")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder and has a child of its own; the child's pid is `holder.child`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    process.child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait(30)
    process.stdout.close()
    os.kill(process.child, signal.SIGKILL)


def test_a_claim_is_refused_with_who_has_it_and_what_to_do(tmp_path, holder):
    with pytest.raises(FolderInUse) as caught:
        claim(tmp_path, "whet train near.toml")
    owner = caught.value.owner
    assert (owner.pid, owner.host, owner.command) == (holder.pid, socket.gethostname(), "whet train far.toml")
    assert abs(owner.since - time.time()) < 100
    for word in (str(tmp_path), f"process {holder.pid}", socket.gethostname(), "whet train far.toml", "since 2", "choose another folder"):
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert owner_of(tmp_path) == owner


def test_the_kernel_lets_go_of_a_killed_holder_though_its_child_lives(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    assert holder.wait(30) == -signal.SIGKILL
    os.kill(holder.child, 0)  # raises if it is gone
    assert (tmp_path / OWNER).exists(), "the note is left behind, and means nothing"
    assert owner_of(tmp_path) is None
    claim(tmp_path, "whet train near.toml").release()


def test_a_claim_is_not_reentrant(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "WAIT_S", 0.1)
    monkeypatch.chdir(tmp_path)
    with claim(tmp_path, "first"):
        for again in (tmp_path, Path(".")):
            with pytest.raises(FolderInUse, match=rf"process {os.getpid()} .*\(first\)"):
                claim(again, "second")
            assert owner_of(again).pid == os.getpid()
    with claim(tmp_path, "third"):
        pass


def test_a_folder_is_free_before_and_after(tmp_path):
    assert owner_of(tmp_path) is None and not list(tmp_path.iterdir()), "asking leaves nothing behind"
    held = claim(tmp_path, "x")
    held.release()
    held.release()
    assert owner_of(tmp_path) is None
    assert not (tmp_path / OWNER).exists()


def test_a_release_after_another_claim_takes_nothing_from_it(tmp_path):
    first = claim(tmp_path, "first")
    first.release()
    with claim(tmp_path, "second"):
        first.release()
        assert owner_of(tmp_path).command == "second"


def test_an_error_inside_lets_go(tmp_path):
    with pytest.raises(KeyError), claim(tmp_path, "x"):
        raise KeyError("y")
    assert owner_of(tmp_path) is None


@pytest.mark.parametrize("note", [None, "", "{", "[]", '{"pid": 3}', "\xff"])
def test_the_note_decides_nothing(tmp_path, monkeypatch, note):
    monkeypatch.setattr(lock_module, "WAIT_S", 0.1)
    with claim(tmp_path, "x"):
        (tmp_path / OWNER).unlink()
        if note is not None:
            (tmp_path / OWNER).write_bytes(note.encode("latin-1"))
        assert owner_of(tmp_path) == Owner(0, "", "", 0.0)
        with pytest.raises(FolderInUse, match="a process that left no note of itself"):
            claim(tmp_path, "y")
    (tmp_path / OWNER).write_text(json.dumps({"pid": 1, "host": "h", "command": "x", "since": 0.0}))
    assert owner_of(tmp_path) is None
    claim(tmp_path, "y").release()


def test_who_only_looks_does_not_refuse_a_claim(tmp_path):
    """A look holds the lock for an instant; a claim waits that long."""
    look = filelock.FileLock(tmp_path / LOCK, thread_local=False)
    look.acquire()
    timer = threading.Timer(0.2, look.release)
    timer.start()
    with claim(tmp_path, "x"):
        assert owner_of(tmp_path).command == "x"
    timer.join(10)


def test_what_cannot_be_locked_is_told(tmp_path):
    (tmp_path / LOCK).mkdir()
    for ask in (lambda: claim(tmp_path, "x"), lambda: owner_of(tmp_path)):
        with pytest.raises(ValueError, match=r"cannot be locked: Is a directory; choose another folder"):
            ask()


def test_a_note_that_cannot_be_written_gives_the_folder_back(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock_module, "replace_file", full)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        claim(tmp_path, "x")
    assert owner_of(tmp_path) is None


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    """filelock would take the existence of a file for a lock there, which outlives a killed process."""
    import fcntl

    def flock(fd, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="its file system has no locks; choose another folder"):
            claim(tmp_path, "x")
    assert not (tmp_path / OWNER).exists()
