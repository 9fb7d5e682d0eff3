"""Programs of others play trajectories unchanged: every token that the model sampled for them trains once, none is tokenised again
(`make test-agents`)."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests.agents.environments import python_of
from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, run
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.rollout.samples import samples_of
from whet.types import Finish, Message, Outcome, SamplingParams, Task

pytestmark = pytest.mark.agents
TASK = Task("t", (Message("user", "12*3?"),), "36")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
TWO = f"{CALL}\n{CALL}"

CHAT = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), [{"role": "user", "content": sys.stdin.read()}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
for _ in range(3):
    if STREAM:
        calls, text = {}, ""
        for event in client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS, stream=True):
            delta = event.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or []:
                calls[call.index] = call
        message = {"role": "assistant", "content": text, "tool_calls": [call.model_dump(exclude={"index"}) for call in calls.values()]}
    else:
        message = client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS).choices[0].message.model_dump()
    messages.append(message)
    if not message["tool_calls"]:
        break
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "36"} for call in message["tool_calls"]]
print(message["content"])
"""
RESPONSES = """
import json, sys
from openai import OpenAI
client, items = OpenAI(), [{"role": "user", "content": sys.stdin.read()}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "calculator", "strict": False, "parameters": PARAMETERS}]
for _ in range(3):
    if STREAM:
        with client.responses.stream(model="gpt-5", input=items, tools=TOOLS, store=False) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(model="gpt-5", input=items, tools=TOOLS, store=False)
    items += [item.model_dump(exclude_none=True) for item in answer.output]
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "36"} for call in calls]
print(answer.output_text)
"""
MESSAGES = """
import sys
from anthropic import Anthropic
client, messages = Anthropic(), [{"role": "user", "content": sys.stdin.read()}]
TOOLS = [{"name": "calculator", "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}}}]
for _ in range(3):
    ask = dict(model="claude", max_tokens=300, messages=messages, tools=TOOLS)
    assert client.messages.count_tokens(model="claude", messages=messages, tools=TOOLS).input_tokens > 5
    if STREAM:
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "36"} for call in calls]})
print(answer.content[0].text)
"""
AGENTS = """
import asyncio, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)

@function_tool
def calculator(expression: str) -> str:
    "Computes."
    return "36"

def agent(name):
    how = {} if STREAM else {"model": OpenAIChatCompletionsModel("gpt-5", AsyncOpenAI())}
    return Agent(name=name, instructions=f"You are {name}.", tools=[calculator], **how)

async def main():
    asked = sys.stdin.read()
    found = await asyncio.gather(*(Runner.run(agent(name), asked) for name in ("12", "3", "36")))
    print([each.final_output for each in found])

asyncio.run(main())
"""
MINI = """
import os, sys
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
model = LitellmTextbasedModel(model_name="openai/gpt-5", cost_tracking="ignore_errors",
    observation_template="{{output.output}} ({{output.returncode}})")
agent = DefaultAgent(model, LocalEnvironment(), system_template="Use bash.", instance_template="{{task}}")
print(agent.run(sys.stdin.read()))
"""


def played(environment, program, replies, *, stream=False):
    """The trajectory of a program and its samples. `replies`: texts, one for each request; or the text for a prompt."""
    engine = FakeEngine()

    def script(request):
        text = replies(RENDERER.decode(request.tokens)) if callable(replies) else replies.pop(0)
        tokens = (*RENDERER.encode(text), STOP)
        assert RENDERER.decode(tokens[:-1]) == text
        return [*((token, -0.01 * (token + 1)) for token in tokens), Finish.STOP]

    engine.script = script
    options = {"command": [python_of(environment), "-c", program.replace("STREAM", str(stream))]}
    make = build_env_factory(EnvConfig(name="program", options=options))
    sampling, limits = SamplingParams(999, stop_token_ids=(STOP,), seed=7), Limits(40, 4000, 400)

    async def main():
        async with aclosing(Resources()) as resources:
            own = resources.of_group(TASK).of_trajectory()

            async def open_env():
                return make(**await own.open(make.needs))

            return await TrajectoryRun("t/0", TASK, engine, RENDERER, sampling, limits).to_end(open_env)

    trajectory = run(main())
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    samples = samples_of(trajectory)
    trained = sorted(token for sample in samples for token, trains in zip(sample.tokens, sample.loss_mask, strict=True) if trains)
    assert trained == sorted(token for _, chunk in engine.chunks for token in chunk.tokens)
    prompts = {tuple(request.tokens) for request in engine.requests}
    for sample in samples:
        mask, tokens = tuple(sample.loss_mask), tuple(sample.tokens)
        for place in range(1, len(mask)):
            assert not mask[place] or mask[place - 1] or tokens[:place] in prompts, "what comes before a reply is its prompt, id by id"
    return trajectory, samples


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("program", [CHAT, RESPONSES, MESSAGES], ids=["openai", "responses", "anthropic"])
def test_a_client_with_tools_is_one_sample(program, stream):
    trajectory, samples = played("clients", program, [TWO, CALL, "The answer is 36."], stream=stream)
    assert len(samples) == 1 and trajectory.counts["calls_extends"] == 2
    assert trajectory.turns[-1].notes[-1].attachments["stdout"] == "The answer is 36.\n"


@pytest.mark.parametrize("responses", [False, True])
def test_agents_of_openai_in_parallel_are_a_sample_each(responses):
    def replies(prompt):
        return "The answer is 36." if "<tool_response>" in prompt else CALL

    trajectory, samples = played("clients", AGENTS, replies, stream=responses)
    assert len(samples) == 3 and trajectory.counts["calls_extends"] == 3
    assert trajectory.turns[-1].notes[-1].attachments["stdout"] == f"{['The answer is 36.'] * 3}\n"


def test_mini_swe_agent_goes_on_behind_the_reply_that_it_threw_away():
    bash = "I look.\n\n```mswea_bash_command\necho 36\n```"
    end = "Done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
    trajectory, samples = played("mini_swe", MINI, [bash, "no command", end])
    assert len(samples) == 2 and (trajectory.counts["calls_extends"], trajectory.counts["calls_branch"]) == (1, 1)
    assert "Submitted" in trajectory.turns[-1].notes[-1].attachments["stdout"]
