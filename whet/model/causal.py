"""A Hugging Face causal language model as trainer and engine use it: hidden states of a row of tokens, and logits of some of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from whet.config import Config
from whet.model.attention import ATTENTION, Attend, PackedRow

DType = Literal["float32", "bfloat16", "float64"]
PROBE_TOKENS = 5


class ModelConfig(Config):
    """Which model, and how it is held."""

    path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    dtype: DType = "float32"
    """Of parameters and computation. With bfloat16 the optimizer keeps float32 master weights."""
    device: str = "auto"
    """auto picks cuda, then mps, then cpu."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""


def pick_device(name: str) -> torch.device:
    """`auto` or a torch device name.

    Raises:
        ValueError: if the device is not there.
    """
    if name != "auto":
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"model.device is {name!r}, but torch sees no CUDA device; use model.device=auto or cpu")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class CausalModel:
    """A transformers model behind whet's attention.

    Args:
        hf: the model; its attention implementation must be `whet`.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.config = cast(PreTrainedConfig, hf.config)
        self.decoder = cast(nn.Module, hf.base_model)
        self.lm_head = cast(nn.Module, hf.get_output_embeddings())
        text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._divisor: float | None = getattr(text, "logits_scaling", None)
        self._factor: float | None = getattr(text, "logit_scale", None)

    @property
    def device(self) -> torch.device:
        return next(self.hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.hf.parameters()).dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of a row.

        Args:
            tokens: [T] int64.
            positions: [T] int64, each token's place in its own sequence.
            attend: who sees whom.

        Returns:
            [T, H].
        """
        out = self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V], as the model's own forward computes them."""
        logits = self.lm_head(hidden)
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._factor is not None:
            logits = logits * self._factor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once, by its name in Hugging Face files."""
        return iter(self.hf.named_parameters())

    @torch.no_grad()
    def check(self) -> None:
        """Compare five tokens with the model's own forward.

        Raises:
            ValueError: naming the model, if whet would run it wrongly.
        """
        name = type(self.hf).__name__
        tokens = torch.arange(PROBE_TOKENS, device=self.device) % self.vocab_size
        attend = PackedRow([PROBE_TOKENS], self.device)
        mine = self.logits(self.hidden(tokens, attend.positions, attend)).float()
        self.hf.set_attn_implementation("eager")
        try:
            theirs = self.hf(input_ids=tokens[None], use_cache=False).logits[0].float()
        finally:
            self.hf.set_attn_implementation(ATTENTION)
        tolerance = 1e-3 if self.dtype != torch.bfloat16 else 0.25
        error = (mine - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
        if not error < tolerance:
            raise ValueError(
                f"{name} gives other logits through whet's attention than through its own (relative error {error:.2g}): "
                "it has a feature that whet does not support yet"
            )


def load_causal(folder: Path, config: ModelConfig, *, trainable: bool) -> CausalModel:
    """Load a model folder.

    Raises:
        ValueError: if the folder holds no model, or one that whet cannot run; the text says which and why.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path: {folder} has no config.json; it must be a model folder in Hugging Face format")
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": ATTENTION,
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        hf = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {folder} cannot be loaded as a causal language model: {error}") from error
    return prepare(hf, config, trainable=trainable)


def random_causal(hf_config: PreTrainedConfig, config: ModelConfig, *, seed: int) -> CausalModel:
    """A model of the given shape with random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=ATTENTION, dtype=getattr(torch, config.dtype)
        )
    return prepare(hf, config, trainable=True)


def prepare(hf: PreTrainedModel, config: ModelConfig, *, trainable: bool) -> CausalModel:
    """Put a transformers model on its device, in the state that whet needs, and check it."""
    hf.to(pick_device(config.device))  # pyright: ignore[reportArgumentType]
    hf.eval()  # no dropout: the trainer differentiates what the engine samples from
    hf.requires_grad_(trainable)
    model = CausalModel(hf)
    model.check()
    if trainable and config.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        hf.train()
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model folder's config.json."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
