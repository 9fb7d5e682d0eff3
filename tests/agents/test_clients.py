"""`whet serve` asked by the official clients of Anthropic and OpenAI and by OpenAI's agents (`make test-agents`)."""

import re
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agents.environments import run_program
from tests.serve.dialects import ARGUMENTS, CALL, thinker
from tests.serve.serve_setup import Live, assert_all_free, is_idle, live, model_folder, scripted
from whet.engine.base import EngineFailed
from whet.serve.access import Keys
from whet.types import Finish

pytestmark = pytest.mark.agents
KEY = "a-key-for-clients-only"
ANTHROPIC = """
import json, sys
import anthropic
from anthropic import Anthropic
url, key = sys.argv[1:3]
client = Anthropic(base_url=url, api_key=key, max_retries=0)
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
ASK = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "How many?"}]}
def tell(value):
    print(json.dumps(value))
"""
OPENAI = """
import json, sys
import openai
from openai import OpenAI
url, key = sys.argv[1:3]
client = OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": False}]
ASK = {"model": "tiny", "input": "How many?"}
def tell(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("agents") / "model")


@contextmanager
def saying(model, *texts):
    """A server whose model says the texts, one after the other, and the last one from then on."""
    with Live(scripted(model, texts[0])) as server:
        renderer, left = server.service.renderer, list(texts)

        def script(request):
            text = left.pop(0) if len(left) > 1 else left[0]
            return [*((token, -0.1) for token in (*renderer.encode(text), renderer.stop_token_ids[0])), Finish.STOP]

        server.service.engine.script = script
        yield server


def run(server, base, program, key="unused"):
    return run_program("clients", base + textwrap.dedent(program), server.url, key)


def test_anthropic_s_client_reads_messages_whole_and_streamed(model):
    program = """
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    raw = [event.type for event in client.messages.create(**ASK, tools=TOOLS, stream=True)]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "7", "is_error": True} for block in whole.content[1:]]
    history = [*ASK["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    again = client.messages.create(**{**ASK, "messages": history}, tools=TOOLS)
    counted = client.messages.count_tokens(model="tiny", messages=history, tools=TOOLS)
    def said(message):
        return [block.text if block.type == "text" else [block.name, block.input] for block in message.content]
    tell([said(whole), said(final), "".join(texts), whole.stop_reason, final.stop_reason, raw[0], raw[-1],
          again.usage.input_tokens == counted.input_tokens, final.usage.output_tokens == whole.usage.output_tokens])
    """
    with saying(model, f"Let me see.\n{CALL}\n{CALL}") as server:
        said = ["Let me see.", ["add", ARGUMENTS], ["add", ARGUMENTS]]
        assert run(server, ANTHROPIC, program) == [
            *(said, said, "Let me see.", "tool_use", "tool_use"),
            *("message_start", "message_stop", True, True),
        ]


def test_the_program_on_the_page_runs(model):
    page = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text()
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "import Anthropic" in block]
    with saying(model, f"Let me see.\n{CALL}") as server:
        told = 'import json; print(json.dumps([message.stop_reason, len(message.content)]))'
        assert run_program("clients", program.replace("http://127.0.0.1:8000", server.url) + told) == ["tool_use", 2]


def test_anthropic_s_client_reads_thinking_and_sends_it_back(model):
    program = """
    with client.messages.stream(**ASK, tools=TOOLS, thinking={"type": "adaptive"}) as stream:
        final = stream.get_final_message()
    history = [*ASK["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": "And 5?"}]
    client.messages.create(**{**ASK, "messages": history}, tools=TOOLS)
    tell([[block.type for block in final.content], final.content[0].thinking, bool(final.content[0].signature)])
    """
    with Live(thinker(model, "<think>\nSo.\n</think>\n\nSeven.")) as server:
        assert run(server, ANTHROPIC, program) == [["thinking", "text"], "So.", True]


def test_anthropic_s_client_names_the_errors(model):
    program = """
    def kind(**options):
        try:
            client.messages.create(**{**ASK, **options})
        except anthropic.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.body["error"]["type"]]
    held, client = client, Anthropic(base_url=url, api_key="wrong", max_retries=0)
    found = [kind()]
    client = held
    bearer = Anthropic(base_url=url, auth_token=key, max_retries=0).messages.create(**ASK).type
    tell([*found, kind(model="other"), kind(messages=[]), kind(extra_body={"temperature": -1}), bearer])
    """
    with live(model, Keys(KEY, None)) as server:
        assert run(server, ANTHROPIC, program, KEY) == [
            ["AuthenticationError", 401, "authentication_error"],
            ["NotFoundError", 404, "not_found_error"],
            ["BadRequestError", 400, "invalid_request_error"],
            ["BadRequestError", 400, "invalid_request_error"],
            "message",
        ]


@pytest.mark.parametrize(("base", "call"), [(ANTHROPIC, "messages"), (OPENAI, "responses")], ids=["anthropic", "openai"])
def test_a_client_asks_again_where_the_engine_failed(model, base, call):
    program = f"""
    client = client.with_options(max_retries=2)
    done = client.{call}.create(**ASK)
    try:
        next(stream for stream in client.{call}.create(**ASK, stream=True) if stream.type in ("error", "response.failed"))
        ended = "told"
    except StopIteration:
        ended = "whole"
    except Exception as error:
        ended = "raised " + str("no memory" in str(error))
    tell([done.id[:3], ended])
    """
    with saying(model, "Seven.") as server:
        script, tries = server.service.engine.script, []

        def failing(request):
            tries.append(request.id)
            if len(tries) < 3:
                return [EngineFailed("no memory")]
            return [*list(script(request))[:2], EngineFailed("no memory")] if len(tries) > 3 else script(request)

        server.service.engine.script = failing
        told = run(server, base, program)
        assert told == (["msg", "raised True"] if call == "messages" else ["res", "told"])
        assert len(tries) == 4, "twice again for the first, and not for a stream that had begun"


@pytest.mark.parametrize(("base", "call"), [(ANTHROPIC, "messages"), (OPENAI, "responses")], ids=["anthropic", "openai"])
def test_a_connection_that_is_cut_ends_its_request(model, base, call):
    program = f"""
    stream = client.{call}.create(**ASK, stream=True, extra_body={{"ignore_eos": True}})
    kinds = [next(stream).type for _ in range(3)]
    stream.close()
    client.close()
    tell(len(kinds))
    """
    with live(model) as server:
        assert run(server, base, program) == 3
        server.until(lambda: is_idle(server))
        assert_all_free(server)


def test_openai_s_client_reads_responses_whole_and_streamed(model):
    program = """
    whole = client.responses.create(**ASK, tools=TOOLS)
    with client.responses.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in final.output[1:]]
    history = [{"role": "user", "content": "How many?"}, *final.output, *outputs]
    again = client.responses.create(model="tiny", input=history, tools=TOOLS)
    def said(response):
        return [item.content[0].text if item.type == "message" else [item.name, json.loads(item.arguments)] for item in response.output]
    tell([said(whole), said(final), again.status, kinds[0], kinds[-1], kinds.count("response.function_call_arguments.done")])
    """
    with saying(model, f"Let me see.\n{CALL}\n{CALL}") as server:
        said = ["Let me see.", ["add", ARGUMENTS], ["add", ARGUMENTS]]
        assert run(server, OPENAI, program) == [said, said, "completed", "response.created", "response.completed", 2]


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_s_agents_call_their_tools_and_read_the_answers(model, streamed):
    program = f"""
    import asyncio
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    set_tracing_disabled(True)
    calls = []

    @function_tool
    def add(a: int, note: str) -> str:
        calls.append([a, note])
        return str(a + 6)

    async def main():
        served = OpenAIResponsesModel(model="tiny", openai_client=openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0))
        agent = Agent(name="adder", instructions="Add.", model=served, tools=[add])
        if {streamed}:
            result = Runner.run_streamed(agent, "How many?", max_turns=4)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "How many?", max_turns=4)
        tell([calls, result.final_output])

    asyncio.run(main())
    """
    with saying(model, f"I add.\n{CALL}\n{CALL}", "Seven.") as server:
        assert run(server, OPENAI, program) == [[[1, "né"], [1, "né"]], "Seven."]
