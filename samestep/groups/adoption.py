"""Which parameters of a model take the places of those that groups have: by name."""

from collections.abc import Sequence

from torch import Tensor, nn

from samestep.groups.mistakes import is_ddp, some
from samestep.groups.param_groups import Group
from samestep.groups.routing import without_wrappers


def params_by_name(groups: Sequence[Group], model: nn.Module) -> list[list[Tensor]]:
    """For each group the parameters of `model` that have the names of its own.

    Names count without what DDP, torch.compile and checkpointing put in. Raises if a group has no
    names, or a name is not there.
    """
    while is_ddp(model):
        model = getattr(model, "module", None) or model.get_submodule("_orig_mod")
    there: dict[str, Tensor] = {
        without_wrappers(name): param
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    found = []
    for index, group in enumerate(groups):
        names = group.get("param_names")
        if names is None:
            raise ValueError(
                f"param_groups[{index}] has no names to find its parameters by: build the "
                "optimizer from a model, or from (name, parameter) pairs"
            )
        missing = [name for name in names if without_wrappers(name) not in there]
        if missing:
            raise ValueError(
                f"the model has no {some(missing)}, which the optimizer has in "
                f"param_groups[{index}]; it has {some(list(there))}: build the optimizer from it"
            )
        found.append([there[without_wrappers(name)] for name in names])
    return found
