"""Resources that trajectories share: opened once, when first needed, and closed innermost first, by the task that opened them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.rollout.scripted import run
from whet.config import ConfigError
from whet.env import resources
from whet.env.build import EnvConfig, build_env_factory
from whet.env.resources import ResourceFailed, Resources, per_group, per_run, per_trajectory, resources_of
from whet.env.tools import Tool
from whet.types import Task

TASK = Task("q", "p", origin="rows.jsonl:7")


class Log:
    """A run's resource `server`, and a group's resource `sandbox` that needs it; both write down what happens."""

    def __init__(self, *, fails=(), closing_fails=False):
        self.seen: list[str] = []
        self.fails = list(fails)
        """Errors of the sandbox's openings, in order; None: it opens."""

        @asynccontextmanager
        async def server():
            entered = asyncio.current_task()
            self.seen.append("server opened")
            yield "server"
            assert asyncio.current_task() is entered
            self.seen.append("server closed")

        @asynccontextmanager
        async def sandbox(task, host=per_run(server)):
            entered = asyncio.current_task()
            await asyncio.sleep(0)
            error = self.fails.pop(0) if self.fails else None
            if error is not None:
                raise error
            self.seen.append(f"{task.id} opened on {host}")
            try:
                yield object()
            finally:
                assert asyncio.current_task() is entered
                self.seen.append(f"{task.id} closed")
                if closing_fails:
                    raise OSError("it does not answer")

        def uses(box=per_group(sandbox), host=per_run(server), other=3): ...

        self.needs = resources_of(uses)
        self.warnings: list[str] = []
        self.run = Resources(self.warnings.append)


def test_siblings_share_what_is_opened_once_and_closed_innermost_first():
    log = Log()

    async def main():
        group = log.run.of_group(TASK)
        assert log.seen == [] and list(log.needs) == ["box", "host"]
        first, second = await asyncio.gather(group.open(log.needs), group.open(log.needs))
        assert first == second and first["host"] == "server"
        await group.aclose()
        await group.aclose()
        other = log.run.of_group(Task("r", "p"))
        assert (await other.open(log.needs))["box"] is not first["box"]
        await log.run.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert log.seen == ["server opened", "q opened on server", "q closed", "r opened on server", "r closed", "server closed"]
    assert log.warnings == []


def test_nothing_is_opened_that_nobody_asks_for():
    log = Log()

    async def main():
        await log.run.of_group(TASK).aclose()
        await log.run.aclose()

    run(main())
    assert log.seen == []


def test_a_failure_names_resource_prompt_cause_and_place_and_the_next_who_asks_tries_again():
    log = Log(fails=[OSError("no room"), TimeoutError("no answer"), None])

    async def main():
        group = log.run.of_group(TASK)
        both = await asyncio.gather(group.open(log.needs), group.open(log.needs), return_exceptions=True)
        words = r"sandbox of the prompt rows.jsonl:7 could not be opened: OSError: no room \(at .*test_resources.py:\d+ in sandbox\)"
        for error in both:
            with pytest.raises(ResourceFailed, match=words):
                raise error
        with pytest.raises(TimeoutError, match="TimeoutError: no answer"):
            await group.open(log.needs)
        await group.open(log.needs)
        await log.run.aclose()

    run(main())
    assert log.seen == ["server opened", "q opened on server", "q closed", "server closed"]


def test_what_another_resource_needs_fails_under_its_own_name():
    @asynccontextmanager
    async def broken():
        raise KeyError("x")
        yield

    @asynccontextmanager
    async def sandbox(task, host=per_run(broken)):
        yield

    async def main():
        run_of = Resources()
        with pytest.raises(ResourceFailed, match="the resource broken of the run could not be opened: KeyError: 'x'"):
            await run_of.of_group(TASK).open({"box": per_group(sandbox)})  # pyright: ignore

    run(main())


def test_one_that_cannot_be_closed_is_a_warning():
    log = Log(closing_fails=True)

    async def main():
        group = log.run.of_group(TASK)
        await group.open(log.needs)
        await group.aclose()

    run(main())
    (warning,) = log.warnings
    assert warning.startswith("the resource sandbox of the prompt rows.jsonl:7 could not be closed: OSError: it does not answer (at ")


def test_one_that_hangs_when_it_is_closed_is_cancelled(monkeypatch):
    monkeypatch.setattr(resources, "CLOSE_TIMEOUT_S", 0.05)
    ended = []

    @asynccontextmanager
    async def hangs(task):
        yield
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task.id)

    warnings: list[str] = []

    async def main():
        group = Resources(warnings.append).of_group(TASK)
        await group.open({"it": per_group(hangs)})  # pyright: ignore
        await group.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert ended == ["q"] and "could not be closed: TimeoutError: it took longer than 0.05 s" in warnings[0]


def test_one_that_is_being_opened_is_broken_off_and_a_cancelled_caller_breaks_off_nothing():
    seen, go_on = [], asyncio.Event()

    @asynccontextmanager
    async def slow(task):
        try:
            await asyncio.Event().wait()
            yield
        finally:
            seen.append("broken off")

    @asynccontextmanager
    async def slow_to_close(task):
        yield
        await go_on.wait()
        seen.append("closed")

    async def main():
        run_of = Resources()
        group = run_of.of_group(TASK)
        await group.open({"it": per_group(slow_to_close)})  # pyright: ignore
        waiter = asyncio.create_task(group.open({"it": per_group(slow)}))  # pyright: ignore
        await asyncio.sleep(0.01)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert seen == [], "its siblings may still wait for it"
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert seen == ["broken off"]
        go_on.set()
        await run_of.aclose()
        assert seen == ["broken off", "closed"] and asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_what_is_no_context_manager_or_would_outlive_its_group_is_refused():
    async def bare(task):
        yield

    with pytest.raises(ValueError, match=r"decorate it with contextlib\.asynccontextmanager"):
        per_group(bare)  # pyright: ignore
    sandbox = asynccontextmanager(bare)

    @asynccontextmanager
    async def server(box=per_group(sandbox)):
        yield

    with pytest.raises(ValueError, match="opened once in a run, so it cannot ask for a resource of a group"):
        per_run(server)


