"""Ending groups that are being played, so that nothing that was sampled of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from whet.engine.base import Engine, EngineFailed
from whet.rollout.group_run import GroupRun

ABORT_GRACE_S = 5.0
"""For the engine to hand over what it sampled of a trajectory that is cut off."""
ABORT_AGAIN_S = 0.05
"""Until the engine is asked again: a request may just have been on its way to it."""


async def end_jobs(group_runs: Sequence[GroupRun], engine: Engine) -> None:
    """End every trajectory: the engine hands over the tokens it sampled, and every other wait is
    cancelled."""
    clock = asyncio.get_running_loop().time
    deadline, cancelled = clock() + ABORT_GRACE_S, set[str]()

    def under_way() -> list[tuple[GroupRun, str]]:
        return [(group_run, id) for group_run in group_runs for id, job in group_run.jobs.items() if not job.done()]

    while (left := under_way()) and clock() < deadline:
        for group_run, id in left:
            run = group_run.runs.get(id)
            if run is not None and run.request and id not in cancelled:
                with suppress(EngineFailed, TimeoutError):  # an engine that is gone or hangs: the trajectory is cancelled below
                    async with asyncio.timeout_at(deadline):
                        await engine.abort(run.request)
            elif id not in cancelled:  # once: a second time would break off the closing of its environment
                cancelled.add(id)
                group_run.jobs[id].cancel()
        await asyncio.wait([group_run.jobs[id] for group_run, id in left], timeout=ABORT_AGAIN_S)
    for group_run, id in under_way():
        if id not in cancelled:
            group_run.jobs[id].cancel()
    await asyncio.gather(*(job for group_run in group_runs for job in group_run.jobs.values()), return_exceptions=True)
