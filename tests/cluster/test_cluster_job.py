"""Processes that are watched: what they say, how they end, and who is named when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from queue import SimpleQueue

import pytest

from whet.cluster import supervise
from whet.cluster.process import LEFT_ALONE, Command, LocalProcess, OutputEnd, OutputLine, ProcessExit, in_words
from whet.cluster.supervise import LAST_LINES, LOG, JobFailed, SupervisedJob

BEGIN = "import os, sys, time, signal; from whet.cluster.process import read_line; line = read_line()\n"


@pytest.fixture(autouse=True)
def little_grace(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)


def program(text: str, *, speaks: bool = True, line: str = "") -> Command:
    return Command(("-c", BEGIN + textwrap.dedent(text)), line, {"PYTHONUNBUFFERED": "1"}, speaks=speaks)


def started(*commands: Command):
    """Starts them by rank, and keeps what was started."""
    found: list[LocalProcess] = []

    def start(rank, tell):
        found.append(LocalProcess(commands[rank], tell))
        return found[-1]

    return start, found


def gone(pid: int) -> bool:
    """Whether a process has ended; one that is only not collected yet has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_process_reads_its_line_and_is_heard_to_its_end():
    events = SimpleQueue()
    LocalProcess(program("print('out', line); print('err', file=sys.stderr); sys.exit(7)", line="a line \u00e9"), events.put)
    found = []
    while not isinstance(event := events.get(timeout=30), OutputEnd):
        found.append(event)
    assert ProcessExit(7, "ended with exit status 7") in found
    assert {(said.text, said.is_error) for said in found if isinstance(said, OutputLine)} == {("out a line \u00e9", False), ("err", True)}


def test_the_words_for_an_end():
    assert in_words(0) == "ended with exit status 0"
    assert in_words(-9) == "was killed by SIGKILL"
    assert in_words(-64 - 20) == "was killed by signal 84"


def test_a_folder_that_is_not_there_is_passed_over(tmp_path):
    events = SimpleQueue()
    command = program("print(os.getcwd())")
    for folder in (str(tmp_path), str(tmp_path / "nowhere")):
        LocalProcess(Command(command.arguments, "", folder=folder), events.put)
    said = set()
    while len(said) < 2:
        event = events.get(timeout=30)
        said |= {event.text} if isinstance(event, OutputLine) else set()
    assert said == {str(tmp_path), os.getcwd()}


