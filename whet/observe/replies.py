"""Replies of a rollout that are shown while a run goes on, and that trackers get as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from whet.observe.display import printable
from whet.observe.transcript import conversation_of
from whet.types import Group, Trajectory

TABLE_ROWS = 16
"""Replies of a rollout in a tracker's table."""
PROMPT_CHARS, REPLY_CHARS = 300, 1200
"""Characters of a prompt and of a reply that are printed; longer ones lose their middle."""


@dataclass(frozen=True, slots=True)
class ShownReply:
    """A trajectory in a line of a table."""

    trajectory: str
    prompt: str
    """Last message of the prompt."""
    reply: str
    """Text of all turns."""
    reward: float | None
    outcome: str
    label: str

    @property
    def cells(self) -> list[str | float | None]:
        return [getattr(self, column) for column in COLUMNS]

    def as_text(self) -> str:
        """The reply for a terminal, on several lines."""
        reward = f"reward {self.reward:.3g}" if self.reward is not None else self.outcome
        label = f", label {self.label}" if self.label else ""
        texts = (("prompt", self.prompt, PROMPT_CHARS), ("reply", self.reply, REPLY_CHARS))
        lines = [f"  {name}: {printable(_shortened(text, limit))}".replace("\n", "\n    ") for name, text, limit in texts]
        return "\n".join([f"{self.trajectory}: {reward}{label}", *lines])


COLUMNS = tuple(field.name for field in fields(ShownReply))


def chosen_replies(groups: Sequence[Group], count: int) -> list[ShownReply]:
    """At most `count` replies, from the highest reward to the lowest at even distances; those without a reward come last."""
    found = [t for group in groups for t in group.trajectories if t.turns]
    found.sort(key=lambda t: -t.rewards.total if t.rewards is not None else float("inf"))
    if count <= 0 or not found:
        return []
    last = len(found) - 1
    places = range(len(found)) if len(found) <= count else [round(i * last / max(count - 1, 1)) for i in range(count)]
    return [_reply(found[place]) for place in places]


def _reply(trajectory: Trajectory) -> ShownReply:
    shown = conversation_of(trajectory)
    given = len(shown.messages) - len(trajectory.turns) - (trajectory.error is not None)
    reply = "\n".join(part.text for part in shown.messages[given:])
    return ShownReply(shown.id, shown.messages[given - 1].text if given else "", reply, shown.reward, shown.outcome, shown.label or "")


def _shortened(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
