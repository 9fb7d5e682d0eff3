"""What a rank keeps and sends in an optimizer step, counted in real processes (gloo), beside the formulas of `whet plan`.

    python benchmarks/parallel_bytes.py

Small models (two layers, hidden size 32, float32), one row of 32 tokens for each rank with rows of its own. Figures go to
benchmarks/results/parallel_bytes.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from machine import RESULTS, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.parallel.ranks import on_ranks
from tests.parallel.test_parallel_plan import CONFIG, LENGTH, SENT, held_by_optimizer, meta, sent_in_a_step
from whet.plan.layouts import name_of
from whet.plan.memory import Workload
from whet.plan.mesh_memory import MeshPlanner
from whet.plan.traffic import Passes, flows_of, groups_of
from whet.train.torch_native.config import ParallelConfig, TrainConfig

KEPT = ("parameters", "gradients", "optimizer moments")


def compare(kind: str, degrees: ParallelConfig, *, recompute: bool) -> dict[str, object]:
    """Bytes of one layout: the mean of the ranks, and the formula's."""
    sent = on_ranks(degrees.num_ranks, sent_in_a_step, kind, degrees, recompute)
    kept = on_ranks(degrees.num_ranks, held_by_optimizer, kind, degrees)
    model = meta(kind)
    flows = flows_of(model, groups_of(model, degrees), degrees, Passes(1, LENGTH // degrees.context, recompute))
    plan = MeshPlanner(model, CONFIG).plan(Workload(TrainConfig(), (LENGTH,)), degrees)
    counted = {name: round(sum(each[i] for each in kept) / len(kept)) for i, name in enumerate(KEPT)}
    return {
        "model": kind,
        "layout": name_of(degrees),
        "recompute": recompute,
        "sent_bytes": round(sum(sum(each.values()) for each in sent) / len(sent)),
        "sent_by_formula": round(sum(flow.sent_bytes for flow in flows)),
        "sent_by_kind": {kind: round(size) for kind, size in sent[0].items()},
        "kept_bytes": counted,
        "kept_by_plan": {name: plan.bytes_of(name) for name in KEPT},
    }


def main() -> None:
    found = [compare(kind, ParallelConfig(**degrees), recompute=recompute) for kind, degrees, recompute in SENT]
    out = {"command": "python benchmarks/parallel_bytes.py", "machine": machine(), "layouts": found}
    (RESULTS / "parallel_bytes.json").write_text(json.dumps(out, indent=1) + "\n")
    for each in found:
        print(each["model"], each["layout"], each["sent_bytes"], each["sent_by_formula"], each["kept_bytes"], each["kept_by_plan"])


if __name__ == "__main__":
    main()
