"""Chat templates in the form of families of models, shorter than the families' own, and small tokenizers that have their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML_HEAD = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCALLS<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}"""
CHATML_TAIL = """\
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""
QWEN3 = (
    CHATML_HEAD.replace("CALLS", '<tool_call>{"name": ..., "arguments": ...}</tool_call>')
    + """\
{%- if loop.index0 > last.user and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}"""
    + CHATML_TAIL
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_XML = (
    CHATML_HEAD.replace("CALLS", "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>")
    + """\
{%- if loop.index0 > last.user %}{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}{{ '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}"""
    + CHATML_TAIL
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
LLAMA3 = """\
{{- bos_token }}
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nAnswer with {"name": ..., "parameters": ...}.' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_DEEPSEEK = """\
{{- bos_token }}{% for tool in tools or [] %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{%- set before = namespace(tool=false) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- if not before.tool %}{{ '<｜Assistant｜>OPENING' }}{% endif %}{{ message.content }}
{%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}CALL{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{{- eos_token }}
{%- elif message.role == 'tool' %}
{%- if not before.tool %}{{ 'OUTPUTS' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ 'END' }}{% endif %}
{%- endif %}
{%- set before.tool = message.role == 'tool' %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>OPENING' }}{% endif %}"""
DEEPSEEK_V3 = (
    _DEEPSEEK.replace("OPENING", "")
    .replace("OUTPUTS", "<｜tool▁outputs▁begin｜>")
    .replace("END", "<｜tool▁outputs▁end｜>")
    .replace(
        "CALL{% endfor",
        "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name"
        " + '\\n```json\\n' + (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}{% endfor",
    )
)
DEEPSEEK_V31 = (
    _DEEPSEEK.replace("OPENING", "</think>")
    .replace("OUTPUTS", "")
    .replace("{{ 'END' }}", "")
    .replace(
        "CALL{% endfor",
        "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}"
        "{% endfor",
    )
)
DEEPSEEK_V4 = """\
{{- bos_token }}{% if tools %}{{ '\\n\\n## Tools\\n\\n' }}{% for tool in tools %}{{ (tool.function | tojson) + '\\n' }}{% endfor %}
{%- endif %}
{%- set before = namespace(role='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role in ('user', 'tool') %}
{%- if before.role in ('user', 'tool') %}{{ '\\n\\n' }}{% else %}{{ '<｜User｜>' }}{% endif %}
{{- '<tool_result>' + message.content + '</tool_result>' if message.role == 'tool' else message.content }}
{%- else %}{{ '<｜Assistant｜><think>' + (message.reasoning_content or '') + '</think>' + message.content }}
{%- if message.tool_calls %}{{ '\\n\\n<｜DSML｜tool_calls>' }}
{%- for call in message.tool_calls %}{{ '\\n<｜DSML｜invoke name="' + call.function.name + '">' }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- (value if value is string else value | tojson) + '</｜DSML｜parameter>' }}{% endfor %}
{{- '\\n</｜DSML｜invoke>' }}{% endfor %}{{ '\\n</｜DSML｜tool_calls>' }}{% endif %}{{ eos_token }}
{%- endif %}
{%- set before.role = message.role %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' }}{% endif %}"""
_GLM = """\
{{- '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>NL# Tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>' }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>NL' + message.content }}
{%- elif message.role == 'system' %}{{ '<|system|>NL' + message.content }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- 'NL<tool_response>NL' + message.content + 'NL</tool_response>' }}
{%- else %}{{ '<|assistant|>' }}
{%- set thought = message.reasoning_content or '' if loop.index0 > last.user else '' %}
{{- 'NL<think>' + thought + '</think>' }}{% if message.content %}{{ 'NL' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ 'NL<tool_call>' + call.function.name + 'NL' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>NL<arg_value>' + (value if value is string else value | tojson) + '</arg_value>NL' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>OPEN' }}{% endif %}"""
GLM45 = _GLM.replace("NL", "\\n").replace("OPEN", "")
GLM5 = _GLM.replace("NL", "").replace("OPEN", "<think>")
KIMI = """\
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' + message.content }}
{%- if message.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}
{%- elif message.role == 'tool' %}
{{- '<|im_system|>' + (message.name or 'tool') + '<|im_middle|>## Return of ' + message.tool_call_id + '\\n' + message.content }}
{%- else %}{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content }}{% endif %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""
HARMONY = """\
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index:] %}{% if other.role == 'assistant' and not other.tool_calls %}{% set later.final = true %}{% endif %}
{%- endfor %}
{%- if message.thinking and (not later.final if message.tool_calls else loop.last and not add_generation_prompt) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- set called.name = call.name %}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set called.name = none %}
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('an answer without a call') }}{% endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A family of models: its template and its tokens."""

    form: str
    """Form of its calls, as `writing.WRITERS` names it."""
    format: str
    """Format that `auto` finds."""
    template: str
    eos: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Tokens that are not special."""
    max_calls: int = 4
    thinks: bool = True
    """True if the template writes thinking."""
    drops: bool = False
    """True if the template leaves thinking of earlier turns out."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_CALLS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end", "output▁begin", "output▁end", "sep")
_SEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_SEEK_ADDED = ("<｜User｜>", "<｜Assistant｜>", *(f"<｜tool▁{name}｜>" for name in _CALLS))
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KIMI_CALLS = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_HARMONY = ("endoftext", "start", "end", "return", "call", "message", "channel", "constrain")
FAMILIES = {
    "qwen3": Family("hermes", "hermes", QWEN3, "<|im_end|>", _CHATML, _TAGS, drops=True),
    "qwen_xml": Family("qwen_xml", "qwen_xml", QWEN_XML, "<|im_end|>", _CHATML, _TAGS, drops=True),
    "llama3": Family("llama3", "llama3", LLAMA3, "<|eot_id|>", _LLAMA, max_calls=1, thinks=False),
    "deepseek_v3": Family("deepseek_v3", "deepseek_v3", DEEPSEEK_V3, _SEEK[1], _SEEK, _SEEK_ADDED, thinks=False),
    "deepseek_v31": Family("deepseek_v31", "deepseek_v31", DEEPSEEK_V31, _SEEK[1], _SEEK, (*_SEEK_ADDED, *_TAGS[4:]), thinks=False),
    "deepseek_v4": Family("dsml", "dsml", DEEPSEEK_V4, _SEEK[1], _SEEK, (*_SEEK_ADDED[:2], *_TAGS[4:], "｜DSML｜")),
    "glm45": Family("glm", "glm", GLM45, "<|endoftext|>", _GLM_TOKENS, (*_TAGS, *_ARGS), drops=True),
    "glm5": Family("glm5", "glm", GLM5, "<|endoftext|>", _GLM_TOKENS, (*_TAGS, *_ARGS), drops=True),
    "kimi": Family(
        "kimi",
        "kimi",
        KIMI,
        "<|im_end|>",
        ("[BOS]", *(f"<|im_{name}|>" for name in ("end", "user", "assistant", "system", "middle"))),
        tuple(f"<|tool_{name}|>" for name in _KIMI_CALLS),
        thinks=False,
    ),
    "harmony": Family("harmony", "harmony", HARMONY, "<|return|>", tuple(f"<|{name}|>" for name in _HARMONY), max_calls=1, drops=True),
}
_TEXTS = ["the answer is 12\n\n", "assistant\n\nuser: how many\n", '{"name": "look_up", "arguments": {"text": 1}}\n', "</parameter>\n"] * 8


@cache
def tokenizer_of_family(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose merges run over newlines and markup, so that a wrong seam shows in the ids."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(family.special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.special[0], eos_token=family.eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = family.template
    return fast
