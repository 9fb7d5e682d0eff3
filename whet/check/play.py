"""Checks of environments and tools on one row: made, started, called and closed, each with a deadline."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import cast

from whet.check.boundary import run_user_code, run_user_coroutine
from whet.check.context import TRAINING, CheckContext
from whet.check.findings import Note, fail, ok, skip, warn
from whet.check.own_source import own_tasks
from whet.check.settings import IMPORT_DEADLINE_S
from whet.check.tool_calls import arguments_for, schema_fault
from whet.data.files import read_rows
from whet.data.parsers import Parsed
from whet.data.rows import task_from
from whet.data.source import SourceConfig
from whet.env.base import Env, EnvFactory, Step
from whet.env.build import ENVS, TOOL_ENVS, EnvConfig, build_env_factory
from whet.env.resources import Resources
from whet.env.sandbox.open import chosen as chosen_sandbox
from whet.settings.rl import evaluation_env, evaluation_rows, training_rows
from whet.types import JSON, Message, Task, ToolCall

SHOWN_CHARS = 80
"""Maximum number of characters of a tool's answer."""
START_DEADLINE_S = 60.0
"""Deadline for an environment to start or close, and for all tools to answer."""
WRONG = {"whet_check: no tool has a parameter of this name": None}
"""Arguments that every tool refuses before it runs."""


def check_environment(context: CheckContext) -> Iterator[Note]:
    """Check the environments of training and of the evaluation sets that have their own."""
    config = context.rl
    own = config.data.source is not None
    yield from _environment(context, TRAINING, config.env, (lambda: own_tasks(context)[0]) if own else _first(training_rows(config)))
    for name, chosen in config.evaluate.sets.items():
        env = evaluation_env(config, chosen)
        if env == config.env and env.name in ENVS and TRAINING in context.tools:
            context.tools[name] = context.tools[TRAINING]  # it neither has tools of its own nor changes a task
            continue
        for note in _environment(context, name, env, _first(evaluation_rows(config, chosen))):
            yield Note(note.status, f"{name}: {note.text}", note.lines)


def _first(rows: SourceConfig) -> Callable[[], Task]:
    """Read the first row."""
    return lambda: task_from(next(read_rows(rows.path)), rows, "check/0#0")


def _environment(context: CheckContext, name: str, config: EnvConfig, first: Callable[[], Task]) -> Iterator[Note]:
    what = f"environment {config.name!r}"
    try:
        make = run_user_code(what, lambda: build_env_factory(config), IMPORT_DEADLINE_S)
        if name == TRAINING:  # the run asks for them before anything starts, to know which prompts are too long
            context.tools[name] = run_user_code(what, lambda: list(make().tools), START_DEADLINE_S)
    except ValueError as error:
        yield fail(str(error))
        return
    if (choice := chosen_sandbox(make)) is not None:
        yield (warn if choice.rung.name == "unsafe" else ok)(f"sandbox: {choice.summary()}")
    yield _started(context, name, what, make, first)
    tools = context.tools.get(name)
    if tools is None:
        return
    if faults := [fault for tool in tools if (fault := schema_fault(tool, what))]:
        del context.tools[name]  # no prompt can list them
        yield from map(fail, faults)
        return
    yield ok(f"{config.name} has {', '.join(signature(tool) for tool in tools) or 'no tools'}")
    if config.name in TOOL_ENVS:
        yield from _tool_answers(context, make, tools)
    if context.calls_tools and name in context.tasks:
        yield from _called(context, make, tools, first())
    if tools:
        yield from _told_of_tools(context, config, tools)


def signature(tool: Mapping[str, JSON]) -> str:
    """A tool's schema as `name(parameter, ...)`."""
    function = tool["function"]
    return f"{function['name']}({', '.join(function.get('parameters', {}).get('properties', {}))})"


def _started(context: CheckContext, name: str, what: str, make: EnvFactory, first: Callable[[], Task]) -> Note:
    try:
        task = first()
    except (ValueError, StopIteration):
        return skip("not started: needs a row to start with")

    async def start() -> tuple[Task, list[Mapping[str, JSON]]]:
        async with _started_env(make, task) as (env, started):
            return started, list(env.tools)

    try:
        started, tools = run_user_coroutine(what, start, START_DEADLINE_S)
    except ValueError as error:
        return fail(str(error))
    if started.id != task.id:
        return fail(f"{what} changed the task's id from {task.id!r} to {started.id!r}; it must stay the same")
    context.tasks[name], context.tools[name] = started, tools
    return ok(f"{what} started with {task.origin or task.id} and closed")


