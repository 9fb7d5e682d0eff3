"""`whet show`, and what a command says of the replies at its end: conversations from a run's records."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whet.observe.transcript import Transcript, recorded

Which = Literal["best", "worst", "typical"]
WHICH: tuple[Which, ...] = ("best", "worst", "typical")


def _option(help: str, **more: object) -> dict[str, object]:
    return {"help": help, **more}


@dataclass(frozen=True, slots=True)
class ShowQuery:
    """Conversations that are shown. The metadata of a field are those of its option."""

    rollout: int | None = field(default=None, metadata=_option("Number of the rollout; default: the newest.", metavar="N"))
    task: str | None = field(default=None, metadata=_option("Only tasks whose id has this text.", metavar="ID"))
    best: bool = field(default=False, metadata=_option("The one with the highest reward.", flag="--best"))
    worst: bool = field(default=False, metadata=_option("The one with the lowest reward.", flag="--worst"))
    typical: bool = field(default=False, metadata=_option("The one with the median reward.", flag="--typical"))
    tool: bool = field(default=False, metadata=_option("Only conversations in which the model called a tool.", flag="--tool"))
    num: int | None = field(default=None, metadata=_option("Show this many, in the order in which they were played.", min=1))
    tokens: bool = field(
        default=False, metadata=_option("Each token with its origin, mask, log-prob, advantage and version.", flag="--tokens")
    )
    html: Path | None = field(default=None, metadata=_option("Write one conversation as a page: the viewer's export.", metavar="FILE"))


def transcripts(run: Path, query: ShowQuery) -> list[tuple[str, Transcript]]:
    """The conversations that a query asks for, each with the word that chose it, or "".

    Raises:
        ValueError: there are no records, or none of what was asked for.
    """
    chosen, text_of = chosen_rows(run, query), texts_of(run)
    return [(word, recorded(each, text_of, tokens=query.tokens)) for word, each in chosen]


def chosen_rows(run: Path, query: ShowQuery) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows of the trajectories that a query asks for, each with the word that chose it, or "".

    Raises:
        ValueError: there are no records, or none of what was asked for.
    """
    from whet.observe.record_query import RecordQuery
    from whet.observe.records.query import choose, read_chosen, records_folder

    folder = records_folder(run)
    index = choose(folder, RecordQuery(task=query.task))
    rollouts = sorted(set(index.column("rollout_id").to_pylist()))
    if not rollouts:
        raise ValueError(f"{run}: no task's id has {query.task!r}")
    rollout = rollouts[-1] if query.rollout is None else query.rollout
    if rollout not in rollouts:
        raise ValueError(f"{run}: there are no records of rollout {rollout}; there are those of {rollouts[0]} to {rollouts[-1]}")
    index = choose(folder, RecordQuery(task=query.task, rollout=str(rollout)))
    tables = list(read_chosen(folder, index))
    rows = [table.to_pylist(maps_as_pydicts="strict") for table in tables]
    if query.tool:
        rows = [each for each in rows if any(turn["tool_calls"] for turn in each[0]["turns"])]
    if not rows:
        raise ValueError(f"{run}: in no conversation of rollout {rollout} did the model call a tool")
    asked: list[Which] = [word for word in WHICH if getattr(query, word)]
    if query.num is not None:
        return [("", each) for each in rows[: query.num]]
    return chosen_of(rows, asked or WHICH, lambda each: each[0]["reward"])


def show_run(run: Path, query: ShowQuery, say: Callable[[str], None], *, colour: bool) -> None:
    """Show the conversations that a query asks for, or write one of them as a page.

    Raises:
        ValueError: there are no records, or none of what was asked for; or several, and a page has one.
    """
    if query.html is not None:
        from whet.view.notebook import show

        found = chosen_rows(run, query)
        if len(found) != 1:
            raise ValueError(f"{len(found)} conversations are chosen, and a page has one: add --best, --worst, --typical or --num 1")
        row = found[0][1][0]
        query.html.write_text(show(run, row["trajectory"], row["rollout_id"]).page, encoding="utf-8")
        say(f"{query.html}: {row['trajectory']} of rollout {row['rollout_id']}")
        return
    for word, each in transcripts(run, query):
        say((f"{word}: " if word else "") + each.as_text(colour=colour) + "\n")


def chosen_of(items: Sequence[Any], words: Sequence[Which], reward_of: Callable[[Any], float | None]) -> list[tuple[str, Any]]:
    """Those items that the words mean, by their rewards; one that several words mean comes once. Without rewards: the first one."""
    pairs = [(reward, place) for place, item in enumerate(items) if (reward := reward_of(item)) is not None]
    scored = [items[place] for _, place in sorted(pairs)]
    if not scored:
        return [("", item) for item in items[:1]]
    places = {"best": len(scored) - 1, "worst": 0, "typical": (len(scored) - 1) // 2}
    found: dict[int, str] = {}
    for word in words:
        found.setdefault(places[word], word)
    return [(word, scored[place]) for place, word in found.items()]


def texts_of(run: Path) -> Callable[[int], str]:
    """Function from a token's id to its text, by the tokenizer of the run's model; "" if it is not on this machine."""
    candidates = [run / "model", *(parent / "model" for parent in list(run.parents)[:2])]
    for folder in (run, *list(run.parents)[:2]):
        if (folder / "config.toml").is_file():
            path = model_of(folder)
            candidates.append(Path(path))
            break
    for folder in candidates:
        file = folder / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
            return lambda token: tokenizer.decode([token], skip_special_tokens=False)
    return lambda token: ""


def model_of(run: Path) -> str:
    """The model that a run began with, by its settings; "" without any."""
    settings: Mapping[str, Any] = tomllib.loads((run / "config.toml").read_text())
    return str(settings.get("model", {}).get("path", ""))
