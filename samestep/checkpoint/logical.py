"""A model and its optimizer as named logical tensors, whatever the layout they live in.

model.<name>          parameters and buffers
state.<name>.<key>    optimizer state, in the shape that one process has it in
"""

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.pieces import Pieces
from samestep.comm.meshes import held, mesh_group
from samestep.layout.held_state import HeldBox, whole_box
from samestep.optimizer.full_values import FullValues
from samestep.placements.whole.in_flight import wait_for_anyone

Tensors = dict[str, Pieces]
MODEL, STATE = "model", "state"


def model_tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers, by the names of torch's `get_model_state_dict`; views of them."""
    found: Tensors = {}
    wait_for_anyone(model.parameters())
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}, and only tensors "
                "are stored with a model: give it in extra="
            )
        value = value.detach()
        box = whole_box(value)
        if isinstance(value, DTensor):
            group = mesh_group(value.device_mesh)
            box = HeldBox(held(value, group).boxes[group.rank], value.to_local())
        found[f"{MODEL}.{name}"] = Pieces(value.shape, value.dtype, box.tensor.device, [box])
    return found


def state_tensors(opt: FullValues) -> Tensors:
    """All optimizer state; views of it."""
    found: Tensors = {}
    opt.wait_for_parameters()
    for name, part in opt.held_state():
        tensor = opt.state[part.param][part.key]
        found[state_key(name, part.key)] = Pieces(
            part.shape, tensor.dtype, tensor.device, part.boxes
        )
    return found


def state_key(name: str, key: str) -> str:
    """The name of a state tensor."""
    return f"{STATE}.{name}.{key}"


def tensors_of(model: nn.Module | None, opt: FullValues | None) -> Tensors:
    """Those of both, or of one of them."""
    if model is None and opt is None:
        raise CheckpointError(
            "there is nothing to save or load: give a model, an optimizer or both"
        )
    of_model = {} if model is None else model_tensors(model)
    return (of_model if opt is None else state_tensors(opt)) | of_model
