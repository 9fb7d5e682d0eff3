"""What the tests of examples/mcp_files play: one row of each job, solved as a good model would, with any server of files."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

from whet.data.parsers import Parsed
from whet.env.build import EnvConfig, build_env_factory
from whet.env.resources import Resources
from whet.types import Finish, Message, Outcome, Task, ToolCall, Trajectory, Turn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/mcp_files"


def module(name):
    """A file of the example."""
    spec = importlib.util.spec_from_file_location(f"mcp_files_{name}", EXAMPLE / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def tasks():
    """A task of each job, and of each the person and the room that it is about."""
    data, rng, found = module("data"), random.Random(3), {}
    while len(found) < 3:
        row = data.make_row(rng, data.NAMES)
        messages = tuple(Message(**message) for message in row["prompt"])
        found.setdefault(row["metadata"]["job"], Task("t", messages, row["label"], row["metadata"]))
    return found


def about(task):
    """Path of the file about the team's lead, the room in it, and the last number of the prompt."""
    asked = task.prompt[-1].content
    team = re.search(r"(\w+) team", asked)[1]
    lead = re.search(r"Lead: (\w+)", task.metadata["files"][f"teams/{team}.txt"])[1].lower()
    path = f"people/{lead}.txt"
    return path, re.search(r"Room: (\d+)", task.metadata["files"][path])[1], re.findall(r"\d+", asked)[-1:]


def solution(task):
    """The calls of a model that does the job, and its answer."""
    path, room, new = about(task)
    reads = [("list_directory", {"path": "teams"}), ("read_text_file", {"path": path})]
    if task.metadata["job"] == "find":
        return reads, f"It is room {room}."
    if task.metadata["job"] == "write":
        return [*reads, ("write_file", {"path": "answer.txt", "content": room})], "Done."
    edits = [{"oldText": f"Room: {room}", "newText": f"Room: {new[0]}"}]
    return [*reads, ("edit_file", {"path": path, "edits": edits})], "Done."


def factory(command):
    """The environment of the example, with a server of this command."""
    entry = {"name": f"{EXAMPLE / 'folder.py'}:folder_tools", "command": command}
    return build_env_factory(EnvConfig(name="tools", tools=[entry]))


def tools(command):
    """`env.tools` of the example as it is typed at the command line, with a server of this command."""
    return f'[{{name = "examples/mcp_files/folder.py:folder_tools", command = {json.dumps(command)}}}]'


async def played(make, task, replies):
    """The trajectory of a model that writes these replies, each a text with calls. Its folder is gone at its end."""
    resources, turns = Resources(), []
    try:
        env = make(**await resources.of_group(task).of_trajectory().open(make.needs))
        for text, calls in replies:
            message = Message("assistant", text, tuple(ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(calls)))
            step = await env.step(Parsed(message))
            turns.append((Turn((), (), (3,), (-0.5,), (7,), message, Finish.STOP, notes=step.notes), step.messages))
        return Trajectory("t/0", task, tuple(turn for turn, _ in turns), Outcome.COMPLETED), [messages for _, messages in turns]
    finally:
        await resources.aclose()
