"""Environments of others, each with its real package, in one conversation."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from contextlib import aclosing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.agents.environments import python_of
from tests.agents.places import AGENTS, NODE, free_port, run, says, serving
from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP
from whet.data.own import own_source
from whet.env.adapters.verifiers import Episode, EpisodeFailed, open_reading_bridge, settings_of
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.reward.reasoning_gym import score
from whet.types import Finish, Message, Outcome, SamplingParams, Task, Trajectory, Turn

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
TASK = Task("numbered/1#0", (Message("user", "Play."),))


async def play(config, *replies, task=TASK):
    """The task as it was started, the environment's tools and its answers, in resources of their own."""
    make, whole = build_env_factory(config), Resources()
    env = make(**await whole.of_group(task).of_trajectory().open(make.needs))
    try:
        first = await env.start(task)
        return first, env.tools, [await env.step(reply) for reply in replies]
    finally:
        await env.close()
        await whole.aclose()


def test_a_gymnasium_game_in_text():
    kwargs = {"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 3}
    config = EnvConfig(name="gymnasium", options={"id": "FrozenLake-v1", "kwargs": kwargs, "actions": ["left", "down", "right", "up"]})
    first, _, steps = run(play(config, says("Go right."), says("I wait."), says("left"), says("left")))
    assert "FHFH" in first.prompt[0].content and "(Right)" in steps[0].messages[0].content
    assert steps[1].counts == {"illegal_actions": 1} and (steps[3].done, steps[3].truncated, steps[3].reward) == (True, True, 0.0)


def test_a_textarena_game():
    replies = [says(f"[{number}]") for number in range(1, 21)]
    config = EnvConfig(name="textarena", options={"id": "GuessTheNumber-v0-hardcore"})

    async def main():
        env = build_env_factory(config)()
        first, steps = await env.start(TASK), []
        for reply in replies:
            steps.append(await env.step(reply))
            if steps[-1].done:
                break
        await env.close()
        return first, steps

    first, steps = run(main())
    assert "between 1 and 50" in first.prompt[0].content and "The target number is" in steps[0].messages[0].content
    assert "between 1 and 50" not in steps[0].messages[0].content, "an observation has only what is new"
    assert steps[-1].done and steps[-1].reward is not None


class Counter:
    """Counts, as TRL's environments do."""

    def reset(self, **row) -> str:
        self.value = 0
        return "Count to two."

    def add(self, by: int) -> str:
        """Adds to the counter.

        Args:
            by: how much.
        """
        self.value += by
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value == 2)


def test_what_is_a_tool_for_trl_is_one_here():
    import ast

    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    trainer = Path(found.submodule_search_locations[0]) / "trainer" / "grpo_trainer.py"
    named = [node.value for node in ast.walk(ast.parse(trainer.read_text())) if isinstance(node, ast.Constant)]
    assert {"reset", "get_reward", "environment"} <= set(map(str, named)), "TRL's own names"
    config = EnvConfig(name="trl", options={"factory": f"{__file__}:Counter"})
    first, tools, (step, last) = run(play(config, says("", ("add", {"by": 1}), ("add", {"by": 1})), says("Done.")))
    assert first.prompt[0].content == "Play.\n\nCount to two." and [tool["function"]["name"] for tool in tools] == ["add"]
    assert [message.content for message in step.messages] == ["1", "2"] and (last.done, last.reward) == (True, 1.0)


def test_an_openenv_server_with_one_place():
    port = free_port()
    config = EnvConfig(name="openenv", options={"url": f"http://127.0.0.1:{port}", "reset": {"name": "Ada"}})

    async def main():
        calls = [says("", ("act", {"guess": guess})) for guess in (3, "x", 7)]
        return await asyncio.gather(play(config, *calls), play(config, *calls))

    with serving([python_of("openenv"), str(HERE / "openenv_server.py"), str(port)], port):
        for first, tools, (wrong, refused, right) in run(main()):
            assert first.prompt[0].content == "Play.\n\nGuess a number, Ada."
            assert tools[0]["function"]["parameters"]["required"] == ["guess"]
            assert wrong.messages[0].content == "wrong" and refused.messages[0].content.startswith("Error: guess: Input should be")
            assert right.done and right.reward == 1.0


def test_reasoning_gym_asks_and_scores():
    source = own_source("reasoning_gym", {"dataset": ["leg_counting", "basic_arithmetic"], "size": 5}, 3, 120)
    for task in source.next(10):
        turn = Turn((), (), (3,), (-0.5,), (7,), Message("assistant", f"<answer>{task.label}</answer>"), Finish.STOP)
        right = Trajectory("t", task, (turn,), Outcome.COMPLETED)
        assert score(right).total == 1.0 and score(right, tag="no").total < 1.0


