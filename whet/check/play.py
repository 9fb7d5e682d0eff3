"""Environments, tools and rewards, tried out on one row: made, started, asked and closed, each under a deadline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from whet.check.boundary import run_user_code, run_user_coroutine
from whet.check.context import TRAINING, Scene
from whet.check.findings import Note, fail, ok, skip, warn
from whet.check.own_source import own_tasks
from whet.check.settings import IMPORT_DEADLINE_S
from whet.check.tool_calls import arguments_for, schema_fault
from whet.data.files import read_rows
from whet.data.parsers import Parsed
from whet.data.rows import task_from
from whet.data.source import SourceConfig
from whet.env.base import Env, Step
from whet.env.build import ENVS, EnvConfig, MakeEnv, build_env_factory
from whet.settings.rl import evaluation_env, evaluation_rows, training_rows
from whet.types import JSON, Message, Task, ToolCall

SHOWN_CHARS = 80
"""Of a tool's answer."""
START_DEADLINE_S = 60.0
"""For an environment to start or close, and for all tools to answer."""
WRONG = {"whet_check: no tool has a parameter of this name": None}
"""Arguments that every tool refuses before it runs."""


def check_environment(scene: Scene) -> Iterator[Note]:
    """The environments of training and of the evaluation sets that have their own."""
    config = scene.rl
    own = config.data.source is not None
    yield from _environment(scene, TRAINING, config.env, (lambda: own_tasks(scene)[0]) if own else _first(training_rows(config)))
    for name, chosen in config.evaluate.sets.items():
        env = evaluation_env(config, chosen)
        if env == config.env and env.name in ENVS and TRAINING in scene.tools:
            scene.tools[name] = scene.tools[TRAINING]  # it neither has tools of its own nor changes a task
            continue
        for note in _environment(scene, name, env, _first(evaluation_rows(config, chosen))):
            yield Note(note.status, f"{name}: {note.text}", note.lines)


def _first(rows: SourceConfig) -> Callable[[], Task]:
    """Reads the first row."""
    return lambda: task_from(next(read_rows(rows.path)), rows, "check/0#0")


def _environment(scene: Scene, name: str, config: EnvConfig, first: Callable[[], Task]) -> Iterator[Note]:
    what = f"environment {config.name!r}"
    try:
        make = run_user_code(what, lambda: build_env_factory(config), IMPORT_DEADLINE_S)
        if name == TRAINING:  # the run asks for them before anything starts, to know which prompts are too long
            scene.tools[name] = run_user_code(what, lambda: list(make().tools), START_DEADLINE_S)
    except ValueError as error:
        yield fail(str(error))
        return
    yield _started(scene, name, what, make, first)
    tools = scene.tools.get(name)
    if tools is None:
        return
    if faults := [fault for tool in tools if (fault := schema_fault(tool, what))]:
        del scene.tools[name]  # nobody can be told of them
        yield from map(fail, faults)
        return
    yield ok(f"{config.name} has {', '.join(signature(tool) for tool in tools) or 'no tools'}")
    if config.name == "tools":
        yield from _tool_answers(scene, make, tools)
    if scene.calls_tools and name in scene.tasks:
        yield from _called(scene, make, tools, first())
    if tools:
        yield from _told_of_tools(scene, config, tools)


def signature(tool: Mapping[str, JSON]) -> str:
    """A tool's schema as `name(parameter, ...)`."""
    function = tool["function"]
    return f"{function['name']}({', '.join(function.get('parameters', {}).get('properties', {}))})"


def _started(scene: Scene, name: str, what: str, make: MakeEnv, first: Callable[[], Task]) -> Note:
    try:
        task = first()
    except (ValueError, StopIteration):
        return skip("not started: needs a row to start with")

    async def start() -> tuple[Task, list[Mapping[str, JSON]]]:
        env = make()
        try:
            return await _begun(env, task), list(env.tools)
        finally:
            await env.close()

    try:
        started, tools = run_user_coroutine(what, start, START_DEADLINE_S)
    except ValueError as error:
        return fail(str(error))
    if started.id != task.id:
        return fail(f"{what} changed the task's id from {task.id!r} to {started.id!r}; it must stay the same")
    scene.tasks[name], scene.tools[name] = started, tools
    return ok(f"{what} started with {task.origin or task.id} and closed")


