"""A Hugging Face causal language model as trainer and engine use it, and how model folders are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from whet.model.attention import ATTENTION
from whet.model.config import ModelConfig
from whet.model.contents import Contents, settle_rest, without_tensors
from whet.model.decoder import DecoderModel
from whet.model.recompute import recompute_layers

Model = TypeVar("Model", bound=DecoderModel)


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


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread: streams, graphs and memory figures then refer to
    it."""
    if device.type == "cuda" and device.index is not None:  # else there is one to be seen, which it is already
        torch.cuda.set_device(device)


def torch_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """One thread for torch's work on a device. CUDA's present device is each thread's own, and the first one when a thread starts."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return ThreadPoolExecutor(1, name, initializer=use_device, initargs=(device,))


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
        """True if the outputs of the output layer are changed."""
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

    def outputs(self, tokens: Tensor, hidden: Tensor, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"logits": self.logits(hidden)}

    def own_outputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        return {"logits": self.hf(input_ids=tokens[None], use_cache=False).logits[0]}


def load_causal(
    folder: Path, config: ModelConfig, *, trainable: bool, check: bool = True, key: str = "model.path", spread: bool = False
) -> CausalModel:
    """Load a model folder. `check` compares whet's attention with the model's own; weights that are not finite do not pass it.

    Args:
        folder: in Hugging Face format, with its weights as safetensors.
        config: type and device of the model; its path is not read.
        trainable: True if its weights get gradients.
        check: see above.
        key: the setting that named the folder, for error messages.
        spread: True if ranks of a mesh are to hold it: its tensors then stay without contents until these have shared them out
            (`DecoderModel.fill`), and it is checked there.

    Raises:
        ValueError: if the folder holds no model, or one that whet cannot run; the text says which and why.
    """
    hf_config = config_of(folder, config, key=key)
    model = CausalModel(bare_model(AutoModelForCausalLM, "a causal language model", folder, hf_config, config, key=key))
    model.contents = contents_of(model.hf, folder, key=key)
    return settle(model, config, trainable=trainable, check=check, spread=spread)


def bare_model(
    kind: Any, called: str, folder: Path, hf_config: PreTrainedConfig, config: ModelConfig, *, key: str
) -> PreTrainedModel:
    """A folder's model by a transformers auto class, all but the contents of its files of weights.

    Raises:
        ValueError: if its config.json makes none.
    """
    try:
        hf = without_tensors(kind, hf_config, getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code)
        settle_rest(hf, folder)
    except Exception as error:  # transformers raises what its parts raise
        raise unloadable(folder, error, key=key, called=called) from error
    return hf


def contents_of(hf: PreTrainedModel, folder: Path, *, key: str, headless: bool = False) -> Contents:
    """The weights of a model in a folder's files, which must hold all of them and no others. Arguments
    as for `Contents`.

    Raises:
        ValueError: with the setting, and the fault.
    """
    try:
        found = Contents(hf, folder, headless=headless)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    found.check(key)
    return found


def unloadable(folder: Path, error: Exception, *, key: str = "model.path", called: str = "a causal language model") -> ValueError:
    """Error for a folder that transformers cannot load."""
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


def settle(model: Model, config: ModelConfig, *, trainable: bool, check: bool = True, spread: bool = False) -> Model:
    """Put a model on its device, in the state that whet needs, and check it; of one that is to be spread, the mesh does both."""
    device = pick_device(config.device)
    if device.type == "mps" and config.dtype == "float64":
        raise ValueError("model.dtype is float64, which mps does not have; use float32, or model.device=cpu")
    model.hf.eval()  # no dropout: the trainer differentiates what the engine samples from
    if config.dtype == "float64" and model.hf._can_set_experts_implementation():
        model.hf.set_experts_implementation("eager")  # grouped matrix products have no float64
    model.hf.requires_grad_(trainable)
    if spread:
        model.computes_on = device
    else:
        model.fill(device)
        model.hf.to(device)  # pyright: ignore[reportArgumentType]
        if check:
            model.check()
    if trainable and config.gradient_checkpointing:
        recompute_layers(model.hf, config.gradient_checkpointing, config.gradient_checkpointing_every)
    return model


def config_of(folder: Path, config: ModelConfig, *, key: str) -> PreTrainedConfig:
    """A model folder's config.json as the settings have it. Raises as `read_config`."""
    return read_config(folder, trust_remote_code=config.trust_remote_code, key=key, changes=config.config)


def read_config(
    folder: Path, *, trust_remote_code: bool = False, key: str = "model.path", changes: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """A model folder's config.json, with `model.config` in place of what it says there.

    Raises:
        ValueError: if there is none, transformers does not know it, or it has no such key.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {folder} has no config.json; it must be a model folder in Hugging Face format")
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises what its parts raise
        first = str(error).strip().partition("\n")[0]
        advice = "" if trust_remote_code or "custom code" not in first else "; model.trust_remote_code=true runs it, with your rights"
        raise ValueError(f"{key}: {folder / 'config.json'} cannot be used: {type(error).__name__}: {first}{advice}") from error
    return changed_config(found, folder, changes) if changes else found


def changed_config(found: PreTrainedConfig, folder: Path, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A model's config.json with other values.

    Raises:
        ValueError: if it has no such key, or the model cannot have the value.
    """
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_known(changes, {**found.to_dict(), **written}, "")
    try:
        made = type(found).from_dict(_over(written, changes))
    except Exception as error:  # transformers raises what its parts raise
        raise ValueError(f"model.config does not go with {folder / 'config.json'}: {type(error).__name__}: {error}") from error
    made.name_or_path = found.name_or_path
    return made


def _check_known(changes: Mapping[str, Any], known: Mapping[str, Any], above: str) -> None:
    for name, value in changes.items():
        if name not in known:
            near = get_close_matches(name, known, 3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"model.config.{above}{name}: the model's config.json has no such key{meant}")
        below = known[name]
        if isinstance(value, Mapping) and isinstance(below, Mapping) and name.endswith("config"):  # of a part of the model
            _check_known(cast(Mapping[str, Any], value), cast(Mapping[str, Any], below), f"{above}{name}.")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The tables merged key by key."""
    made = dict(below)
    for name, value in above.items():
        old = made.get(name)
        made[name] = _over(cast(Any, old), cast(Any, value)) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return made
