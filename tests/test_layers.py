"""Imports go one way: a layer may import itself and the layers above it in this list (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "whet"
LAYERS = [
    {"types", "background", "files"},
    {"config"},
    {"core"},
    {"observe"},
    {"runfolder"},
    {"algo"},
    {"model"},
    {"transport"},
    {"data"},
    {"engine"},
    {"env"},
    {"reward"},
    {"train"},
    {"rollout"},
    {"checkpoint"},
    {"evaluate", "serve"},
    {"cluster"},
    {"settings"},
    {"stop", "threads", "loop", "supervised_loop"},
    {"build"},
    {"plan"},
    {"check"},
    {"runs"},
    {"quickstart"},
    {"cli", "typed"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ONLY_IN = {
    "transformers": {"model", "data", "build", "quickstart"},
    "ray": {"cluster"},
    "megatron": {"train"},
    "rich": {"observe"},
    "typer": {"cli", "runs"},
    "pyarrow": {"observe", "data", "transport"},
    "filelock": {"runfolder"},
    "peft": {"model"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
}


def imports_of(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            out.append((node.lineno, node.module or ""))
            if node.module == "whet":
                out += [(node.lineno, f"whet.{alias.name}") for alias in node.names]
    return out


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_every_file_has_a_layer():
    assert {layer_of(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upward(path):
    mine = layer_of(path)
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "whet" and len(parts) > 1:
            assert RANK[parts[1]] <= RANK[mine], f"{path}:{line}: {mine} may not import {name}"
        if parts[0] in ONLY_IN:
            assert mine in ONLY_IN[parts[0]], f"{path}:{line}: {parts[0]} is imported only in {sorted(ONLY_IN[parts[0]])}"


def test_core_is_torch_and_the_standard_library():
    import sys

    for path in (ROOT / "core").glob("*.py"):
        for line, name in imports_of(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in {"torch", "whet"}, f"{path}:{line}: core may not import {name}"


def test_no_module_imports_itself_through_others():
    """Imports inside of functions and for types alone count, too."""
    modules = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")}

    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {one if one in modules else str(node.module) for one in whole}
        graph[name] &= modules.keys() - {name}
    while ends := [name for name, used in graph.items() if not used]:
        for name in ends:
            del graph[name]
        for used in graph.values():
            used.difference_update(ends)
    assert not graph, f"these modules import each other, or such that do: {sorted(graph)}"
