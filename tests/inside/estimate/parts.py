"""DTensors that other meshes have copies of, twice: on real ranks, and as plans without them.

The parameters of `tests.test_every_mesh`, many times as large: cut by rows and columns, evenly or
not, whole with summands of gradients, stacks of experts, and plain ones.
"""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import samestep
from samestep.lab.estimate.grid import Grid
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.layout.boxes import Cut
from tests.test_every_mesh import EVEN, PARAMS

AXES = ("data", "expert", "model")
TIMES = 9  # as large in every dim but that of experts; odd, so that some are cut unevenly


def lies_of(flat):
    """How parameters lie, and how large they are; of flat buffers those that are cut evenly."""
    found = {}
    for name, lies in (EVEN if flat else PARAMS).items():
        times = 8 if flat else TIMES
        stack = lies.shape[: len(lies.shape) == 3]
        shape = (*stack, *(times * size for size in lies.shape[len(stack) :]))
        split = lies.split and tuple(times * size for size in lies.split)
        found[name] = lies._replace(shape=shape, split=split)
    return found


class Parts(nn.Module):
    """The parameters, each with the gradient that it is given."""

    def __init__(self, params, lies):
        super().__init__()
        self.lies = lies
        for name, param in params.items():
            self.register_parameter(name, nn.Parameter(param))

    def forward(self, number):
        """A sum of which backward gives each rank gradients of its own, the last one's first."""
        whole = 0.0
        for place, (name, param) in enumerate(self.named_parameters()):
            local = param
            if isinstance(param, DTensor):
                kinds = list(param.placements)
                if self.lies[name].partial:
                    kinds[-1] = Partial()
                local = param.to_local(grad_placements=kinds)
            whole = whole + (local * (1 + 0.1 * number + 0.01 * place)).sum()
        return whole


def options_of(lies, options):
    kinds = {}
    for name, own in lies.items():
        kinds.setdefault((own.rule, own.split), []).append(name)
    groups = [
        {"params": names, "rule": rule, **({"split_sizes": split} if split else {})}
        for (rule, split), names in kinds.items()
    ]
    return {"groups": groups, "crossover": 900, "bucket_size": 9000, "chunk_size": 9000, **options}


def training(sizes, options):
    """A model on ranks of a mesh (data, expert, model), and its optimizer."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    lies = lies_of(options.get("buffers") == "flat")
    params = {}
    for place, (name, own) in enumerate(lies.items()):
        generator = torch.Generator().manual_seed(place)
        value = torch.randn(own.shape, generator=generator).to(options.get("dtype", torch.float32))
        placements = {"expert": own.expert, "model": own.model}
        kept = {axis: place for axis, place in placements.items() if place is not None}
        if kept:
            inner = mesh[tuple(kept)]
            value = distribute_tensor(value, inner, list(kept.values()), src_data_rank=None)
        params[name] = value
    model = Parts(params, lies)
    return model, made(model, lies, options)


def made(model, lies, options):
    own = {key: value for key, value in options.items() if key != "dtype"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return samestep.MuonAdamW(model, **options_of(lies, own))


def foreseen(sizes, options):
    """The plan of all ranks, from a model on the meta device."""
    lies, dtype = lies_of(options.get("buffers") == "flat"), options.get("dtype", torch.float32)
    params = {n: torch.empty(own.shape, dtype=dtype, device="meta") for n, own in lies.items()}
    optimizer = made(Parts(params, lies), lies, options)

    def spread(name, param):
        own = lies[name]
        placed = {"expert": own.expert, "model": own.model}
        mesh = tuple((axis,) for axis, place in placed.items() if place is not None)
        if not mesh:
            return None
        kept = [place for place in placed.values() if place is not None]
        cuts = tuple(Cut(None if isinstance(p, Replicate) else p.dim) for p in kept)
        return SpreadOver(mesh, cuts, (len(mesh) - 1,) if own.partial else ())

    return plan_on_grid(optimizer, Grid(dict(zip(AXES, sizes, strict=True))), spread=spread)
