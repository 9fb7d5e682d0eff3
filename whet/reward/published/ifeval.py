"""The reward `ifeval`: whether a reply follows the instructions of its row, by the rules of IFEval and IFBench."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from whet.config import Config
from whet.reward.base import bad_row
from whet.reward.instructions import InstructionError, bind_instruction
from whet.types import JSON, Rewards, Task

MAX_READ = 500_000
"""Characters of a reply that is checked."""


class IfevalOptions(Config):
    """Options of the reward `ifeval`."""

    mode: Literal["strict", "loose"] = "strict"
    """loose: it is enough if the reply follows an instruction without its first line, its last line, its asterisks, or several of these."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every instruction is followed; fraction: the share that is."""


def score_ifeval(task: Task, response: str, options: IfevalOptions) -> Rewards:
    """1 if the reply follows all of `metadata.instruction_id_list`, with the arguments of `metadata.kwargs`; else 0.

    The rule of IFEval (arXiv 2311.07911, prompt level) and of slime's `ifbench`. An empty reply follows nothing. `kwargs` holds one object
    for each instruction (an object instead of a list is every instruction's; the last of a list that is too short goes on). The shares of
    followed instructions are components, by the instruction's id. Unknown instructions and arguments are a `LabelError`.
    """
    checks = _checks(task)
    if len(response) > MAX_READ:
        return Rewards(0.0, detail=f"the reply is {len(response)} characters long; at most {MAX_READ} are checked")
    replies = [reply for reply in _variants(response, options.mode) if reply.strip()]
    followed = [(name, any(check(reply) for reply in replies)) for name, check in checks]
    parts: dict[str, list[bool]] = {}
    for name, fine in followed:
        parts.setdefault(name, []).append(fine)
    components = {name: sum(fine) / len(fine) for name, fine in parts.items()}
    failed = [name for name, fine in followed if not fine]
    fraction = 1 - len(failed) / len(followed)
    total = fraction if options.score == "fraction" else float(not failed)
    return Rewards(total, {"ifeval": total, **components}, f"not followed: {', '.join(failed)}" if failed else "")


def _checks(task: Task) -> list[tuple[str, Callable[[str], bool]]]:
    names = [str(name).strip() for name in task.metadata.get("instruction_id_list") or [] if name is not None and str(name).strip()]
    if not names:
        raise bad_row(task, "has no metadata.instruction_id_list; the reward ifeval needs the ids of the instructions that it checks")
    try:
        arguments = _arguments(task.metadata.get("kwargs"), len(names))
        return [(name, bind_instruction(name, given)) for name, given in zip(names, arguments, strict=True)]
    except InstructionError as error:
        raise bad_row(task, f"cannot be checked: {error}") from None


def _arguments(value: JSON, count: int) -> list[dict[str, JSON]]:
    given = [value] * count if isinstance(value, dict) else list(value or [{}])
    given = [entry if isinstance(entry, dict) else {} for entry in given]
    return (given + given[-1:] * count)[:count]


def _variants(response: str, mode: Literal["strict", "loose"]) -> Iterator[str]:
    yield response
    if mode == "loose":
        lines = response.split("\n")
        shorter = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
        yield from shorter[1:]
        yield from (text.replace("*", "") for text in (response, *shorter[1:]))
