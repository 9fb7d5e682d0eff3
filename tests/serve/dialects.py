"""What the tests of Anthropic's and OpenAI's newer routes share: streams of named events, and a model that thinks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.serve_setup import Live, scripted
from whet.data.template import Renderer
from whet.quickstart.model import CHAT_TEMPLATE
from whet.serve.service import Service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "né"}}\n</tool_call>'
ARGUMENTS = {"a": 1, "note": "né"}

SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
LAST = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
THOUGHT = (
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
)
OPENED = "{{- '<|im_start|>assistant\\n' + message.content }}"
THINKING_TEMPLATE = (
    LAST
    + CHAT_TEMPLATE.replace(OPENED, f"{{{{- '<|im_start|>assistant\\n' }}}}{THOUGHT}{{{{- message.content }}}}").rstrip()
    + f"\n{{%- if add_generation_prompt %}}{SWITCH}{{%- endif %}}\n"
)
"""As Qwen3's: it has a variable for thinking, and writes the thinking after the last question alone."""


def events(server: Live, path: str, body: Any) -> list[dict[str, Any]]:
    """The events of a stream to its end, each under the name that is its type."""
    connection = server.connect()
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextmanager
def thinker(model: Path, text: str) -> Iterator[Service]:
    """A service of a model that thinks and whose chat template shows it; it says `text`."""
    with scripted(model, text) as service:
        service.renderer = Renderer(service.renderer.tokenizer, template=THINKING_TEMPLATE)
        yield service


@contextmanager
def prompts_of(server: Live) -> Iterator[list[str]]:
    """The prompts that the engine gets inside."""
    engine, seen = server.service.engine, []
    generate = engine.generate

    def spy(request: Any) -> Any:
        seen.append(server.service.renderer.decode(request.tokens))
        return generate(request)

    engine.generate = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        engine.generate = generate  # type: ignore[method-assign]
