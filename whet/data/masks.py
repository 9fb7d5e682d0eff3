"""Which tokens of a conversation train: whet's own way, by delta, and the ways of other trainers, by name.

Whet renders a conversation as a rollout in which the model says the same (`Renderer.supervised`). Others render each message by itself, or
the whole at once, and cut the assistant's part out; the ids differ from a rollout's where the template rewrites earlier turns. Those ways
are here for runs that have to match theirs. A tool's or a user's words train under none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from whet.data.config import MaskName
from whet.data.parsers import ToolSchemas
from whet.data.template import Renderer
from whet.types import Message

Masked = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and which of them train."""

_THOUGHT = "836194725083"
"""Digits in the place of a message's thinking."""
_PROBE = Message("user", "FOR TESTING ONLY")
_HEADER, _THINK, _END = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>"


def mask_conversation(
    name: MaskName,
    renderer: Renderer,
    messages: Sequence[Message],
    tools: ToolSchemas = (),
    first_trained: int = 0,
    silent: Collection[int] = (),
) -> Masked:
    """A conversation's ids and which of them train, by one of the ways.

    Args:
        first_trained: first message that can train; an assistant's words before it are context.
        silent: messages of an assistant that do not train.

    Raises:
        ValueError: the template cannot render the conversation this way, or nothing in it is an assistant's.
    """
    if name == "delta":
        masked = renderer.supervised(messages, tools, first_trained, silent)
        renderer.check_roles(messages)
        return masked
    trains = [message.role == "assistant" and i >= first_trained and i not in silent for i, message in enumerate(messages)]
    if any(message.reasoning_content for message in messages):
        _refuse_no_thinking(name, renderer, messages, tools, trains)
    masked = _WAYS[name](renderer, messages, tools, trains)
    renderer.check_roles(messages)
    return masked


def message_by_message(renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas, trains: Sequence[bool]) -> Masked:
    """Each message rendered alone, less the default system prompt; the tools go into the first one's rendering (slime's `qwen`)."""
    system_length, header_length = frame_lengths(renderer)
    tokens: list[int] = []
    mask: list[bool] = []
    for i, message in enumerate(messages):
        added = list(_ids(renderer, [message], tools if i == 0 else ()))
        if i > 0 and message.role != "system":
            added = added[system_length:]
        _append(tokens, mask, added, header_length, trains[i])
    return tuple(tokens), tuple(mask)


def after_a_question(renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas, trains: Sequence[bool]) -> Masked:
    """Each message rendered after a user's question that is cut away, so that its thinking is kept (slime's `qwen3`)."""
    system_length, header_length = frame_lengths(renderer)
    if system_length:
        raise ValueError(
            "mask = qwen3 does not fit a chat template that adds a system prompt of its own: cutting it away would cut real tokens; "
            "use mask = qwen or delta"
        )
    prefix_length = len(_ids(renderer, [_PROBE], ()))
    tokens: list[int] = []
    mask: list[bool] = []
    for i, message in enumerate(messages):
        if i == 0:
            added = _ids(renderer, [message, _PROBE], tools)[:-prefix_length]
        else:
            added = _ids(renderer, [_PROBE, message], ())[prefix_length:]
        _append(tokens, mask, list(added), header_length, trains[i])
    return tuple(tokens), tuple(mask)


def whole_text(renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas, trains: Sequence[bool]) -> Masked:
    r"""The whole rendered once; from each assistant's header to its end mark and line break (slime's `qwen3_5`).

    An opening `<think>\n` is context, as the generation prompt writes it. A token that is partly in a trained span trains.
    """
    text = renderer.render(messages, tools, generate=False)
    spans: list[tuple[int, int]] = []
    cursor = 0
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        header = text.find(_HEADER, cursor)
        start = header + len(_HEADER)
        end = text.find(_END, start)
        if header < 0 or end < 0:
            raise ValueError(f"mask = qwen3_5 needs a chat template that writes {_HEADER!r} ... {_END!r} around message {i} (assistant)")
        cursor = end + len(_END)
        cursor += text[cursor : cursor + 1] == "\n"
        if trains[i]:
            spans.append((start + len(_THINK) if text.startswith(_THINK, start) else start, cursor))
    tokens, places = renderer.rendered_with_places(text)
    mask = [any(start < to and frm < end for start, end in spans) for frm, to in places]
    return tuple(tokens), tuple(mask)


def last_answer(renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas, trains: Sequence[bool]) -> Masked:
    """The first message with the generation prompt, then the last message's text, without the messages
    between them (slime's `distill_qwen`)."""
    if messages[-1].role != "assistant":
        raise ValueError(f"mask = distill_qwen trains the last message, which is of the role {messages[-1].role!r}; end on an assistant's")
    prompt = renderer.rendered(renderer.render(messages[:1], tools, generate=True))
    added = renderer.plain(messages[-1].content, prompt, inner=True)
    return (*prompt, *added), (False,) * len(prompt) + (trains[-1],) * len(added)


def frame_lengths(renderer: Renderer) -> tuple[int, int]:
    """Tokens of the system prompt that the template adds by itself, and of an assistant's header.

    Raises:
        ValueError: the template does not show a user's words twice unchanged, so neither length can be
            found.
    """
    words = renderer.encode(_PROBE.content)
    whole = _ids(renderer, [_PROBE, _PROBE], ())
    found = [i for i in range(len(whole) - len(words) + 1) if whole[i : i + len(words)] == words]
    if len(found) != 2:
        raise ValueError(f"the chat template shows a user's words {len(found)} times where it was given them twice; use mask = delta")
    first, second = found
    after = len(whole) - len(words) - second
    system_length = first - ((second - first) - after - len(words))
    header_length = len(renderer.rendered(renderer.render([_PROBE, _PROBE], (), generate=True))) - len(whole)
    return system_length, header_length


_WAYS: dict[str, Callable[[Renderer, Sequence[Message], ToolSchemas, Sequence[bool]], Masked]] = {
    "qwen": message_by_message,
    "qwen3": after_a_question,
    "qwen3_5": whole_text,
    "distill_qwen": last_answer,
}


def _refuse_no_thinking(name: str, renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas, trains: Sequence[bool]) -> None:
    """See that the last thinking is written. That of earlier turns may be dropped by the template's own rule, as the others train."""
    last = max(i for i, message in enumerate(messages) if message.reasoning_content)
    probe = [replace(message, reasoning_content=_THOUGHT) if i == last else message for i, message in enumerate(messages)]
    tokens, _ = _WAYS[name](renderer, probe, tools, trains)
    if _THOUGHT not in renderer.decode(tokens):
        raise ValueError(
            f"mask = {name} with this chat template leaves out the thinking (reasoning_content) of message {last} "
            f"({messages[last].role}); use mask = delta, or a template that writes it there (data.template)"
        )


def _ids(renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas) -> tuple[int, ...]:
    return renderer.rendered(renderer.render(messages, tools, generate=False))


def _append(tokens: list[int], mask: list[bool], added: list[int], header_length: int, trains: bool) -> None:
    tokens.extend(added)
    mask.extend(trains and place >= header_length for place in range(len(added)))
