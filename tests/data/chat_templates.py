"""Chat templates of the kinds that are in use, written for the tests, and tokenizers that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- set content = message.content %}
{%- if DROP_THINKING and '</think>' in content and loop.index0 < ns_last[0] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""

LAST_USER = """\
{%- set last = namespace(place=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.place = loop.index0 %}{% endif %}{% endfor %}
{%- set ns_last = [last.place] %}"""

THINKING = """\
{%- set last = namespace(place=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.place = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > last.place and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's: thinking is a field of its own, and written behind the last user's turn alone."""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for message in messages %}
{%- set after_tool = loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- if not after_tool %}{{ '<｜Assistant｜>' }}{% endif %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if not after_tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}"""

LLAMA2 = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

PLAIN = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@dataclass(frozen=True)
class Kind:
    template: str | None
    eos: str
    special: tuple[str, ...]
    tool_role: bool = True
    system_role: bool = True


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KINDS = {
    "chatml": Kind(CHATML.replace("DROP_THINKING", "false"), "<|im_end|>", _CHATML_TOKENS),
    "chatml_base": Kind(CHATML.replace("DROP_THINKING", "false"), "<|endoftext|>", _CHATML_TOKENS),
    "qwen3": Kind(LAST_USER + CHATML.replace("DROP_THINKING", "true"), "<|im_end|>", _CHATML_TOKENS),
    "llama3": Kind(
        LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    ),
    "deepseek": Kind(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ),
    "llama2": Kind(LLAMA2, "</s>", ("<s>", "</s>"), tool_role=False, system_role=False),
    "plain": Kind(PLAIN, "<|endoftext|>", ("<|endoftext|>",)),
    "none": Kind(None, "<|endoftext|>", ("<|endoftext|>",)),
}

_TEXTS = ["the answer is 12\n\n", "assistant\n\nuser: how many\n", '{"name": "add", "arguments": {"a": 1}}\n'] * 8


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose merges run over newlines and markup, so that a wrong seam shows in the ids."""
    chosen = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(chosen.special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chosen.special[0],
        eos_token=chosen.eos,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chosen.template
    return fast
