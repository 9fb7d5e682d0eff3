"""Programs written for OpenAI's API: every model call is recorded with the tokens that were sampled, and trains once."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import aclosing
from pathlib import Path
from types import ModuleType

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import RENDERER, STOP, run
from whet.engine.base import EngineLost
from whet.env.build import EnvConfig, build_env_factory
from whet.env.deadline import Deadline
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.rollout.samples import samples_of
from whet.types import Finish, Message, Origin, Outcome, SamplingParams, Task

TASK = Task("t", (Message("system", "Be brief."), Message("user", "12*3?")), "36", {"level": 2})
LIMITS = Limits(max_turns=40, max_tokens=2000, max_turn_tokens=200)
PARAMS = SamplingParams(999, temperature=0.7, stop_token_ids=(STOP,), seed=7)
TOOL = {"type": "function", "function": {"name": "calculator", "description": "c", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'


def script(*texts):
    """The n-th request gets the n-th text, whatever it asks."""
    left = list(texts)

    def reply(request):
        text = left.pop(0)
        if not isinstance(text, str):
            return [text]
        return [*((token, -0.01 * (token + 1)) for token in (*RENDERER.encode(text), STOP)), Finish.STOP]

    return reply


@pytest.fixture
def agent(monkeypatch):
    """Makes a module's function of an agent, and returns how it plays."""

    def played(function, *texts, limits=LIMITS, deadline=None, engine=None, **options):
        module = ModuleType("my_agent")
        module.agent = function
        monkeypatch.setitem(sys.modules, "my_agent", module)
        engine = engine or FakeEngine(script(*texts))
        make = build_env_factory(EnvConfig(name="program", options={"function": "my_agent:agent", **options}))

        async def main():
            async with aclosing(Resources()) as resources:
                own = resources.of_group(TASK).of_trajectory()

                async def open_env():
                    return make(**await own.open(make.needs))

                made = TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, limits, deadline=deadline() if deadline else Deadline())
                return await made.to_end(open_env)

        trajectory = run(main())
        engine.check_idle()
        return trajectory, engine

    return played


def length(*texts):
    """Sampled tokens of replies, their ends included."""
    return sum(len(RENDERER.encode(text)) + 1 for text in texts)


def client_of(endpoint, **options):
    return AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, **options)


def asked(task):
    return [message.to_dict() for message in task.prompt]


def check_whole(trajectory, engine):
    """Every sampled token is in one sample, once, and each sample's tokens are what the engine was asked to continue and sampled."""
    samples = samples_of(trajectory)
    trained = [token for sample in samples for token, trains in zip(sample.tokens, sample.loss_mask, strict=True) if trains]
    sampled = [token for _, chunk in engine.chunks for token in chunk.tokens]
    assert sorted(trained) == sorted(sampled)
    for sample in samples:
        for place, trains in enumerate(sample.loss_mask):
            assert not trains or sample.logprobs[place] == pytest.approx(-0.01 * (sample.tokens[place] + 1), abs=1e-6)
    prompts = [tuple(request.tokens) for request in engine.requests]
    for sample in samples:
        begin = tuple(sample.tokens)[: tuple(sample.loss_mask).index(True)]
        assert begin in prompts, "a sample begins with a prompt as the engine had it"
    return samples


def test_a_tool_loop_is_one_sample_of_the_sampled_tokens(agent):
    async def loop(task, endpoint):
        client, messages = client_of(endpoint), asked(task)
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))  # as people write it
            if not message.tool_calls:
                return 1.0
            call = message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"expression": "12*3"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "36"})

    trajectory, engine = agent(loop, CALL, "The answer is 36.")
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
    assert trajectory.turns[-1].reward == 1.0 and trajectory.counts["calls_extends"] == 1
    (sample,) = check_whole(trajectory, engine)
    first, second = (tuple(request.tokens) for request in engine.requests)
    reply = (*RENDERER.encode(CALL), STOP)
    assert second[: len(first) + len(reply)] == (*first, *reply), "the prompt begins with what was prompted and sampled"
    assert tuple(sample.tokens) == (*second, *RENDERER.encode("The answer is 36."), STOP)
    assert second == (*first, *reply, *RENDERER.reply((Message("tool", "36"),), reply))
    assert {request.sampling.temperature for request in engine.requests} == {0.7}
    assert len({request.sampling.seed for request in engine.requests}) == 2