def test_a_process_does_not_outlive_its_starter():
    code = BEGIN + "from whet.cluster.process import Command, LocalProcess\nimport sys\n"
    inner = BEGIN + "time.sleep(60)"
    code = f"""
import sys, time
from whet.cluster.process import Command, LocalProcess
print(LocalProcess(Command(("-c", {inner!r}), ""), print).pid, flush=True)
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert not gone(pid)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_a_process_without_a_line_ends():
    done = subprocess.run([sys.executable, "-c", BEGIN], stdin=subprocess.DEVNULL, timeout=30)
    assert done.returncode == LEFT_ALONE


def test_a_job_that_ends_well(tmp_path, capfd):
    start, _ = started(program("print('I lead')"), program("print('a \\x1b[31mred one')"), program("pass"))
    assert SupervisedJob(3, tmp_path / "run" / LOG).run(start) == 0
    told = capfd.readouterr()
    assert told.out == "I lead\n"
    assert told.err == "[rank 1] a \\x1b[31mred one\n"
    assert (tmp_path / "run" / LOG).read_text() == told.err


def test_who_does_not_end_with_the_controller_is_named_and_killed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(supervise, "FOLLOW_S", 0.5)
    start, processes = started(program("pass"), program("time.sleep(60)"), program("pass"))
    assert SupervisedJob(3, tmp_path / LOG).run(start) == 0
    assert capfd.readouterr().err == "warning: rank 1 of 3 had not ended 0.5 s after the run had, and was killed\n"
    assert all(gone(process.pid) for process in processes)


def test_a_silent_job_leaves_no_log(tmp_path):
    start, _ = started(program("pass"), program("pass"))
    assert SupervisedJob(2, tmp_path / LOG).run(start) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("follows", ["sys.exit(1)", "os.abort()"])
@pytest.mark.parametrize(
    ("last", "how"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"), ("raise MemoryError('all gone')", "ended with exit status 1")],
)
def test_who_fails_first_is_named_with_its_last_words_and_the_others_end(tmp_path, monkeypatch, last, how, follows):
    monkeypatch.setattr(supervise, "GRACE_S", 1.0)
    sign = str(tmp_path / "failing")
    waits = program(f"""
        while not os.path.exists({sign!r}):
            time.sleep(0.01)
        time.sleep(0.3)
        {follows}
    """)
    fails = program(f"[print('step', i) for i in range({LAST_LINES + 5})]; time.sleep(0.1); open({sign!r}, 'w').close(); {last}")
    start, processes = started(waits, fails, program("time.sleep(60)"))
    with pytest.raises(JobFailed) as caught:
        SupervisedJob(3, tmp_path / LOG).run(start)
    text = str(caught.value)
    assert text.startswith(f"rank 1 of 3 {how}, so the job has ended. Its last lines:\n")
    assert f"    step {LAST_LINES + 4}" in text and "    step 0\n" not in text
    assert ("MemoryError: all gone" in text) == ("MemoryError" in last)
    assert all(gone(process.pid) for process in processes)
    assert (tmp_path / LOG).read_text().endswith(f"{text}\n")


def test_a_controller_that_says_why_it_ends_is_believed(tmp_path):
    start, processes = started(program("sys.exit(2)", speaks=False), program("time.sleep(60)"))
    assert SupervisedJob(2, tmp_path / LOG).run(start) == 2
    assert all(gone(process.pid) for process in processes)


def test_another_rank_that_says_why_it_ends_is_believed_too(tmp_path):
    tells = program("print('error: the other one hangs', file=sys.stderr); print('a word after it', file=sys.stderr); sys.exit(2)")
    start, _ = started(program("time.sleep(60)", speaks=False), tells)
    with pytest.raises(JobFailed, match=r"^the other one hangs \(from rank 1 of 2\)$"):
        SupervisedJob(2, tmp_path / LOG).run(start)


def test_a_controller_that_is_killed_is_named(tmp_path):
    start, _ = started(program("os.kill(os.getpid(), signal.SIGKILL)", speaks=False), program("time.sleep(60)"))
    with pytest.raises(JobFailed, match="rank 0 of 2 was killed by SIGKILL, so the job has ended; its output is above"):
        SupervisedJob(2, tmp_path / LOG).run(start)


def test_what_cannot_be_started_ends_the_others(tmp_path):
    start_one, processes = started(program("time.sleep(60)"))

    def start(rank, tell):
        if rank:
            raise FileNotFoundError("no such program")
        return start_one(rank, tell)

    with pytest.raises(FileNotFoundError, match="no such program"):
        SupervisedJob(2, tmp_path / LOG).run(start)
    assert len(processes) == 1 and gone(processes[0].pid)


def test_a_full_disk_does_not_hide_why_a_job_ended(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    start, _ = started(program("time.sleep(60)"), program("sys.exit(1)"))
    with pytest.raises(JobFailed, match="rank 1 of 2 ended with exit status 1"):
        SupervisedJob(2, tmp_path / "file" / LOG).run(start)
    assert "warning:" in capfd.readouterr().err


def test_a_signal_is_the_controllers_to_answer(tmp_path):
    """The controller saves and ends with the signal's status; nobody else hears of it."""
    before = signal.getsignal(signal.SIGTERM)

    def ask():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    leads = program(
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(60)"
    )
    start, processes = started(leads, program("time.sleep(60)"))
    asking = threading.Thread(target=ask)
    asking.start()
    assert SupervisedJob(2, tmp_path / LOG).run(start) == 143
    asking.join()
    assert all(gone(process.pid) for process in processes)
    assert signal.getsignal(signal.SIGTERM) == before
