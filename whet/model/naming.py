"""A model's own tensors and those of its files: transformers joins some (the experts of a layer) that
files keep apart.

transformers tells the form of a tensor in files (`revert_weight_conversion`), one tensor at a time; the
way back is found from the same answer, since files hold the same elements in another order. So no more
than one tensor is held, for a model of any size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from whet.model.decoder import DecoderModel

Read = Callable[[str], Tensor]
"""Gives a tensor of a file by its name."""


@dataclass(frozen=True, slots=True)
class Box:
    """Neighbours in every dimension."""

    shape: torch.Size
    """In a file."""
    slices: tuple[slice, ...]

    def put(self, part: Tensor, out: Tensor) -> None:
        there = out[self.slices]
        there.copy_(part.reshape(there.shape))


@dataclass(frozen=True, slots=True)
class Scattered:
    """Entries in any order."""

    shape: torch.Size
    entries: Tensor
    """Indices in the flattened tensor. int64"""

    def put(self, part: Tensor, out: Tensor) -> None:
        out.view(-1)[self.entries] = part.reshape(-1)


def place_in(order: Tensor, places: Tensor) -> Box | Scattered:
    """Place of entries in a tensor.

    Args:
        order: the tensor's entries by their numbers, 0 to its size.
        places: numbers of a file's entries, in the file's order.
    """
    entries = places.reshape(-1)
    if len(entries):
        corners = [torch.unravel_index(entries[i], order.shape) for i in (0, -1)]
        slices = tuple(slice(int(low), int(high) + 1) for low, high in zip(*corners, strict=True))
        if torch.equal(order[slices].reshape(-1), entries):
            return Box(places.shape, slices)
    return Scattered(places.shape, entries)


class Naming:
    """Names and shapes on both sides.

    Args:
        model: without contents (`meta.read_meta`).

    Raises:
        ValueError: if a tensor in its files is made of several of its own, so that it cannot be written by itself.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._hf = model.hf
        found = get_model_conversion_mapping(model.hf, add_legacy=False)
        kept = [each for each in found if not isinstance(each, PrefixChange)]
        self._hf._weight_conversions = kept  # pyright: ignore[reportArgumentType] (they would be looked for at every tensor otherwise)
        known = {name for name, _ in model.hf.named_parameters(remove_duplicate=False)}
        self.parameters: Mapping[str, Tensor] = dict(model.hf.named_parameters())
        """Each once, tied ones under the first of their names."""
        self.buffers: Mapping[str, Tensor] = {name: tensor for name, tensor in model.hf.state_dict().items() if name not in known}
        """Those that files hold, too."""
        self.own: Mapping[str, Tensor] = {**self.parameters, **self.buffers}
        """Everything that files hold of the model, by its own names."""
        self.aliases = known - self.parameters.keys()
        """Further names of tied parameters, which files need not have."""
        parts = {name: self.to_files(name, tensor) for name, tensor in self.own.items()}
        self.files = {name: [file for file, _ in found] for name, found in parts.items()}
        """The tensors in files that each of the model's own becomes."""
        self._same = {name for name, found in parts.items() if len(found) == 1 and found[0][1] is self.own[name]}
        together = revert_weight_conversion(self._hf, dict(self.own))
        if self.file_names != together.keys():
            raise ValueError(f"{type(model.hf).__name__} has tensors that are written together; it cannot be converted one after another")
        self._boxes: dict[tuple[str, torch.Size], list[Box]] = {}
        ends = (model.hf.get_input_embeddings(), model.hf.get_output_embeddings())
        weights = [module.weight for module in ends if isinstance(module, (torch.nn.Embedding, torch.nn.Linear))]
        self._of_vocabulary = {name for name, tensor in self.parameters.items() if any(tensor is weight for weight in weights)}

    @property
    def file_names(self) -> set[str]:
        return {file for files in self.files.values() for file in files}

    def to_files(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Tensors in files for one of the model's own."""
        found: Mapping[str, Tensor] = revert_weight_conversion(self._hf, {name: tensor})
        return list(found.items())

    def from_files(self, name: str, read: Read) -> Tensor:
        """One of the model's own tensors, from what files have of it.

        Raises:
            ValueError: if a shape is another than the model's; rows of a vocabulary that was padded are left out.
        """
        wanted = self.own[name]
        if name in self._same:
            return self.fitting(name, read(self.files[name][0]))
        out: Tensor | None = None
        for file, place in zip(self.files[name], self._places(name), strict=True):
            part = read(file)
            if part.shape != place.shape:
                raise ValueError(f"{file} has the shape {tuple(part.shape)}, not the model's {tuple(place.shape)}")
            out = torch.empty(wanted.shape, dtype=part.dtype) if out is None else out
            place.put(part, out)
        assert out is not None, f"{name} becomes nothing in files"
        return out

    def _places(self, name: str) -> list[Box | Scattered]:
        """Places of a tensor's files in it. Layers are alike, so boxes are found once for all of them."""
        wanted = self.own[name].shape
        kind = re.sub(r"\d+", "#", name), wanted
        if kind in self._boxes:
            return list(self._boxes[kind])
        order = torch.arange(wanted.numel(), dtype=torch.int64).view(wanted)
        found = [place_in(order, places) for _, places in self.to_files(name, order)]
        boxes = [place for place in found if isinstance(place, Box)]
        if len(boxes) == len(found):
            self._boxes[kind] = boxes
        return found

    def fitting(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model's shape, without rows that pad a vocabulary.

        Raises:
            ValueError: if it has another shape.
        """
        wanted = self.own[name].shape
        padded = name in self._of_vocabulary and tensor.shape[1:] == wanted[1:] and len(tensor) > len(self.own[name])
        if padded:
            return tensor[: wanted[0]]
        if tensor.shape != wanted:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, not the model's {tuple(wanted)}")
        return tensor
