"""Imports go one way: a layer may import itself and the layers above it in this list (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "whet"
LAYERS = [
    {"types", "background", "files", "here", "calling"},
    {"config"},
    {"calls"},
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
    {"record"},
    {"cluster"},
    {"settings"},
    {"stop", "threads", "loop", "supervised_loop"},
    {"build"},
    {"plan"},
    {"check"},
    {"view"},
    {"runs"},
    {"quickstart"},
    {"init"},
    {"api"},
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
    "pyarrow": {"observe", "data", "transport", "view"},
    "filelock": {"runfolder"},
    "peft": {"model"},
    "gguf": {"model"},
    "mcp": {"env"},
    "mcp_types": {"env"},
    "starlette": {"serve", "record", "view"},
    "uvicorn": {"serve", "record", "view"},
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


def trees() -> list[tuple[str, ast.Module]]:
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in FILES]


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function, with the name of the class that it stands in."""
    out = []
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                out.append((f"{node.name}.{child.name}" if isinstance(node, ast.ClassDef) else child.name, child))
    return out


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    found = function.args
    return [each for each in (*found.posonlyargs, *found.args, *found.kwonlyargs) if each.arg not in ("self", "cls")]


NATIVE = "whet.train.torch_native"
KNOWS_NATIVE = {
    "plan/": {"config", "mesh_ranks", "optim"},  # sizes what it allocates
    "build/trained.py": {"saving"},  # reads and writes files of its checkpoints
    "checkpoint/convert.py": {"saving"},
}
"""Modules of torch_native that are known outside of it, besides its settings."""


def test_the_factory_alone_names_a_backend():
    """With another one comes an entry in `build_backend`, and nothing else changes; its internals are no part of `Backend`."""
    for name, tree in trees():
        if name.startswith("train/torch_native/") or name == "train/build.py":
            continue
        known = {"config"}.union(*(modules for where, modules in KNOWS_NATIVE.items() if name.startswith(where)))
        for line, module in imports_of(ROOT / name):
            if module.startswith(NATIVE):
                assert module.removeprefix(NATIVE + ".") in known, f"{name}:{line}: use the protocol in train/base.py, not {module}"
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "TorchBackend"], name


MOST_PARAMETERS = 8


def test_functions_have_few_parameters():
    found = {f"{name}:{function}" for name, tree in trees() for function, node in functions(tree) if len(arguments(node)) > MOST_PARAMETERS}
    assert found == set(), f"more than {MOST_PARAMETERS} parameters, make a record of some: {sorted(found)}"


WHOLE_RUN = {"config", "settings", "build", "check", "runs", "api", "cli"}
"""Layers whose functions may be given all settings of a run."""


def test_few_functions_are_given_all_settings_of_a_run():
    from whet.settings import rl, supervised

    kinds = {name for module in (rl, supervised) for name, kind in vars(module).items() if isinstance(kind, type)}
    kinds = {name for name in kinds if name.endswith("RunConfig")} | {"StepRunConfig", "ServeConfig"}
    found = set()
    for name, tree in trees():
        if layer_of(ROOT / name) in WHOLE_RUN or name == "serve/server.py":
            continue
        for function, node in functions(tree):
            noted = [ast.walk(each.annotation) for each in arguments(node) if each.annotation is not None]
            if any(isinstance(part, ast.Name) and part.id in kinds for parts in noted for part in parts):
                found.add(f"{name}:{function}")
    assert not found, f"give these their own part of the settings: {sorted(found)}"


SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT.parent / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_scripts_import_modules_and_names_that_exist(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "whet":
            continue
        place = ROOT.parent / (node.module or "").replace(".", "/")
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not module.exists():
            missing.append(f"{path}:{node.lineno}: {node.module}")
            continue
        names = names_of(module)
        missing += [
            f"{path}:{node.lineno}: {node.module}.{alias.name}"
            for alias in node.names
            if alias.name not in names and not (place / f"{alias.name}.py").exists() and not (place / alias.name).is_dir()
        ]
    assert not missing


def names_of(module: Path) -> set[str]:
    """Names that a module defines or imports, inside of conditions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()):
            names.add(node.name.id)
    return names
