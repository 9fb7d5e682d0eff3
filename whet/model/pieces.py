"""Sources of a model's tensor in files: a tensor of one file, or several put together. Any part can be
read without the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from whet.model.headers import weight_headers

KeptIndices = Sequence[Tensor]
"""For each dimension the indices that are wanted, in order. int64"""


class Piece(Protocol):
    """A tensor that files have."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def source(self) -> str:
        """A file that has it, or some of it."""
        ...

    def read(self, kept: KeptIndices) -> Tensor:
        """Those of its entries."""
        ...


class Files:
    """The safetensors files of a folder, open inside `opened`.

    Args:
        folder: in Hugging Face format.

    Raises:
        ValueError: as `weight_headers`.
    """

    def __init__(self, folder: Path) -> None:
        self.headers = weight_headers(folder)
        self._open: dict[Path, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, each file is opened as it is first read from, once."""
        with ExitStack() as self._stack:
            yield
        self._open.clear()

    def read(self, name: str, kept: KeptIndices) -> Tensor:
        """A part of a tensor; no other byte of it is copied.

        Raises:
            ValueError: if the file is damaged.
        """
        path = self.headers[name][0]
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
            return self._open[path].get_tensor(name) if not kept else taken(self._open[path].get_slice(name), kept)
        except SafetensorError as error:
            raise ValueError(f"{path} is cut short or damaged ({error}); copy or download it again") from error


def taken(source: Any, kept: KeptIndices) -> Tensor:
    """A part of what can be sliced, in as few slices as it has stretches."""

    def take(chosen: tuple[slice, ...]) -> Tensor:
        dim = len(chosen)
        if dim == len(kept):
            return source[chosen]
        parts = [take((*chosen, run)) for run in _runs(kept[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return take(())


def _runs(indices: Tensor) -> list[slice]:
    """The stretches of neighbours in a list of indices; of an empty list an empty one."""
    if not len(indices):
        return [slice(0, 0)]
    pieces = indices.tensor_split(((indices.diff() != 1).nonzero().squeeze(-1) + 1).tolist())
    return [slice(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor as a file has it."""

    files: Files
    name: str

    @property
    def header(self) -> Tensor:
        return self.files.headers[self.name][1]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.header.shape)

    @property
    def source(self) -> str:
        return self.files.headers[self.name][0].name

    def read(self, kept: KeptIndices) -> Tensor:
        return self.files.read(self.name, kept)


class Stacked:
    """Tensors of one shape, one after another along a new dimension, such as the experts of a layer.

    Args:
        parts: in order.
        dim: the new one.

    Raises:
        ValueError: if their shapes differ.
    """

    def __init__(self, parts: Sequence[Piece], dim: int) -> None:
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"its parts have the shapes {', '.join(map(str, sorted(shapes)))}")
        self._parts, self._dim = parts, dim
        (shape,) = shapes
        self.shape = (*shape[:dim], len(parts), *shape[dim:])
        self.source = parts[0].source

    def read(self, kept: KeptIndices) -> Tensor:
        rest = [*kept[: self._dim], *kept[self._dim + 1 :]]
        parts = [self._parts[i].read(rest) for i in kept[self._dim].tolist()]
        return torch.stack(parts, self._dim) if parts else _nothing(self._parts[0], kept, rest)


class Joined:
    """Tensors put side by side along one of their dimensions, such as gates and what they let through.

    Args:
        parts: in order.
        dim: along which they differ.

    Raises:
        ValueError: if they differ along another.
    """

    def __init__(self, parts: Sequence[Piece], dim: int) -> None:
        shape = list(parts[0].shape)
        odd = [part.shape for part in parts if [*part.shape[:dim], *part.shape[dim + 1 :]] != shape[:dim] + shape[dim + 1 :]]
        if odd:
            raise ValueError(f"its parts have the shapes {tuple(shape)} and {odd[0]}, which cannot be joined along dimension {dim}")
        self._parts, self._dim = parts, dim
        shape[dim] = sum(part.shape[dim] for part in parts)
        self.shape = tuple(shape)
        self.source = parts[0].source

    def read(self, kept: KeptIndices) -> Tensor:
        found: list[Tensor] = []
        start, wanted = 0, kept[self._dim]
        for part in self._parts:
            end = start + part.shape[self._dim]
            here = wanted[(wanted >= start) & (wanted < end)] - start
            if len(here) or len(self._parts) == 1:
                found.append(part.read([*kept[: self._dim], here, *kept[self._dim + 1 :]]))
            start = end
        return torch.cat(found, self._dim) if found else _nothing(self._parts[0], kept, kept)


def _nothing(like: Piece, kept: KeptIndices, of_part: KeptIndices) -> Tensor:
    """No entry, of the type that a part has."""
    found = like.read([indices[:0] for indices in of_part])
    return found.new_empty([len(indices) for indices in kept])


class Conversion:
    """Tensors that transformers computes from others: all are made whole, once, when the first of them
    is read.

    Args:
        hf: the model.
        converter: transformers' rule.
        target: the first of the model's tensors that it makes.
        sources: the tensors to read, by the rule's patterns.
    """

    def __init__(self, hf: PreTrainedModel, converter: WeightConverter, target: str, sources: dict[str, list[InFile]]) -> None:
        self._hf, self._converter, self._target, self._sources = hf, converter, target, sources
        self._made: dict[str, Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that it makes, by name. Errors of transformers pass through."""
        return {name: tuple(made.shape) for name, made in self._make(lambda part: part.header).items()}

    def take(self, name: str) -> Tensor:
        """One of them, whole; each is taken once."""
        if not self._made:
            self._made = self._make(lambda part: part.read([torch.arange(size) for size in part.shape]))
        return self._made.pop(name)

    @property
    def source(self) -> str:
        return next(iter(self._sources.values()))[0].source

    def _make(self, read: Any) -> dict[str, Tensor]:
        rule = deepcopy(self._converter)
        for pattern, parts in self._sources.items():
            for part in parts:
                rule.add_tensor(self._target, part.name, pattern, read(part))
        made: dict[str, Any] = rule.convert(self._target, model=self._hf, config=self._hf.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


@dataclass(frozen=True, slots=True)
class Converted:
    """One of the tensors that a conversion makes."""

    conversion: Conversion
    name: str
    shape: tuple[int, ...]

    @property
    def source(self) -> str:
        return self.conversion.source

    def read(self, kept: KeptIndices) -> Tensor:
        return taken(self.conversion.take(self.name), kept)


def converted(hf: PreTrainedModel, rule: WeightConverter, target: str, sources: dict[str, list[InFile]]) -> dict[str, Piece]:
    """Tensors that a rule of transformers' makes of others, by the model's names.

    Raises:
        Exception: any error of transformers; ValueError, if tensors do not fit together.
    """
    if not all(isinstance(step, MergeModulelist | Concatenate) for step in rule.operations) or len(rule.target_patterns) > 1:
        conversion = Conversion(hf, rule, target, sources)
        return {name: Converted(conversion, name, shape) for name, shape in conversion.shapes().items()}
    lists: list[Sequence[Piece]] = [sources[pattern] for pattern in rule.source_patterns if pattern in sources]
    for step in rule.operations:
        assert isinstance(step, MergeModulelist | Concatenate)
        if isinstance(step, MergeModulelist):
            lists = [[Stacked(pieces, step.dim)] for pieces in lists]
        else:
            lists = [[Joined([piece for pieces in lists for piece in pieces], step.dim)]]
    if len(lists) != 1 or len(lists[0]) != 1:
        raise ValueError(f"{rule} leaves {len(lists)} tensors")
    return {target: lists[0][0]}
