"""The trained policy, exported and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from whet.build.programs import program_of
from whet.data.template import load_tokenizer
from whet.model.lora import FILE as ADAPTER_FILE
from whet.settings.rl import BaseRunConfig
from whet.train.base import Backend


def export_model(policy: Backend, config: BaseRunConfig, source: Path, target: Path, template: str | None = None) -> None:
    """Write the policy in Hugging Face format, with the tokenizer of the model that it came from.

    Args:
        policy: the model that was trained; every process of a job takes part in its calls.
        config: the run's settings.
        source: the folder of the model that the run began with.
        target: the folder to write; of an adapter that is exported merged, too, the whole model is in `merged` next to it.
        template: the chat template that the policy was trained with; None: the tokenizer's.

    Raises:
        ValueError: if what was written does not read back as what was trained.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=config.model.trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    lora = config.train.lora
    if lora is not None:
        policy.export(target, str(source))
        _read_back(target, load_file(target / ADAPTER_FILE), policy.named_weights("adapter"))
        if not lora.export_merged:
            return
        target = target.with_name("merged")
        policy.export_merged(target)
        tokenizer.save_pretrained(target)
    else:
        policy.export(target)
    on_cpu = config.model.model_copy(update={"device": "cpu", "gradient_checkpointing": False, "gradient_checkpointing_every": 1})
    written = program_of(config).model.load_frozen(target, on_cpu)
    _read_back(target, dict(written.named_weights()), policy.named_weights())


def _read_back(target: Path, found: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compare an exported model with the trained one, tensor by tensor."""
    equal = {name: torch.equal(found[name], tensor.detach().cpu()) for name, tensor in own if name in found}
    for name in found:
        if not equal.get(name, False):
            raise ValueError(f"{target}: {name} does not read back as it was trained; is the disk full?")
