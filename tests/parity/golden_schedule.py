"""Micro-batch schedules, packing, balancing and context-parallel layouts."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.context import context_slices
from tests.parity.golden_batches import by_source
from tests.parity.schedule import SchedulePlan, schedule_steps
from whet.train.balance import balanced_parts
from whet.train.torch_native.packing import pack


def dp_schedule(case):
    given, params = case["inputs"], case["params"]
    packing = "count"
    if params["use_dynamic_batch_size"]:
        packing = "cost" if params["balance_by_flops"] else "tokens"
    plan = SchedulePlan(
        num_ranks=params["dp_size"],
        trajectories_per_step=params["global_batch_size"],
        packing=packing,
        max_tokens=(params["max_tokens_per_gpu"] or 0) * params["cp_size"],
        samples_per_micro_batch=params["micro_batch_size"],
        balance_ranks=params["balance_data"],
        multiple=params["microbatch_group_size_per_vp_stage"] if params["vpp_size"] > 1 else 1,
    )
    steps = schedule_steps(given["total_lengths"], given["rollout_indices"], plan, lambda length: slime_flops(length, params))
    partitions: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    places: list[list[list[int]]] = [[] for _ in range(plan.num_ranks)]
    for step in steps:
        for rank, micro_batches in enumerate(step.micro_batches):
            for samples in micro_batches:
                start = len(partitions[rank])
                partitions[rank].extend(samples)
                places[rank].append(list(range(start, len(partitions[rank]))))
    return {
        "partitions": partitions,
        "micro_batch_indices": places,
        "num_microbatches": [len(step.micro_batches[0]) for step in steps],
        "global_batch_sizes": [step.num_trajectories for step in steps],
    }


def slime_flops(length: int, params: dict[str, Any]) -> float:
    """slime's estimate, which counts num_heads // num_groups heads once for keys and values together."""
    hidden, heads, width = params["hidden_size"], params["num_attention_heads"], params["kv_channels"]
    projections = 2 * length * hidden * width * (heads + heads // params["num_query_groups"]) + 2 * length * hidden * hidden
    attention = 2 * heads * length * length * width
    ffn = params["ffn_hidden_size"]
    if params["num_experts"] is not None:
        ffn = params["moe_ffn_hidden_size"] * params["moe_router_topk"] + (params.get("moe_shared_expert_intermediate_size") or 0)
    layer = projections + attention + 6 * length * hidden * ffn
    return layer * params["num_layers"] + 2 * length * hidden * params["vocab_size"]


def first_fit(case):
    return {"bins": pack(case["inputs"]["lengths"], case["params"]["max_tokens"])}


def karmarkar_karp(case):
    params = case["params"]
    return {"partitions": balanced_parts(case["inputs"]["lengths"], params["k"], equal_size=params["equal_size"])}


def cp_layout(case):
    length, response = case["inputs"]["total_length"], case["inputs"]["response_length"]
    slices = context_slices(length, response, case["params"]["cp_size"])
    return {
        "ranks": [
            {
                "rank": rank,
                "chunk_size": found.chunk_tokens,
                "chunks_offset": found.chunks,
                "logits_offset": found.predictors,
                "tokens_offset": found.predicted,
                "slice_with_cp(arange,pad=0)": found.take(torch.arange(1, length + 1)),
                "slice_log_prob_with_cp(arange)": found.take_response(torch.arange(response), length - response),
            }
            for rank, found in enumerate(slices)
        ]
    }


ADAPTERS = {
    "slime_schedule_cp": by_source(
        {
            "build_dp_schedule": dp_schedule,
            "first_fit_pack": first_fit,
            "get_seqlen_balanced_partitions": karmarkar_karp,
            "get_logits_and_tokens_offset_with_cp": cp_layout,
        }
    )
}
