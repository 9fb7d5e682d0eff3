"""The bridge to verifiers, in front of a fake of the package: its tasks, several episodes at a time, and every way to fail."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from whet.env.adapters.verifiers import Episode, EpisodeFailed, open_reading_bridge, settings_of, verifiers_source

FAKE = {
    "__init__": "",
    "v1/__init__": "",
    "v1/utils/__init__": "",
    "v1/configs/__init__": "",
    "v1/configs/env": """
        from pydantic import BaseModel
        class EnvConfig(BaseModel):
            taskset: dict
            agent: dict
    """,
    "v1/types": """
        class SamplingConfig(dict): ...
    """,
    "v1/clients": """
        from types import SimpleNamespace
        EvalClientConfig = ModelContext = SimpleNamespace
    """,
    "v1/utils/loaders": """
        import asyncio, os
        from contextlib import asynccontextmanager
        from types import SimpleNamespace as Named
        from pydantic import BaseModel
        from verifiers.v1.configs.env import EnvConfig

        class Data(BaseModel):
            idx: int
            prompt: str
            answer: str

        class Fake:
            def __init__(self, config):
                print("this is no answer")
                self.arrived, self.all = 0, asyncio.Event()
                tasks = [Named(data=Data(idx=i, prompt=f"{i}+1?", answer=str(i + 1))) for i in range(config.taskset["n"])]
                self.taskset = Named(load=lambda: tasks)
            @asynccontextmanager
            async def serving(self):
                yield
            def slots(self, task):
                return [task]
            async def run_slot(self, task, context, _):
                i = task.data.idx
                if i == 2:
                    raise KeyError("no such tool")
                if i == 4:
                    os._exit(3)
                if i == 5:
                    await asyncio.Event().wait()
                self.arrived += 1
                if self.arrived == 2:
                    self.all.set()
                await self.all.wait()
                key, url = os.environ[context.client.api_key_var], context.client.base_url
                errors = [Named(message=f"{url} refused {key}")] if i == 3 else []
                trace = Named(errors=errors, rewards={"exact": 0.5}, metrics={"length": i, "none": None}, reward=0.5, num_turns=2)
                return Named(traces=[trace], errors=[])

        def environment_class(taskset, name):
            return Fake
    """,
}


@pytest.fixture
def folder(tmp_path):
    for name, code in FAKE.items():
        path = tmp_path / "verifiers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    return str(tmp_path)


def test_episodes_run_side_by_side_and_failures_say_why(folder):
    source = verifiers_source(0, sys.executable, {"id": "fake", "n": 6}, folder=folder)
    tasks = {task.metadata["verifiers"]: task for task in source.next(6)}
    assert tasks["1"].prompt[0].content == "1+1?" and tasks["1"].label == "2"

    async def main():
        settings = settings_of({"id": "fake", "n": 6}, "null", None)
        async with asyncio.timeout(60), open_reading_bridge(sys.executable, settings, folder) as bridge:
            def played(i):
                return bridge.episode(tasks[str(i)], "http://here/v1", f"key-{i}", "whet", {"temperature": 1.0})

            good = await asyncio.gather(played(0), played(1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await played(5)
            bad = await asyncio.gather(played(2), played(3), return_exceptions=True)
            ended = await asyncio.gather(played(5), played(4), return_exceptions=True)
            with pytest.raises(EpisodeFailed, match="the bridge to verifiers ended"):
                await played(0)
            return good, [str(error) for error in bad], ended

    good, bad, ended = asyncio.run(main())
    assert good == [Episode(0.5, {"exact": 0.5, "length": float(i)}, 2) for i in range(2)]
    assert bad[0].endswith("failed: KeyError: 'no such tool'") and bad[1].endswith("failed: http://here/v1 refused key-3")
    assert all(isinstance(error, EpisodeFailed) and "the bridge to verifiers ended" in str(error) for error in ended)


def test_a_bridge_that_cannot_start_has_last_words(tmp_path):
    with pytest.raises(EpisodeFailed, match=r"(?s)the bridge to verifiers ended; its last words: .*No module named 'verifiers'"):
        verifiers_source(0, sys.executable, "fake", folder=str(tmp_path))
    assert not list(Path(tmp_path).iterdir())
