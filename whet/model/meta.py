"""A model without memory: its tensors have shapes and types, and no contents. For questions about a folder that need no weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from whet.model.attention import ATTENTION
from whet.model.causal import CausalModel, ModelConfig, read_config, unloadable
from whet.model.decoder import DecoderModel
from whet.model.recompute import recompute_layers
from whet.model.scalar import HEAD, KIND, ScalarModel, is_headless, require_one_label

Decoder = TypeVar("Decoder", bound=DecoderModel)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors files."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights in torch's own format. Transformers reads them where there are no safetensors files."""


class NotCompared(Exception):
    """It cannot be told whether weights fit a model; the text says why."""


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What transformers' own loader says of weights and a model."""

    missing: tuple[str, ...]
    """Tensors of the model that no weight gives. Tied ones are given by what they are tied to."""
    misfits: tuple[str, ...]
    """`name: its shape, not the model's`, and weights whose conversion fails (fused experts that lack one, say)."""
    unused: tuple[str, ...]
    """Weights that the model has no place for."""


def read_meta(folder: Path, config: ModelConfig, *, key: str = "model.path") -> CausalModel:
    """The model that `load_causal` would make of a folder, by its config.json alone: without contents, and not checked.

    Raises:
        ValueError: if there is no config.json, or none of a causal language model.
    """
    hf_config = read_config(folder, trust_remote_code=config.trust_remote_code, key=key)
    try:
        return meta_causal(hf_config, config)
    except Exception as error:  # transformers raises what its parts raise
        raise unloadable(folder, error, key=key) from error


def read_meta_scalar(folder: Path, config: ModelConfig, *, key: str = "model.path") -> ScalarModel:
    """The model that `load_scalar` would make of a folder, with a new head if need be, by its config.json alone: without contents.

    Raises:
        ValueError: as `load_scalar` does.
    """
    hf_config = read_config(folder, trust_remote_code=config.trust_remote_code, key=key)
    require_one_label(folder, hf_config, headless=is_headless(hf_config), key=key)
    try:
        hf = _without_contents(AutoModelForSequenceClassification, hf_config, config)
    except Exception as error:  # transformers raises what its parts raise
        raise unloadable(folder, error, key=key, called=KIND) from error
    return ScalarModel(hf)


def meta_like(model: CausalModel | ScalarModel, hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel | ScalarModel:
    """A model of the same kind and the given shape, without contents and not checked."""
    if isinstance(model, CausalModel):
        return meta_causal(hf_config, config)
    return ScalarModel(_without_contents(AutoModelForSequenceClassification, hf_config, config))


def meta_causal(hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel:
    """A model of the given shape, without contents and not checked."""
    return CausalModel(_without_contents(AutoModelForCausalLM, hf_config, config))


def _without_contents(auto: Any, hf_config: PreTrainedConfig, config: ModelConfig) -> PreTrainedModel:
    with torch.device("meta"):
        hf: PreTrainedModel = auto.from_config(
            hf_config,
            attn_implementation=ATTENTION,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=config.trust_remote_code,
        )
    hf.eval()
    if config.gradient_checkpointing:
        recompute_layers(hf, config.gradient_checkpointing, config.gradient_checkpointing_every)
    return hf


def without_contents(model: Decoder) -> Decoder:
    """The same model without contents; what is tied stays so."""
    known: dict[int, Any] = {}
    for tensor in (*model.hf.parameters(), *model.hf.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        known[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, known)


def weight_headers(folder: Path) -> dict[str, Tensor]:
    """Names, shapes and types of a model folder's weights, as tensors without contents. Only the files' headers are read.

    Raises:
        ValueError: a file is missing or damaged, or there are no weights.
        NotCompared: the weights are in torch's own format.
    """
    headers: dict[str, Tensor] = {}
    for path in weight_files(folder):
        headers.update(read_header(path))
    return headers


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, without their contents.

    Raises:
        ValueError: the file is damaged, or holds a type that torch does not have.
    """
    headers: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                piece = file.get_slice(name)
                kind = piece.get_dtype()
                if kind not in DTYPES:
                    raise ValueError(f"{path}: {name} is of type {kind}, which whet does not read")
                headers[name] = torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); copy or download it again") from error
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read.

    Raises:
        ValueError: there are none, or one that the index names is not there.
        NotCompared: the weights are in torch's own format.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if found := next((name for name in TORCH if (folder / name).is_file()), None):
            raise NotCompared(f"{found} is in torch's own format, which cannot be read in part")
        raise ValueError(f"model.path: {folder} has no weights ({SINGLE}); copy or download the whole model there")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} has no readable weight_map: {type(error).__name__}: {error}") from error
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise ValueError(f"{folder} lacks {len(lacking)} of the {len(names)} files that {INDEX} names, among them {lacking[0]}")
    return [folder / name for name in names]


def take_weights(model: CausalModel | ScalarModel, headers: Mapping[str, Tensor]) -> WeightReport:
    """Load weights without contents into a model without contents, with transformers' own renaming, conversion and tying.

    The model's tensors are replaced: it is then as `from_pretrained` would leave it.

    Raises:
        NotCompared: this version of transformers cannot be asked, or the weights are quantized.
    """
    hf: Any = model.hf
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotCompared("the weights are quantized (quantization_config in config.json)")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        options = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            device_map={"": "meta"},
            dtype=model.dtype,
            dtype_plan=hf._get_dtype_plan(model.dtype),
            weight_mapping=cast(Any, get_model_conversion_mapping(hf)),
        )
        found, _ = convert_and_load_state_dict_in_model(hf, dict(headers), options)
        broken = tuple(f"{name}: {_first_line(text)}" for name, text in found.conversion_errors.items())
        found.conversion_errors.clear()
        found = hf._finalize_model_loading(hf, options, found)
    except (ImportError, AttributeError, TypeError, NotImplementedError) as error:
        raise NotCompared(f"transformers' loader cannot be asked about {type(hf).__name__}: {type(error).__name__}: {error}") from error
    shapes = tuple(f"{name} is {tuple(theirs)}, not {tuple(mine)}" for name, theirs, mine in sorted(found.mismatched_keys))
    made = {f"{HEAD}.weight"} if isinstance(model, ScalarModel) and is_headless(model.config) else set[str]()
    missing = tuple(sorted(name for name in set(found.missing_keys) - made if not any(text.startswith(f"{name}:") for text in broken)))
    return WeightReport(missing, (*shapes, *broken), tuple(sorted(found.unexpected_keys)))


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0][:200]
