"""A Hugging Face causal language model as trainer and engine use it: hidden states of a row, logits of some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.config import Config
from whet.model.attention import ATTENTION, Attend, PackedRow

DType = Literal["float32", "bfloat16", "float64"]
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
"""Files of weights, and the index of those in several files, which loading checks."""
PROBE = ((3, 10, 17, 24, 31), (38, 45, 52))
"""Two sequences that share a row when a model is checked."""
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest distance from the model's own logits, relative to their norm."""


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
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device is {name!r}, which torch does not know; use auto, cuda, mps or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"model.device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"model.device is {name!r}, but torch has no Metal device here; use auto or cpu")
    return device


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

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that its outputs depend on: parameters, tied ones under each of their names, and buffers."""
        yield from self.hf.named_parameters(remove_duplicate=False)
        yield from self.hf.named_buffers()

    @torch.no_grad()
    def check(self) -> None:
        """Compare two sequences in one row with the model's own forward of each.

        Raises:
            ValueError: naming the model, if whet would run it wrongly.
        """
        name = type(self.hf).__name__
        num_layers: int = self.config.get_text_config().num_hidden_layers
        if not self.hf._supports_attention_backend:
            raise ValueError(f"{name} does not use transformers' attention interface, so whet cannot run it")
        pieces = [torch.tensor(piece, device=self.device) % self.vocab_size for piece in PROBE]
        row = PackedRow([len(piece) for piece in pieces], self.device)
        layers: list[int] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            layers.append(layer)
            return row(layer, q, k, v, scale)

        mine = self.logits(self.hidden(torch.cat(pieces), row.positions, attend)).float()
        if sorted(layers) != list(range(num_layers)):
            raise ValueError(f"{name}: only {len(layers)} of its {num_layers} layers attend; whet does not support the others yet")
        self.hf.set_attn_implementation("eager")
        try:
            theirs = torch.cat([self.hf(input_ids=piece[None], use_cache=False).logits[0].float() for piece in pieces])
        finally:
            self.hf.set_attn_implementation(ATTENTION)
        distance, norm = float((mine - theirs).norm()), float(theirs.norm())
        if not distance <= PROBE_TOLERANCE[self.dtype] * norm:
            raise ValueError(
                f"{name} gives other logits through whet's attention than through its own (distance {distance:.2g}; "
                f"norm {norm:.2g}): it has a feature that whet does not support yet"
            )


def load_causal(folder: Path, config: ModelConfig, *, trainable: bool, check: bool = True) -> CausalModel:
    """Load a model folder. `check` compares whet's attention with the model's own; weights that are not finite do not pass it.

    Raises:
        ValueError: if the folder holds no model, or one that whet cannot run; the text says which and why.
    """
    read_config(folder, trust_remote_code=config.trust_remote_code)
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise ValueError(f"model.path: {folder} has no weights (model.safetensors); copy or download the whole model there")
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": ATTENTION,
        "trust_remote_code": config.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, with their names
    }
    try:
        found = cast(Any, AutoModelForCausalLM.from_pretrained(folder, **options))
    except Exception as error:  # transformers raises what its parts raise
        if damaged := _damaged(folder):
            text = f"model.path: the weights {damaged} are cut short or damaged; copy or download them again"
            raise ValueError(text) from error
        kind = type(error).__name__
        raise ValueError(f"model.path: {folder} cannot be loaded as a causal language model: {kind}: {error}") from error
    hf, report = found
    _check_weights(folder, report)
    return prepare(hf, config, trainable=trainable, check=check)


def _check_weights(folder: Path, report: Mapping[str, Any]) -> None:
    """What transformers would make up: tensors that the files lack or that have other shapes."""
    advice = "they are of another model or incomplete; copy or download the whole model there"
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"model.path: the weights in {folder} lack {len(missing)} tensors that its config.json asks for, "
            f"among them {', '.join(missing[:3])}; {advice}"
        )
    if other := sorted(report["mismatched_keys"]):
        name, found, wanted = other[0]
        raise ValueError(
            f"model.path: the weights in {folder} have {len(other)} tensors of other shapes than its config.json asks for, "
            f"among them {name}: {tuple(found)}, not {tuple(wanted)}; {advice}"
        )


def random_causal(hf_config: PreTrainedConfig, config: ModelConfig, *, seed: int) -> CausalModel:
    """A model of the given shape with random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: other devices' generators are not restored
        hf = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=ATTENTION, dtype=getattr(torch, config.dtype)
        )
    return prepare(hf, config, trainable=True)


def prepare(hf: PreTrainedModel, config: ModelConfig, *, trainable: bool, check: bool = True) -> CausalModel:
    """Put a transformers model on its device, in the state that whet needs, and check it."""
    device = pick_device(config.device)
    if device.type == "mps" and config.dtype == "float64":
        raise ValueError("model.dtype is float64, which mps does not have; use float32, or model.device=cpu")
    hf.to(device)  # pyright: ignore[reportArgumentType]
    hf.eval()  # no dropout: the trainer differentiates what the engine samples from
    hf.requires_grad_(trainable)
    model = CausalModel(hf)
    if check:
        model.check()
    if trainable and config.gradient_checkpointing:
        hf.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for module in hf.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # of the layer alone, which asks for it; what is inside stays without dropout
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model folder's config.json.

    Raises:
        ValueError: if there is none, or none that transformers knows.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path: {folder} has no config.json; it must be a model folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises what its parts raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"model.path: {folder / 'config.json'} cannot be used: {type(error).__name__}: {first}") from error


def _damaged(folder: Path) -> Path | None:
    """The first file of weights that is not whole, if any."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError):
            return path
    return None