def test_streams_and_whole_answers_say_the_same(agent):
    async def streams(task, endpoint):
        client, messages = client_of(endpoint), asked(task)
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        async for event in stream:
            text += (event.choices[0].delta.content or "") if event.choices else ""
            usage = event.usage or usage
        assert text == "12 and 3" and usage.completion_tokens == len(RENDERER.encode(text)) + 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        whole = await client.chat.completions.create(model="m", messages=messages, max_tokens=50)
        assert whole.choices[0].message.content == "36"

    trajectory, engine = agent(streams, "12 and 3", "36")
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(check_whole(trajectory, engine)) == 1
    assert [request.sampling.max_tokens for request in engine.requests][1] == 50


def test_branches_other_conversations_and_rewritten_histories_begin_samples_of_their_own(agent):
    async def many(task, endpoint):
        client, messages = client_of(endpoint), asked(task)

        async def ask(messages, **options):
            answer = await client.chat.completions.create(model="m", messages=messages, **options)
            return {"role": "assistant", "content": answer.choices[0].message.content}

        first = await ask(messages)  # first
        await ask([*messages, first, {"role": "user", "content": "a"}])  # extends
        await ask([*messages, first, {"role": "user", "content": "b"}])  # branch
        await ask([{"role": "system", "content": "You search."}, {"role": "user", "content": "12"}])  # other
        await ask([*messages, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "c"}])  # rewritten

    trajectory, engine = agent(many, "12", "3", "4", "5", "6")
    rules = {rule: trajectory.counts[f"calls_{rule}"] for rule in ("first", "extends", "branch", "other", "rewritten")}
    assert rules == dict.fromkeys(rules, 1)
    samples = check_whole(trajectory, engine)
    assert [sum(sample.loss_mask) for sample in samples] == [length("12", "3"), length("4"), length("5"), length("6")]
    branch = samples[1]
    begin = (*engine.requests[0].tokens, *RENDERER.encode("12"), STOP)
    assert tuple(branch.tokens)[: len(begin)] == begin
    assert {sample.trajectory for sample in samples} == {"t/0"} and [sample.order for sample in samples] == [0, 1, 2, 3]
    assert all(origin is Origin.PROMPT for origin in tuple(branch.origin)[: len(engine.requests[2].tokens)])


