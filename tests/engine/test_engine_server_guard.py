"""The process between a run and a server that it starts: nothing of the server is left, whatever ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from whet.engine.servers import guard

SERVER = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(600)"
)


@pytest.fixture
def started():
    """A guard, its server and a process of the server's, and the guard's second process."""
    command = [sys.executable, guard.__file__, sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        family: list[psutil.Process] = []
        try:
            family = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
            second = [each for each in psutil.Process(process.pid).children() if each not in family]
            assert len(second) == 1
            yield process, [*family, *second]
        finally:
            process.kill()
            for each in family:
                if each.is_running():
                    each.kill()


def check_gone(family):
    deadline = time.monotonic() + 15
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family):
        assert time.monotonic() < deadline, family
        time.sleep(0.02)


def test_the_server_ends_when_the_guard_is_killed(started):
    process, family = started
    process.kill()
    check_gone(family)


def test_the_server_ends_when_the_run_is_gone(started):
    process, family = started
    process.stdin.close()
    assert process.wait(15) == 128 + 15, "a server that SIGTERM ended"
    check_gone(family)


def test_a_guard_that_is_asked_to_end_ends_the_server(started):
    process, family = started
    process.terminate()
    assert process.wait(15) == 128 + 15
    check_gone(family)


def test_the_guard_ends_as_its_command_did_and_its_output_with_it():
    command = [sys.executable, guard.__file__, sys.executable, "-c", "print('last words'); raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == "last words\n"
        assert process.wait(15) == 7
