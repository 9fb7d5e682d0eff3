"""A trajectory as a person reads it: who said what, and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.observe.display import printable
from whet.types import Message, Proof, Trajectory

COLOURS = {"system": "35", "user": "36", "prompt": "36", "assistant": "32", "tool": "33"}
"""Colour of each role on a terminal, as the parameter of its escape sequence."""
MAX_CHARS = 4000
"""Characters of a message that are shown; longer ones lose their middle."""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message."""

    role: str
    text: str
    note: str = ""
    """Remark on it, such as its number of tokens."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token, with the numbers that the records have of it."""

    text: str
    origin: str
    trains: bool
    logprob: float | None
    advantage: float | None
    version: int | None

    def note(self) -> str:
        """Its numbers in words."""
        numbers = {"log-prob": self.logprob, "advantage": self.advantage, "version": self.version}
        known = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
        return ", ".join([self.origin, "trains" if self.trains else "does not train", *known])


@dataclass(frozen=True, slots=True)
class Transcript:
    """A trajectory to be shown."""

    id: str
    outcome: str
    reward: float | None
    messages: Sequence[ShownMessage]
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    label: str | None = None
    detail: str = ""
    tokens: Sequence[ShownToken] = ()
    proofs: Mapping[int, Proof] = field(default_factory=dict[int, Proof])
    """Proof of each version that sampled its tokens, as far as it is known; they are shown below the tokens."""

    @property
    def title(self) -> str:
        """Its id, its outcome and its reward."""
        reward = "no reward" if self.reward is None else f"reward {self.reward:.3g}"
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.components.items())
        label = f"  label {self.label}" if self.label is not None else ""
        return f"{self.id}  {self.outcome}  {reward}" + (f" ({parts})" if parts else "") + label

    def as_text(self, *, colour: bool = False) -> str:
        """For a terminal, or for a file."""

        def painted(text: str, code: str) -> str:
            return f"\x1b[{code}m{text}\x1b[0m" if colour else text

        lines = [painted(printable(self.title), "1")]
        for part in self.messages:
            note = f" ({part.note})" if part.note else ""
            text = printable(shortened(part.text)).replace("\n", "\n    ")
            lines.append(f"  {painted(part.role + note, COLOURS.get(part.role, '0'))}\n    {text}")
        if self.detail:
            lines.append(f"  {painted('reward', '1')}\n    {printable(self.detail)}")
        for place, each in enumerate(self.tokens):
            code = {"model": "32", "environment": "33"}.get(each.origin, "36")
            lines.append(f"  {place:>5}  {painted(repr(each.text)[1:-1].ljust(16), code)}  {each.note()}")
        lines += [f"  version {version}: {proof.words()}" for version, proof in self.proofs.items()]
        return "\n".join(lines)


def shortened(text: str) -> str:
    """A text, or its beginning and its end."""
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def conversation_of(trajectory: Trajectory) -> Transcript:
    """A trajectory that was just played."""
    prompt = trajectory.task.prompt
    parts = [ShownMessage("prompt", prompt)] if isinstance(prompt, str) else [_shown(message) for message in prompt]
    parts += [_shown(turn.message, f"{len(turn.tokens)} tokens, {turn.finish}") for turn in trajectory.turns]
    if trajectory.error is not None:
        parts.append(ShownMessage("error", f"{trajectory.error.kind} in {trajectory.error.where}: {trajectory.error.message}"))
    found = trajectory.rewards
    components = {} if found is None else dict(found.components)
    return Transcript(
        trajectory.id, str(trajectory.outcome), None if found is None else found.total, parts, components, trajectory.task.label,
        "" if found is None else found.detail,
    )  # fmt: skip


def _shown(message: Message, note: str = "") -> ShownMessage:
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False) for call in message.tool_calls]
    return ShownMessage(message.role, "\n".join(text for text in (message.reasoning_content, message.content, *calls) if text), note)


def recorded(rows: Sequence[Mapping[str, Any]], text_of: Callable[[int], str], *, tokens: bool = False) -> Transcript:
    """A trajectory from its rows of the records.

    Args:
        rows: one for each sample, or the one of a trajectory without any.
        text_of: the text of a token's id.
        tokens: True: with each token.
    """
    row = rows[0]
    parts = [_written(message) for message in row["prompt"] or ()]
    shown = _environment(rows, text_of)
    for i, turn in enumerate(row["turns"]):
        parts += [ShownMessage("tool", text) for text in ([shown[i]] if i and shown.get(i) else [])]
        parts.append(_written(turn, f"{turn['num_tokens']} tokens, {turn['finish']}"))
    if row["error"] is not None:
        parts.append(ShownMessage("error", f"{row['error']['kind']} in {row['error']['where']}: {row['error']['message']}"))
    return Transcript(
        row["trajectory"], row["outcome"], row["reward"], parts, dict(row["reward_components"] or {}), row["label"],
        row["reward_detail"] or "", [each for row in rows for each in _tokens(row, text_of)] if tokens else (),
        proofs_of(rows) if tokens else {},
    )  # fmt: skip


def proofs_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, Proof]:
    """The proof of each version that sampled tokens of some rows of the records; none in those of an earlier whet."""
    found = {version: proof for row in rows for version, proof in (row.get("proofs") or {}).items()}
    return {version: Proof.from_json(found[version]) for version in sorted(found)}


def _written(message: Mapping[str, Any], note: str = "") -> ShownMessage:
    words = (message.get("reasoning_content"), message["content"], message["tool_calls"])
    return ShownMessage(message["role"] or "prompt", "\n".join(text for text in words if text), note)


def _environment(rows: Sequence[Mapping[str, Any]], text_of: Callable[[int], str]) -> dict[int, str]:
    """The text of the context before each turn but the first, as far as the tokens were recorded: what the environment answered."""
    row, found, place = rows[0], dict[int, str](), 0
    if row["tokens"] is None or len(rows) > 1:
        return {}
    for i, turn in enumerate(row["turns"]):
        found[i] = "".join(text_of(token) for token in row["tokens"][place : place + turn["num_context"]]).strip()
        place += turn["num_context"] + turn["num_tokens"]
    return found


ORIGINS = ("prompt", "model", "environment")


def _tokens(row: Mapping[str, Any], text_of: Callable[[int], str]) -> list[ShownToken]:
    if row["tokens"] is None:
        return []
    advantages = row.get("advantages")
    out: list[ShownToken] = []
    for t, token in enumerate(row["tokens"]):
        is_sampled = row["versions"][t] >= 0
        out.append(
            ShownToken(
                text_of(token),
                ORIGINS[row["origin"][t]],
                bool(row["loss_mask"][t]),
                row["logprobs"][t] if is_sampled else None,
                None if advantages is None else advantages[t],
                row["versions"][t] if is_sampled else None,
            )
        )
    return out