def mcp(server, *arguments):
    command = ["node", str(NODE / server / "dist" / "index.js"), *arguments]
    return EnvConfig(name="tools", tools=[{"name": "mcp", "command": command}])


def test_the_mcp_server_everything():
    calls = (("echo", {"message": "hello"}), ("get-sum", {"a": 2, "b": 3}), ("get-sum", {"a": 2}), ("get-tiny-image", {}))
    _, tools, (step,) = run(play(mcp("server-everything"), says("", *calls)))
    assert {"echo", "get-sum"} <= {tool["function"]["name"] for tool in tools}
    echo, total, wrong, image = [message.content for message in step.messages]
    assert "hello" in echo and "5" in total and "[image, image/png" in image
    assert wrong.startswith("Error: get-sum was called with wrong arguments")


def test_the_mcp_server_filesystem(tmp_path):
    (tmp_path / "note.txt").write_text("The key is under the mat.")
    calls = (("read_text_file", {"path": str(tmp_path / "note.txt")}), ("read_text_file", {"path": "/etc/passwd"}))
    _, _, (step,) = run(play(mcp("server-filesystem", str(tmp_path)), says("", *calls)))
    inside, outside = [message.content for message in step.messages]
    assert "under the mat" in inside and outside.startswith("Error: ")


@contextmanager
def model(seen):
    """An endpoint of chat completions that counts on, and the keys and paths that it was asked with."""

    class Endpoint(BaseHTTPRequestHandler):
        def log_message(self, *told): ...

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, self.headers["authorization"]))
            number = int("".join(filter(str.isdigit, asked["messages"][-1]["content"]))[0])
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": asked["model"]}
            deltas = (({"role": "assistant", "content": f"It is {number + 1}."}, None), ({}, "stop"))
            chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} for delta, finish in deltas]
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            for chunk in (*map(json.dumps, (*chunks, {**base, "choices": [], "usage": usage})), "[DONE]"):
                self.wfile.write(f"data: {chunk}\n\n".encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_verifiers_taskset_asks_the_endpoint_of_each_trajectory():
    tasksets, python = str(HERE / "tasksets"), python_of("verifiers")
    tasks = own_source("verifiers", {"python": python, "taskset": "next_number", "folder": tasksets}, 0, 300).next(3)
    seen = []

    async def main(address):
        async with open_reading_bridge(python, settings_of("next_number", "null", None), tasksets) as bridge:
            urls = [f"{address}/s/{task.metadata['verifiers']}/v1" for task in tasks]
            played = (bridge.episode(task, url, f"key-{url[-4]}", "policy") for task, url in zip(tasks, urls, strict=True))
            good = await asyncio.gather(*played)
            with pytest.raises(EpisodeFailed, match="All connection attempts failed"):
                await bridge.episode(tasks[0], "http://127.0.0.1:1/v1", "key", "policy")
            return good

    with model(seen) as address:
        assert run(main(address), 500) == [Episode(1.0, {"exact": 1.0}, 1)] * 3
    assert {path for path, _ in seen} == {f"/s/{i}/v1/chat/completions" for i in range(3)}
    assert all(key == f"Bearer key-{path[3]}" for path, key in seen)


def test_a_verifiers_episode_is_a_trajectory_of_recorded_tokens():
    tasksets, python = str(HERE / "tasksets"), python_of("verifiers")
    options = {"python": python, "taskset": "next_number", "folder": tasksets}
    (task,) = own_source("verifiers", options, 0, 300).next(1)
    make = build_env_factory(EnvConfig(name="verifiers", options=options))
    engine = FakeEngine(lambda request: [*((t, -0.5) for t in (*RENDERER.encode("12"), STOP)), Finish.STOP])

    async def main():
        async with aclosing(Resources()) as resources:
            own = resources.of_group(task).of_trajectory()

            async def open_env():
                return make(**await own.open(make.needs))

            sampling, limits = SamplingParams(99, stop_token_ids=(STOP,)), Limits(9, 2000, 99)
            return await TrajectoryRun("t/0", task, engine, RENDERER, sampling, limits).to_end(open_env)

    trajectory = run(main(), 500)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert trajectory.turns[-1].reward is not None and len(engine.requests) == len(trajectory.turns)


def test_the_places_are_there():
    assert AGENTS.is_dir() and NODE.is_dir()
