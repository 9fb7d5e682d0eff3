"""The items of a response, and the events that tell of them as they grow."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence

from whet.serve.answers import Event
from whet.types import JSON, ToolCall

PREFIXES = {"reasoning": "rs", "message": "msg"}
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of the part that holds an item's text."""


def reasoning_item(text: str, status: str, item_id: str | None = None) -> Event:
    content = [] if status == "in_progress" else [_part("reasoning", text)]
    return {"type": "reasoning", "id": item_id or _id("rs"), "summary": [], "content": content, "encrypted_content": None, "status": status}


def message_item(text: str, status: str, logprobs: Sequence[JSON] = (), item_id: str | None = None) -> Event:
    content = [] if status == "in_progress" else [_part("message", text, logprobs)]
    return {"type": "message", "id": item_id or _id("msg"), "role": "assistant", "status": status, "content": content}


def call_item(call: ToolCall) -> Event:
    """A tool call, with an id that no other reply's calls have."""
    written = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {
        "type": "function_call",
        "id": _id("fc"),
        "call_id": f"call_{uuid.uuid4().hex[:24]}",
        "name": call.name,
        "arguments": written,
        "status": "completed",
    }


class ItemStream:
    """Events of a response's stream, numbered in their order."""

    def __init__(self) -> None:
        self.num_events = 0
        self.done: list[Event] = []
        """Items that are whole."""
        self.logprobs: list[JSON] = []
        """Log-probs of all tokens so far, markup included, where the request asks for them."""
        self._num_sent = 0
        self._sent = {"reasoning": "", "message": ""}
        self._open = self._id = ""
        """Type and id of the item that is being written; empty: none is."""

    def event(self, kind: str, **fields: JSON) -> Event:
        """The next event."""
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def grown(self, kind: str, text: str) -> list[Event]:
        """Events for what the text of an item of type `kind` has more than was sent of it."""
        new = text[len(self._sent[kind]) :]
        if not new:
            return []
        out = self.opened(kind)
        self._sent[kind] = text
        return [*out, self._of_part(f"response.{PARTS[kind]}.delta", delta=new, **self._new_logprobs(kind))]

    def opened(self, kind: str) -> list[Event]:
        """Events that begin an item of type `kind`, unless it is the one that is being written."""
        if self._open == kind:
            return []
        out = self.closed("completed")
        self._open, self._id = kind, _id(PREFIXES[kind])
        out.append(self.event("response.output_item.added", output_index=len(self.done), item=self._item(kind, "", "in_progress")))
        return [*out, self._of_part("response.content_part.added", part=_part(kind, ""))]

    def closed(self, status: str) -> list[Event]:
        """Events that end the item that is being written."""
        if not self._open:
            return []
        kind, text = self._open, self._sent[self._open]
        out = [
            self._of_part(f"response.{PARTS[kind]}.done", text=text, **_logprobs(kind, self.logprobs)),
            self._of_part("response.content_part.done", part=_part(kind, text, self.logprobs)),
        ]
        self._open = ""
        return [*out, self._whole(self._item(kind, text, status))]

    def called(self, item: Event) -> list[Event]:
        """Events of a tool call."""
        place: dict[str, JSON] = {"output_index": len(self.done), "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self.event("response.output_item.added", output_index=len(self.done), item=begun),
            self.event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self.event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]),
            self._whole(item),
        ]

    def _whole(self, item: Event) -> Event:
        self.done.append(item)
        return self.event("response.output_item.done", output_index=len(self.done) - 1, item=item)

    def _of_part(self, event: str, **fields: JSON) -> Event:
        return self.event(event, item_id=self._id, output_index=len(self.done), content_index=0, **fields)

    def _item(self, kind: str, text: str, status: str) -> Event:
        return reasoning_item(text, status, self._id) if kind == "reasoning" else message_item(text, status, self.logprobs, self._id)

    def _new_logprobs(self, kind: str) -> dict[str, JSON]:
        """Log-probs that no words were sent with yet."""
        shown = _logprobs(kind, self.logprobs[self._num_sent :])
        self._num_sent = len(self.logprobs) if shown else self._num_sent
        return shown


def _part(kind: str, text: str, logprobs: Sequence[JSON] = ()) -> Event:
    words: Mapping[str, JSON] = {"annotations": [], **_logprobs(kind, logprobs)}
    return {"type": PARTS[kind], "text": text, **(words if kind == "message" else {})}


def _logprobs(kind: str, logprobs: Sequence[JSON]) -> dict[str, JSON]:
    return {"logprobs": list(logprobs)} if kind == "message" else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