MODULE = """
from contextlib import asynccontextmanager
from whet.env.resources import per_group, per_run

@asynccontextmanager
async def notes(task):
    yield [task.id]

@asynccontextmanager
async def index():
    yield {"a": "1"}

def note(text: str, notes: list = per_group(notes)) -> list:
    "Takes a note, and reads all of them."
    notes.append(text)
    return notes

async def look(word: str, index=per_run(index)) -> str:
    "Looks a word up."
    return index[word]

class Mine:
    tools = ()
    def __init__(self, size=1, notes=per_group(notes), index=per_run(index)):
        self.size, self.notes, self.index = size, notes, index
    async def start(self, task): return task
    async def resume(self, task, turns): return task
    async def step(self, reply): ...
    async def close(self): ...
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "my_world.py").write_text(MODULE)
    return str(tmp_path / "my_world.py")


def test_a_tool_s_resources_are_not_the_model_s_business(module):
    from whet.data.formats.hermes import parse_hermes

    make = build_env_factory(EnvConfig(name="tools", tools=[f"{module}:note", f"{module}:look"]))
    assert [list(tool["function"]["parameters"]["properties"]) for tool in make().tools] == [["text"], ["word"]]
    assert sorted(make.needs) == ["look.index", "note.notes"]
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    calls = call % ("note", "text", "x") + call % ("look", "word", "a")
    wrong = '<tool_call>{"name": "note", "arguments": {"text": "x", "notes": []}}</tool_call>'

    async def main():
        run_of = Resources()
        group = run_of.of_group(TASK)
        first, second = make(**await group.open(make.needs)), make(**await group.open(make.needs))
        await first.step(parse_hermes(calls))
        answers = [m.content for m in (await second.step(parse_hermes(calls))).messages]
        refused = (await first.step(parse_hermes(wrong))).messages[0].content
        await run_of.aclose()
        return answers, refused

    answers, refused = run(main())
    assert answers == ['["q", "x", "x"]', "1"]
    assert refused.startswith("Error: note was called with wrong arguments: notes: Extra inputs")


def test_an_environment_gets_its_resources_unless_the_options_have_others(module):
    make = build_env_factory(EnvConfig(name=f"{module}:Mine", options={"size": 2}))

    async def main():
        group = Resources().of_group(TASK)
        env = make(**await group.open(make.needs))
        await group.aclose()
        return env

    env = run(main())
    assert (env.size, env.notes, env.index) == (2, ["q"], {"a": "1"})
    assert list(build_env_factory(EnvConfig(name=f"{module}:Mine", options={"notes": []})).needs) == ["index"]


def test_a_conversation_goes_on_where_its_environment_can_and_its_tools_keep_nothing_of_the_group(module):
    def resumable(**settings):
        return build_env_factory(EnvConfig(**settings)).resumable

    assert resumable(name=f"{module}:Mine") and resumable(name="tools", tools=[f"{module}:look"])
    assert not resumable(name="tools", tools=["calculator", f"{module}:note"])


def test_a_resource_that_is_none_is_found_when_its_module_is_imported(tmp_path):
    path = tmp_path / "bad_world.py"
    path.write_text("from whet.env.resources import per_group\nasync def f(task):\n    yield\ndef tool(a=per_group(f)):\n    'T'\n")
    with pytest.raises(ConfigError, match=r"the resource f is no async context manager; decorate it .*\(.*bad_world.py:4\)"):
        build_env_factory(EnvConfig(name="tools", tools=[f"{path}:tool"]))


def test_a_tool_without_resources_is_as_before():
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    assert Tool(double).needs == {}


def test_a_trajectory_has_a_resource_of_its_own_closed_before_its_group_s():
    log: list[str] = []

    @asynccontextmanager
    async def shop(task):
        log.append("shop opened")
        yield "shop"
        log.append("shop closed")

    @asynccontextmanager
    async def session(task, shop=per_group(shop)):
        number = sum("session" in line for line in log)
        log.append(f"session {number} of {task.id} in {shop} opened")
        yield number
        log.append(f"session {number} closed")

    def buy(thing: str, session=per_trajectory(session)): ...

    async def main():
        whole = Resources()
        group = whole.of_group(TASK)
        one, other = group.of_trajectory(), group.of_trajectory()
        needs = resources_of(buy)
        assert await one.open(needs) == await one.open(needs) == {"session": 0}
        assert await other.open(needs) == {"session": 1}
        await one.aclose()
        assert log[-1] == "session 0 closed"
        await whole.aclose()
        assert log[-2:] == ["session 1 closed", "shop closed"]
        assert not whole._inner and not group._inner
        empty = whole.of_group(TASK).of_trajectory()
        await empty.aclose()

    run(main())


def test_what_lives_longer_cannot_ask_for_what_ends_before_it():
    @asynccontextmanager
    async def session(task):
        yield

    @asynccontextmanager
    async def shop(task, session=per_trajectory(session)):
        yield

    with pytest.raises(ValueError, match="shop is opened once in a group, so it cannot ask for a resource of a trajectory"):
        per_group(shop)
