"""On-policy distillation: the reverse KL to a teacher, sampled by the student, as a part of any advantage."""

from __future__ import annotations

from torch import Tensor


def distilled(advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """A - coef (log p_student - log p_teacher) for each token. [T]

    The student is pulled to where the teacher puts more mass on what the student itself wrote. Source: on-policy
    distillation, arXiv 2306.13649; as a reward: K. Lu, "On-Policy Distillation", Thinking Machines, 2025.
    """
    return advantages - coef * (logprobs - teacher_logprobs)
