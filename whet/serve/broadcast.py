"""Weights that a trainer broadcasts to the server: process groups, and updates that are opened, filled and ended, as SGLang's are.

Nothing is changed before an update ends: until then its tensors are kept, in as much memory as the model's weights take.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.serve.bodies import Body
from whet.serve.bounds import MAX_CONTAINERS, Name
from whet.serve.control import WeightsRefused
from whet.transport.group import JOIN_TIMEOUT_S, WeightGroup, join_by_name, own_address

T = TypeVar("T")

GROUP = "weight_update_group"
"""SGLang's name of a group that has no other."""
MESSAGE_S = 600.0
"""For the next tensor of a bucket to arrive."""
MAX_RANKS = 2**16
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

Selector = Literal["target", "draft", "all"]
"""Models that are meant; here is one."""
Names = Annotated[list[Name], Field(max_length=MAX_CONTAINERS)]
TensorShape = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=16)]


class GroupBody(Body):
    """A process group to join; the server's processes have the ranks from `rank_offset` on."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, le=MAX_RANKS)
    world_size: int = Field(ge=2, le=MAX_RANKS)
    group_name: Name = GROUP
    backend: Name = "nccl"


class BucketBody(Body):
    """Tensors that are broadcast next, one after another. Caches of older weights are always dropped."""

    names: Names
    dtypes: Names
    shapes: Annotated[list[TensorShape], Field(max_length=MAX_CONTAINERS)]
    group_name: Name = GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Name | None = None
    load_format: None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False


class FileTensors(Protocol):
    """The model's weights, as files have them."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of each tensor by its name."""
        ...

    def own(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """The model's own weights."""
        ...


@dataclass(slots=True)
class OpenUpdate:
    """Tensors that have arrived since an update began."""

    tensors: dict[str, Tensor]
    label: str | None = None


class Broadcasts:
    """Process groups that trainers broadcast through, and the update that is open.

    Args:
        files: the model's weights as they arrive; None: none are taken.
        num_ranks: processes that the server says it has; each has a rank of a group.
    """

    def __init__(self, files: FileTensors | None, num_ranks: int) -> None:
        self._known, self._num_ranks = files, num_ranks
        self._groups: dict[str, list[WeightGroup]] = {}
        self._update: OpenUpdate | None = None
        self._changing = asyncio.Lock()

    async def join(self, body: GroupBody) -> None:
        """Join a group, when all others do.

        Raises:
            WeightsRefused: if that cannot be.
        """
        if body.backend != "gloo":
            raise WeightsRefused(f"backend is {body.backend!r}, and this server joins groups of gloo alone")
        if body.rank_offset + self._num_ranks > body.world_size:
            raise WeightsRefused(f"rank_offset {body.rank_offset} leaves no room for {self._num_ranks} ranks in {body.world_size}")
        async with self._changing:
            if body.group_name in self._groups:
                raise WeightsRefused(f"there is a group {body.group_name!r} already: destroy it first")
            self._groups[body.group_name] = await _on_thread(lambda: _joined(body, self._num_ranks))

    async def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            WeightsRefused: if there is none.
        """
        async with self._changing:
            if self._groups.pop(name, None) is None:
                raise WeightsRefused(f"the group to be destroyed does not exist: {name!r}")

    async def begin(self) -> None:
        """Open an update. What came of one that was not ended is forgotten."""
        async with self._changing:
            self._update = OpenUpdate({})

    async def receive(self, body: BucketBody) -> None:
        """Keep the tensors of a bucket.

        Raises:
            WeightsRefused: if no update is open, they are not the model's, or they do not arrive.
        """
        async with self._changing:
            update, groups = self._update, self._groups.get(body.group_name)
            if update is None:
                raise WeightsRefused("no update is open: /begin_weight_update comes first")
            if groups is None:
                raise WeightsRefused(f"there is no group {body.group_name!r}: /init_weights_update_group comes first")
            if not len(body.names) == len(body.dtypes) == len(body.shapes):
                raise WeightsRefused(f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes")
            if len(set(body.names)) < len(body.names):
                raise WeightsRefused("a bucket has each name once")
            for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
                self._check(name, dtype, shape)
            made = [torch.empty(shape, dtype=DTYPES[dtype]) for dtype, shape in zip(body.dtypes, body.shapes, strict=True)]
            await _on_thread(lambda: _receive(groups, made))
            update.tensors |= dict(zip(body.names, made, strict=True))
            update.label = body.weight_version or update.label

    async def end(self) -> OpenUpdate:
        """Close the update, and return what arrived.

        Raises:
            WeightsRefused: if none is open, or weights are missing or not finite.
        """
        async with self._changing:
            update, self._update = self._update, None
        if update is None:
            raise WeightsRefused("no update is open: /begin_weight_update comes first")
        if missing := [name for name in self._files.shapes if name not in update.tensors]:
            raise WeightsRefused(f"{len(missing)} tensors are missing, the first {', '.join(missing[:5])}")
        if odd := await _on_thread(lambda: [name for name, tensor in update.tensors.items() if not bool(torch.isfinite(tensor).all())]):
            raise WeightsRefused(f"{len(odd)} tensors have numbers that are not finite, the first {', '.join(odd[:5])}")
        return update

    @property
    def _files(self) -> FileTensors:
        if self._known is None:
            raise WeightsRefused("this server takes no broadcast")
        return self._known

    def own(self, update: OpenUpdate) -> Iterable[tuple[str, Tensor]]:
        """The model's own weights of an update."""
        return self._files.own(update.tensors)

    def _check(self, name: str, dtype: str, shape: list[int]) -> None:
        """Refuse a tensor before memory is taken for it."""
        if name not in self._files.shapes:
            raise WeightsRefused(f"the model has no tensor {name[:200]!r}")
        if dtype not in DTYPES:
            raise WeightsRefused(f"{name}: the dtype {dtype[:50]!r} is not one of {', '.join(DTYPES)}")
        if tuple(shape) != tuple(self._files.shapes[name]):
            raise WeightsRefused(f"{name} has the shape {tuple(shape)}, not the model's {tuple(self._files.shapes[name])}")


def _joined(body: GroupBody, num_ranks: int) -> list[WeightGroup]:
    """The group as each of the server's ranks sees it. They join side by side, for none is in it before all are."""

    def one(rank: int) -> WeightGroup:
        address = own_address(body.master_address, body.master_port)  # first, for it fails at once where there is no such name
        store = TCPStore(body.master_address, body.master_port, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
        return join_by_name(store, body.group_name, rank, body.world_size, body.backend, address, MESSAGE_S)

    try:
        with ThreadPoolExecutor(num_ranks) as threads:
            return list(threads.map(one, range(body.rank_offset, body.rank_offset + num_ranks)))
    except (RuntimeError, OSError, ValueError) as error:  # torch's, and those of a name that no machine can have
        raise WeightsRefused(f"failed to join the group: {_first_line(error)}") from None


def _receive(groups: list[WeightGroup], tensors: list[Tensor]) -> None:
    """Receive tensors in their order. Each of the server's ranks gets all of them, and those of the first are kept."""
    places = [tensors, *([torch.empty_like(tensor) for tensor in tensors] for _ in groups[1:])]
    try:
        for work in [group.broadcast(tensor) for group, own in zip(groups, places, strict=True) for tensor in own]:
            work.wait()
    except RuntimeError as error:
        raise WeightsRefused(f"the tensors did not arrive: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


async def _on_thread(work: Callable[[], T]) -> T:
    """The result of work that nobody can end, on a thread that the server's end does not wait for."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(error: BaseException | None, found: list[T]) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(found[0])

    def run() -> None:
        found: list[T] = []
        fault: BaseException | None = None
        try:
            found.append(work())
        except Exception as error:  # it is raised where the work is waited for
            fault = error
        loop.call_soon_threadsafe(settle, fault, found)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.shield(future)
