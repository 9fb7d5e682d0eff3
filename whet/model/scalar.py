"""A decoder with one number for each token: a critic's values, or a reward model's scores.

In Hugging Face's format for sequence classification with one label, so that reward models from the hub load here, and what whet trains
loads with `AutoModelForSequenceClassification`, which reads the score at a sequence's last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from whet.model.causal import bare_model, config_of, contents_of, settle
from whet.model.config import ModelConfig
from whet.model.decoder import DecoderModel

HEAD = "score"
KIND = "a sequence classification model"
NewHead = Literal["zeros", "normal"]
"""zeros: every score is 0 at first, a critic's usual start; normal: standard deviation 1 / sqrt(H + 1), a reward model's
(arXiv 2009.01325)."""


class ScalarModel(DecoderModel):
    """A transformers model for sequence classification with one label, behind whet's attention.

    Args:
        hf: the model; its attention implementation must be `whet`.

    Raises:
        ValueError: if it has several labels, or its head is not a linear layer `score` without bias.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        head, width = dict(hf.named_children()).get(HEAD), self.config.get_text_config().hidden_size
        if not isinstance(head, nn.Linear) or head.bias is not None or head.in_features != width:
            raise ValueError(f"{type(hf).__name__} has no linear layer {HEAD!r} without bias on its hidden states; whet cannot run it")
        if head.out_features != 1:
            raise ValueError(f"{type(hf).__name__} has {head.out_features} labels, not one")
        self.head = head

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to one number each [...], in float32 at least."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.head.weight.to(dtype)).squeeze(-1)

    def outputs(self, tokens: Tensor, hidden: Tensor, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pad = self.config.get_text_config().pad_token_id
        last = len(tokens) - 1 if pad is None else int((tokens != pad).nonzero().max())  # where transformers reads the score
        # A score is a difference of large terms: rounding of the hidden states may change all its digits. Both heads read the same states.
        return {"hidden states": hidden, "scores": self.scores(own["hidden states"][last : last + 1])}

    def own_outputs(self, tokens: Tensor) -> Mapping[str, Tensor]:
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
        try:
            scores = self.hf(input_ids=tokens[None], use_cache=False).logits[0]
        finally:
            hook.remove()
        return {"hidden states": seen[0], "scores": scores}


def load_scalar(
    folder: Path,
    config: ModelConfig,
    *,
    trainable: bool,
    new_head: NewHead | None = None,
    seed: int = 0,
    check: bool = True,
    key: str = "model.path",
    spread: bool = False,
) -> ScalarModel:
    """Load a folder of a sequence classification model with one label, or give a causal language model's decoder a new head.

    Args:
        folder: in Hugging Face format.
        config: type and device of the model; its path is not read.
        trainable: True if its weights get gradients.
        new_head: what the head of a causal language model starts as; None: such a folder is refused.
        seed: seed of a normal head.
        check: compare whet's attention with the model's own.
        key: the setting that named the folder, for error messages.
        spread: as for `load_causal`.

    Raises:
        ValueError: if the folder holds no such model, or one that whet cannot run; the text says which and why.
    """
    hf_config = config_of(folder, config, key=key)
    headless = is_headless(hf_config)
    if headless and new_head is None:
        raise ValueError(
            f"{key}: {folder} is a language model ({', '.join(hf_config.architectures or [])}) without a score head; name a folder that "
            "holds a reward model (AutoModelForSequenceClassification with one label)"
        )
    require_one_label(folder, hf_config, headless=headless, key=key)
    model = ScalarModel(bare_model(AutoModelForSequenceClassification, KIND, folder, hf_config, config, key=key))
    if headless and new_head is not None:
        weight = model.head.weight
        model.head.weight = nn.Parameter(torch.empty_like(weight, device="cpu"))
        fill_head(model, new_head, seed)
    model.contents = contents_of(model.hf, folder, key=key, headless=headless)
    return settle(model, config, trainable=trainable, check=check, spread=spread)


def is_headless(hf_config: PreTrainedConfig) -> bool:
    """True if a folder's config.json names a model other than one for sequence classification."""
    return not any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or [])


def require_one_label(folder: Path, hf_config: PreTrainedConfig, *, headless: bool, key: str) -> None:
    """Refuse several labels; a model that had no head gets one label."""
    if headless:
        hf_config.num_labels = 1
    elif hf_config.num_labels != 1:
        raise ValueError(
            f"{key}: {folder} tells {hf_config.num_labels} classes apart (num_labels in config.json); a critic or a reward model gives one "
            "number, so it must have one label"
        )


@torch.no_grad()
def fill_head(model: ScalarModel, kind: NewHead, seed: int) -> None:
    """Start a head; a normal one is the same for the same seed."""
    weight = model.head.weight
    if kind == "zeros":
        weight.zero_()
        return
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(drawn / (weight.shape[1] + 1) ** 0.5)
