"""A model and its optimizer as logical tensors, independent of their layout.

model.<name>          parameters and buffers
state.<name>.<key>    optimizer state, in the shape that one process has it in
options of groups     learning rates, betas, momentum, as JSON has them
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from samestep.checkpoint.storage import DTYPES, CheckpointError
from samestep.comm.meshes import own_box
from samestep.groups.param_groups import (
    Group,
    blocks_of_group,
    decisive_changes,
    name_matches,
    options_of,
    parameter_names,
)
from samestep.layout.boxes import Box, HeldBox, HeldState, whole_box
from samestep.layout.fused_rows import in_order, parts_apart, rows_in, whole_name
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.rules.converted import present_master
from samestep.rules.state import MASTER
from samestep.rules.stored import REMAINDER_KEY, join_remainder
from samestep.shards.replicated.awaited import wait_for_anyone

MODEL, STATE = "model", "state"
GroupFacts = dict[str, Any]  # "params": names, "options": by key
PLAIN = bool | int | float | str | None
OWN = (
    "rule",
    "fused",
    "state_dtypes",
    "split_sizes",
    "flatten",
    "transposed",
)  # not the checkpoint's business


# --- tensors ---------------------------------------------------------------------------------


class Pieces(Tensor):
    """A logical tensor, of which this rank has the boxes `held`; it can only be saved and loaded.

    In the words of torch.distributed.checkpoint, which plans who writes and reads what.
    """

    held: tuple[HeldBox, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, held: Sequence[HeldBox]
    ) -> "Pieces":
        """Make a logical tensor; empty boxes are dropped, unless the tensor itself is empty."""
        made: Pieces = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made.held = tuple(one for one in held if one.box.numel)
        if not made.numel():
            made.held = (whole_box(torch.empty(made.shape, dtype=dtype, device=device)),)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = ", ".join(str(box) for box, _ in self.held)
        return f"Pieces({tuple(self.shape)}, {self.dtype}, [{boxes}])"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse computation; metadata is handled before."""
        if func is torch.ops.aten.detach.default:
            (own,) = args
            return Pieces(own.shape, own.dtype, own.device, own.held)
        raise TypeError(
            f"{func} cannot run on the shards of a checkpoint, which can only be saved and loaded"
        )

    # --- for torch.distributed.checkpoint -------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """One write item per box, even if the box is held more than once."""
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
        return [_chunk(box) for box, _ in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.index is not None and index.index < len(self.held):
            box, tensor = self.held[index.index]
            if index.offset == torch.Size(box.offsets):
                return tensor
        return next(tensor for box, tensor in self.held if torch.Size(box.offsets) == index.offset)


def empty_pieces(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, boxes: Iterable[Box]
) -> Pieces:
    """Logical tensors with new boxes to be filled by a load."""
    held = [HeldBox(box, torch.empty(box.sizes, dtype=dtype, device=device)) for box in boxes]
    return Pieces(shape, dtype, device, held)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


Tensors = dict[str, Pieces]


def model_tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers as views, by the names of torch's `get_model_state_dict`."""
    found: Tensors = {}
    wait_for_anyone(model.parameters())
    with parts_apart():
        state_dict = get_model_state_dict(model)
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}, and "
                "only tensors are stored with a model: pass it in extra="
            )
        box = _held_here(value.detach())
        found[name] = Pieces(value.shape, value.dtype, box.tensor.device, [box])
    return {f"{MODEL}.{name}": pieces for name, pieces in _joined(found).items()}


def _held_here(value: Tensor) -> HeldBox:
    """The whole tensor, or the local shard of a DTensor."""
    if not isinstance(value, DTensor):
        return whole_box(value)
    return HeldBox(own_box(value), value.to_local())


class Remainder(NamedTuple):
    """A box of a main parameter that is stored as a remainder, with its parameter."""

    master: Tensor
    param: Tensor
    rest: Tensor


Remainders = dict[str, list[Remainder]]  # by the whole parameter's name; [] if others have it all


def _with_parameters(part: HeldState) -> Iterator[tuple[Box, Tensor, Tensor]]:
    """Boxes of main parameters, stored either way, with the same boxes of the parameters."""
    outer = _held_here(part.param.detach())
    for box, kept in part.boxes:
        yield box, kept, outer.tensor[box.within(outer.box).slices].reshape(kept.shape)


def _joined_master(part: HeldState) -> list[Remainder]:
    """Whole main parameters from remainders, as checkpoints store them."""
    return [
        Remainder(join_remainder(own.to(rest.device), rest), own, rest)
        for _, rest, own in _with_parameters(part)
    ]