def test_parallel_calls_are_kept_apart(agent):
    async def parallel(task, endpoint):
        client = client_of(endpoint)

        async def sub(name):
            messages = [{"role": "system", "content": name}, {"role": "user", "content": "12*3?"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": name}]

        await asyncio.gather(*(sub(name) for name in ("12", "3", "36", "is")))

    trajectory, engine = agent(parallel, *["The answer is 36."] * 12)
    samples = check_whole(trajectory, engine)
    assert len(samples) == 4 and all(sum(sample.loss_mask) == 3 * length("The answer is 36.") for sample in samples)
    assert trajectory.counts["calls_extends"] == 8


def test_several_samples_of_one_request_are_siblings(agent):
    async def both(task, endpoint):
        answer = await client_of(endpoint).chat.completions.create(model="m", messages=asked(task), n=2)
        assert [choice.message.content for choice in answer.choices] == ["12", "36"]
        messages = [*asked(task), {"role": "assistant", "content": "36"}, {"role": "user", "content": "is"}]
        await client_of(endpoint).chat.completions.create(model="m", messages=messages)

    trajectory, engine = agent(both, "12", "36", "3")
    samples = check_whole(trajectory, engine)
    assert [sum(sample.loss_mask) for sample in samples] == [length("12"), length("36", "3")] and trajectory.counts["calls_branch"] == 1


def test_a_retry_gets_the_answer_that_was_sampled(agent):
    async def retries(task, endpoint):
        impatient = client_of(endpoint, timeout=0.4, max_retries=3)
        answer = await impatient.chat.completions.create(model="m", messages=asked(task))
        assert answer.choices[0].message.content == "12 36"

    engine = FakeEngine(script("12 36"), pace_s=0.25)
    trajectory, _ = agent(retries, engine=engine)
    assert len(engine.requests) == 1 and len(trajectory.turns) == 1 and trajectory.counts["calls_retried"] >= 1


def test_auxiliary_models_and_forced_forms_are_recorded_and_do_not_train(agent):
    async def mixed(task, endpoint):
        client = client_of(endpoint)
        await client.chat.completions.create(model="small-haiku-1", messages=[{"role": "user", "content": "title?"}])
        first = await client.chat.completions.create(model="m", messages=asked(task))
        biased = [*asked(task), {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "12"}]
        second = await client.chat.completions.create(model="m", messages=biased, logit_bias={"5": 3})
        biased += [{"role": "assistant", "content": second.choices[0].message.content}, {"role": "user", "content": "3"}]
        await client.chat.completions.create(model="m", messages=biased)

    trajectory, engine = agent(mixed, "12", "36", "3", "is", untrained_models=["*haiku*"])
    samples = samples_of(trajectory)
    assert trajectory.counts["calls_untrained"] == 2 and [sum(sample.loss_mask) for sample in samples] == [length("36"), length("is")]
    assert tuple(samples[1].tokens)[: len(engine.requests[3].tokens)] == tuple(engine.requests[3].tokens)


def test_completions_go_on_by_their_text(agent):
    async def react(task, endpoint):
        client = client_of(endpoint)
        one = await client.completions.create(model="m", prompt="12*3?", max_tokens=20)
        await client.completions.create(model="m", prompt=f"12*3?{one.choices[0].text} 36 ", max_tokens=20)

    trajectory, engine = agent(react, "The answer", "is")
    (sample,) = check_whole(trajectory, engine)
    assert tuple(sample.tokens) == (*engine.requests[1].tokens, *RENDERER.encode("is"), STOP)


@pytest.mark.parametrize(
    "limits, words", [(Limits(1, 2000, 200), "rollout.max_turns = 1"), (Limits(9, 60, 200), "rollout.max_tokens = 60")]
)
def test_a_limit_refuses_a_call_and_the_trajectory_is_truncated(agent, limits, words):
    async def goes_on(task, endpoint):
        client, messages = client_of(endpoint), asked(task)
        with pytest.raises(BadRequestError, match=words):
            for _ in range(9):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "12 " * 9}]

    trajectory, engine = agent(goes_on, *["The answer is 36."] * 9, limits=limits)
    assert trajectory.outcome is Outcome.TRUNCATED and trajectory.turns
    check_whole(trajectory, engine)


def test_a_program_that_ends_at_a_limit_s_error_is_truncated_too(agent):
    async def goes_on(task, endpoint):
        client, messages = client_of(endpoint), asked(task)
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "12"}]

    trajectory, engine = agent(goes_on, *["The answer is 36."] * 9, limits=Limits(2, 2000, 200))
    assert (trajectory.outcome, trajectory.error, len(trajectory.turns)) == (Outcome.TRUNCATED, None, 2)
    assert "rollout.max_turns = 2" in trajectory.turns[-1].notes[-1].attachments["ended_by"]
    check_whole(trajectory, engine)


