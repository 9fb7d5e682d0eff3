"""Programs that play trajectories, written for the clients of OpenAI and Anthropic, OpenAI's agents and mini-swe-agent.

STREAM stands for True or False.
"""

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
import os, re, sys
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

class Careful(LocalEnvironment):
    def execute(self, action, *args, **kwargs):
        harmless = re.fullmatch(r"echo [A-Za-z0-9_ ]*", action["command"].strip())
        return super().execute(action if harmless else {"command": "false"}, *args, **kwargs)

model = LitellmTextbasedModel(model_name="openai/gpt-5", cost_tracking="ignore_errors",
    observation_template="{{output.output}} ({{output.returncode}})")
agent = DefaultAgent(model, Careful(), system_template="Use bash.", instance_template="{{task}}")
print(agent.run(sys.stdin.read()))
"""
LOGPROBS = """
import json, sys
from openai import OpenAI
client, wanted = OpenAI(), ["message.output_text.logprobs"]
answer = client.responses.create(model="gpt-5", input=sys.stdin.read(), include=wanted, top_logprobs=1, store=False)
told = answer.output[0].content[0].logprobs
assert all(len(each.top_logprobs) == 1 and each.top_logprobs[0].logprob >= each.logprob - 1e-5 for each in told)
print(json.dumps([each.logprob for each in told]))
"""
RETRIES = """
import sys
from anthropic import Anthropic
from openai import OpenAI
again, asked = {"x-stainless-retry-count": "1"}, [{"role": "user", "content": sys.stdin.read()}]
claude, gpt = Anthropic().messages, OpenAI().chat.completions
for create, said in ((claude.create, lambda answer: answer.content), (gpt.create, lambda answer: answer.choices[0].message)):
    first = create(model="m", max_tokens=30, messages=asked)
    assert said(create(model="m", max_tokens=30, messages=asked, extra_headers=again)) == said(first)
    asked = [{"role": "user", "content": "And 3*12?"}]
"""
IMPATIENT = """
import sys
from anthropic import Anthropic
from openai import OpenAI
asked, ways = [{"role": "user", "content": sys.stdin.read()}], {"timeout": 0.4, "max_retries": 5}
print(Anthropic(**ways).messages.create(model="m", max_tokens=30, messages=asked).content[0].text)
asked = [{"role": "user", "content": "And 3*12?"}]
print(OpenAI(**ways).chat.completions.create(model="m", max_tokens=30, messages=asked).choices[0].message.content)
"""
