"""Calls as each family's models write them, written here by a few lines of its own."""

from __future__ import annotations

import json

from whet.data.formats.table import FORMATS

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "deep": {"type": "boolean"},
                "items": {"type": "array", "items": {}},
                "options": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [TOOL, NOW]


def js(value):
    return json.dumps(value, ensure_ascii=False)


def bare(value):
    return value if isinstance(value, str) else js(value)


def jinja(value):
    """As templates of Qwen3.5 write a value: objects and lists as JSON, anything else as Python has it."""
    return js(value) if isinstance(value, dict | list) else str(value)


def hermes(calls):
    return "\n".join(
        f'<tool_call>\n{{"name": {js(name)}, "arguments": {js(arguments)}}}\n</tool_call>' for name, arguments in calls
    )


def qwen_xml(calls):
    def one(name, arguments):
        inner = "".join(f"<parameter={key}>\n{jinja(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls, gap="\n"):
    def one(name, arguments):
        pairs = "".join(f"<arg_key>{k}</arg_key>{gap}<arg_value>{bare(v)}</arg_value>{gap}" for k, v in arguments.items())
        return f"<tool_call>{name}{gap}{pairs}</tool_call>"

    return gap.join(one(*call) for call in calls)


def glm5(calls):
    return glm(calls, "")


def dsml(calls, section="tool_calls"):
    def one(name, arguments):
        inner = "\n".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{bare(v)}</｜DSML｜parameter>'
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>'

    inner = "\n".join(one(*call) for call in calls)
    return f"\n\n<｜DSML｜{section}>\n{inner}\n</｜DSML｜{section}>"


def deepseek_v3(calls):
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{js(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    inner = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{js(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{js(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def llama3(calls):
    return "; ".join(f'{{"name": {js(name)}, "parameters": {js(arguments)}}}' for name, arguments in calls)


def pythonic(calls):
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls) + "]"


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{js(arguments)}<|call|>"
        for name, arguments in calls
    )


WRITERS = {
    "hermes": (hermes, FORMATS["hermes"]),
    "qwen_xml": (qwen_xml, FORMATS["qwen_xml"]),
    "glm": (glm, FORMATS["glm"]),
    "glm5": (glm5, FORMATS["glm"]),
    "dsml": (dsml, FORMATS["dsml"]),
    "dsml_v32": (lambda calls: dsml(calls, "function_calls"), FORMATS["dsml"]),
    "deepseek_v3": (deepseek_v3, FORMATS["deepseek_v3"]),
    "deepseek_v31": (deepseek_v31, FORMATS["deepseek_v31"]),
    "kimi": (kimi, FORMATS["kimi"]),
    "llama3": (llama3, FORMATS["llama3"]),
    "pythonic": (pythonic, FORMATS["llama3"]),
    "harmony": (harmony, FORMATS["harmony"]),
}
"""By form: what writes calls in it, and the format that reads it."""
