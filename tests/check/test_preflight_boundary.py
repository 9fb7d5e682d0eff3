"""Code of a user's own: whatever it does becomes a fault with a place."""

import asyncio
import sys
import threading
import time

import pytest

from whet.check.boundary import UserFault, run_user_code, run_user_coroutine
from whet.config import ConfigError


def raises(error):
    def work():
        raise error

    return work


def test_results_come_back():
    async def later():
        await asyncio.sleep(0)
        return 4

    assert run_user_code("it", lambda: 3, 10.0) == 3
    assert run_user_coroutine("it", later, 10.0) == 4


def test_what_is_raised_is_told_with_its_type_and_place():
    line = raises.__code__.co_firstlineno + 2
    for error in (KeyError("gone"), SystemExit(1), ValueError("mine")):
        with pytest.raises(UserFault, match=rf"reward x: {type(error).__name__}: .*test_preflight_boundary.py:{line} in work"):
            run_user_code("reward x", raises(error), 10.0)


def test_what_whet_finds_wrong_is_told_in_its_own_words():
    with pytest.raises(UserFault) as found:
        run_user_code("it", raises(ConfigError(["no such module"])), 10.0)
    assert str(found.value) == "no such module"


def test_a_function_that_hangs_is_left_behind_with_its_place():
    stop = threading.Event()

    def hangs():
        while not stop.is_set():
            time.sleep(0.01)

    try:
        with pytest.raises(UserFault, match=r"it took longer than 0.2 s \(at .*test_preflight_boundary.py:\d+ in hangs\)"):
            run_user_code("it", hangs, 0.2)
    finally:
        stop.set()


def test_a_coroutine_that_waits_too_long_is_cancelled_with_its_place():
    cancelled = []

    async def waits():
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(True)

    with pytest.raises(UserFault, match=r"it took longer than 0.2 s \(at .*test_preflight_boundary.py:\d+ in waits\)"):
        run_user_coroutine("it", waits, 0.2)
    assert cancelled


def test_a_timeout_of_its_own_is_not_the_deadline():
    async def gives_up():
        raise TimeoutError("no answer")

    with pytest.raises(UserFault, match=r"it: TimeoutError: no answer \(at .*in gives_up\)"):
        run_user_coroutine("it", gives_up, 30.0)


def test_the_place_is_the_users_even_if_a_library_raised():
    def asks_numpy():
        import numpy as np

        return np.zeros(3).reshape(2, 2)

    with pytest.raises(UserFault, match=r"test_preflight_boundary.py:\d+ in asks_numpy"):
        run_user_code("it", asks_numpy, 60.0)


def test_no_thread_is_left_after_a_result():
    before = threading.active_count()
    run_user_code("it", lambda: sys.version, 10.0)
    assert threading.active_count() == before
