"""What the tests of the memory plan measure with: real models, and the bytes of storages that are really alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV3Config, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from whet.core.batch import TrainBatch, batch_of
from whet.core.weights import REDUCERS
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.model.meta import meta_causal
from whet.types import Origin, Sample

VOCAB = 211
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def qwen3(**changes) -> PreTrainedConfig:
    return Qwen3Config(**{**SIZES, "head_dim": 20, **changes})


def qwen3_moe(**changes) -> PreTrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 20}
    return Qwen3MoeConfig(**{**SIZES, **experts, **changes})


def deepseek(**changes) -> PreTrainedConfig:
    """Multi-head latent attention: keys and values have other sizes than hidden_size / heads."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    return DeepseekV3Config(**{**SIZES, **latent, **experts, "num_key_value_heads": 4, "first_k_dense_replace": 1, **changes})


def pair(shape: PreTrainedConfig, **settings) -> tuple[CausalModel, CausalModel]:
    """The same model without contents, and with random ones."""
    config = ModelConfig(path="tiny", device="cpu", **settings)
    return meta_causal(shape, config), random_causal(shape, config, seed=0)


def batch(lengths: list[int]) -> TrainBatch:
    """Samples in which every token trains that can."""
    samples = [
        Sample(
            tuple((7 * i + 3 * j) % VOCAB for j in range(n)), (Origin.PROMPT,) * n, (False, *(True,) * (n - 1)), (0.0,) * n, (-1,) * n,
            f"g{i}", f"g{i}",
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    found = batch_of(samples)
    return found.with_(weights=REDUCERS["token_mean"](found))


class Alive(TorchDispatchMode):
    """Every storage that was made is looked at again after every operation: slow, and nothing to get wrong."""

    def __init__(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self.peak = 0
        self._wanted = wanted
        self._seen: dict[int, tuple[weakref.ref, bool]] = {}
        """By id: the storage, and whether it counts. What it counts as is decided by the tensor that it was made for."""

    def ignore(self, tensors) -> Alive:
        for tensor in tensors:
            self._see(tensor, counts=False)
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, counts=self._wanted(tensor))
        alive = [storage.nbytes() for ref, counts in self._seen.values() if counts and (storage := ref()) is not None]
        self.peak = max(self.peak, sum(alive))
        return out

    def _see(self, tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        known = self._seen.get(id(storage))
        if known is None or known[0]() is not storage:
            self._seen[id(storage)] = (weakref.ref(storage), counts)


def as_wide_as_the_vocabulary(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-1] == VOCAB
