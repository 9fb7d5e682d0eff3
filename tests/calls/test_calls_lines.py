"""Calls as lines of JSON: what comes back is a value or an error as text, in time, and never a pickle."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from whet.calls.lines import AnswerTooLong, LinePipes, answer, decode, encode
from whet.calls.messages import RemoteCall, RemoteFailure, RemoteResult, whole_traceback
from whet.calls.methods import Target


class Adder:
    def add(self, one, other):
        return one + other


def child(code):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", f"import sys, time; {code}"], bufsize=0, **pipes)


def exchanged(code, data, timeout_s=20.0, limit_bytes=2**20):
    with child(code) as process:
        pipes = LinePipes(process, limit_bytes)
        try:
            return pipes.exchange(data, timeout_s), pipes
        finally:
            process.kill()


def test_a_message_is_the_same_on_the_other_side():
    call = RemoteCall("a", "b", [1], kwargs={"c": [1, None]}, timeout_s=2.0)
    for message in (call, RemoteResult({"x": "\n"}), RemoteFailure("K", "m", "", "w", "t")):
        assert decode(encode(message)) == message
        assert encode(message).count(b"\n") == 1
    with pytest.raises(TypeError):
        encode(RemoteResult(1j))


def test_an_answer_is_a_value_or_an_error_as_text():
    targets = {"adder": Target(Adder(), Adder)}
    assert decode(answer(targets, RemoteCall("adder", "add", (1, 2)), whole_traceback)) == RemoteResult(3)
    failed = decode(answer(targets, RemoteCall("adder", "add", (1, "x")), whole_traceback))
    assert isinstance(failed, RemoteFailure) and failed.kind == "TypeError"
    assert str(__file__) in failed.place and "return one + other" in failed.traceback
    refused = decode(answer(targets, RemoteCall("adder", "__init__"), whole_traceback))
    assert isinstance(refused, RemoteFailure) and refused.kind == "RefusedCall"


def test_much_goes_both_ways_at_once():
    line = b"x" * 3_000_000 + b"\n"
    code = "sys.stderr.write('e' * 300_000); [(sys.stdout.write(l), sys.stdout.flush()) for l in sys.stdin]"
    found, pipes = exchanged(code, line, limit_bytes=2**22)
    assert found == line and len(pipes.last_words) <= 4096


def test_what_does_not_answer_ends_or_has_no_end_is_told_apart():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        exchanged("time.sleep(60)", b"x\n", 0.2)
    assert time.monotonic() - started < 20.0
    with pytest.raises(EOFError):
        exchanged("pass", b"x" * 3_000_000)
    with pytest.raises(AnswerTooLong, match="longer than 1000 bytes"):
        exchanged("sys.stdout.write('y' * 5000); sys.stdout.flush(); time.sleep(60)", b"x\n", limit_bytes=1000)
