"""Tensors of a checkpoint that is converted, under samestep's names, before anything is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from samestep.checkpoint.claims import uncovered
from samestep.checkpoint.logical import MODEL, GroupFacts, plain_options, state_key
from samestep.checkpoint.storage import CheckpointError, in_boxes
from samestep.layout.boxes import Box, held_range, whole_box

Part = Literal["model", "optimizer"]
# Of parameters: one list in the order of the optimizer's, or one per group.
Names = Sequence[str] | Sequence[Sequence[str]]
Values = Tensor | Callable[[], Tensor]  # those of a box, or what reads them
Boxes = Iterable[tuple[Box, Values]]


class SourceOptions(NamedTuple):
    """Options of a conversion beside the path."""

    optimizers: Sequence[Path] = ()
    names: Names | None = None
    model: nn.Module | None = None
    verify: bool = True
    only: Part | None = None
    step: int | None = None


@dataclass
class Source:
    """Tensors under samestep's names, read by `read`, and a list of what is left out."""

    read: Callable[[MetadataIndex], Tensor]
    tensors: dict[str, TensorStorageMetadata]
    origins: dict[str, str]  # where a tensor was, in their words
    groups: list[GroupFacts]
    extra: Any = None
    world_size: int = 1
    left_out: list[str] = field(default_factory=list)
    by: set[str] = field(default_factory=set)  # whose optimizers they are, where groups tell


class _Parts(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    origin: str
    boxes: dict[tuple[int, ...], tuple[Box, Values]]


class Collected:
    """Collects boxes of tensors: views of mapped files, or read on demand.

    Options of parameters are gathered into groups of those that have the same.
    """

    def __init__(self) -> None:
        self._found: dict[str, _Parts] = {}
        self._groups: dict[str, GroupFacts] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def add(self, name: str, tensor: Tensor, origin: str) -> None:
        """Add a tensor that is whole in one file."""
        self.add_boxes(name, tensor.shape, tensor.dtype, [whole_box(tensor)], origin)

    def add_range(
        self, name: str, shape: torch.Size, start: int, values: Tensor, origin: str
    ) -> None:
        """Add a range of a tensor that was saved flattened."""
        held = held_range(tuple(shape), start, values.reshape(-1)) if len(values) else ()
        self.add_boxes(name, shape, values.dtype, held, origin)

    def add_boxes(
        self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: Boxes, origin: str
    ) -> None:
        """Add boxes, whose values are given or read on demand."""
        parts = self._found.setdefault(name, _Parts(torch.Size(shape), dtype, origin, {}))
        if parts.shape != torch.Size(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(parts.shape)} in {parts.origin} and "
                f"{tuple(shape)} in {origin}: give files of one checkpoint"
            )
        parts.boxes.update({one[0].offsets: one for one in boxes})

    def add_same(self, name: str, other: str) -> None:
        """Add further names for the same tensor."""
        self._found[name] = self._found[other]

    def add_step(self, name: str, count: Any, origin: str) -> None:
        """Add a parameter's step count, if it is saved and not known yet."""
        key = state_key(name, "step")
        if count is not None and key not in self:
            self.add(key, step_tensor(count), origin)

    def add_options(self, place: Any, name: str, options: Mapping[str, Any]) -> None:
        """Add options of a group; `place` keeps groups with equal options apart."""
        key = f"{place} {sorted(options.items(), key=str)}"
        new: GroupFacts = {"params": [], "options": plain_options(options)}
        self._groups.setdefault(key, new)["params"].append(name)

    @property
    def groups(self) -> list[GroupFacts]:
        return list(self._groups.values())

    def drop(self, name: str) -> None:
        del self._found[name]

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor."""
        parts = self._check(name)
        whole = torch.empty(parts.shape, dtype=parts.dtype)
        for box, values in parts.boxes.values():
            whole[box.slices] = _read(values)
        return whole

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return {
            name: in_boxes(parts.shape, parts.dtype, (box for box, _ in parts.boxes.values()))
            for name, parts in self._found.items()
        }

    @property
    def origins(self) -> dict[str, str]:
        return {name: parts.origin for name, parts in self._found.items()}

    def read(self, box: MetadataIndex) -> Tensor:
        _, values = self._found[box.fqn].boxes[tuple(box.offset or ())]
        return _read(values)

    def _check(self, name: str) -> _Parts:
        """Raise unless the boxes of a tensor cover it."""
        parts = self._found[name]
        problem = uncovered(parts.shape, [box for box, _ in parts.boxes.values()])
        if problem:
            raise CheckpointError(
                f"{name} has {problem} in {parts.origin} and the files beside it: copy "
                "the files of all ranks"
            )
        return parts

    def source(self, **facts: Any) -> Source:
        """Everything that was added; raises if part of a tensor is missing."""
        for name in self._found:
            self._check(name)
        return Source(self.read, self.tensors, self.origins, self.groups, **facts)


def _read(values: Values) -> Tensor:
    return values if isinstance(values, Tensor) else values()


def model_name(name: str) -> str:
    return f"{MODEL}.{name}"


def step_tensor(value: Any) -> Tensor:
    """A step count as a tensor (), samestep's form."""
    return torch.as_tensor(value).to(torch.float32).reshape(())
