"""Parameters that stay as they are while the rest of the model trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

BUT = "!"
"""Before a pattern: the parameters of this name train."""
SHOWN = 4


def freeze(hf: PreTrainedModel, patterns: Sequence[str]) -> int:
    """Freeze the parameters that patterns name (`train.freeze`). Where several match a name, the last one counts.

    Returns:
        The number of parameters that do not train.

    Raises:
        ValueError: a pattern matches nothing, or nothing is left to train.
    """
    named = dict(hf.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        train, glob = pattern.startswith(BUT), pattern.removeprefix(BUT)
        found = [name for name in named if fnmatchcase(name, glob)]
        if not found:
            near = get_close_matches(glob.strip("*."), sorted(_endings(named)), SHOWN, 0.5) or list(named)[:SHOWN]
            there = f"(* stands for any text); there are {', '.join(near)}"
            raise ValueError(f"train.freeze: no parameter of the model is named like {glob!r} {there}")
        for name in found:
            named[name].requires_grad_(train)
    if not any(parameter.requires_grad for parameter in named.values()):
        advice = f'name fewer parameters, or some that train: "{BUT}*.mlp.*"'
        raise ValueError(f"train.freeze = {list(patterns)} leaves nothing to train; {advice}")
    return sum(parameter.numel() for parameter in hf.parameters() if not parameter.requires_grad)


def _endings(names: Iterable[str]) -> set[str]:
    """Parts of names that a pattern may be for."""
    return {part for name in names for part in (name, *name.split("."))}
