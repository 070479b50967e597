"""DTensors and meshes in less time, with the same results.

torch finds the shape of a result by running the operation in a fake mode that it makes anew each
time, with the stack of whoever asks. Every forked rank looks at every operation again, which was
half the time of small models on meshes. On tensors without data the same kernels give the same
shapes. And it computes which ranks a mesh has whenever somebody asks, an eighth of the time of
small parameters on meshes: a mesh does not change. `make soak` has torch as it is.
"""

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _op_schema
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


def _without_data(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _described(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return TensorMeta(result.shape, result.stride(), result.dtype)
    if isinstance(result, (tuple, list)):
        metas = [_described(item) if isinstance(item, torch.Tensor) else None for item in result]
        return tuple(metas) if isinstance(result, tuple) else metas
    return None


def install() -> None:
    """For the rest of this process and its children, with the torch that it was compared with."""
    if torch.__version__.startswith("2.13."):
        _shapes_without_fake_mode()
        _ranks_of_a_mesh_once()


def _shapes_without_fake_mode() -> None:
    by_fake_mode = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: ShardingPropagator, schema: _op_schema.OpSchema) -> Any:
        if schema.op is torch.ops.aten.equal.default or detect_fake_mode() is not None:
            return by_fake_mode(self, schema)
        try:
            with _disable_current_modes():
                args, kwargs = tree_map_only(
                    DTensorSpec,
                    _without_data,
                    (schema.args_schema, schema.kwargs_schema),
                    is_leaf=lambda leaf: isinstance(leaf, DTensorSpec),
                )
                return _described(schema.op(*args, **kwargs))
        except (NotImplementedError, RuntimeError):  # it makes data, or needs some
            return by_fake_mode(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def _ranks_of_a_mesh_once() -> None:
    compute = DeviceMesh.mesh.fget

    def ranks(self: DeviceMesh) -> torch.Tensor:
        found = self.__dict__.get("_kept_ranks")
        if found is None:
            found = compute(self)
            if type(found) is torch.Tensor and not torch.compiler.is_compiling():
                self.__dict__["_kept_ranks"] = found
        return found

    DeviceMesh.mesh = property(ranks)
