"""What is taken out of a checkpoint before anything is written: tensors under our names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.logical import MODEL, GroupFacts, Pieces, Tensors
from samestep.checkpoint.storage import CheckpointError
from samestep.layout.boxes import Box, HeldBox, held_range, whole_box

META = torch.device("meta")


@dataclass
class Source:
    """Tensors under our names, of which `read` gets the values; and what is left out."""

    read: Callable[[MetadataIndex], Tensor]
    tensors: Tensors = field(default_factory=dict)
    groups: list[GroupFacts] = field(default_factory=list)
    extra: Any = None
    world_size: int = 1
    left_out: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)  # where a tensor was, in their words
    by: set[str] = field(default_factory=set)  # whose optimizers they are, where groups tell

    def add(self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: list[HeldBox]) -> None:
        """A tensor in boxes that are without values."""
        self.tensors[name] = Pieces(shape, dtype, META, boxes)


class _Box(NamedTuple):
    box: Box
    dtype: torch.dtype
    get: Callable[[], Tensor]


@dataclass
class _Parts:
    shape: torch.Size
    origin: str
    boxes: dict[tuple[int, ...], _Box] = field(default_factory=dict)


class Collected:
    """Boxes of tensors from wherever they are found: views of mapped files, or read when asked."""

    def __init__(self) -> None:
        self._found: dict[str, _Parts] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def add(self, name: str, tensor: Tensor, origin: str) -> None:
        """A whole tensor."""
        self._add(name, tensor.shape, [_held(whole_box(tensor))], origin)

    def add_range(
        self, name: str, shape: torch.Size, start: int, values: Tensor, origin: str
    ) -> None:
        """A range of the flattened tensor."""
        held = held_range(tuple(shape), start, values.reshape(-1)) if len(values) else ()
        self._add(name, shape, [_held(one) for one in held], origin)

    def add_box(self, name: str, shape: torch.Size, box: Box, tensor: Tensor, origin: str) -> None:
        self._add(name, shape, [_held(HeldBox(box, tensor))], origin)

    def add_later(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        boxes: Iterable[tuple[Box, Callable[[], Tensor]]],
        origin: str,
    ) -> None:
        """Boxes whose values are read when they are asked for."""
        self._add(name, shape, [_Box(box, dtype, get) for box, get in boxes], origin)

    def add_same(self, name: str, other: str) -> None:
        """What is the same tensor as another one."""
        self._found[name] = self._found[other]

    def drop(self, name: str) -> None:
        del self._found[name]

    def whole(self, name: str) -> Tensor:
        """All of a tensor, read now."""
        parts = self._found[name]
        dtype = next(iter(parts.boxes.values())).dtype
        whole = torch.empty(parts.shape, dtype=dtype)
        for box, _, get in parts.boxes.values():
            whole[box.slices] = get()
        return whole

    def source(self, **facts: Any) -> Source:
        """All that was found; raises if a part of a tensor is missing."""
        source = Source(self._read, **facts)
        for name, parts in self._found.items():
            there, wanted = sum(one.box.numel for one in parts.boxes.values()), parts.shape.numel()
            if there != wanted:
                raise CheckpointError(
                    f"{name} has {there} of its {wanted} elements in {parts.origin} and beside it: "
                    "are the files of all ranks there?"
                )
            dtypes = [one.dtype for one in parts.boxes.values()]
            held = [
                HeldBox(box, torch.empty(box.sizes, dtype=dtype, device=META))
                for box, dtype, _ in parts.boxes.values()
            ]
            source.add(name, parts.shape, dtypes[0] if dtypes else torch.float32, held)
            source.origins[name] = parts.origin
        return source

    def _add(self, name: str, shape: torch.Size, boxes: list[_Box], origin: str) -> None:
        parts = self._found.setdefault(name, _Parts(torch.Size(shape), origin))
        if parts.shape != torch.Size(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(parts.shape)} in {parts.origin} and {tuple(shape)} in "
                f"{origin}: are these files of one checkpoint?"
            )
        parts.boxes |= {one.box.offsets: one for one in boxes}

    def _read(self, box: MetadataIndex) -> Tensor:
        return self._found[box.fqn].boxes[tuple(box.offset or ())].get()


def _held(held: HeldBox) -> _Box:
    return _Box(held.box, held.tensor.dtype, lambda: held.tensor)


def model_name(name: str) -> str:
    return f"{MODEL}.{name}"


def boxes_of(chunks: list[Any]) -> list[HeldBox]:
    """Chunks of torch.distributed.checkpoint, without values."""
    return [
        HeldBox(
            Box(tuple(chunk.offsets), tuple(chunk.sizes)), torch.empty(chunk.sizes, device=META)
        )
        for chunk in chunks
    ]


def step_tensor(value: Any) -> Tensor:
    """A count of steps as ours is kept: 0-D."""
    return torch.as_tensor(value).to(torch.float32).reshape(())
