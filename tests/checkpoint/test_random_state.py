import json
import random

import numpy as np
import torch

from whet.checkpoint.random_state import RandomState


def draws():
    arrays = np.random.rand(3), torch.rand(5), torch.randn(3)
    return random.random(), random.gauss(0, 1), np.random.normal(), [array.tolist() for array in arrays]


def test_every_generator_goes_on_where_it_was():
    """The state survives JSON; gauss and normal keep half of a pair, which counts, too."""
    draws()
    state = json.loads(json.dumps(RandomState().state()))
    expected = [draws() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draws() != expected[0]
    RandomState().restore(state)
    assert [draws() for _ in range(3)] == expected
