"""The true preference. It does not train: config.toml looks at it next to the reward model's score."""

from whet.types import Trajectory


def polite(trajectory: Trajectory) -> float:
    """1 for a friendly reply, -1 for a rude one, 0 for any other."""
    friendly, rude = (trajectory.response.startswith(lead) for lead in ("With pleasure!", "Not again!"))
    return float(friendly - rude)
