"""Best, worst and majority of k samples by resampling: mean and spread over many draws.

For the best of k of a yes-or-no score `passk` is exact, and without the noise of resampling; this also covers scores of any
size, the worst of k and majority votes, in the form that verl logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Vote = str | int | float
NUM_DRAWS = 1000
SEED = 42


def sample_statistics(
    scores: Sequence[float], answers: Sequence[Vote] | None = None, *, num_draws: int = NUM_DRAWS, seed: int = SEED
) -> dict[str, float]:
    """mean@n and, for n > 1, std@n (n in the denominator) and `best@k`, `worst@k`, `maj@k`, each as
    /mean and /std over draws.

    k goes over the powers of two below n, and n. Draws are with replacement; a vote is won by the most
    frequent answer (on a tie by the first drawn), and has the score of the first sample with that
    answer.

    Args:
        scores: scores of one task's n samples.
        answers: answer of each sample; without them there are no votes.
        num_draws: draws for each k.
        seed: seed of the draws; each k restarts from it.
    """
    n = len(scores)
    values = np.asarray(scores, dtype=np.float64)
    out = {f"mean@{n}": float(values.mean())}
    if n == 1:
        return out
    out[f"std@{n}"] = float(values.std())
    reductions: dict[str, Callable[[np.ndarray], float]] = {
        "best": lambda drawn: float(values[drawn].max()),
        "worst": lambda drawn: float(values[drawn].min()),
    }
    if answers is not None:
        reductions["maj"] = lambda drawn: scores[majority([answers[i] for i in drawn], drawn)]
    for k in sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | {n}):
        draws = np.random.RandomState(seed).choice(n, size=(num_draws, k), replace=True)
        for name, reduce in reductions.items():
            results = np.array([reduce(drawn) for drawn in draws])
            out[f"{name}@{k}/mean"], out[f"{name}@{k}/std"] = float(results.mean()), float(results.std())
    return out


def majority(answers: Sequence[Vote], samples: Sequence[int] | np.ndarray) -> int:
    """The first sample that gave the most frequent answer; of several such answers, the first."""
    counts: dict[Vote, int] = {}
    for answer in answers:
        counts[answer] = counts.get(answer, 0) + 1
    winner = max(counts, key=lambda answer: counts[answer])
    return int(samples[list(answers).index(winner)])
