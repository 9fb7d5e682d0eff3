"""Tests with the mark `cuda` are skipped, and named, where there is no CUDA device."""

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker("cuda")) is None:
        return
    wanted = mark.kwargs.get("devices", 1)
    if torch.cuda.device_count() < wanted:
        pytest.skip("needs CUDA" if wanted == 1 else f"needs {wanted} CUDA devices")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
