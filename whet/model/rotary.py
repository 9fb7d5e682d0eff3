"""Rotary scaling that depends on the longest sequence of a forward pass, and the limit up to which it
does not.

transformers chooses the frequencies of longrope and of dynamic NTK scaling by the largest position of
the whole row, so a long sequence would change the numbers of the others in its row. Up to a number of
positions the frequencies are always the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from transformers import PreTrainedConfig


def rotary_limit(text: PreTrainedConfig) -> int | None:
    """Tokens of the longest sequence whose rotary frequencies are those of every shorter one; None: any length.

    Args:
        text: the configuration of a model's decoder.
    """
    limits = [limit for scaling in _scalings(getattr(text, "rope_parameters", None)) if (limit := _limit(scaling, text)) is not None]
    return min(limits, default=None)


def check_rotary(lengths: Iterable[int], limit: int | None, model: str) -> None:
    """Refuse sequences that would change the rotary frequencies.

    Args:
        lengths: tokens of each sequence.
        limit: `rotary_limit` of the model.
        model: what it is called.

    Raises:
        ValueError: naming the longest.
    """
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"a sequence has {longest} tokens, but beyond {limit} the rotary scaling of {model} depends on the longest sequence of a pass, "
            "so the numbers of a sample would depend on its company; whet runs it up to there: lower the token limits "
            "(rollout.max_tokens, data.max_tokens), or take a model whose scaling is fixed (yarn, llama3, linear)"
        )


def _scalings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """A model's scaling, or that of each kind of its layers."""
    if not isinstance(parameters, Mapping):
        return
    given = cast("Mapping[str, Any]", parameters)
    if "rope_type" in given:
        yield given
    else:
        for value in given.values():
            yield from _scalings(value)


def _limit(scaling: Mapping[str, Any], text: PreTrainedConfig) -> int | None:
    kind = scaling["rope_type"]
    if kind == "longrope":
        return scaling["original_max_position_embeddings"]
    return text.max_position_embeddings if "dynamic" in kind else None  # pyright: ignore[reportAttributeAccessIssue]
