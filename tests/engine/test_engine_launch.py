"""How workers are started: as children, or anywhere, from where they dial back and prove who they are."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError

import pytest
from engine_setup import CONFIGS, DEADLINE_S, engine_of, reply_to

from whet.engine.base import EngineFailed
from whet.engine.embedded import launch
from whet.engine.embedded.copies import EngineCopies
from whet.engine.embedded.engine import EmbeddedConfig
from whet.engine.embedded.launch import DialingLauncher, Invitation, LocalLauncher, LocalProcess
from whet.model.causal import ModelConfig, random_causal
from whet.types import Request, SamplingParams

SIZES = EmbeddedConfig(cache_tokens=512, block_size=4, max_running=8, max_batch_tokens=128, copies=2)
DIALS = (
    "import sys; from whet.engine.embedded.worker import dial; from whet.engine.embedded.launch import Invitation;"
    "dial(Invitation(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer.read()))"
)


def model():
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=0)


def elsewhere(name, invitation, script=DIALS, key=None):
    """A process that was started by somebody else, who passed the invitation on."""
    arguments = [sys.executable, "-c", script, invitation.host, str(invitation.port)]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdin is not None
    child.stdin.write(invitation.key if key is None else key)
    child.stdin.close()
    return LocalProcess(name, child)


def refused(invitation):
    with suppress(AuthenticationError, OSError, EOFError):
        invitation.accept()
        raise AssertionError("a stranger was let in")


def test_workers_that_dial_back_serve_like_children(monkeypatch):
    monkeypatch.setattr(launch, "HANDSHAKE_TIMEOUT_S", 1.0)
    invited = []

    def begin(name, invitation):
        """Strangers come first: one that says nothing, one with another key, and one that speaks another language."""
        address = invitation.host, invitation.port
        silent, rude = socket.create_connection(address), socket.create_connection(address)
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wrong = Invitation(*address, b"guessed")
        threading.Thread(target=refused, args=(wrong,), daemon=True).start()
        invited.append((name, invitation, silent, rude))
        return elsewhere(name, invitation)

    engine = EngineCopies(model(), SIZES, ["cpu"] * 2, deterministic=False, launcher=DialingLauncher(begin))
    asked = [Request(f"r{i}", (1, 2, 3 + i), SamplingParams(8, seed=i)) for i in range(4)]

    async def play(engine):
        try:
            return await asyncio.wait_for(asyncio.gather(*(reply_to(engine, request) for request in asked)), DEADLINE_S)
        finally:
            await engine.close()

    assert [reply.tokens for reply in asyncio.run(play(engine))] == [reply.tokens for reply in asyncio.run(play(engine_of(model())))]
    assert sorted(name for name, *_ in invited) == ["engine copy 0", "engine copy 1"]
    assert len({invitation.key for _, invitation, *_ in invited}) == 2, "a key is of one worker"
    assert all("key" not in repr(invitation) for _, invitation, *_ in invited)
    for *_, silent, rude in invited:
        silent.close()
        rude.close()


def test_a_worker_that_ends_or_never_dials_is_named_with_its_last_words():
    dead = DialingLauncher(lambda name, invitation: elsewhere(name, invitation, "raise SystemExit('no such device')"))
    with pytest.raises(EngineFailed, match=r"engine copy 0 ended before it dialed \(exit status 1\)\nit said last:\n    no such device"):
        EngineCopies(model(), SIZES, ["cpu"] * 2, deterministic=False, launcher=dead)
    started = []

    def idle(name, invitation):
        started.append(elsewhere(name, invitation, "import time; print('asleep', flush=True); time.sleep(600)"))
        return started[-1]

    with pytest.raises(EngineFailed, match=r"engine copy 0 did not dial back to 127\.0\.0\.1 within 0\.5 s"):
        EngineCopies(model(), SIZES, ["cpu"] * 2, deterministic=False, launcher=DialingLauncher(idle, timeout_s=0.5))
    assert started[0].ended(DEADLINE_S) is not None, "and nothing is left of it"


def test_a_worker_with_another_key_gets_nothing_to_unpickle(monkeypatch):
    monkeypatch.setattr(launch, "HANDSHAKE_TIMEOUT_S", 1.0)
    wrong = DialingLauncher(lambda name, invitation: elsewhere(name, invitation, key=b"another"), timeout_s=DEADLINE_S)
    with pytest.raises(EngineFailed, match=r"(?s)ended before it dialed .*AuthenticationError"):
        wrong.start("w", "a setup")  # type: ignore[arg-type]


def test_what_cannot_dial_is_refused():
    with pytest.raises(EngineFailed, match=r"nobody can dial back to 192\.0\.2\.1: .*is it an address of this machine"):
        DialingLauncher(lambda *_: pytest.fail("nothing is begun"), host="192.0.2.1").start("w", "a setup")  # type: ignore[arg-type]
    ranks = SIZES.model_copy(update={"copies": 1, "tensor_parallel": 2})
    with pytest.raises(ValueError, match=r"only those that are started on this machine can be one copy"):
        EngineCopies(model(), ranks, ["cpu"] * 2, deterministic=False, launcher=DialingLauncher(lambda *_: pytest.fail("nothing is begun")))


def test_a_copy_that_does_not_start_is_named_with_its_last_words(monkeypatch):
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    with pytest.raises(EngineFailed, match=r"engine copy 0 did not start \(exit status 1\)"):
        EngineCopies(model(), SIZES, ["cpu"] * 2, deterministic=False, launcher=LocalLauncher())
