"""Treatment of tokens that are older than the bound."""

import pytest

from whet.observe.metrics import flatten
from whet.rollout.staleness import bounded
from whet.types import UNSAMPLED, Origin, Sample


def sample(group, trajectory, *versions):
    num = len(versions)
    return Sample(
        (1, *range(2, 2 + num)), (Origin.PROMPT, *(Origin.MODEL,) * num), (False, *(True,) * num), (0.0, *(-1.0,) * num),
        (UNSAMPLED, *versions), group, trajectory, 0, 1.0, True, 1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("too_old", "kept"), [("mask", [1, 2, 2]), ("drop", [0, 2, 2]), ("drop_group", [0, 0, 2])])
def test_what_trains_where_one_token_is_too_old(too_old, kept):
    samples = [sample("a", "a/0", 3, 5), sample("a", "a/1", 5, 5), sample("b", "b/0", 5, 4)]
    bound, metrics = bounded(samples, 5, 1, too_old)
    assert [sum(each.loss_mask) for each in bound] == kept
    assert flatten(metrics)["staleness/masked_tokens"] == 6 - sum(kept)
