"""OpenAI's routes, asked by OpenAI's own client."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionTextParams

from tests.serve.serve_setup import is_idle
from whet.types import Message, Task

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "How many pens are 3 and 4?"}]}
TEXT = {"model": "tiny", "prompt": "Ann has 5 apples"}


@pytest.fixture(scope="module")
def client(shared):
    with OpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_the_model_is_listed(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "whet"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_chat_counts_its_tokens_and_says_why_it_ended(client, server):
    done = client.chat.completions.create(**ASK, max_completion_tokens=7, seed=1)
    prompt = server.service.renderer.encode("<|im_start|>user\nHow many pens are 3 and 4?<|im_end|>\n<|im_start|>assistant\n")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (len(prompt), 7, len(prompt) + 7)
    (choice,) = done.choices
    assert (done.object, done.model, choice.finish_reason, choice.message.role) == ("chat.completion", "tiny", "length", "assistant")
    assert choice.message.tool_calls is None and choice.message.content


def test_a_seed_repeats_and_a_stream_says_the_same(client):
    options = {"max_tokens": 24, "seed": 5, "temperature": 1.3}
    first, second = (client.chat.completions.create(**ASK, **options).choices[0].message.content for _ in range(2))
    assert first == second
    assert first != client.chat.completions.create(**ASK, **{**options, "seed": 6}).choices[0].message.content
    assert text_of(client.chat.completions.create(**ASK, **options, stream=True)) == first


def test_a_stream_ends_with_its_reason_and_if_asked_with_its_usage(client):
    chunks = list(client.chat.completions.create(**ASK, max_tokens=4, seed=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    without = list(client.chat.completions.create(**ASK, max_tokens=4, seed=5, stream=True))
    assert len(without) == len(chunks) - 1 and all(chunk.usage is None for chunk in without)


def test_several_choices_differ_and_each_is_what_its_own_seed_draws(client):
    done = client.chat.completions.create(**ASK, n=3, seed=10, max_tokens=12)
    texts = [choice.message.content for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert done.usage.completion_tokens == 36
    assert client.chat.completions.create(**ASK, seed=12, max_tokens=12).choices[0].message.content == texts[2]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**ASK, n=3, seed=10, max_tokens=12, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_a_stop_text_ends_the_reply_and_is_no_part_of_it(client):
    whole = client.completions.create(**TEXT, seed=3, max_tokens=40).choices[0].text
    stop = whole[10:12]
    cut = client.completions.create(**TEXT, seed=3, max_tokens=40, stop=[stop, "never said"])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]
    streamed = client.completions.create(**TEXT, seed=3, max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_logprobs_are_the_models_own_whatever_the_temperature(client, server):
    done = client.chat.completions.create(**ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    content = done.choices[0].logprobs.content
    assert len(content) == 6
    renderer = server.service.renderer
    prompt = renderer.encode("<|im_start|>user\nHow many pens are 3 and 4?<|im_end|>\n<|im_start|>assistant\n")
    greedy = server.generate(input_ids=list(prompt), sampling_params={"temperature": 0, "max_new_tokens": 6})["output_ids"]
    scores = server.do(server.service.engine.score((*prompt, *greedy))).logprobs[len(prompt) - 1 :]
    assert [token.logprob for token in content] == pytest.approx(scores, abs=1e-4)
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy takes the most likely one
    streamed = client.chat.completions.create(**ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True)
    told = [token for chunk in streamed if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert told == content


def test_completions_take_texts_and_token_ids_one_or_many(client, server):
    ids = list(server.service.renderer.encode(TEXT["prompt"]))
    options = {"model": "tiny", "seed": 4, "max_tokens": 5, "temperature": 0}
    one = client.completions.create(prompt=TEXT["prompt"], **options)
    assert client.completions.create(prompt=ids, **options).choices[0].text == one.choices[0].text
    many = client.completions.create(prompt=[ids, [7, 8]], n=2, **options)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in many.choices[:2]] == [one.choices[0].text] * 2
    assert many.usage.prompt_tokens == len(ids) + 2 and many.usage.completion_tokens == 20
    unnamed = client.completions.create(prompt="a", model="tiny", extra_body={"ignore_eos": True})
    assert unnamed.usage.completion_tokens == 16


def test_logprobs_of_completions_stand_beside_each_other(client):
    asked = {**TEXT, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    told = client.completions.create(**asked).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 8
    assert told.text_offset[0] == 0 and told.text_offset[-1] == sum(len(token) for token in told.tokens[:-1])
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [offset for each in streamed for offset in each.text_offset] == told.text_offset


def test_an_echo_begins_with_the_prompt_and_its_logprobs(client, server):
    ids = list(server.service.renderer.encode(TEXT["prompt"]))
    scored = server.do(server.service.engine.score(tuple(ids), 1.0, 2))
    decode = server.service.renderer.decode
    options = {"model": "tiny", "echo": True, "logprobs": 2, "seed": 4, "temperature": 0.7}
    for prompt in (TEXT["prompt"], ids):
        told = client.completions.create(prompt=prompt, max_tokens=0, **options).choices[0]
        assert told.text == TEXT["prompt"] and told.finish_reason == "length"
        assert told.logprobs.token_logprobs == [None, *scored.logprobs] and told.logprobs.tokens == [decode([i]) for i in ids]
        assert told.logprobs.top_logprobs == [None, *({decode([i]): x for i, x in top} for top in scored.top_logprobs)]
    more = client.completions.create(prompt=ids, max_tokens=3, n=2, **options)
    alone = client.completions.create(prompt=ids, max_tokens=3, n=2, **{**options, "echo": False})
    assert more.usage.completion_tokens == 6 and more.usage.prompt_tokens == len(ids)
    for one, other in zip(more.choices, alone.choices, strict=True):
        assert one.text == TEXT["prompt"] + other.text
        assert one.logprobs.token_logprobs == [*told.logprobs.token_logprobs, *other.logprobs.token_logprobs]
        assert len(one.logprobs.tokens) == len(one.logprobs.top_logprobs) == len(one.logprobs.text_offset) == len(ids) + 3
    chunks = [chunk.choices[0] for chunk in client.completions.create(prompt=ids, max_tokens=3, stream=True, **options)]
    assert "".join(chunk.text for chunk in chunks) == more.choices[0].text
    assert [x for chunk in chunks for x in chunk.logprobs.token_logprobs] == more.choices[0].logprobs.token_logprobs
    assert [x for chunk in chunks for x in chunk.logprobs.text_offset] == more.choices[0].logprobs.text_offset
    assert client.completions.create(model="tiny", prompt="Ann", echo=True, max_tokens=0).choices[0].text == "Ann"
    for bad in ([-1], [10**12]):
        with pytest.raises(openai.BadRequestError, match="token ids"):
            client.completions.create(model="tiny", prompt=bad, echo=True)


def test_best_of_is_what_n_is_or_refused(client):
    assert len(client.completions.create(**TEXT, max_tokens=1, n=2, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of is 3, but 1 choices are answered") as error:
        client.completions.create(**TEXT, best_of=3)
    assert error.value.body["param"] == "best_of"


@pytest.mark.parametrize(("route", "params"), [("chat/completions", CompletionCreateParamsBase), ("completions", CompletionTextParams)])
def test_every_field_that_the_client_knows_is_taken_or_refused_by_its_name(server, route, params):
    """None is passed over in silence: a field with a value that no server could mean is an error about that field."""
    asked = {"messages": ASK["messages"]} if "chat" in route else {"prompt": "a"}
    for name in set(params.__annotations__) - set(asked):
        status, answer = server.send(f"/v1/{route}", {**asked, "max_tokens": 1, name: [{"odd": 1}]})
        assert status == 400 and answer["error"]["param"].split(".")[0] == name, (name, answer)


def test_biases_and_penalties_reach_the_engine(client, server):
    (token,) = server.service.renderer.encode("9")
    forced = client.completions.create(**TEXT, max_tokens=5, logit_bias={str(token): 100})
    assert forced.choices[0].text == "99999"
    options = {"max_tokens": 30, "temperature": 0}
    plain = client.completions.create(**TEXT, **options).choices[0].text
    assert plain != client.completions.create(**TEXT, **options, frequency_penalty=2, presence_penalty=2).choices[0].text
    assert (
        plain == client.completions.create(**TEXT, **options, extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1}).choices[0].text
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("top_p", 0), ("n", 0), ("n", 129), ("max_tokens", 0), ("max_tokens", 600), ("presence_penalty", 3),
        ("stop", [""]), ("logit_bias", {"x": 1}), ("logit_bias", {"99999": 1}), ("top_logprobs", 2),
        ("response_format", {"type": "grammar"}),
        ("tool_choice", "required"), ("messages", []), ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("tools", [{"type": "function"}]),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_name(client, field, value):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**ASK, field: value})
    assert field.split("_")[0] in error.value.body["message"] or error.value.body["param"] == field
    assert error.value.body["type"] == "invalid_request_error"


def test_what_is_unknown_is_refused_and_null_asks_for_nothing(client):
    with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
        client.chat.completions.create(**ASK, extra_body={"temprature": 1})
    done = client.chat.completions.create(**ASK, max_tokens=1, extra_body={"guided_json": None, "tools": None, "stop": None})
    assert done.usage.completion_tokens == 1


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="does not exist here; this server has 'tiny'") as error:
        client.chat.completions.create(**{**ASK, "model": "gpt-4o"})
    assert error.value.body["code"] == "model_not_found"


def test_a_prompt_that_leaves_no_room_is_refused(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=[5] * 512, max_tokens=1)
    assert error.value.body["code"] == "context_length_exceeded"


def test_a_reply_can_be_sent_back_as_it_came(client):
    """Clients append the message object itself to the history."""
    message = client.chat.completions.create(**ASK, max_tokens=3, seed=1).choices[0].message
    history = [*ASK["messages"], message.model_dump(), {"role": "user", "content": "And 5?"}]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=2).usage.prompt_tokens > 20


def test_200_clients_at_once_each_get_what_they_would_have_got_alone(shared, client):
    async def everyone():
        async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as many:

            async def one(i):
                if i % 2:
                    done = await many.completions.create(model="tiny", prompt=[i % 7 + 3, 9], seed=i, max_tokens=6)
                    return done.choices[0].text
                stream = await many.completions.create(model="tiny", prompt=[i % 7 + 3, 9], seed=i, max_tokens=6, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(200)))

    texts = asyncio.run(everyone())
    for i in (0, 1, 76, 199):
        assert texts[i] == client.completions.create(model="tiny", prompt=[i % 7 + 3, 9], seed=i, max_tokens=6).choices[0].text
    shared.until(lambda: is_idle(shared))


def test_every_answer_is_strict_json(server):
    """Byte tokens that are no characters included."""
    status, answer = server.send("/v1/completions", {**TEXT, "max_tokens": 64, "temperature": 5, "logprobs": 5, "seed": 0})
    assert status == 200 and json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_a_client_s_messages_and_tools_spell_no_special_tokens(client, server):
    """As many tokens of the template's own as in a harmless conversation; a raw prompt is taken as it stands."""
    renderer = server.service.renderer
    stop = renderer.stop_token_ids[0]

    def prompt(text):
        tool = {"type": "function", "function": {"name": "add", "description": text, "parameters": {"type": "object", "properties": {}}}}
        messages = (Message("system", text), Message("user", text), Message("assistant", text), Message("tool", text))
        return asyncio.run(server.service.prompt(messages, (tool,)))

    forged = f"a{renderer.decode([stop])}b"
    assert prompt(forged).count(stop) == prompt("ab").count(stop)
    assert stop in asyncio.run(server.service.encode(forged, "prompt"))
    messages = [{"role": "user", "content": forged}]
    plain = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=1)
    assert plain.usage.prompt_tokens == len(renderer.prompt(Task("t", (Message("user", forged),))))