def _present_masters(part: HeldState) -> list[HeldBox]:
    """Main parameters with later edits of the parameters; views where nothing was edited."""
    boxes = []
    for box, kept, own in _with_parameters(part):
        present = present_master(own.to(kept.device), kept)
        boxes.append(HeldBox(box, kept if torch.equal(present, kept) else present))
    return boxes


def state_tensors(opt: RuleOptimizer, remainders: Remainders | None = None) -> Tensors:
    """All optimizer state: for loading if `remainders` is given, else for saving.

    Views of it, but for master copies of which remainders are kept: these are made, and told in
    `remainders`. So are those to be saved whose parameters were edited since.
    """
    by_key: dict[str, Tensors] = {}
    order: dict[tuple[str, str], None] = {}  # names and keys as they come
    opt.wait_for_parameters()
    for name, part in opt.held_state():
        tensor = opt.state[part.param][part.key]
        dtype = tensor.dtype
        if part.key == REMAINDER_KEY:
            made = _joined_master(part)
            if remainders is not None:
                remainders.setdefault(whole_name(name), []).extend(made)
            boxes = [
                HeldBox(box, one.master) for (box, _), one in zip(part.boxes, made, strict=True)
            ]
            part, dtype = part._replace(key=MASTER, boxes=boxes), torch.float32
        elif part.key == MASTER and remainders is None:
            part = part._replace(boxes=_present_masters(part))
        pieces = Pieces(part.shape, dtype, tensor.device, part.boxes)
        by_key.setdefault(part.key, {})[name] = pieces
        order[whole_name(name), part.key] = None
    by_key = {key: _joined(of_params) for key, of_params in by_key.items()}
    return {state_key(name, key): by_key[key][name] for name, key in order}


def _joined(tensors: Tensors) -> Tensors:
    """Join the parts of fused parameters, and their state, row after row.

    A number, such as a count of steps, is the same of all parts.
    """
    of_whole: dict[str, list[str]] = {}
    for name in tensors:
        of_whole.setdefault(whole_name(name), []).append(name)
    found: Tensors = {}
    for whole, names in of_whole.items():
        if names == [whole]:
            found[whole] = tensors[whole]
            continue
        of_parts = [tensors[str(part)] for part in in_order(names)]
        first, done, held = of_parts[0], 0, list[HeldBox]()
        for one in of_parts:
            held += [HeldBox(_shifted(box, done), tensor) for box, tensor in one.held]
            done += one.shape[0] if one.ndim else 0
        shape = (done, *first.shape[1:]) if first.ndim else ()
        found[whole] = Pieces(shape, first.dtype, first.device, held)
    return found


def _shifted(box: Box, rows: int) -> Box:
    return Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes) if box.offsets else box


def state_key(name: str, key: str) -> str:
    return f"{STATE}.{name}.{key}"


def name_and_key(tensor: str) -> tuple[str, str | None]:
    """Split the name of a stored tensor into parameter and state key; None for the parameter."""
    part, _, rest = tensor.partition(".")
    if part == MODEL:
        return rest, None
    name, _, key = rest.rpartition(".")
    return name, key


def tensors_of(
    model: nn.Module | None,
    opt: RuleOptimizer | None,
    remainders: Remainders | None = None,
) -> Tensors:
    """Logical tensors of model and optimizer; `remainders` as in `state_tensors`."""
    if model is None and opt is None:
        raise CheckpointError(
            "neither a model nor an optimizer was given, so there is nothing to save "
            "or load: pass one of them or both"
        )
    of_model = {} if model is None else model_tensors(model)
    return (of_model if opt is None else state_tensors(opt, remainders)) | of_model


# --- options ---------------------------------------------------------------------------------


def group_facts(opt: RuleOptimizer) -> list[GroupFacts]:
    """Names and options of each group, with numbers that other code keeps there."""
    facts = []
    group_of: dict[str, int] = {}
    for index, group in enumerate(opt.param_groups):
        for name in map(whole_name, parameter_names(group, index)):
            if group_of.setdefault(name, index) != index:
                raise CheckpointError(
                    f"shards of parameter {name!r} are in several param_groups, and it "
                    "is saved as one: put all of them into one group"
                )
    for index, group in enumerate(opt.param_groups):
        others = {key: value for key, value in group.items() if isinstance(value, PLAIN)}
        names, cuts = _whole_names(group, index)
        options = plain_options({**others, **options_of(group), **cuts})
        facts.append({"params": names, "options": options})
    return facts