def _tool_answers(scene: Scene, make: MakeEnv, tools: Sequence[Mapping[str, JSON]]) -> Iterator[Note]:
    """Call each tool with arguments that it refuses, and render its answer as the run would."""
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        call = Message("assistant", "", (ToolCall(name, WRONG, "call_0"),))
        answer = run_user_coroutine(f"tool {name!r}", lambda: _step(make(), call), START_DEADLINE_S).messages[0]  # noqa: B023
        if not answer.content.startswith("Error: "):
            yield fail(f"tool {name} took arguments that it does not have, and answered {answer.content[:80]!r}")
            return
        if scene.renderer is not None:
            try:
                scene.renderer.reply((answer,), ())
            except ValueError as error:
                yield fail(f"the answer of tool {name} cannot be shown to the model: {error}")
                return
    yield ok(f"{', '.join(names)}: wrong arguments are refused, and the refusal is rendered")


async def _step(env: Env, message: Message) -> Step:
    return await env.step(Parsed(message))


def _called(scene: Scene, make: MakeEnv, tools: Sequence[Mapping[str, JSON]], task: Task) -> Iterator[Note]:
    """Really call each tool once, in an environment of its own that was started on a row, and render its answer as the run would."""
    for tool in tools:
        name, arguments = tool["function"]["name"], arguments_for(tool, task)
        call = Message("assistant", "", (ToolCall(name, arguments, "call_0"),))
        shown = f"{name}({json.dumps(arguments, ensure_ascii=False)})"
        try:
            step = run_user_coroutine(f"tool {name!r}", lambda: played(make, task, call), START_DEADLINE_S)[1]  # noqa: B023
            if scene.renderer is not None and step.messages:
                scene.renderer.reply(step.messages, ())
        except ValueError as error:
            yield fail(f"{shown}: {error}")
            continue
        answer = step.messages[0].content if step.messages else step.text or "nothing: the conversation is over"
        yield (warn if answer.startswith("Error: ") else ok)(f"{shown} answered {answer[:SHOWN_CHARS]!r}")


async def played(make: MakeEnv, task: Task, message: Message) -> tuple[Task, Step]:
    """What an environment makes of a row, and its answer to one message of the model; it is closed again."""
    env = make()
    try:
        begun, step = await _begun(env, task), cast(object, await env.step(Parsed(message)))
        if not isinstance(step, Step):
            raise ValueError(f"env.step returned {step!r}; it must return a Step")
        return begun, step
    finally:
        await env.close()


async def _begun(env: Env, task: Task) -> Task:
    begun = cast(object, await env.start(task))
    if not isinstance(begun, Task):
        raise ValueError(f"env.start returned {begun!r}; it must return the task that is played")
    return begun


def _told_of_tools(scene: Scene, config: EnvConfig, tools: Sequence[Mapping[str, JSON]]) -> Iterator[Note]:
    """Whether the model hears of the tools, is heard when it calls one, and gets to use the answer."""
    if config.parser == "none":
        yield warn("env.parser is none: whatever the model writes, no tool is called")
    if scene.rl.rollout.max_turns == 1:
        yield warn("rollout.max_turns is 1: a trajectory ends before the model can read a tool's answer")
    if scene.renderer is None:
        return
    probe = Task("check", (Message("user", "u"),))
    try:
        heard = scene.renderer.prompt(probe, tools) != scene.renderer.prompt(probe)
    except ValueError as error:
        yield fail(str(error))
        return
    if not heard:
        yield warn("the chat template leaves tools out, so the model is not told of them: tell it in data.system_prompt")
