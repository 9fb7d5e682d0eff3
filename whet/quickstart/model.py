"""A small model on disk, in Hugging Face format, made on the spot: nothing is downloaded.

    config.json             Qwen3's architecture, four small layers
    generation_config.json  its stop token
    model.safetensors       random weights, the same for the same seed
    tokenizer.json          byte-level BPE, trained on the quickstart's own texts: every text can be written, common words are one token
    tokenizer_config.json   its special tokens
    chat_template.jinja     ChatML, tools in the system message, calls and replies in Hermes style

They are what any model from a hub has, so every other command reads them as it would read those.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from whet.config import Config
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.tensor_files import save_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
"""Words with the space before them, single digits, runs of punctuation, white space."""

CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- if tools %}{{- '\\n' }}{%- endif %}{%- endif %}
{%- if tools %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- ' ' + tool.function.name + '(' + tool.function.parameters.properties.keys() | join(', ') + ')' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class SmallModelConfig(Config):
    """The small model's shape."""

    hidden_size: int = 128
    """Width."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Width of a head."""
    intermediate_size: int = 384
    """Width of the feed-forward part."""
    max_positions: int = 2048
    """Longest sequence."""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges come from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(folder: Path, texts: Iterable[str], shape: SmallModelConfig, seed: int) -> None:
    """Write a small random model and a tokenizer for `texts` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        bos_token_id=None,
    )
    model = random_causal(config, ModelConfig(path=str(folder), device="cpu"), seed=seed)
    save_model(model.hf, folder)
    tokenizer.save_pretrained(folder)
