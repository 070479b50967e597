"""A tensor of which this rank holds some boxes, as torch.distributed.checkpoint can store it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from samestep.layout.dtensor_shards import Box
from samestep.layout.held_state import HeldBox, whole_box


class Pieces(Tensor):
    """A logical tensor; `held` are the boxes that are here. It can only be saved and loaded."""

    held: tuple[HeldBox, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, held: Sequence[HeldBox]
    ) -> "Pieces":
        """An empty stretch is left out, but of an empty tensor every rank has all."""
        made: Pieces = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made.held = tuple(one for one in held if one.box.numel)
        if not made.numel():
            made.held = (whole_box(torch.empty(made.shape, dtype=dtype, device=device)),)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The boxes."""
        boxes = ", ".join(str(box) for box, _ in self.held)
        return f"Pieces({tuple(self.shape)}, {self.dtype}, [{boxes}])"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """There is nothing to compute with; what looks at metadata alone never gets here."""
        if func is torch.ops.aten.detach.default:
            (own,) = args
            return Pieces(own.shape, own.dtype, own.device, own.held)
        raise TypeError(f"{func} cannot run on pieces of a tensor: they are saved and loaded only")

    # --- for torch.distributed.checkpoint -------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """One per box, also if it is here more than once, or on several ranks."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=properties, size=self.shape
                ),
            )
            for place, (box, _) in enumerate(self.held)
            if box not in (earlier for earlier, _ in self.held[:place])
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What is to be read."""
        return [_chunk(box) for box, _ in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        if index.index is not None and index.index < len(self.held):
            box, tensor = self.held[index.index]
            if index.offset == torch.Size(box.offsets):
                return tensor
        return next(tensor for box, tensor in self.held if torch.Size(box.offsets) == index.offset)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
