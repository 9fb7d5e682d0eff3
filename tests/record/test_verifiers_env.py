"""The environment `verifiers`, in front of a fake of the package whose harness asks the endpoint for real."""

from __future__ import annotations

import sys
import textwrap
from contextlib import aclosing
from dataclasses import replace

from tests.env.adapters.test_verifiers import FAKE
from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, TASK, run
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.types import Finish, Outcome, SamplingParams

ASKS = """
    async def run_slot(self, task, context, _):
        import json, urllib.request
        key, url = os.environ[context.client.api_key_var], context.client.base_url
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        messages = [{"role": "user", "content": task.data.prompt}]
        def ask():
            body = json.dumps({"model": context.model, "messages": messages}).encode()
            return json.load(urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)))
        if task.data.idx == 1:
            raise KeyError("no such tool")
        text = (await asyncio.to_thread(ask))["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        await asyncio.to_thread(ask)
        trace = Named(errors=[], rewards={"exact": 0.5}, metrics={"length": len(text)}, reward=0.5, num_turns=2)
        return Named(traces=[trace], errors=[])
"""


def test_an_episode_is_a_trajectory_of_recorded_calls_with_its_reward(tmp_path):
    for name, code in FAKE.items():
        path = tmp_path / "verifiers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        code = textwrap.dedent(code)
        if "run_slot" in code:
            begin, end = code.index("    async def run_slot"), code.index("def environment_class")
            code = code[:begin] + ASKS.lstrip("\n") + "\n" + code[end:]
        path.write_text(code)
    options = {"python": sys.executable, "taskset": {"id": "fake", "n": 2}, "folder": str(tmp_path)}
    make = build_env_factory(EnvConfig(name="verifiers", options=options))
    engine = FakeEngine(lambda request: [*((t, -0.5) for t in (*RENDERER.encode("12"), STOP)), Finish.STOP])

    async def main():
        async with aclosing(Resources()) as resources:
            found = []
            for index in ("0", "1"):
                task = replace(TASK, metadata={"verifiers": index})
                async with aclosing(resources.of_group(task)) as group:

                    async def open_env(group=group):
                        return make(**await group.of_trajectory().open(make.needs))

                    sampling, limits = SamplingParams(99, stop_token_ids=(STOP,)), Limits(9, 999, 99)
                    made = TrajectoryRun(f"t/{index}", task, engine, RENDERER, sampling, limits)
                    found.append(await made.to_end(open_env))
            return found

    good, bad = run(main())
    assert good.outcome is Outcome.COMPLETED, good.error
    assert [turn.restart for turn in good.turns] == [False, False] and good.turns[-1].reward == 0.5
    assert good.turns[-1].notes[-1].metrics == {"exact": 0.5, "length": 2.0}
    assert bad.outcome is Outcome.ENV_ERROR and "no such tool" in bad.error.message
