"""A question to the records of a run: the options of `whet records`. Importable without pyarrow, as options are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


def _option(help: str, **more: object) -> dict[str, object]:
    return {"help": help, **more}


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Which trajectories, in which order, and what is shown of them. The metadata of a field are those of its option."""

    rollout: str | None = field(default=None, metadata=_option("Only this rollout, or a range: 12, 10:20.", metavar="N"))
    task: str | None = field(default=None, metadata=_option("Only tasks whose id has this text.", metavar="ID"))
    outcome: str | None = field(default=None, metadata=_option("Only this outcome: completed, truncated, env_error ..."))
    role: str | None = field(default=None, metadata=_option("Only samples of this role of a game, with its rewards.", metavar="ROLE"))
    dropped: bool | None = field(
        default=None, metadata=_option("Only groups that were dropped, or only the others.", flag="--dropped/--kept")
    )
    failed: bool = field(default=False, metadata=_option("Only trajectories with an error.", flag="--failed"))
    sort: str | None = field(default=None, metadata=_option("reward, tokens, turns, advantage or rollout; the largest first."))
    reverse: bool = field(default=False, metadata=_option("The smallest first; without --sort the newest.", flag="--reverse"))
    limit: int | None = field(default=None, metadata=_option("Trajectories listed (default: 20) or written (default: all).", min=1))
    trajectory: str | None = field(default=None, metadata=_option("Show this trajectory with its tokens.", metavar="ID"))
    columns: str | None = field(default=None, metadata=_option("Per-token columns that are shown, with commas between them."))
    jsonl: Path | None = field(default=None, metadata=_option("Write the trajectories' rows to this file of JSON lines.", metavar="FILE"))
