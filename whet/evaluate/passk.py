"""pass@k, unbiased (arXiv 2107.03374, section 2.1)."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not k={k}, n={num_samples}, c={num_correct}")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
