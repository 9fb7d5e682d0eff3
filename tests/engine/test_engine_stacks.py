"""Where the threads of a worker are: it goes on as if it had not been asked, unless it is lost anyway."""

import subprocess
import sys

from whet.engine.workers import launch
from whet.engine.workers.launch import LocalWorker

CALLS = """
def deep(n):
    return n and deep(n - 1)
def calls():
    while True:
        deep(400)  # its frames take memory that is given back as it returns
"""
STARTS = "import faulthandler; from whet.runfolder.stacks import say_on_signal; faulthandler.enable(); say_on_signal()\n"


def begun(script):
    child = subprocess.Popen([sys.executable, "-c", STARTS + script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    return LocalWorker("worker", child)


def test_a_worker_that_computes_says_its_stacks_again_and_again_and_its_other_words_stay_apart():
    process = begun(
        f"{CALLS}import threading\nfor _ in range(2): threading.Thread(target=calls, daemon=True).start()\n"
        "print('ready', flush=True)\nimport time\nwhile True:\n    print('a word', flush=True)\n    time.sleep(0.01)"
    )
    try:
        for _ in range(40):
            found = process.stacks(lost=False)
            assert found.count("hread 0x") == 4 and (" in deep\n" in found or " in calls\n" in found) and "a word" not in found
        assert process.ended(0.0) is None and set(process.last_lines()) == {"a word"}
    finally:
        process.kill()
        process.ended(10.0)


def test_a_worker_that_lets_no_thread_run_is_made_to_say_them_only_when_it_is_lost(monkeypatch):
    monkeypatch.setattr(launch, "spied", lambda pid: "")
    monkeypatch.setattr(launch, "TIMEOUT_S", 0.5)
    process = begun(
        "import ctypes, os; ends = os.pipe()\ndef hangs(): ctypes.PyDLL(None).read(ends[0], bytes(1), 1)\n"
        "print('ready', flush=True); hangs()"
    )
    try:
        assert any(process.stacks(lost=False) == "" for _ in range(40)), "until it hangs, it says them"
        assert process.ended(0.0) is None
        assert " in hangs\n" in process.stacks(lost=True)
        process.kill()
        process.ended(10.0)
        assert process.stacks(lost=True) == ""
    finally:
        process.kill()
        process.ended(10.0)
