"""Recorded numbers of other implementations, run through whet's public functions: `python -m tests.parity.golden DIR`.

Every `*.json` of DIR is a list of cases {name, source, inputs, params, outputs[, note | peer_defect]}. A table per family
of numbers (`golden_*.py`) has an adapter for each file, which makes whet's answer from a case's inputs and params alone.
What whet answers differently on purpose stands in `golden_deviations.py`, with the reason and whet's own answer.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Case = Mapping[str, Any]
Adapter = Callable[[Case], Any]
"""A case to what whet answers: the structure of the case's outputs. It raises where whet refuses."""

FAMILIES = ("advantages", "losses", "kl", "reducers", "correction", "logprobs", "policy_step", "schedule", "evaluate")
CHECKING_FAMILIES = ("graders", "masks")
"""Their adapters compare for themselves and raise AssertionError; what they answer differently stands in their own tables."""
RTOL, ATOL = 1e-4, 1e-5
WHITENED_RTOL = 1e-3
WHITENED = ("slime_whiten", "verl_torch_functional")
REFUSALS = (ValueError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Check:
    """An adapter that compares for itself."""

    run: Callable[[Case], None]


def load_adapters() -> dict[str, Adapter | Check]:
    """The adapters of every family, by the stem of the file."""
    adapters: dict[str, Adapter | Check] = {}
    for family in FAMILIES + CHECKING_FAMILIES:
        module = f"tests.parity.golden_{family}"
        table = importlib.import_module(module).ADAPTERS
        twice = adapters.keys() & table.keys()
        assert not twice, f"{module}: {sorted(twice)} have an adapter already"
        adapters.update({stem: Check(run) for stem, run in table.items()} if family in CHECKING_FAMILIES else table)
    return adapters


def run_case(stem: str, case: Case, adapters: Mapping[str, Adapter | Check]) -> str | None:
    """What is wrong with whet's answer to a case; None if nothing is."""
    from tests.parity.golden_deviations import deviation_of

    if stem not in adapters:
        return f"no adapter for {stem}.json"
    adapter = adapters[stem]
    try:
        if isinstance(adapter, Check):
            adapter.run(case)
            return None
        expected = case["outputs"]
        deviation = deviation_of(stem, case)
        if deviation is not None:
            expected = deviation.answer(case)
        try:
            found = adapter(case)
        except REFUSALS as refusal:
            if _is_error(expected):
                return None
            return f"whet refuses: {type(refusal).__name__}: {refusal}"
        if _is_error(expected):
            return f"whet answers where {expected['error']} was expected"
        rtol = WHITENED_RTOL if stem in WHITENED else RTOL
        return next(differences(expected, plain(found), rtol), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_folder(folder: Path) -> dict[str, list[tuple[str, str | None]]]:
    """Every case of every file: its name and what is wrong with it."""
    adapters = load_adapters()
    return {
        path.stem: [(case["name"], run_case(path.stem, case, adapters)) for case in json.loads(path.read_text())]
        for path in sorted(folder.glob("*.json"))
    }


def plain(value: Any) -> Any:
    """Tensors as nested lists, tuples as lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def differences(expected: Any, found: Any, rtol: float, where: str = "") -> Iterator[str]:
    """Where two answers differ, in words."""
    where = where or "outputs"
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            yield f"{where}: missing {sorted(expected.keys() - found.keys())}, too many {sorted(found.keys() - expected.keys())}"
            return
        for key in expected:
            yield from differences(expected[key], found[key], rtol, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{where}: {len(found)} entries, expected {len(expected)}"
            return
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            yield from differences(a, b, rtol, f"{where}[{i}]")
    elif _is_number(expected) and _is_number(found):
        if not _close(float(expected), float(found), rtol):
            yield f"{where}: {found}, expected {expected}"
    elif type(expected) is not type(found) or expected != found:
        yield f"{where}: {found!r}, expected {expected!r}"


def _close(expected: float, found: float, rtol: float) -> bool:
    if math.isnan(expected) or math.isinf(expected):
        return math.isnan(found) if math.isnan(expected) else found == expected
    return abs(found - expected) <= ATOL + rtol * abs(expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_error(expected: Any) -> bool:
    return isinstance(expected, Mapping) and expected.keys() == {"error"}


def main(arguments: list[str]) -> int:
    """Prints a line per file, the failures, and the sum; 1 if anything failed."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m tests.parity.golden DIR (a folder with *.json files of recorded cases)", file=sys.stderr)
        return 2
    if (Path(arguments[0]) / "tokenizers").is_dir():
        os.environ.setdefault("WHET_GOLDEN", arguments[0])  # read by `golden_masks`, which is imported later
    passed = failed = 0
    for stem, results in run_folder(Path(arguments[0])).items():
        wrong = [(name, problem) for name, problem in results if problem is not None]
        print(f"{stem}: {len(results) - len(wrong)} passed, {len(wrong)} failed")
        for problem, count in Counter(problem for _, problem in wrong if problem.startswith("no adapter")).items():
            print(f"  {count} cases: {problem}")
        for name, problem in wrong:
            if not problem.startswith("no adapter"):
                print(f"  {name}: {problem}")
        passed += len(results) - len(wrong)
        failed += len(wrong)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
