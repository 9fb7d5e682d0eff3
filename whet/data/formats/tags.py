"""Plain tags, as Search-R1 and slime have them: `<search>some words</search>` calls the tool `search`.

The tags are the names of the tools. The text between them is the tool's one argument, or a JSON object where the tool takes several. A turn
ends with the closing tag, and the answer follows as `<information>...</information>` inside the assistant's turn. `<answer>...</answer>`
ends the conversation like any reply without a call, unless a tool is called `answer`.
"""

from __future__ import annotations

from contextlib import suppress

from whet.data.formats.format import Format
from whet.data.formats.reading import ReplyParts, TooManyCalls, markup_pattern, outside_thinking, parameters_of, read_json, single_parameter
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import Message

ANSWER_END = "</answer>"


def parse_tags(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them."""
    reply = ReplyParts()
    names = [tool["function"]["name"] for tool in tools]
    with suppress(TooManyCalls):
        _read(text, names, tools, reply)
    return reply.parsed()


def _read(text: str, names: list[str], tools: ToolSchemas, reply: ReplyParts) -> None:
    if not names:
        reply.say(text)
        return
    pattern = markup_pattern(*(f"<{name}>" for name in names), *(f"</{name}>" for name in names))
    spoken, at, stray = 0, 0, ""
    while (found := outside_thinking(text, pattern, at)) is not None:
        at = found.end()
        if found[0].startswith("</"):
            stray = stray or found[0]
            continue
        name = found[0][1:-1]
        close = text.find(f"</{name}>", at)
        reply.say(text[spoken : found.start()])
        if close < 0:
            reply.fault(f"a <{name}> is never closed by </{name}>")
            return
        _call(name, text[at:close], tools, reply)
        spoken = at = close + len(name) + 3
    reply.say(text[spoken:])
    if stray:
        reply.fault(f"a {stray} has no <{stray[2:]} before it")


def _call(name: str, inner: str, tools: ToolSchemas, reply: ReplyParts) -> None:
    key = single_parameter(tools, name)
    try:
        if key is not None:
            reply.call(name, {key: inner.strip()})
            return
        value, end = read_json(inner, 0)
        if not isinstance(value, dict) or inner[end:].strip():
            raise ValueError("the tool call is not one JSON object")
        reply.call(name, value)
    except ValueError as error:
        keys = ", ".join(map(str, parameters_of(tools, name).get("required", ())))
        reply.fault(f"{name} takes {keys}, so a JSON object with them is due between <{name}> and </{name}>: {error}")


def wrap_information(message: Message) -> str:
    """A tool's answer as it is appended to the assistant's turn. What it says cannot close itself."""
    content = message.content.strip().replace("</information>", "< /information>")
    return f"\n\n<information>{content}</information>\n\n"


def tag_ends(tools: ToolSchemas) -> tuple[str, ...]:
    """The closing tags of the tools, and that of the answer."""
    return tuple(dict.fromkeys((*(f"</{tool['function']['name']}>" for tool in tools), ANSWER_END)))


TAGS = Format(
    "tags",
    parse_tags,
    openers=None,
    thinks=False,
    listed=False,
    wrap=wrap_information,
    stop_texts=tag_ends,
    why_not_forced="its calls are plain tags",
)
