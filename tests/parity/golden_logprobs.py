"""Log-probs and entropies from logits, with a replayed nucleus, in chunks."""

from __future__ import annotations

import torch

from tests.parity.golden_batches import by_source, gradient
from whet.core.logprobs import Nucleus, chunked_logprobs


def log_probs_and_entropy(case):
    given = case["inputs"]
    logits, targets = torch.tensor(given["logits"], requires_grad=True), torch.tensor(given["tokens"])
    nucleus = None
    if given["keep_mask"] is not None:
        keep = torch.tensor(given["keep_mask"]).scatter(1, targets[:, None], True)
        nucleus = Nucleus(keep.nonzero()[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)]))
    size = case["params"]["chunk_size"]
    logprobs, entropy = chunked_logprobs(
        lambda rows: rows,
        logits,
        targets,
        torch.ones(len(targets)),
        len(targets) if size <= 0 else size,
        entropy_grad=True,
        nucleus=nucleus,
    )
    pulls = (torch.tensor(given[f"grad_weight_{name}"]) for name in ("log_prob", "entropy"))
    value = sum((pull * column).sum() for pull, column in zip(pulls, (logprobs, entropy), strict=True))
    return {"log_prob": logprobs, "entropy": entropy, "grad_logits_of_weighted_sum": gradient(value, logits)}


ADAPTERS = {"slime_logprob_entropy": by_source({"calculate_log_probs_and_entropy": log_probs_and_entropy})}
