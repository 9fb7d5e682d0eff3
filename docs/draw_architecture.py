"""Draws docs/pictures/architecture.svg: the folders of the package, and which imports which, from the code itself.

A box stands below everything that imports it. An arrow that follows from two others is left out: where `runs` imports `build` and
`build` imports `core`, no arrow goes from `runs` to `core`.

    python docs/draw_architecture.py
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "whet"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, MARGIN = 1120, 124, 30, 62, 24
COLOURS = {
    "#dbeafe": {"types", "config", "core", "files", "background", "observe", "runfolder"},
    "#dcfce7": {"data", "env", "reward", "rollout", "engine", "algo", "train", "transport", "model", "sync", "evaluate", "serve"},
    "#fef3c7": {"settings", "build", "plan", "check", "runs", "cli", "loop", "quickstart", "api", "cluster", "checkpoint"},
}
OTHER = "#f1f5f9"


def imports() -> dict[str, set[str]]:
    """The folders and files at the top of the package, with what each imports of the others."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name.startswith("__"):
            continue
        used = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                modules = [f"whet.{alias.name}" for alias in node.names] if node.module == "whet" else [node.module]
            used |= {module.split(".")[1] for module in modules if module.startswith("whet.")}
    return {name: {one for one in used if one in found and one != name} for name, used in found.items()}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Everything that `start` imports, directly or through others."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def without_detours(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction: arrows that no chain of other arrows replaces."""
    through = {name: reachable(graph, name) for name in graph}
    return {name: {one for one in used if not any(one in through[other] for other in used - {one})} for name, used in graph.items()}


def rows_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The boxes by row, importers first: a box stands one row below the lowest of those that import it."""
    depth: dict[str, int] = {}

    def place(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((place(other) for other, used in graph.items() if name in used), default=-1)
        return depth[name]

    for name in graph:
        place(name)
    return [sorted(name for name in graph if depth[name] == row) for row in range(max(depth.values()) + 1)]


def places_of(rows: list[list[str]], graph: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """The centre of each box in pixels; boxes of a row are ordered by where their importers are."""
    places: dict[str, tuple[float, float]] = {}
    for index, row in enumerate(rows):
        def wanted(name: str) -> float:
            above = [places[other][0] for other, used in graph.items() if name in used and other in places]
            return sum(above) / len(above) if above else WIDTH / 2

        step = (WIDTH - 2 * MARGIN) / len(row)
        for position, name in enumerate(sorted(row, key=wanted)):
            places[name] = (MARGIN + step * (position + 0.5), 60 + index * ROW_HEIGHT + BOX_HEIGHT / 2)
    return places


def picture() -> str:
    """The picture as SVG."""
    graph = imports()
    arrows = without_detours(graph)
    rows = rows_of(graph)
    places = places_of(rows, arrows)
    height = 60 + len(rows) * ROW_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#64748b"/></marker></defs>',
        f'<text x="{MARGIN}" y="34" font-size="17" fill="#0f172a">The folders of whet: an arrow goes from a folder to one that it imports'
        "</text>",
    ]
    for name, used in sorted(arrows.items()):
        x, y = places[name]
        for other in sorted(used):
            to_x, to_y = places[other]
            start, end = y + BOX_HEIGHT / 2, to_y - BOX_HEIGHT / 2
            bend = (end - start) / 2
            parts.append(
                f'<path d="M{x:.0f} {start:.0f} C{x:.0f} {start + bend:.0f} {to_x:.0f} {end - bend:.0f} {to_x:.0f} {end:.0f}" fill="none" '
                'stroke="#64748b" stroke-opacity="0.7" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in sorted(places.items()):
        colour = next((colour for colour, names in COLOURS.items() if name in names), OTHER)
        parts.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{colour}" stroke="#334155"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="#0f172a">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture())
