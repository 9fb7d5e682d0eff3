"""The settings of how messages become text and text becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from whet.config import Config


class ChatConfig(Config):
    """How messages are rendered."""

    template: str | None = None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    special_tokens_in_text: bool = False
    """Have special tokens that a text spells (of a data row, a user, a tool or its schema) become such, as if the template had written
    them; false: they stay text, and are counted."""

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