def _whole_names(group: Group, index: int) -> tuple[list[str], Group]:
    """A group's parameter names with fused ones joined, and their `split_sizes`."""
    names = list(parameter_names(group, index))
    wholes = list(dict.fromkeys(map(whole_name, names)))
    cut = group.get("split_sizes")
    if wholes == names or isinstance(cut, Sequence):
        return wholes, {}
    blocks = zip(names, blocks_of_group(group, names), strict=True)
    fused = {name: of for name, of in blocks if of and rows_in(name)}
    cuts: dict[str, tuple[int, ...]] = dict(cut or {})
    for whole in dict.fromkeys(map(whole_name, fused)):
        parts = in_order(name for name in fused if whole_name(name) == whole)
        cuts[whole] = tuple(block.rows for part in parts for block in fused[str(part)])
    return wholes, {"split_sizes": cuts} if cuts else {}


def of_all_stages(groups: Iterable[Sequence[GroupFacts]]) -> list[GroupFacts]:
    """Merge the groups of all pipeline stages, each parameter once."""
    merged: list[GroupFacts] = []
    known: set[str] = set()
    for group in (group for of_rank in groups for group in of_rank):
        new = [name for name in group["params"] if name not in known]
        if new:
            known.update(new)
            merged.append({**group, "params": new})
    return merged


def check_options(opt: RuleOptimizer, groups: list[GroupFacts], partial: bool) -> None:
    """Raise if a parameter's state was made by another rule or for other options."""
    members = list(_by_group(opt, groups))
    for group, cuts, own in members:
        for name, saved in own:
            if saved["rule"] != group["rule"]:
                raise CheckpointError(
                    f"parameter {name!r} was trained with rule {saved['rule']!r} and "
                    f"has rule {group['rule']!r} in this optimizer: give it the same "
                    "rule, or load the model alone, without optimizer="
                )
            kept_as_here = {"state_dtypes": group.get("state_dtypes")}
            changes = decisive_changes(
                _alone(name, {**group, **saved, **kept_as_here}), _alone(name, {**group, **cuts})
            )
            if changes and not partial:
                raise CheckpointError(
                    f"parameter {name!r} was saved with options that its state depends "
                    f"on, and this optimizer has others ({changes}): build the "
                    "optimizer with the saved values"
                )
    if not partial:
        for index, (group, _, own) in enumerate(members):
            _refuse_mixed(index, group, own)


def _refuse_mixed(index: int, group: Group, members: Sequence[tuple[str, Group]]) -> None:
    """Raise if parameters of one group were saved with different options."""
    keys = [key for key in options_of(group) if key not in OWN]
    for name, saved in members[1:]:
        first, before = members[0]
        for key in keys:
            if saved.get(key) != before.get(key):
                raise CheckpointError(
                    f"{first!r} and {name!r} are both in param_groups[{index}], and "
                    f"were saved with {key} = {before.get(key)} and {saved.get(key)}: "
                    "put them into different groups, as when they were saved, or pass "
                    "partial=True to keep the value of this optimizer"
                )


def restore_options(opt: RuleOptimizer, groups: list[GroupFacts]) -> None:
    """Give every group the saved options of its parameters, where they all agree."""
    for group, _, members in _by_group(opt, groups):
        for key, value in members[0][1].items() if members else ():
            if any(other.get(key) != value for _, other in members):
                continue
            if key in OWN or decisive_changes(group, {**group, key: value}):
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in options.items()}


def options_from(plain: Mapping[str, Any]) -> Group:
    """Inverse of `plain_options`, except that lists become tuples."""
    return {key: _back(value) for key, value in plain.items()}


class _Members(NamedTuple):
    """One present group: its parameters that were saved, with their options."""

    group: Group
    cuts: Group
    saved: list[tuple[str, Group]]


def _by_group(opt: RuleOptimizer, groups: list[GroupFacts]) -> Iterator[_Members]:
    saved: dict[str, Group] = {}
    for facts in groups:
        saved |= dict.fromkeys(facts["params"], options_from(facts["options"]))
    for index, group in enumerate(opt.param_groups):
        names, cuts = _whole_names(group, index)
        yield _Members(group, cuts, [(name, saved[name]) for name in names if name in saved])


def _alone(name: str, options: Group) -> Group:
    """A group's options as those of one parameter, because grouping may differ."""
    cut = options.get("split_sizes")
    if isinstance(cut, Mapping):
        found = [sizes for pattern, sizes in cut.items() if name_matches(name, pattern)]
        cut = cut.get(name, found[0] if found else None)
    return {**options, "split_sizes": cut}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"entries": {str(key): _plain(entry) for key, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _back(value: Any) -> Any:
    if isinstance(value, dict):
        if "dtype" in value:
            return DTYPES[value["dtype"]]
        return {key: _back(entry) for key, entry in value["entries"].items()}
    return tuple(map(_back, value)) if isinstance(value, list) else value
