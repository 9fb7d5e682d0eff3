"""Prompts that are longer than they may be: dropped, an error, or cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from whet.types import Task

LongPrompts = Literal["drop", "error", "left", "middle", "right"]
GAP = "…"
"""In place of what was cut from the middle of a text."""


def cut_prompt(task: Task, length: Callable[[Task], int], limit: int, side: LongPrompts) -> Task:
    """Cut the longest text of a prompt: the message with the most characters, so that the chat template stays whole.

    Args:
        task: its prompt is too long.
        length: counts a task's prompt tokens.
        limit: tokens that the prompt may have.
        side: left: the beginning is cut; right: the end; middle: the middle, with a `…` in its place.

    Raises:
        ValueError: the prompt is too long even without that text.
    """
    texts = [task.prompt] if isinstance(task.prompt, str) else [message.content for message in task.prompt]
    place = max(range(len(texts)), key=lambda i: len(texts[i]))

    def with_chars(count: int) -> Task:
        text = _cut(texts[place], count, side)
        if isinstance(task.prompt, str):
            return replace(task, prompt=text)
        messages = list(task.prompt)
        messages[place] = replace(messages[place], content=text)
        return replace(task, prompt=tuple(messages))

    fits, too_many = 0, len(texts[place])
    if not too_many or length(with_chars(1)) > limit:
        raise ValueError(f"{task.origin}: the prompt is longer than max_prompt_tokens = {limit} even with its longest text cut: raise it")
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        fits, too_many = (count, too_many) if length(with_chars(count)) <= limit else (fits, count)
    return with_chars(max(fits, 1))


def _cut(text: str, count: int, side: LongPrompts) -> str:
    """The `count` characters of a text that stay."""
    if side == "left":
        return text[-count:]
    if side == "right":
        return text[:count]
    head = (count + 1) // 2
    return text[:head] + GAP + text[len(text) - (count - head) :]
