"""A process that does not come to an exchange is named by the others, with where all of them are."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.ranks import as_job
from whet.calls.messages import RemoteCall
from whet.train import watchdog
from whet.train.controller import Job, begin_call
from whet.train.watchdog import RankHung, RankReport, RunStatus, Watchdog, late

TIMEOUT_S = 1.5


def watchdog_of(folder, timeout_s=TIMEOUT_S):
    """This process joins the others, by a file as the processes of one machine do."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / "meeting").mkdir(exist_ok=True)
    watchdog.ANSWER_S, watchdog.LINGER_S = 1.5, 0.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting/store", rank=rank, world_size=count)
    return Watchdog(folder, timeout_s)


def loop_until(store):
    """A loop that never ends, as far as the others can tell."""
    while not store.check(["cause"]):
        time.sleep(0.05)


def hangs(folder, victim, how):
    """Three processes exchange something; the victim stays away the third time. What the others raise, or None."""
    mine = watchdog_of(folder)
    job = Job(mine)
    pair = dist.new_group([0, 1], backend="gloo")
    pids = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    if job.is_controller:
        job.report_status(lambda: RunStatus("update", ("trajectory 7/0",)))
    with job.running(begin_call(1)):
        dist.barrier()
    told = None
    try:
        for i in range(3):
            with job.running(RemoteCall("policy", "forward_backward")):
                if i == 2 and dist.get_rank() == victim:
                    if how == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    else:
                        loop_until(mine._store)
                    break
                if dist.get_rank() < 2:
                    dist.all_reduce(torch.ones(2), group=pair)
                dist.all_reduce(torch.ones(2))
    except RankHung as error:
        told = str(error)
        with pytest.raises(RankHung):  # nothing further is exchanged
            job.broadcast(RemoteCall("policy", "save")).__enter__() if job.is_controller else job.next_call()
        if how == "stopped":
            with suppress(ProcessLookupError):  # another did, and it has ended
                os.kill(pids[victim], signal.SIGCONT)
    mine.close()
    return told


@pytest.mark.parametrize(("victim", "how"), [(1, "loop"), (0, "stopped")])
def test_who_stays_away_is_named_with_the_stacks_of_all(tmp_path, victim, how):
    told = as_job(3, hangs, tmp_path, victim, how)
    assert told[victim] is None
    [cause] = {text for text in told if text is not None}
    [file] = (tmp_path / "failures").iterdir()
    assert cause.startswith(f"rank {victim} of 3 (process ") and cause.endswith(f"; the run ends; see {file}")
    assert f"did not come to an exchange within {TIMEOUT_S:g} s (train.exchange_timeout_s)" in cause
    assert file.name == f"1_rank_{victim}.txt"
    text = file.read_text()
    stacks = {rank: text.partition(f"stacks of rank {rank} (")[2].partition("stacks of ")[0] for rank in range(3)}
    for rank in {0, 1, 2} - {victim}:
        assert "policy.forward_backward, for " in stacks[rank] and " in hangs" in stacks[rank]
    assert "Timed out waiting" in text
    if how == "loop":
        assert "in loop_until" in stacks[victim] and "it hangs, or computes for longer" in cause
        assert "phase: update\n\nin flight:\n    trajectory 7/0\n" in text
    else:
        assert "it does not answer" in cause and ("hangs (" in stacks[victim] or "does not answer a signal" in stacks[victim])
        assert "phase: unknown, rank 0 does not say" in text


def abandoned(folder):
    """The controller's threads stand still between two calls. How the other ends."""
    mine = watchdog_of(folder)
    if dist.get_rank() == 0:
        mine._closed.set()
        mine._listening.join()
        loop_until(mine._store)
        time.sleep(0.5)
        return []
    ended = []
    leave, os._exit = os._exit, ended.append
    while not ended:
        time.sleep(0.05)
    os._exit = leave
    return ended


def test_a_controller_that_shows_no_life_is_found_while_the_others_wait_for_its_call(tmp_path, capfd):
    assert as_job(2, abandoned, tmp_path)[1][0] == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said[0].startswith("error: rank 0 of 2 (process ") and "it does not answer; the run ends; see " in said[0]
    [file] = (tmp_path / "failures").iterdir()
    assert "in loop_until" in file.read_text().partition("stacks of rank 0")[2].partition("stacks of ")[0], "its signal handler answers"


def broken(folder):
    mine = watchdog_of(folder, 30.0)
    with pytest.raises(RuntimeError, match="Connection closed") as raised, mine.watch("a call"):
        raise RuntimeError("Connection closed by peer")
    mine.close()
    return isinstance(raised.value, RankHung)


def test_an_exchange_that_fails_otherwise_stays_what_it_is(tmp_path):
    assert as_job(2, broken, tmp_path) == [False, False]
    assert not (tmp_path / "failures").exists()


@given(st.data())
def test_who_waits_for_nobody_did_not_come(data):
    """Any program of exchanges in any groups, that ends with one of all: one stops somewhere, the others go on as far as they can."""
    count = data.draw(st.integers(2, 5))
    groups = [list(range(count)), *data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=2).map(sorted), max_size=4))]
    program = [*data.draw(st.lists(st.integers(0, len(groups) - 1), max_size=12)), 0]
    hung = data.draw(st.integers(0, count - 1))
    mine = [i for i, group in enumerate(program) if hung in groups[group]]
    stops = data.draw(st.sampled_from(mine))
    place, begun = [0] * count, [[0] * len(groups) for _ in range(count)]
    moved = True
    while moved:
        moved = False
        for rank in range(count):
            while place[rank] < len(program):
                group = program[place[rank]]
                if rank in groups[group]:
                    number = program[: place[rank]].count(group) + 1
                    if begun[rank][group] < number:
                        if rank == hung and place[rank] >= stops:
                            break
                        begun[rank][group] = number
                        moved = True
                    if min(begun[other][group] for other in groups[group]) < number:
                        break
                place[rank] += 1
                moved = True
    answers = {
        rank: RankReport("", "", [], {str(g): begun[rank][g] for g in range(len(groups)) if rank in groups[g]}, "") for rank in range(count)
    }
    assert late(answers) == [hung]
