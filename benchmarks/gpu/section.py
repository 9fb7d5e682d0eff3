"""The process of one section: `python -m gpu.section MODULE --name decode --out FILE --seconds 120 --sizes auto`.

A section's module has `cases(sizes, device)`, or `run(record, sizes, device, end)` where it finds its cases itself; `sizes` is "small" or
"full".
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import time
from pathlib import Path
from typing import Any

from gpu.record import Record

TOLD_BEFORE_S = 4.0
"""Seconds before the deadline at which every thread's stack is written to the log."""


def main() -> int:
    parser = argparse.ArgumentParser(description="one section")
    parser.add_argument("module")
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sizes", choices=("auto", "small", "full"), default="auto")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds - TOLD_BEFORE_S
    faulthandler.dump_traceback_later(max(args.seconds - TOLD_BEFORE_S, 1.0), exit=False)
    record = Record(args.out, args.name)
    try:
        return run(record, args.module, args.sizes, end)
    except Exception as error:  # imports and preparation may raise anything
        record.fail(error)
        return 1


def run(record: Record, name: str, sizes: str, end: float) -> int:
    """Run all cases. 0: none failed."""
    import torch
    from machine import machine

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    sizes = sizes if sizes != "auto" else "full" if kind == "cuda" else "small"
    record.facts |= {"machine": machine(), "device": kind, "sizes": sizes}
    record.write()
    module: Any = importlib.import_module(name)
    if hasattr(module, "run"):
        module.run(record, sizes, device, end)
    else:
        cases = module.cases(sizes, device)
        record.expect([case.name for case in cases])
        for case in cases:
            record.measure(case)
    return 0 if record.end() else 1


if __name__ == "__main__":
    raise SystemExit(main())
