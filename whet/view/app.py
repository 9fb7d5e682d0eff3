"""The routes of the viewer: its page, and the answers that the page asks for. Each is read from the runs' folders when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from whet.view.export import export_page, file_name_of
from whet.view.folders import ViewedRun, find_runs, rollouts_of
from whet.view.index import RunIndex, choose_groups
from whet.view.metrics import failures_of, metrics_pack, summary_of
from whet.view.pack import json_bytes
from whet.view.pieces import Pieces, pieces_of
from whet.view.scan import groups_of_rollout, same_prompt, search, worst_tokens
from whet.view.trajectories import place_of, rollout_pack, rows_of_trajectory, trajectory_pack
from whet.view.waits import waits_of

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".LICENSE": "text/plain"}
MOST_GROUPS = 500
SCAN_S = 0.4
"""Seconds after which the page gets the groups of the rollouts that were read so far, and asks again."""


class Viewer:
    """The runs that are viewed, with what is known of them.

    Args:
        paths: folders of runs.

    Raises:
        ValueError: a folder has no run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.runs: dict[str, ViewedRun] = {}
        self._indexes: dict[str, RunIndex] = {}
        self._pieces: dict[Path, Pieces | None] = {}
        self._find()

    def _find(self) -> None:
        """Look for runs; those that are known stay."""
        for run in find_runs(self._paths):
            if self.runs.get(run.name) != run:
                self.runs[run.name], self._indexes[run.name] = run, RunIndex(run)

    def pieces(self, run: ViewedRun) -> Pieces | None:
        """The texts of a run's tokens, where its tokenizer is on this machine."""
        if run.settings not in self._pieces:
            self._pieces[run.settings] = pieces_of(run)
        return self._pieces[run.settings]

    def trajectory(self, run: ViewedRun, rollout: int, name: str, group: int | None) -> bytes:
        """The pack of a trajectory."""
        return trajectory_pack(run, self._indexes[run.name], self.pieces(run), rollout, name, group)

    def answers(self) -> dict[str, Callable[[Asked], Response]]:
        """The function for each path below `api`."""
        return {
            "runs": self._runs,
            "metrics": lambda asked: _packed(metrics_pack(asked.run, asked.number("start", 0))),
            "failures": lambda asked: _json(failures_of(asked.run)),
            "waits": lambda asked: _json(waits_of(asked.run)),
            "rollouts": lambda asked: _json(rollouts_of(asked.run)),
            "rollout": lambda asked: _json(groups_of_rollout(asked.run, self._index(asked), asked.number("rollout"))),
            "groups": self._groups,
            "search": lambda asked: _json(search(asked.run, self.pieces(asked.run), asked.text("text")[:200], asked.optional("before"))),
            "trajectory": lambda asked: _packed(self.trajectory(*asked.trajectory())),
            "credit": lambda asked: _packed(rollout_pack(asked.run, asked.number("rollout"))),
            "same": self._same,
            "worst": lambda asked: _json(worst_tokens(asked.run, self.pieces(asked.run), asked.number("rollout"))),
            "export": self._export,
        }

    def _index(self, asked: Asked) -> RunIndex:
        return self._indexes[asked.run.name]

    def _runs(self, asked: Asked) -> Response:
        with suppress(ValueError):  # a named folder was emptied or removed; what was found there before answers for itself
            self._find()
        return _json([summary_of(run) for run in list(self.runs.values())])

    def _groups(self, asked: Asked) -> Response:
        page = asked.number("start", 0), min(asked.number("count", 100), MOST_GROUPS)
        groups, scanned, rollouts, broken = self._index(asked).groups(SCAN_S)
        found = choose_groups(groups, asked.text("sort", "rollout"), asked.text("filter", "all"), *page, asked.optional("rollout"))
        return _json({**found, "scanned": scanned, "rollouts": rollouts, "broken": broken})

    def _same(self, asked: Asked) -> Response:
        _, rollout, name, group = asked.trajectory()
        place = place_of(self._index(asked), rollout, name, group)
        prompt = rows_of_trajectory(asked.run, rollout, place)["prompt"][0].as_py()
        return _json(same_prompt([(each, self._indexes[each.name]) for each in list(self.runs.values())], place["task_id"], prompt))

    def _export(self, asked: Asked) -> Response:
        run, rollout, name, group = asked.trajectory()
        page = export_page(self.trajectory(run, rollout, name, group), rollout_pack(run, rollout), asked.text("language", "en"))
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{file_name_of(name, rollout)}"}
        return Response(page, media_type="text/html", headers=headers)


class Asked:
    """The parameters of a request, each checked when it is read.

    Args:
        request: the request.
        runs: runs by name.
    """

    def __init__(self, request: Request, runs: dict[str, ViewedRun]) -> None:
        self._given, self._runs = request.query_params, runs

    @property
    def run(self) -> ViewedRun:
        """The run that is asked for.

        Raises:
            ValueError: it is not viewed.
        """
        name = self.text("run")
        if name not in self._runs:
            raise ValueError(f"no run {name!r} is viewed here")
        return self._runs[name]

    def text(self, name: str, default: str | None = None) -> str:
        """A parameter."""
        value = self._given.get(name, default)
        if value is None:
            raise ValueError(f"the parameter {name} is missing")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A parameter that is a whole number from 0 on."""
        value = self.text(name, None if default is None else str(default))
        if not re.fullmatch(r"[0-9]{1,15}", value):
            raise ValueError(f"{name} must be a whole number, not {value[:40]!r}")
        return int(value)

    def optional(self, name: str) -> int | None:
        """A whole number, or None where it was not given."""
        return self.number(name) if name in self._given else None

    def trajectory(self) -> tuple[ViewedRun, int, str, int | None]:
        """Run, rollout, id and group of a trajectory."""
        return self.run, self.number("rollout"), self.text("trajectory"), self.optional("group")


def make_app(viewer: Viewer) -> Starlette:
    """Everything that is served, without who may ask for it."""
    files = {f"/{path.relative_to(PAGE).as_posix()}": path for path in PAGE.rglob("*") if path.is_file()}
    files["/"] = PAGE / "index.html"

    def file(request: Request) -> Response:
        path = files.get(request.scope["path"])
        if path is None:
            raise HTTPException(404)
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    def answer(work: Callable[[Asked], Response], request: Request) -> Response:
        try:
            return work(Asked(request, viewer.runs))
        except KeyError as error:
            return _json({"error": f"the records lack a column that this view needs: {str(error)[:200]}"}, 404)
        except (pa.ArrowException, OSError) as error:
            return _json({"error": f"a file of the run is damaged, or changes while it is read: {str(error)[:2000]}"}, 404)
        except UnicodeError as error:
            return _json({"error": f"a text of the run's files, or the name of its folder, is not UTF-8: {str(error)[:2000]}"}, 404)
        except ValueError as error:
            return _json({"error": str(error)[:2000]}, 404)

    routes = [Route(f"/api/{name}", partial(answer, work), methods=["GET"]) for name, work in viewer.answers().items()]
    return Starlette(routes=[*routes, Route("/{path:path}", file, methods=["GET"])])


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


def _packed(data: bytes) -> Response:
    return Response(data, media_type="application/octet-stream")

