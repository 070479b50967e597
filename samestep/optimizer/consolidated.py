"""The whole state of an optimizer whose ranks share it, gathered for whoever saves it on one rank.

The words are those of torch's ZeroRedundancyOptimizer, which trainers know: all ranks call
`consolidate_state_dict()`, and `state_dict()` is then whole on one of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block
from samestep.optimizer.full_values import FullValues
from samestep.rules.state import State, initial_state

AT_ONCE = 1 << 26  # elements of parameters whose state is gathered together


class Consolidated(NamedTuple):
    """State that was gathered; good until the next change of it.

    to: the rank that has it; None: every rank has it.
    state: all of it in the host's memory, or nothing on other ranks.
    """

    to: int | None
    state: dict[Tensor, State] | None


def gathered(values: FullValues, *, keep: bool) -> dict[Tensor, State] | None:
    """The whole state of all parameters, copied to the host; None unless this rank keeps it.

    Collective. On a device there is never more of it than that of `AT_ONCE` elements, or of one
    parameter.
    """
    whole: dict[Tensor, State] = {}
    for param, state in values.states_in_turn(AT_ONCE):
        if keep:
            whole[param] = {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
    return {param: whole[param] for param in values.by_name().values()} if keep else None


def as_built(
    groups: Iterable[Group], blocks: Mapping[Tensor, list[Block] | None], master_weights: bool
) -> dict[Tensor, State]:
    """The whole state before anything has happened to it, on the host: nobody has to be asked."""
    return {
        param: initial_state(
            rule_of(group), param.detach().to("cpu"), blocks[param], group, master_weights
        )
        for group in groups
        for param in group["params"]
    }


def refuse_part(part: Mapping[str, Any], kept: str, *, alike: bool) -> RuntimeError:
    """For a state dict that would have one rank's part only."""
    has = (
        f"rank {part['rank']} of {part['ranks']} has a part of the optimizer's state ({kept}), and "
        "whoever saves what one rank gives loses the rest: "
    )
    by_part = (
        'build the optimizer with state_dict_form="part" if every rank saves and loads a file of '
        "its own"
    )
    if not alike:
        return RuntimeError(
            f"{has}save with samestep.save(path, model, optimizer), which all ranks call, or "
            f"{by_part}"
        )
    return RuntimeError(
        f"{has}call consolidate_state_dict() on every rank right before, which gathers it on rank "
        "0 (Lightning does so itself, Hugging Face's Trainer with "
        "callbacks=[samestep.hf.SaveWhole()], accelerate after "
        "samestep.hf.save_whole(accelerator, optimizer)); or build the optimizer with "
        'sharding="none", where every rank has all of it; or save with '
        f"samestep.save(path, model, optimizer), which all ranks call; or {by_part}"
    )
