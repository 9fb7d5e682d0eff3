"""Weights from whet to a vLLM server."""

from __future__ import annotations

from typing import Any

NAME = "whet"
"""Of the weight-transfer engine."""


def register() -> None:
    """Make the weight-transfer engine known to vLLM, in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "whet_vllm.transfer", "WhetTransferEngine")


class WorkerExtension:
    """Calls of a worker for `/collective_rpc`."""

    weight_transfer_engine: Any

    def whet_takes_tickets(self) -> bool:
        """True if the server was started with the weight-transfer engine of this package."""
        return type(self.weight_transfer_engine).__name__ == "WhetTransferEngine"

    def whet_digests(self) -> dict[str, str]:
        """Digest of each tensor of the last update as it arrived, by its name in Hugging Face files."""
        return dict(self.weight_transfer_engine.digests)
