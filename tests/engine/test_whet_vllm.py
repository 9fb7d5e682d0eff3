"""The weight-transfer engine for vLLM, beside stand-ins for what it takes from vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

INFO, UPDATE = TypeVar("INFO"), TypeVar("UPDATE")


class Base(Generic[INFO, UPDATE]):
    """As vLLM's `WeightTransferEngine`."""


class Quantized(nn.Module):
    """A layer as Marlin's kernels leave it: with an empty parameter of their own, and without a scale that no file had."""

    def __init__(self):
        super().__init__()
        self.weight_packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.w_zp = nn.Parameter(torch.empty(0), requires_grad=False)

    def restore(self):
        """As vLLM does before a reload."""
        del self.w_zp
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        return {name for name, _ in weights}


@pytest.fixture
def transfer(monkeypatch):
    def module(name, **content):
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor", "vllm.model_executor.model_loader"):
        module(name)
    infos = {"WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    module("vllm.distributed.weight_transfer.base", WeightTransferEngine=Base, **infos)
    reload = {"initialize_layerwise_reload": Quantized.restore, "finalize_layerwise_reload": lambda model, config: None}
    module("vllm.model_executor.model_loader.reload", **reload)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "whet-vllm"))
    for name in ("whet_vllm", "whet_vllm.transfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import whet_vllm.transfer  # pyright: ignore[reportMissingImports]

    yield whet_vllm.transfer
    for name in ("whet_vllm", "whet_vllm.transfer"):
        sys.modules.pop(name, None)


def test_parameters_of_kernels_and_scales_that_no_file_has_need_no_weights_and_all_others_do(transfer, tmp_path):
    engine = transfer.WhetTransferEngine()
    engine.model, engine.device, engine._receiver = Quantized(), torch.device("cpu"), object()
    found = {"weight_packed": torch.ones(2, dtype=torch.int32), "weight_scale": torch.ones(2)}
    save_file(found, tmp_path / "model.safetensors")
    engine.start_weight_update()
    engine.receive_weights(transfer.TicketInfo(1, str(tmp_path)))
    assert engine.digests.keys() == found.keys() and engine.model.weight_scale.tolist() == [1.0, 1.0]
    save_file({"weight_packed": found["weight_packed"]}, tmp_path / "model.safetensors")
    engine.model = Quantized()
    engine.start_weight_update()
    with pytest.raises(ValueError, match=r"version 2: 1 parameters got no weights, the first weight_scale"):
        engine.receive_weights(transfer.TicketInfo(2, str(tmp_path)))
    with pytest.raises(ValueError, match=r"version 3: /elsewhere is not to be seen on .*; sync\.folder must lie on a file system that"):
        engine.receive_weights(transfer.TicketInfo(3, "/elsewhere"))


def test_serve_runs_vllms_own_command_where_there_is_one(tmp_path):
    """Its builds for CPUs have another name, and are called directly (tests/vllm)."""
    there = tmp_path / "vllm-9.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9\n")
    (there / "entry_points.txt").write_text("[console_scripts]\nvllm = command_of_vllm:main\n")
    (tmp_path / "command_of_vllm.py").write_text("import sys\ndef main():\n    print(*sys.argv)\n")
    root = Path(__file__).resolve().parents[2]
    line = [sys.executable, "-m", "whet_vllm.serve", "model", "--port", "3"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root / "whet-vllm")])}
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "vllm serve model --port 3\n", done.stderr