@pytest.mark.parametrize(
    ("asks", "goes_on", "outcome"),
    [(None, False, Outcome.TRUNCATED), (3, False, Outcome.ENV_ERROR), (None, True, Outcome.ENV_ERROR)],
    ids=["the-run's-limit", "its-own-limit", "it-went-on"],
)
def test_a_program_that_fails_at_a_reply_that_the_run_has_cut_is_truncated(agent, asks, goes_on, outcome):
    async def strict(task, endpoint):
        client, messages = client_of(endpoint), asked(task)
        answer = await client.chat.completions.create(model="m", messages=messages, **({} if asks is None else {"max_tokens": asks}))
        assert answer.choices[0].finish_reason == "length"
        if goes_on:
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "12"}]
            last = await client.chat.completions.create(model="m", messages=messages)
            assert last.choices[0].finish_reason == "stop"
        raise RuntimeError("a reply that is not whole, or anything else")

    trajectory, engine = agent(strict, "The answer is 36.", "36", limits=Limits(9, 2000, 3))
    assert trajectory.outcome is outcome and (trajectory.error is None) == outcome.valid
    if outcome is Outcome.TRUNCATED:
        assert "not whole" in trajectory.turns[-1].notes[-1].attachments["ended_by"]
    check_whole(trajectory, engine)


def test_an_engine_that_is_lost_aborts_the_trajectory_whatever_the_program_does(agent):
    async def stubborn(task, endpoint):
        client = client_of(endpoint, max_retries=0)
        for _ in range(100):
            try:
                await client.chat.completions.create(model="m", messages=asked(task))
            except Exception:
                await asyncio.sleep(0.01)

    trajectory, _ = agent(stubborn, EngineLost("gone"))
    assert (trajectory.outcome, trajectory.error.where, trajectory.error.kind) == (Outcome.ABORTED, "engine", "EngineLost")


def test_what_was_sampled_before_the_time_is_over_is_kept(agent):
    async def waits(task, endpoint):
        await client_of(endpoint).chat.completions.create(model="m", messages=asked(task))

    engine = FakeEngine(lambda request: [*((token, -0.5) for token in RENDERER.encode("The answer")), HANG])
    trajectory, _ = agent(waits, engine=engine, deadline=lambda: Deadline.after(0.5))
    assert trajectory.outcome is Outcome.TIMEOUT
    assert tuple(trajectory.turns[0].tokens) == RENDERER.encode("The answer") and trajectory.turns[0].finish is Finish.ABORT


def test_a_program_that_fails_is_an_error_of_the_environment_and_its_calls_are_kept(agent):
    async def breaks(task, endpoint):
        await client_of(endpoint).chat.completions.create(model="m", messages=asked(task))
        raise KeyError("x")

    trajectory, _ = agent(breaks, "12")
    assert (trajectory.outcome, trajectory.error.kind, len(trajectory.turns)) == (Outcome.ENV_ERROR, "KeyError", 1)

    async def idle(task, endpoint):
        return 1.0

    trajectory, _ = agent(idle)
    assert trajectory.outcome is Outcome.ENV_ERROR and "without a model call" in trajectory.error.message


def test_a_key_opens_its_own_session_alone_and_nothing_once_it_is_over(agent):
    import http.client
    from urllib.parse import urlsplit

    kept = []

    def ask(url, path, headers):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("POST", path, b"{}", {"content-type": "application/json", **headers})
        return connection.getresponse().status

    async def tries(task, endpoint):
        kept.append(endpoint)
        await client_of(endpoint).chat.completions.create(model="m", messages=asked(task))
        for path, headers, status in (
            ("/v1/chat/completions", {}, 401),
            ("/v1/chat/completions", {"authorization": "Bearer wrong"}, 401),
            ("/s/wrong/v1/chat/completions", {"authorization": f"Bearer {endpoint.key}"}, 401),
            ("/v1/chat/completions", {"x-api-key": endpoint.key}, 400),
            ("/pause_generation", {"x-api-key": endpoint.key}, 404),
            ("/update_weights_from_disk", {"x-api-key": endpoint.key}, 404),
        ):
            assert await asyncio.to_thread(ask, endpoint.url, path, headers) == status, path

    trajectory, _ = agent(tries, "12")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert len(kept[0].key) >= 32


