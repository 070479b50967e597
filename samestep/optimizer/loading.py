"""Loads optimizer state: checks it, keeps its dtypes, and matches by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.groups.group_keys import (
    refuse_lost_keys,
    with_keys_of_torchs_muon,
    without_keys_for_torchs_muon,
    without_keys_of_torch,
)
from samestep.groups.param_groups import (
    Group,
    ParamGroup,
    complete,
    decisive_changes,
    naming_group,
    own_spelling,
    parameter_names,
    rule_of,
)
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import local_of, mesh_of
from samestep.rules.converted import as_stored, from_other_master, other_master
from samestep.rules.state import (
    MASTERS,
    State,
    StoredTensors,
    needs_master,
    stored_tensors,
    whole_shapes,
)
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, STEP

StateDict = dict[str, Any]
PutWhole = Callable[[Tensor, State, Mapping[str, Tensor]], None]
TakeParameters = Callable[[Mapping[Tensor, State]], None]
PART = "part"  # in a state dict: which rank's part of a plan it is
SAVE_WHOLE = (
    "save with samestep.save and load with samestep.load, which gives all bits to the parameter"
)
OF_FORMATS = (*MASTERS, STEP)  # keys that come and go with formats, as those of scales do
GATHERED_ON = "gathered on"  # in a part: it is empty, and that rank has all of the state


class _Hidden:
    """Wrapper that hides tensors from the casts of torch's loading."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state


def load_state(
    optimizer: torch.optim.Optimizer,
    torch_load: Callable[[StateDict], None],
    state_dict: StateDict,
    shapes: Mapping[Tensor, Mapping[str, Shape]],
    put_whole: PutWhole,
    take_parameters: TakeParameters,
    stored: Mapping[Tensor, StoredTensors],
    ready: Callable[[], None],
) -> None:
    """Run torch's own `load_state_dict`, hooks included, around our check and copy.

    torch casts floating state to the parameter's dtype, which would round fp32 moments of
    bf16 parameters. So the last pre-hook checks everything and hides the tensors from the
    cast, and the first post-hook copies them into the state that exists.

    Parameters in `shapes` have the state of one process in the state dict, in these shapes:
    `put_whole(param, state, whole)` takes out of it what belongs here. Parameters in `stored` have
    theirs in any format, and these are the ones wanted. `take_parameters(states)` makes the master
    copies in the state of parameters that were saved without one: of their present values.
    `ready()` is called when all is checked, and raises if it is not on all ranks.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise ValueError(
            'the state of an optimizer is a dict with the keys "state" and "param_groups", '
            f"got {str(got)[:200]}"
        )
    own: dict[Tensor, State] = dict(optimizer.state)

    def check_and_hide(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
        checked = _checked(optimizer, loaded, shapes, stored)
        ready()
        return checked

    def copy_into_place(_: torch.optim.Optimizer) -> None:
        without_master: dict[Tensor, State] = {}
        for param, state in own.items():
            hidden = optimizer.state.get(param)
            saved = hidden["hidden"].state if hidden else {}
            whole = {} if param not in shapes else _whole(saved, state, param.device)
            put_whole(param, state, whole)
            # Not before: what is loaded may lie where it goes to, as in torch's checkpoints.
            done = filled_by(whole, state)
            if saved.keys().isdisjoint(MASTERS):
                without_master[param] = state
                done |= set(MASTERS)
            _fill(param, {key: state[key] for key in state if key not in done}, saved)
            optimizer.state[param] = state
        take_parameters(without_master)

    pre = optimizer.register_load_state_dict_pre_hook(check_and_hide)
    post = optimizer.register_load_state_dict_post_hook(copy_into_place, prepend=True)
    try:
        torch_load(state_dict)
    finally:
        pre.remove()
        post.remove()


def with_plain_options(state_dict: StateDict) -> StateDict:
    """A state dict whose options of formats are text.

    Nothing reads it, as state that is loaded tells its formats itself. torch's own API for state
    dicts sends options between ranks, and knows neither dtypes nor mappings that only some have.
    """
    for group in state_dict.get("param_groups", ()):  # a hook may have made another
        group.update(with_keys_of_torchs_muon(group))
        chosen = group.get("state_dtypes")
        if isinstance(chosen, Mapping):
            words = (f"{key}={str(word).removeprefix('torch.')}" for key, word in chosen.items())
            group["state_dtypes"] = ", ".join(words)
    return state_dict


def shapes_of_whole_state(
    groups: Iterable[Group],
    blocks: Mapping[Tensor, list[Block] | None],
    stored: Mapping[Tensor, StoredTensors],
) -> dict[Tensor, dict[str, Shape]]:
    """The shapes of the state that one process keeps of each parameter."""
    return {
        p: whole_shapes(rule_of(group), tuple(p.shape), blocks[p], group, stored[p])
        for group in groups
        for p in group["params"]
    }


def filled_by(whole: Mapping[str, Tensor], state: State) -> set[str]:
    """State keys that a saved entry provides."""
    keys = set(whole)
    return keys | (state.keys() & set(MASTERS)) if keys & set(MASTERS) else keys


def stored_of(
    groups: Iterable[Group], blocks: Mapping[Tensor, list[Block] | None], master_weights: bool
) -> dict[Tensor, StoredTensors]:
    """Formats of each parameter's state."""
    return {
        param: stored_tensors(rule_of(group), param, blocks[param], group, master_weights)
        for group in groups
        for param in group["params"]
    }


