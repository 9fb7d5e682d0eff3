"""A Hugging Face causal language model as trainer and engine use it, and how model folders are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from whet.config import Config, refuse_unread
from whet.model.attention import ATTENTION
from whet.model.decoder import DecoderModel
from whet.model.recompute import Recompute, recompute_layers

DType = Literal["float32", "bfloat16", "float64"]
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
"""Files of weights, and the index of those in several files, which loading checks."""
Model = TypeVar("Model", bound=DecoderModel)


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
    gradient_checkpointing: Recompute = False
    """Recompute each layer's activations in the backward pass: least memory, about a third more compute; selective: keep what matrix
    products and attention gave, and recompute the rest, for a few per cent."""
    gradient_checkpointing_every: int = Field(default=1, ge=1)
    """Of so many layers one recomputes; the others keep all their activations."""

    @model_validator(mode="after")
    def _read(self) -> ModelConfig:
        if not self.gradient_checkpointing:
            refuse_unread(self, ["gradient_checkpointing_every"], "without gradient_checkpointing", "set gradient_checkpointing=true")
        return self


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """`auto` or a torch device name; `key` is the setting that it comes from.

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
        raise ValueError(f"{key} is {name!r}, which torch does not know; use auto, cuda, mps or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{key} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"{key} is {name!r}, but torch has no Metal device here; use auto or cpu")
    return device


def release_unused() -> None:
    """Give the device what torch keeps of its memory for later, so that other processes may have it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class CausalModel(DecoderModel):
    """A causal language model behind whet's attention.

    Args:
        hf: the model; its attention implementation must be `whet`.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.lm_head = cast(nn.Module, hf.get_output_embeddings())
        text = self.config.get_text_config()
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._divisor: float | None = getattr(text, "logits_scaling", None)
        self._factor: float | None = getattr(text, "logit_scale", None)

    @property
    def changes_logits(self) -> bool:
        """Whether something is done to what the output layer gives."""
        return any(x is not None for x in (self._divisor, self._factor, self._softcap))

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

    def outputs(self, tokens: Tensor, hidden: Tensor) -> Mapping[str, Tensor]:
        return {"logits": self.logits(hidden)}

    def own_outputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        return {"logits": self.hf(input_ids=tokens[None], use_cache=False).logits[0]}


def load_causal(folder: Path, config: ModelConfig, *, trainable: bool, check: bool = True, key: str = "model.path") -> CausalModel:
    """Load a model folder. `check` compares whet's attention with the model's own; weights that are not finite do not pass it.

    Args:
        folder: in Hugging Face format.
        config: how the model is held; its path is not looked at.
        trainable: whether its weights get gradients.
        check: see above.
        key: the setting that named the folder, for error messages.

    Raises:
        ValueError: if the folder holds no model, or one that whet cannot run; the text says which and why.
    """
    hf_config = read_config(folder, trust_remote_code=config.trust_remote_code, key=key)
    hf, report = read_model(AutoModelForCausalLM, "a causal language model", folder, hf_config, config, key=key)
    check_weights(folder, report, key=key)
    return prepare(hf, config, trainable=trainable, check=check)


def read_model(
    kind: Any, called: str, folder: Path, hf_config: PreTrainedConfig, config: ModelConfig, *, key: str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A folder's model as a transformers auto class loads it, on the CPU, and transformers' report of the weights, for `check_weights`.

    Raises:
        ValueError: if there are no weights, or they cannot be loaded.
    """
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise ValueError(f"{key}: {folder} has no weights (model.safetensors); copy or download the whole model there")
    try:
        found = kind.from_pretrained(
            folder,
            config=hf_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused by `check_weights`, with their names
        )
    except Exception as error:  # transformers raises what its parts raise
        if damaged := _damaged(folder):
            raise ValueError(f"{key}: the weights {damaged} are cut short or damaged; copy or download them again") from error
        raise unloadable(folder, error, key=key, called=called) from error
    return found


def check_weights(folder: Path, report: Mapping[str, Any], *, key: str) -> None:
    """Refuse what transformers would make up.

    Raises:
        ValueError: with the tensors that the files lack, or that have other shapes.
    """
    advice = "they are of another model or incomplete; copy or download the whole model there"
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{key}: the weights in {folder} lack {len(missing)} tensors that its config.json asks for, "
            f"among them {', '.join(missing[:3])}; {advice}"
        )
    if other := sorted(report["mismatched_keys"]):
        name, found, wanted = other[0]
        raise ValueError(
            f"{key}: the weights in {folder} have {len(other)} tensors of other shapes than its config.json asks for, "
            f"among them {name}: {tuple(found)}, not {tuple(wanted)}; {advice}"
        )


def unloadable(folder: Path, error: Exception, *, key: str = "model.path", called: str = "a causal language model") -> ValueError:
    """What is told of a folder that transformers cannot load."""
    return ValueError(f"{key}: {folder} cannot be loaded as {called}: {type(error).__name__}: {error}")


def random_causal(hf_config: PreTrainedConfig, config: ModelConfig, *, seed: int) -> CausalModel:
    """A model of the given shape with random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: other devices' generators are not restored
        hf = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=ATTENTION, dtype=getattr(torch, config.dtype)
        )
    return prepare(hf, config, trainable=True)


def prepare(hf: PreTrainedModel, config: ModelConfig, *, trainable: bool, check: bool = True) -> CausalModel:
    """`settle` a causal language model."""
    return settle(CausalModel(hf), config, trainable=trainable, check=check)


def settle(model: Model, config: ModelConfig, *, trainable: bool, check: bool = True) -> Model:
    """Put a model on its device, in the state that whet needs, and check it."""
    device = pick_device(config.device)
    if device.type == "mps" and config.dtype == "float64":
        raise ValueError("model.dtype is float64, which mps does not have; use float32, or model.device=cpu")
    model.hf.to(device)  # pyright: ignore[reportArgumentType]
    model.hf.eval()  # no dropout: the trainer differentiates what the engine samples from
    if config.dtype == "float64" and model.hf._can_set_experts_implementation():
        model.hf.set_experts_implementation("eager")  # grouped matrix products have no float64
    model.hf.requires_grad_(trainable)
    if check:
        model.check()
    if trainable and config.gradient_checkpointing:
        recompute_layers(model.hf, config.gradient_checkpointing, config.gradient_checkpointing_every)
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False, key: str = "model.path") -> PreTrainedConfig:
    """A model folder's config.json.

    Raises:
        ValueError: if there is none, or none that transformers knows.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {folder} has no config.json; it must be a model folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises what its parts raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{key}: {folder / 'config.json'} cannot be used: {type(error).__name__}: {first}") from error


def _damaged(folder: Path) -> Path | None:
    """The first file of weights that is not whole, if any."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError):
            return path
    return None