async def played_alone(make, engine):
    """A trajectory of the factory's environment, in resources of its own."""
    async with aclosing(Resources()) as resources:
        own = resources.of_group(TASK).of_trajectory()

        async def open_env():
            return make(**await own.open(make.needs))

        return await TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, LIMITS).to_end(open_env)


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["WHET_TASK"]))
assert "label" not in task and task["metadata"] == {"level": 2} and sys.stdin.read() == "12*3?"
assert "SECRET" not in os.environ
body = json.dumps({"model": "m", "messages": task["prompt"]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
open(os.environ["WHET_SCORE"], "w").write("0.25")
sys.exit(int(os.environ.get("WITH", "0")))
"""


@pytest.mark.parametrize("sandbox", [True, False])
@pytest.mark.parametrize(
    "score, status, expected", [("file", 0, 0.25), ("exit", 0, 1.0), ("exit", 3, 0.0), ("none", 0, None), ("none", 3, "error")]
)
def test_a_command_plays_and_is_scored_by_its_end_or_its_file(monkeypatch, score, status, expected, sandbox):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("WITH", str(status))
    options = {"command": [sys.executable, "-c", PROGRAM], "score": score, "variables": ["WITH"], "sandbox": sandbox}
    trajectory = run(played_alone(build_env_factory(EnvConfig(name="program", options=options)), FakeEngine(script("36"))))
    if expected == "error":
        assert trajectory.outcome is Outcome.ENV_ERROR and "ended with status 3" in trajectory.error.message
        return
    assert (trajectory.outcome, trajectory.turns[-1].reward) == (Outcome.COMPLETED, expected), trajectory.error
    assert trajectory.turns[-1].notes[-1].attachments == {"exit": status, "stdout": "36\n", "stderr": ""}
    assert trajectory.rewards is None and samples_of(trajectory)[0].valid is False, "no reward has scored it yet"


def test_a_command_names_files_of_the_folder_where_the_run_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file \./agent\.py in .*env\.options\.command"):
        build_env_factory(EnvConfig(name="program", options={"command": [sys.executable, "./agent.py"]}))()
    (tmp_path / "agent.py").write_text(PROGRAM)
    options = {"command": [sys.executable, "./agent.py"], "score": "file"}
    trajectory = run(played_alone(build_env_factory(EnvConfig(name="program", options=options)), FakeEngine(script("36"))))
    assert (trajectory.outcome, trajectory.turns[-1].reward) == (Outcome.COMPLETED, 0.25), trajectory.error


def test_a_program_that_ends_before_it_asks_is_an_error_with_its_last_words():
    options = {"command": [sys.executable, "-c", "raise KeyError('no such room')"], "score": "exit", "sandbox": False}
    trajectory = run(played_alone(build_env_factory(EnvConfig(name="program", options=options)), FakeEngine()))
    assert trajectory.outcome is Outcome.ENV_ERROR and "no such room" in trajectory.error.message


LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
child = subprocess.Popen([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), flush=True)
sys.exit(3)
"""


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    options = {"command": [sys.executable, "-c", LEAVES], "score": "none", "sandbox": False}
    trajectory = run(played_alone(build_env_factory(EnvConfig(name="program", options=options)), FakeEngine()))
    assert trajectory.outcome is Outcome.ENV_ERROR
    (pid,) = re.findall(r"ended with status 3: (\d+)", trajectory.error.message)
    assert not Path(f"/proc/{pid}").exists(), "its keeper ended the child, which has a session of its own"


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "needs a command"),
        ({"command": ["a"], "function": "os:getcwd"}, "one of them"),
        ({"command": ["a"], "score": "best"}, "score is none, exit or file"),
        ({"command": ["a"], "untrained_rules": ["branches"]}, "there is no rule 'branches'"),
        ({"command": "a b"}, "a list of texts"),
        ({"function": "os:getcwd", "sandbox": True}, "a function runs in the run's own process"),
        ({"command": ["a"], "sandbox": "no"}, "sandbox is true or false"),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, options, words):
    monkeypatch.setattr("whet.record.program.program_needs", lambda options, sandbox: {})
    make = build_env_factory(EnvConfig(name="program", options=options))
    with pytest.raises(ValueError, match=words):
        make()