def check_part(state_dict: StateDict, mine: Mapping[str, Any] | None, *, alike: bool) -> None:
    """Raise unless a state is whole, or is this rank's part of the same plan.

    `alike`: all ranks have the same parameters; else whole state of one is not that of another.
    """
    saved = state_dict.get(PART) if isinstance(state_dict, Mapping) else None
    if saved is None and mine is not None and not alike:
        raise ValueError(
            "the loaded state is that of one process, and in this optimizer ranks have "
            "different parameters under the same names (pipeline stages, or a "
            "param_group with its own process_group): load on every rank the file that "
            "it saved, or use samestep.save and samestep.load"
        )
    if saved is None or saved == mine:
        return
    if GATHERED_ON in saved:
        raise ValueError(
            f"the loaded state is the remainder of rank {saved['rank']}, whose state "
            f"was gathered on rank {saved[GATHERED_ON]}: load the file of rank "
            f"{saved[GATHERED_ON]} on every rank"
        )
    way = (
        "every rank loads the file that it has saved, on as many ranks. To save on one rank and "
        "load on any number of them, call consolidate_state_dict() on all ranks before "
        "state_dict(), or save with samestep.save(path, model, optimizer), which all ranks call"
    )
    if mine is None or saved["ranks"] != mine["ranks"]:
        wanted = "all of it" if mine is None else f"one of {mine['ranks']} ranks' parts"
        raise ValueError(
            f"the loaded state is one part of {saved['ranks']}, saved by as many ranks, "
            f"and {wanted} is needed: {way}"
        )
    if saved["rank"] != mine["rank"]:
        raise ValueError(
            f"the loaded state is the part of rank {saved['rank']}, and this is rank "
            f"{mine['rank']}: {way}"
        )
    raise ValueError(
        "the loaded state was saved with another assignment of parameters to ranks: "
        "build the optimizer with the same model, sharding, bucket_size, crossover, "
        "owners and state_dtypes as when it was saved. Another version of samestep may "
        "assign otherwise: load the files with that version on the same number of "
        "ranks, call samestep.save(path, model, optimizer) there, and "
        "samestep.load(path, model, optimizer) here"
    )


def _whole(saved: Mapping[str, Any], state: State, device: torch.device) -> State:
    """The tensors of a saved entry that are not laid out as our state is: DTensors in DTensors."""
    whole = {key: torch.as_tensor(value).to(device) for key, value in saved.items()}

    def lies_alike(key: str, tensor: Tensor) -> bool:
        own = state.get(key, state.get(other_master(key) or ""))
        return own is not None and mesh_of(tensor) is not None and mesh_of(own) is not None

    return {key: tensor for key, tensor in whole.items() if not lies_alike(key, tensor)}


@torch.no_grad()
def _fill(param: Tensor, state: State, saved: Mapping[str, Any]) -> None:
    """Copy a saved entry, or start afresh without one."""
    for key, tensor in state.items():
        other = other_master(key)
        if key in saved:
            tensor.copy_(torch.as_tensor(saved[key]))
        elif other is not None and other in saved:
            local = local_of(tensor)
            values = param, torch.as_tensor(saved[other])
            local.copy_(from_other_master(key, *(local_of(v).to(local.device) for v in values)))
        else:
            tensor.zero_()


