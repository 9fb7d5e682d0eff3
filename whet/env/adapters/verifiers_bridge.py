"""A program for the virtual environment of the package verifiers: it plays episodes of one environment, and imports nothing of whet.

`python verifiers_bridge.py SETTINGS` reads commands as lines of JSON and writes answers as such; SETTINGS are the environment's, as JSON.
`{"do": "tasks"}` is answered with `{"tasks": [...]}`. `{"do": "run", "number": n, "task": {...}, "base_url": ..., "key": ..., "model": ...,
"sampling": {...}}` is answered, when the episode has ended, with `{"number": n, ...}` and its reward, metrics and errors; several run at a
time. `{"do": "cancel", "number": n}` ends one. The end of the input ends all.
"""

# pyright: reportMissingImports=false
# Its package is in another environment.

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

MAX_ERROR_CHARS = 2000


class Bridge:
    """The episodes of one environment, and the pipe to who asks for them."""

    def __init__(self, settings: dict[str, Any], out: int) -> None:
        from verifiers.v1.utils.loaders import environment_class

        kind = environment_class(settings["taskset"]["id"], settings.get("id", ""))
        self._env = kind(_config_of(kind).model_validate(settings))
        self._out = os.fdopen(out, "w", encoding="utf-8")
        self._tasks = {str(task.data.idx): task for task in self._env.taskset.load()}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer commands until there are no more."""
        reader = asyncio.StreamReader(limit=1 << 26)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self._env.serving():
            self._say({"ready": True})
            while line := await reader.readline():
                self._obey(json.loads(line))
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "tasks":
            rows = [json.loads(task.data.model_dump_json()) for task in self._tasks.values()]
            self._say({"tasks": rows})
        elif command["do"] == "run":
            self._running[command["number"]] = asyncio.create_task(self._run(command))
        elif (running := self._running.get(command["number"])) is not None:
            running.cancel()

    async def _run(self, command: dict[str, Any]) -> None:
        number = command["number"]
        variable = f"WHET_{number}_API_KEY"  # the client reads the key from a variable; programs do not inherit names like this
        os.environ[variable] = command["key"]
        answer: dict[str, Any]
        try:
            answer = await self._episode(command, variable)
        except Exception as error:  # an environment's code may raise anything
            answer = {"failed": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
        except asyncio.CancelledError:
            answer = {"failed": "it was cancelled"}
        finally:
            del os.environ[variable], self._running[number]
        self._say({"number": number, **answer})

    async def _episode(self, command: dict[str, Any], variable: str) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        if command["index"] not in self._tasks:
            raise KeyError(f"the taskset has no task {command['index']}")
        client = EvalClientConfig(base_url=command["base_url"], api_key_var=variable)
        context = ModelContext(model=command["model"], client=client, sampling=SamplingConfig(**command["sampling"]))
        (slot,) = self._env.slots(self._tasks[command["index"]])
        episode = await self._env.run_slot(slot, context, None)
        errors = [_words(error) for holder in (episode, *episode.traces) for error in holder.errors]
        scored = [trace for trace in episode.traces if not trace.errors]
        metrics: dict[str, float] = {}
        for trace in scored:
            parts = {**trace.rewards, **trace.metrics}
            metrics.update({name: float(getattr(part, "value", part)) for name, part in parts.items() if _is_number(part)})
        rewards = [float(trace.reward) for trace in scored]
        turns = sum(trace.num_turns for trace in episode.traces)
        return {"reward": sum(rewards) if rewards else None, "metrics": metrics, "errors": errors, "num_turns": turns}

    def _say(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def _config_of(kind: type[Any]) -> Any:
    """The class of an environment's settings: what its generic base was given."""
    from verifiers.v1.configs.env import EnvConfig

    for base in kind.__mro__:
        for origin in getattr(base, "__orig_bases__", ()):
            for argument in getattr(origin, "__args__", ()):
                if isinstance(argument, type) and issubclass(argument, EnvConfig):
                    return argument
    return EnvConfig


def _is_number(part: Any) -> bool:
    value = getattr(part, "value", part)
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")


def _words(error: Any) -> str:
    return (error if isinstance(error, str) else str(getattr(error, "message", error)))[:MAX_ERROR_CHARS]


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is no answer
    sys.path[0] = os.getcwd()  # in place of this file's folder, whose names are those of packages
    asyncio.run(Bridge(json.loads(sys.argv[1]), answers).serve())
