"""A version of an adapter as a folder, as peft writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from whet.model.config import LoraConfig
from whet.model.decoder import DecoderModel
from whet.model.folders import write_tensors
from whet.model.lora import FILE, add_adapter
from whet.model.meta import without_contents


class AdapterWriter:
    """Writes versions of an adapter.

    Args:
        model: model that the adapter is put on; it has none, and stays so.
        config: the adapter's settings.
        base: path of the model, which the folders name.
    """

    def __init__(self, model: DecoderModel, config: LoraConfig, base: Path) -> None:
        self._adapter, self._base = add_adapter(without_contents(model), config), base
        self._shapes = {name: tensor.shape for name, tensor in self._adapter.tensors().items()}

    def write(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Returns bytes of all tensors.

        Raises:
            ValueError: if they are of another adapter.
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        wrong = sorted(name for name in self._shapes.keys() | tensors.keys()
                       if name not in tensors or tensors[name].shape != self._shapes.get(name))  # fmt: skip
        if wrong:
            raise ValueError(f"the adapter is another than train.lora's: {len(wrong)} tensors differ, among them {', '.join(wrong[:3])}")
        write_tensors(tensors, folder / FILE)
        self._adapter.describe(folder, str(self._base))
        return sum(tensor.nbytes for tensor in tensors.values())
