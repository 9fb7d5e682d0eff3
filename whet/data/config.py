"""The settings of how messages become text and text becomes tokens, and of data that is learned from as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from whet.config import Config
from whet.types import JSON

MaskName = Literal["delta", "qwen", "qwen3", "qwen3_5", "distill_qwen"]


class ChatConfig(Config):
    """Rendering of messages as tokens."""

    template: str | None = None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    special_tokens_in_text: bool = False
    """Turn special tokens spelled in a text (of a data row, a user, a tool or its schema) into real
    ones, as if the template had written them; false: they stay text, and are counted."""

    @property
    def template_text(self) -> str | None:
        """The template's text; None: the tokenizer's own is used.

        Raises:
            ValueError: the file cannot be read.
        """
        if self.template is None or "{{" in self.template or "{%" in self.template:
            return self.template
        try:
            return Path(self.template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"the chat template {self.template} cannot be read (template: a file, or Jinja itself): {error}") from None


class SupervisedConfig(ChatConfig):
    """Data files of conversations to learn from, and their order."""

    path: str | list[str] = Field(min_length=1)
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    messages_key: str | None = "messages"
    """Column of a conversation: a list of OpenAI messages. Every message of an assistant trains, except with `step_loss_mask` 0."""
    prompt_key: str | None = None
    """Instead of messages_key, with response_key: column of the prompt, text or a list of OpenAI messages."""
    response_key: str | None = None
    """Column of the reply to the prompt: text. It trains."""
    tools_key: str | None = "tools"
    """Column of the tools that the row's assistant may call: a list of OpenAI schemas or a JSON string
    of one."""
    mask: MaskName = "delta"
    """Application of the chat template, and choice of the tokens that train. delta: as in a rollout
    with the same messages; qwen, qwen3, qwen3_5, distill_qwen: as in slime under these names, to match
    its runs."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Drop the conversations with more tokens (they are counted)."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the files."""
    seed: int | None = None
    """Seed of the shuffles; unset: the run's seed."""

    @model_validator(mode="before")
    @classmethod
    def _prompts_replace_messages(cls, values: JSON) -> JSON:
        if isinstance(values, dict) and "messages_key" not in values and values.get("prompt_key") is not None:
            return {**values, "messages_key": None}
        return values

    @model_validator(mode="after")
    def _one_form(self) -> SupervisedConfig:
        if (self.prompt_key is None) != (self.response_key is None):
            raise ValueError("prompt_key and response_key go together; set both, or neither and messages_key")
        if (self.messages_key is None) == (self.prompt_key is None):
            raise ValueError("set either messages_key, or prompt_key and response_key")
        return self


class PairColumns(Config):
    """The columns of preference rows."""

    prompt_key: str | None = None
    """Column of the prompt, text or a list of OpenAI messages; unset: chosen and rejected are whole conversations, and what they begin with
    alike is the prompt."""
    chosen_key: str = "chosen"
    """Column of the preferred reply: a list of OpenAI messages or, with prompt_key, text. What its assistant says after the prompt
    trains."""
    rejected_key: str = "rejected"
    """Column of the other reply, in the same form."""
    margin_key: str | None = None
    """Column of a number by how much the chosen reply is to win; unset: 0 for all. `dpo.loss = "ipo"` has none."""
    tools_key: str | None = "tools"
    """Column of the tools that the row's assistant may call: a list of OpenAI schemas or a JSON string
    of one."""
    mask: MaskName = "delta"
    """Application of the chat template, and choice of the tokens that train, as for `whet sft`."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Drop the pairs with a longer conversation (they are counted)."""


class PreferenceConfig(PairColumns, ChatConfig):
    """Data files of preference pairs, and their order."""

    path: str | list[str] = Field(min_length=1)
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the files."""
    seed: int | None = None
    """Seed of the shuffles; unset: the run's seed."""