def _tool_answers(context: CheckContext, make: EnvFactory, tools: Sequence[Mapping[str, JSON]]) -> Iterator[Note]:
    """Call each tool with arguments that it refuses, and render its answer as the run would."""
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        call = Message("assistant", "", (ToolCall(name, WRONG, "call_0"),))
        answer = run_user_coroutine(f"tool {name!r}", lambda: _step(make(), call), START_DEADLINE_S).messages[0]  # noqa: B023
        if not answer.content.startswith("Error: "):
            yield fail(f"tool {name} took arguments that it does not have, and answered {answer.content[:80]!r}")
            return
        if context.renderer is not None:
            try:
                context.renderer.reply((answer,), ())
            except ValueError as error:
                yield fail(f"the answer of tool {name} cannot be shown to the model: {error}")
                return
    yield ok(f"{', '.join(names)}: wrong arguments are refused, and the refusal is rendered")


async def _step(env: Env, message: Message) -> Step:
    return await env.step(Parsed(message))


def _called(context: CheckContext, make: EnvFactory, tools: Sequence[Mapping[str, JSON]], task: Task) -> Iterator[Note]:
    """Really call each tool once, in an environment that was started on a row, and render its answer as the
    run does.
    """
    for tool in tools:
        name, arguments = tool["function"]["name"], arguments_for(tool, task)
        call = Message("assistant", "", (ToolCall(name, arguments, "call_0"),))
        shown = f"{name}({json.dumps(arguments, ensure_ascii=False)})"
        try:
            step = run_user_coroutine(f"tool {name!r}", lambda: played(make, task, call), START_DEADLINE_S)[1]  # noqa: B023
            if context.renderer is not None and step.messages:
                context.renderer.reply(step.messages, ())
        except ValueError as error:
            yield fail(f"{shown}: {error}")
            continue
        answer = step.messages[0].content if step.messages else step.text or "nothing: the conversation is over"
        yield (warn if answer.startswith("Error: ") else ok)(f"{shown} answered {answer[:SHOWN_CHARS]!r}")


async def played(make: EnvFactory, task: Task, message: Message) -> tuple[Task, Step]:
    """Task that an environment makes of a row, and its answer to one message. The environment is closed
    again.
    """
    async with _started_env(make, task) as (env, started):
        step = cast(object, await env.step(Parsed(message)))
        if not isinstance(step, Step):
            raise ValueError(f"env.step returned {step!r}; it must return a Step")
        return started, step


@asynccontextmanager
async def _started_env(make: EnvFactory, task: Task) -> AsyncIterator[tuple[Env, Task]]:
    """An environment, started with resources of its own, and the task that it plays. All is closed again.

    Raises:
        ValueError: it returned no task, or a resource cannot be opened or closed.
    """
    faults: list[str] = []
    async with aclosing(Resources(faults.append)) as run:
        env = make(**await run.of_group(task).of_trajectory().open(make.needs))
        try:
            started = cast(object, await env.start(task))
            if not isinstance(started, Task):
                raise ValueError(f"env.start returned {started!r}; it must return the task that is played")
            yield env, started
        finally:
            await env.close()
    if faults:
        raise ValueError("\n".join(faults))


def _told_of_tools(context: CheckContext, config: EnvConfig, tools: Sequence[Mapping[str, JSON]]) -> Iterator[Note]:
    """Check that the prompt lists the tools, that calls are parsed, and that a turn is left to use the
    answer.
    """
    if config.parser == "none":
        yield warn("env.parser is none: whatever the model writes, no tool is called")
    if context.rl.rollout.max_turns == 1:
        yield warn("rollout.max_turns is 1: a trajectory ends before the model can read a tool's answer")
    if context.renderer is None:
        return
    probe = Task("check", (Message("user", "u"),))
    try:
        heard = context.renderer.prompt(probe, tools) != context.renderer.prompt(probe)
    except ValueError as error:
        yield fail(str(error))
        return
    if not heard:
        yield warn("the chat template leaves tools out, so the model is not told of them: tell it in data.system_prompt")
