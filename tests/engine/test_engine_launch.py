"""How workers are started: as children, or anywhere, from where they dial back and prove who they are."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError

import pytest

from tests.engine.engine_setup import CONFIGS, DEADLINE_S, elsewhere, engine_of, reply_to
from whet.cluster import process
from whet.engine.base import EngineFailed
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.workers import dialing, launch
from whet.engine.workers.copies import EngineCopies
from whet.engine.workers.dialing import DialingLauncher, Invitation
from whet.engine.workers.launch import LocalLauncher
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams

pytestmark = pytest.mark.long

SIZES = EmbeddedConfig(cache_tokens=512, block_size=4, max_running=8, max_batch_tokens=128, copies=2)
def model():
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=0)


def refused(invitation):
    with suppress(AuthenticationError, OSError, EOFError):
        invitation.accept()
        raise AssertionError("a stranger was let in")


def test_workers_that_dial_back_serve_like_children(monkeypatch):
    monkeypatch.setattr(dialing, "HANDSHAKE_TIMEOUT_S", 1.0)
    invited = []

    def begin(name, invitation, given_up):
        """Strangers come first: one that says nothing, one with another key, and one that speaks another language."""
        address = invitation.host, invitation.port
        silent, rude = socket.create_connection(address), socket.create_connection(address)
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wrong = Invitation(*address, b"guessed", 5.0)
        threading.Thread(target=refused, args=(wrong,), daemon=True).start()
        invited.append((name, invitation, silent, rude))
        return elsewhere(name, invitation)

    engine = EngineCopies(model(), SIZES, deterministic=False, launcher=DialingLauncher(begin))
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


class Somebody:
    """A process that goes on."""

    host = launch.HERE

    def ended(self, timeout_s):
        return None

    def kill(self):
        raise AssertionError("it dialed")

    def last_lines(self):
        return []


def test_strangers_who_say_nothing_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(dialing, "HANDSHAKE_TIMEOUT_S", 600.0)
    silent, heard = [], []

    def begin(name, invitation, given_up):
        silent.extend(socket.create_connection((invitation.host, invitation.port)) for _ in range(5))
        worker = threading.Thread(target=lambda: heard.append(invitation.accept().recv()))
        silent.append(worker)
        worker.start()
        return Somebody()

    DialingLauncher(begin, timeout_s=20.0).start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]
    *strangers, worker = silent
    worker.join(20.0)
    assert heard == ["a setup"]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("num_strangers", [6, 3 * dialing.MOST_CALLERS])
def test_a_worker_is_heard_at_once_however_many_others_say_nothing(monkeypatch, num_strangers):
    """They have ten minutes each, so the worker is heard beside them; and those there are no places for are turned away."""
    monkeypatch.setattr(dialing, "HANDSHAKE_TIMEOUT_S", 600.0)
    silent, heard = [], []

    def begin(name, invitation, given_up):
        silent.extend(socket.create_connection((invitation.host, invitation.port)) for _ in range(num_strangers))
        silent.append(threading.Thread(target=lambda: heard.append(invitation.accept().recv())))
        silent[-1].start()
        return Somebody()

    DialingLauncher(begin, timeout_s=20.0).start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]
    *strangers, worker = silent
    worker.join(20.0)
    assert heard == ["a setup"]
    for stranger in strangers:
        stranger.settimeout(20.0)
        with suppress(ConnectionResetError):
            while stranger.recv(256):
                pass  # the challenge; then it is turned away, since nobody is expected any more
        stranger.close()


def test_a_worker_that_is_turned_away_dials_again(monkeypatch):
    """By one who hears it only the third time, as where strangers take all places before it can show its key."""
    monkeypatch.setattr(dialing, "AGAIN_S", 0.01)
    key, heard = b"its key", []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        invitation = Invitation(*listener.getsockname(), key, 20.0)
        worker = threading.Thread(target=lambda: heard.append(invitation.accept().recv()))
        worker.start()
        for _ in range(2):
            listener.accept()[0].close()
        connection = dialing._proven(listener.accept()[0], key, 20.0, known=lambda: None)
        connection.send("a setup")
        worker.join(20.0)
        connection.close()
    assert heard == ["a setup"]
    with pytest.raises(ConnectionRefusedError):
        invitation.accept()


def test_both_ends_of_a_silent_connection_ask_whether_the_other_is_still_there():
    ends = []

    def begin(name, invitation, given_up):
        worker = threading.Thread(target=lambda: ends.append(invitation.accept()))
        worker.start()
        ends.append(worker)
        return Somebody()

    ours = DialingLauncher(begin, timeout_s=20.0).start("w", "a setup", given_up=threading.Event()).connection  # type: ignore[arg-type]
    ends[0].join(20.0)
    for connection in (ours, ends[1]):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in dialing.KEEP_ALIVE.items():
                if hasattr(socket, name):
                    assert end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name
        connection.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stranger_who_is_heard_with_an_error_leaves_his_place_to_others(monkeypatch):
    monkeypatch.setattr(dialing, "MOST_CALLERS", 1)
    prove, worker = dialing._proven, threading.Event()

    def fails_at_first(link, key, timeout_s, known=None):
        if known is not None and not worker.is_set():
            worker.set()
            raise RuntimeError("of no kind that was thought of")
        return prove(link, key, timeout_s, known)

    def begin(name, invitation, given_up):
        socket.create_connection((invitation.host, invitation.port)).close()
        threading.Thread(target=lambda: worker.wait() and invitation.accept()).start()
        return Somebody()

    monkeypatch.setattr(dialing, "_proven", fails_at_first)
    DialingLauncher(begin, timeout_s=5.0).start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]
    for thread in threading.enumerate():  # the one that fails says so in this test, not in the next one
        if thread.name == "whet caller":
            thread.join(DEADLINE_S)


def test_a_stranger_who_says_little_at_a_time_has_no_more_time_than_another(monkeypatch):
    monkeypatch.setattr(dialing, "HANDSHAKE_TIMEOUT_S", 0.5)
    cut = threading.Event()

    def dribble(address):
        with socket.create_connection(address) as link, suppress(OSError):
            while not cut.wait(0.1):
                link.sendall(b"\0")
        cut.set()

    def begin(name, invitation, given_up):
        threading.Thread(target=dribble, args=((invitation.host, invitation.port),), daemon=True).start()
        return elsewhere(name, invitation, "import time; time.sleep(600)")

    with pytest.raises(EngineFailed, match="did not dial back"):
        DialingLauncher(begin, timeout_s=5.0).start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]
    assert cut.is_set()


def test_a_worker_that_ends_or_never_dials_is_named_with_its_last_words():
    dead = DialingLauncher(lambda name, invitation, _: elsewhere(name, invitation, "raise SystemExit('no such device')"))
    with pytest.raises(EngineFailed, match=r"engine copy 0 ended before it dialed \(exit status 1\)\nits last output:\n    no such device"):
        EngineCopies(model(), SIZES, deterministic=False, launcher=dead)
    started = []

    def idle(name, invitation, given_up):
        started.append(elsewhere(name, invitation, "import time; print('asleep', flush=True); time.sleep(600)"))
        return started[-1]

    with pytest.raises(EngineFailed, match=r"engine copy 0 did not dial back to 127\.0\.0\.1 within 0\.5 s"):
        EngineCopies(model(), SIZES, deterministic=False, launcher=DialingLauncher(idle, timeout_s=0.5))
    assert started[0].ended(DEADLINE_S) is not None, "and nothing is left of it"


def test_a_worker_that_is_given_up_before_it_dials_is_ended_at_once():
    started, given_up = [], threading.Event()

    def idle(name, invitation, given_up):
        started.append(elsewhere(name, invitation, "import time; time.sleep(600)"))
        given_up.set()
        return started[-1]

    with pytest.raises(EngineFailed, match="w: it was given up before it dialed back"):
        DialingLauncher(idle, timeout_s=300.0).start("w", "a setup", given_up=given_up)  # type: ignore[arg-type]
    assert started[0].ended(DEADLINE_S) is not None, "and nothing is left of it"


def test_a_worker_with_another_key_gets_nothing_to_unpickle():
    wrong = DialingLauncher(lambda name, invitation, _: elsewhere(name, invitation, key=b"another"), timeout_s=DEADLINE_S)
    with pytest.raises(EngineFailed, match=r"(?s)ended before it dialed .*AuthenticationError"):
        wrong.start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]


def test_what_cannot_dial_is_refused():
    with pytest.raises(EngineFailed, match=r"nobody can dial back to 192\.0\.2\.1: .*is it an address of this machine"):
        DialingLauncher(lambda *_: pytest.fail("nothing is begun"), address="192.0.2.1").start("w", "a setup", given_up=threading.Event())  # type: ignore[arg-type]
    ranks = SIZES.model_copy(update={"copies": 1, "tensor_parallel": 2})
    with pytest.raises(ValueError, match=r"only those that are started on this machine can be one copy"):
        EngineCopies(model(), ranks, deterministic=False, launcher=DialingLauncher(lambda *_: pytest.fail("nothing is begun")))


def test_a_copy_that_does_not_start_is_named_with_its_last_words(monkeypatch):
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    with pytest.raises(EngineFailed, match=r"engine copy 0 did not start \(exit status 1\)"):
        EngineCopies(model(), SIZES, deterministic=False, launcher=LocalLauncher())


def test_workers_are_told_of_no_token(monkeypatch):
    secrets = {"HF_TOKEN": "hf_x", "WANDB_API_KEY": "k", "OPENAI_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k", "WHET_API_KEY": "k"}
    for name, value in {**secrets, "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    seen = []

    def popen(arguments, **options):
        seen.append(options["env"])
        raise OSError("not now")

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="not now"):
        EngineCopies(model(), SIZES, deterministic=False)
    with pytest.raises(OSError, match="not now"):
        process.LocalProcess(process.Command(("-c", ""), "", {"MORE": "1"}, is_trainer=False), lambda event: None)
    with pytest.raises(OSError, match="not now"):
        process.LocalProcess(process.Command(("-c", ""), "", {"MORE": "1"}), lambda event: None)
    *workers, rank = seen
    assert workers and not any(secrets.keys() & told.keys() for told in workers)
    assert all(told["OMP_WAIT_POLICY"] == "PASSIVE" and "PATH" in told for told in workers) and workers[-1]["MORE"] == "1"
    assert secrets.items() <= rank.items(), "the processes of a job are the trainer"