def _checked(
    optimizer: torch.optim.Optimizer,
    loaded: StateDict,
    shapes: Mapping[Tensor, Mapping[str, Shape]],
    stored: Mapping[Tensor, StoredTensors],
) -> StateDict:
    """The state dict in our order, with our keys and hidden tensors; raises if it does not fit."""
    saved_groups = loaded["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, "
            f"but this optimizer has {len(optimizer.param_groups)}"
        )
    groups, state = [], {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        names = parameter_names(group, index)
        ids = _ids_in_our_order(index, group, saved)
        groups.append(_merged(index, group, {**saved, "params": ids}))
        for name, param, saved_id in zip(names, group["params"], ids, strict=True):
            entry = loaded["state"].get(saved_id)
            if entry:
                own = {key: tuple(tensor.shape) for key, tensor in optimizer.state[param].items()}
                wanted = shapes.get(param, own)
                _refuse_broken_codes(name, entry)
                if param in stored:
                    entry = _in_formats(entry, stored[param], wanted)
                _refuse_masters(name, param, wanted, entry)
                _check_entry(name, wanted, entry, any_master=param in stored)
                state[saved_id] = {"hidden": _Hidden(entry)}
    known = {saved_id for saved in saved_groups for saved_id in saved["params"]}
    unknown = [key for key in loaded["state"] if key not in known]
    if unknown:
        raise ValueError(
            f"the loaded state has entries for {unknown[:3]!r}, which are in no loaded group "
            f"(those have {sorted(known, key=str)[:3]!r}, ...): was it saved in another format?"
        )
    for index, group in enumerate(groups):
        with naming_group(index):
            refuse_lost_keys(group)
    return {**loaded, "param_groups": groups, "state": state}


def _ids_in_our_order(index: int, group: Group, saved: Group) -> list[Any]:
    """Saved ids in the order of the group, matched by name where possible."""
    ids: list[Any] = saved["params"]
    names, saved_names = group.get("param_names"), saved.get("param_names")
    if names is not None and saved_names is not None and len(saved_names) == len(ids):
        missing, extra = (
            sorted(set(names) - set(saved_names)),
            sorted(set(saved_names) - set(names)),
        )
        if missing or extra:
            lacks = f"{missing[0]!r} is not in the loaded group" if missing else "the loaded group"
            has = f"{', which' if missing else ''} has {extra[0]!r}" if extra else ""
            raise ValueError(
                f"param_groups[{index}]: {lacks}{has}; load into the same model, grouped in the "
                "same way, with the same parameters frozen"
            )
        by_name = dict(zip(saved_names, ids, strict=True))
        return [by_name[name] for name in names]
    if len(ids) != len(group["params"]):
        raise ValueError(
            f"loaded state dict contains a parameter group that doesn't match the size of "
            f"optimizer's group: param_groups[{index}] was saved with {len(ids)} parameters "
            f"and has {len(group['params'])} here"
        )
    return ids


def _merged(index: int, group: Group, saved: Group) -> Group:
    """Present hyperparameters overwritten by saved ones; raises if shapes of state would change."""
    own = ("fused", "state_dtypes")  # how a step is computed and kept is not the file's business
    saved = own_spelling(without_keys_for_torchs_muon(saved))
    saved = {key: value for key, value in saved.items() if key not in own}
    saved = without_keys_of_torch(saved, rule_of(group))
    if group["rule"] == "muon" and "rule" not in saved:  # from torch.optim.Muon
        saved = {"orthogonalize": "newton-schulz", **saved}
    if saved.get("rule", group["rule"]) != group["rule"]:
        raise ValueError(
            f"param_groups[{index}] was saved with rule {saved['rule']!r} and has "
            f"{group['rule']!r} here"
        )
    merged = ParamGroup(complete({**group, **saved}, {}))
    if "param_names" in group:
        merged["param_names"] = group["param_names"]
    changes = decisive_changes(group, merged)
    if changes:
        raise ValueError(
            f"param_groups[{index}] was saved with options that its state depends on, "
            f"and this optimizer has others ({changes}): build the optimizer with the "
            "saved values"
        )
    return merged


def _in_formats(
    entry: Mapping[str, Any], stored: StoredTensors, shapes: Mapping[str, Shape]
) -> Mapping[str, Any]:
    """Convert a saved entry to the present formats."""
    tensors = {key: torch.as_tensor(value) for key, value in entry.items()}
    local = {key: local_of(tensor) for key, tensor in tensors.items()}
    made = as_stored(local, stored, shapes)
    found: dict[str, Any] = {}
    for key, tensor in made.items():
        if tensor is local.get(key):
            found[key] = entry[key]
            continue
        base = tensors.get(key.removesuffix(SCALE_SUFFIX))
        per = stored[key].per if key in stored else 1
        found[key] = tensor
        if base is not None and mesh_of(base) is not None and per is not None:
            from samestep.shards.dtensor.local_shards import placed_beside

            found[key] = placed_beside(base, tensor, per)  # type: ignore[arg-type]
    return found


def _refuse_broken_codes(name: str, entry: Mapping[str, Any]) -> None:
    """Raise if codes of 8 bits have no scales, or scales of something else."""
    shapes = {key: tuple(torch.as_tensor(value).shape) for key, value in entry.items()}
    for key, value in entry.items():
        if torch.as_tensor(value).dtype not in (torch.int8, torch.uint8):
            continue
        codes, scales = shapes[key], shapes.get(key + SCALE_SUFFIX)
        if scales is None or codes[:-1] != scales[:-1] or codes[-1] % max(1, scales[-1]):
            has = "are not there" if scales is None else f"have shape {scales}"
            raise ValueError(
                f"state {key!r} of {name!r} is {codes} codes of 8 bits, and their "
                f"scales, {key + SCALE_SUFFIX!r}, {has}: the state was changed after it "
                "was saved: load it unchanged"
            )


def _refuse_masters(
    name: str, param: Tensor, shapes: Mapping[str, Shape], entry: Mapping[str, Any]
) -> None:
    """Raise if a saved entry has a master copy that nothing here can take."""
    key = next((key for key in MASTERS if key in entry), None)
    dtype = str(param.dtype).removeprefix("torch.")
    if key is None:
        return
    if key == REMAINDER_KEY and param.dtype != torch.bfloat16:
        raise ValueError(
            f"state of {name!r} was saved with {key!r}, the low bits of fp32 main "
            f"parameters of a bfloat16 parameter, and the parameter is {dtype} here: "
            f"load it into a bfloat16 model, with master_weights=True, or {SAVE_WHOLE}"
        )
    if not needs_master(param, master_weights=True):
        raise ValueError(
            f"state of {name!r} was saved with {key!r}, the fp32 main parameter of a "
            f"16-bit parameter, and the parameter is {dtype} here, without a main "
            "parameter: load it into a 16-bit model, with master_weights=True, or "
            f"{SAVE_WHOLE}"
        )
    if shapes.keys().isdisjoint(MASTERS):
        raise ValueError(
            f"state of {name!r} was saved with {key!r}, its fp32 main parameter, and "
            "this optimizer has none: build the optimizer with master_weights=True, or "
            "save with samestep.save and load with samestep.load, which leaves it out"
        )


def _check_entry(
    name: str, shapes: Mapping[str, Shape], entry: Mapping[str, Any], *, any_master: bool
) -> None:
    """The saved entry of one parameter has our keys and shapes.

    `any_master`: its master copy may be there in another form.
    """
    formats = "" if any_master else _other_formats(shapes, entry)
    missing = set(shapes) - set(entry) - set(MASTERS)  # can be made from the parameter
    unexpected = set(entry) - set(shapes)
    if any_master and shapes.keys() & set(MASTERS):
        unexpected -= set(MASTERS)
        entry = {key: value for key, value in entry.items() if key in shapes}
    if missing or unexpected:
        raise ValueError(
            f"state of {name!r} was saved with the keys {sorted(entry)}, but {sorted(shapes)} "
            f"are needed{formats}"
        )
    for key, value in entry.items():
        shape = tuple(torch.as_tensor(value).shape)
        if shape != shapes[key]:
            raise ValueError(
                f"state {key!r} of {name!r} was saved with shape {shape}, but {shapes[key]} is "
                f"needed{formats}"
            )


def _other_formats(shapes: Mapping[str, Shape], entry: Mapping[str, Any]) -> str:
    """Advice about a rank's part that was kept in other formats; "" if it was not."""
    own = {key for key in shapes if key in OF_FORMATS or key.endswith(SCALE_SUFFIX)}
    saved = {key for key in entry if key in OF_FORMATS or key.endswith(SCALE_SUFFIX)}
    alike = own == saved and all(
        tuple(torch.as_tensor(entry[key]).shape) == shapes[key] for key in own
    )
    if alike:
        return ""
    return (
        ": state is kept in another format here, and a part of it is not converted; build the "
        "optimizer with the state_dtypes and master_weights that it was saved with, or save with "
        "samestep.save and load with samestep.load, which converts"
    )
