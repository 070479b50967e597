"""Parameters tied over pipeline stages, such as an embedding and the output head.

Each of these stages holds a copy and finds a part of its gradient. The parts are added up over
stages, and their mean is taken over the ranks of a stage, which see other data. Who cuts a model
into stages says so here (`parallel.stages`), and optimizers ask.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.comm.groups import RankGroup, registry
from samestep.comm.messages import gather_everywhere
from samestep.groups.routing import Elsewhere
from samestep.layout.boxes import mesh_of

Places = tuple[int, ...]

_places: MutableMapping[Tensor, Places] = WeakTensorKeyDictionary()


class TiedMembers(NamedTuple):
    """Parameters of a group that are tied over the same stages."""

    places: Places  # of these stages in `stage_group`
    names: tuple[str, ...]


def set_places(param: Tensor, places: Iterable[int]) -> None:
    """Record which stages have a copy of a parameter."""
    _places[param] = tuple(sorted(set(places)))


def places_of(param: Tensor) -> Places:
    """Ranks in `stage_group` that have a copy; () if the parameter is not tied."""
    return _places.get(param, ())


def refuse_replaced(model: nn.Module) -> None:
    """Raise if a tied parameter was replaced, because its gradients would not be summed."""
    for path, module in model.named_modules():
        if not isinstance(module, Elsewhere):
            continue
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and not places_of(param):
                kind = "became a DTensor" if mesh_of(param) is not None else "was replaced"
                raise ValueError(
                    f"parameter '{path}.{name}' is tied over pipeline stages, and "
                    f"{kind} since: FSDP2, tensor parallel and copying a stage break "
                    "the tie. Keep a copy on every data rank (fsdp=False, tp=1), untie "
                    "it, or call tie again"
                )


def names_of_tied(model: nn.Module) -> list[str]:
    """Names of parameters of a stage that are tied to other stages."""
    return [name for name, param in model.named_parameters() if places_of(param)]


def tied_apart(params: Any) -> Any:
    """Put tied parameters into groups of their own, before all others.

    So that their groups have the same number in all of their stages.
    """
    items = list(params) if isinstance(params, list | tuple) else None
    if not items or not any(map(places_of, _tensors(items))):
        return params
    groups = items if isinstance(items[0], Mapping) else [{"params": items}]
    apart: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        members = _pairs(group)
        of_places: dict[Places, list[Any]] = {}
        for member in members:
            of_places.setdefault(places_of(_tensor(member)), []).append(member)
        for places, own in of_places.items():
            (apart if places else rest).append(_copied(group, own))
    return [*apart, *rest]


def tied_members(group: Mapping[str, Any]) -> TiedMembers | None:
    """Parameters of a group that are tied over stages; None if none is.

    Raises:
        ValueError: Some are tied and some are not, or over other stages.
    """
    members = _pairs(group)
    found = {places_of(_tensor(member)) for member in members}
    if found <= {()}:
        return None
    names = [member[0] if isinstance(member, tuple) else "a parameter" for member in members]
    if len(found) > 1:
        tied = [n for n, member in zip(names, members, strict=True) if places_of(_tensor(member))]
        raise ValueError(
            f"{tied[0]!r} is tied over pipeline stages, and other parameters of its "
            "group are not: put it into a param_group of its own, with the same index "
            "on all of its stages"
        )
    return TiedMembers(found.pop(), tuple(names))


def ranks_of(tied: TiedMembers, beside: RankGroup, stages: RankGroup) -> RankGroup:
    """All ranks with a copy of a tied parameter. Collective among them.

    beside: the ranks of this stage; they tell each other who is at the places of their pipelines.
    """
    mine = [stages.members[place] for place in tied.places]
    everyones: Sequence[list[int]] = [mine]
    if beside.size > 1:
        everyones = gather_everywhere(mine, beside.handle)
    return registry.of_members({rank for members in everyones for rank in members})


def refuse_other_places(tied: TiedMembers, stages: RankGroup | None) -> None:
    """Raise unless this rank is in a stage with a copy."""
    where = f"{tied.names[0]!r} is tied over the stages of ranks {list(tied.places)} of a pipeline"
    if stages is None:
        raise ValueError(
            f"{where}, whose gradients are added up: pass process_group=, the ranks "
            "that hold this stage (even if it is only this rank), and stage_group=, "
            "one rank of each stage"
        )
    if stages.rank not in tied.places or max(tied.places) >= stages.size:
        raise ValueError(
            f"{where}, and this is rank {stages.rank} of the {stages.size} of "
            "stage_group: give the stage_group of the pipeline that the model was "
            "split for"
        )


def _pairs(group: Mapping[str, Any]) -> list[Any]:
    """Parameters of a group, with names where it has them."""
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    names = group.get("param_names")
    is_named = any(isinstance(param, tuple) for param in params)  # whatever is told beside
    # Names of another kind or number are refused where groups are checked.
    if is_named or not isinstance(names, list | tuple) or len(names) != len(params):
        return params
    return list(zip(names, params, strict=True))


def _copied(group: Mapping[str, Any], members: list[Any]) -> dict[str, Any]:
    # Tensors are copied: schedulers write into learning rates, group by group.
    own = {k: deepcopy(v) if isinstance(v, Tensor) else v for k, v in group.items()}
    own.pop("param_names", None)
    return {**own, "params": members}


def _tensor(member: Any) -> Tensor:
    found: Tensor = member[1] if isinstance(member, tuple) else member
    return found


def _tensors(items: Sequence[Any]) -> Iterable[Tensor]:
    for item in items:
        if isinstance(item, Mapping):
            yield from map(_tensor, _pairs(item)) if "params" in item else ()
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
            yield item[1]
        elif isinstance(item, Tensor):
            yield item
