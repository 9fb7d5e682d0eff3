"""gpt-oss: messages on channels. `analysis` is thinking, `commentary` with a recipient is a call, `final` is the answer.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>{...}<|call|>`.
The recipient may also come before the channel. A turn ends with a sampled `<|call|>` or `<|return|>`; in history the template
writes `<|end|>` for the latter.
"""

from __future__ import annotations

import re
from contextlib import suppress

from whet.data.formats.format import Forced, Format
from whet.data.formats.reading import MAX_ATTEMPTS, ReplyParts, TooManyCalls, as_arguments, as_name, read_json, single_parameter, skip_space
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import JSON

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
_BODY_END = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START))))
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]{1,256})")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w{1,64})")
_MAX_MESSAGES = 16 * MAX_ATTEMPTS


def parse_harmony(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls, the thinking and the words of a reply, which begins behind `<|start|>assistant`."""
    reply, thinking = ReplyParts(), list[str]()
    with suppress(TooManyCalls):
        _read(text, tools, reply, thinking)
    return reply.parsed("\n".join(thinking).strip() or None)


def _read(text: str, tools: ToolSchemas, reply: ReplyParts, thinking: list[str]) -> None:
    at, spoken = 0, False
    for _ in range(_MAX_MESSAGES):
        head = text.find(MESSAGE, at)
        if head < 0:
            break
        header = text[max(at, head - 1024) : head]
        found = _BODY_END.search(text, head)
        body = text[head + len(MESSAGE) : len(text) if found is None else found.start()]
        at = len(text) if found is None else found.start() + (0 if found[0] == START else len(found[0]))
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None and recipient[1] != "user":
            _call(recipient[1], body, tools, reply)
        elif channel is not None and channel[1] == "analysis":
            thinking.append(body)
        else:
            reply.say(f"\n{body}" if spoken else body)
            spoken = True
    rest = text[at:]
    if recipient := _RECIPIENT.search(rest[:1024]):
        reply.fault(f"the call of {recipient[1]} has no {MESSAGE}")
    elif rest.strip() and CHANNEL not in rest and START not in rest:
        reply.say(rest)


def _call(recipient: str, body: str, tools: ToolSchemas, reply: ReplyParts) -> None:
    name = recipient.removeprefix(FUNCTIONS)
    try:
        reply.call(as_name(name), _arguments(body, name, tools))
    except ValueError as error:
        reply.fault(str(error))


def _arguments(body: str, name: str, tools: ToolSchemas) -> dict[str, JSON]:
    """The arguments of a call; a body that is no JSON is the one argument of a tool that takes plain text, such as `python`."""
    try:
        value, end = read_json(body, 0)
        if skip_space(body, end) != len(body):
            raise ValueError("the tool call is not valid JSON: more text behind it")
        return as_arguments(value, name)
    except ValueError:
        single = single_parameter(tools, name)
        takes_text = any(tool["function"]["name"] == name for tool in tools) and single is not None
        if not takes_text or single is None or body.lstrip().startswith("{"):
            raise
        return {single: body}


def visible_harmony(text: str) -> tuple[str, str]:
    """The thinking and the words of the beginning of a reply, as far as no later text changes them."""
    words, thinking, at = list[str](), list[str](), 0
    while (head := text.find(MESSAGE, at)) >= 0:
        header = text[max(at, head - 1024) : head]
        found = _BODY_END.search(text, head)
        body = text[head + len(MESSAGE) : len(text) if found is None else found.start()]
        at = len(text) if found is None else found.start() + (0 if found[0] == START else len(found[0]))
        channel = _CHANNEL.search(header)
        if _RECIPIENT.search(header) is not None:
            continue
        into = thinking if channel is not None and channel[1] == "analysis" else words
        into.append(body if found is not None else body.rstrip())
    return "\n".join(thinking).strip(), "\n".join(words).strip("\n")


HARMONY = Format(
    "harmony",
    parse_harmony,
    openers=None,
    markup=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    exact=True,
    thinks=False,
    stops=(RETURN, CALL),
    closing=END,
    visible=visible_harmony,
    forced=Forced("", lambda name: f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}", "", None, bare=True),
)
