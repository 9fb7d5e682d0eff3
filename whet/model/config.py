"""The settings of a model, and of an adapter on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread

DType = Literal["float32", "bfloat16", "float16", "float64"]
Recompute = bool | Literal["selective"]


class ModelConfig(Config):
    """The model, its type and its device."""

    path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    dtype: DType = "float32"
    """Type of parameters and computation. With bfloat16 and float16 the optimizer keeps float32 master
    weights; with float16 the loss is scaled, too, and a step whose gradients overflow is computed again."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Values in place of those in the model's config.json, such as `{max_position_embeddings = 32768}`
    for longer sequences, or its rotary scaling. A trained model keeps them."""
    device: str = "auto"
    """auto picks cuda, then mps, then cpu."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    gradient_checkpointing: Recompute = False
    """Recompute each layer's activations in the backward pass: least memory, about a third more
    compute; selective: keep the results of matrix products and attention, and recompute the rest, for a
    few per cent."""
    gradient_checkpointing_every: int = Field(default=1, ge=1)
    """Recompute one of this many layers; the others keep all their activations."""

    @model_validator(mode="after")
    def _read(self) -> ModelConfig:
        if not self.gradient_checkpointing:
            refuse_unread(self, ["gradient_checkpointing_every"], "without gradient_checkpointing", "set gradient_checkpointing=true")
        return self


class LoraConfig(Config):
    """An adapter of `alpha / rank` times B A on each of some linear layers. Only A and B train, and a new score head."""

    rank: int = Field(default=16, ge=1)
    """Rows of A, columns of B."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj,
    up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example
    ["q_proj", "v_proj"]."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    export_merged: bool = False
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged
    into its weights to `<run_dir>/merged`."""
