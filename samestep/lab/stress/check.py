"""Compares all replicas inside a training loop: cheap while they agree, exact if not."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.groups import RankGroup, rank_group, registry
from samestep.comm.integrity.agreement import (
    RanksDisagreeError,
    agreed,
    differing,
    gather_texts,
    require_same_lines,
)
from samestep.comm.integrity.checksum import checksum, checksums, text_checksum
from samestep.comm.integrity.differences import Value, locate
from samestep.groups.param_groups import LAYOUT_KEYS, Group, members
from samestep.groups.routing import unwrapped
from samestep.layout.boxes import mesh_of
from samestep.layout.fused_rows import without_wrappers
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.rules import RULES
from samestep.shards.replicated.awaited import wait_for_anyone

if TYPE_CHECKING:
    from samestep.lab.stress.outside_copies import OutsideCopies

Kind = Literal["parameter", "buffer", "state", "options", "plan"]

NAME = "check of replicas"  # for whoever reads of a collective that failed
SHOWN = 8  # drifts that an error tells of


@dataclass(frozen=True)
class Drift:
    """A value that should be equal on several ranks and is not; the same object on every rank.

    name: of a parameter or buffer; `parameter.key` of state; `param_groups[i][key]`.
    ranks: the global ranks that differ from `first_rank`, the first of those that share it.
    max_abs_diff: over all these ranks; inf where no number tells: NaN against a number, a text.
    count: how many elements differ, on the rank with most of them; of a plan lines.
    index: the first element that differs on ranks[0]; of a DTensor in the part that is held there.
    first, other: its values on `first_rank` and on ranks[0].
    """

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    max_abs_diff: float
    count: int
    index: tuple[int, ...]
    first: Value
    other: Value
    first_rank: int = 0

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        values = f"{self.first!r} on rank {self.first_rank}, {self.other!r} on rank {self.ranks[0]}"
        if self.kind in ("options", "plan"):
            return f"{self.kind} {self.name}: {who} differ{'s' * (len(self.ranks) == 1)}: {values}"
        elements = f"1 element on {who} differs"
        if self.count > 1:
            elements = f"{self.count} elements on {who} differ"
        return (
            f"{self.kind} {self.name}: {elements} from rank {self.first_rank}'s, by up to "
            f"{self.max_abs_diff:.3g}; the first at {list(self.index)}: {values}"
        )


class DriftError(RuntimeError):
    """Raised on every rank when replicas differ; `drifts` lists every difference."""

    def __init__(self, drifts: Sequence[Drift]) -> None:
        self.drifts = list(drifts)
        lines = [f"  {drift}" for drift in self.drifts[:SHOWN]]
        if len(self.drifts) > SHOWN:
            lines.append(f"  and {len(self.drifts) - SHOWN} more: see the error's .drifts")
        super().__init__(
            "replicas have drifted apart:\n" + "\n".join(lines) + "\n"
            "From here on ranks train different models. To go on: load the last good checkpoint "
            "on every rank, or broadcast the first rank's values and build a new optimizer. To "
            "find the cause: check more often, and look at what the ranks above did alone since "
            "the last check that passed (code under `if rank == ...`, weights or options changed "
            "outside of step(), random numbers, a faulty device). check(..., "
            "raise_on_drift=False) only looks and gives this list."
        )

    def __reduce__(self) -> tuple[type["DriftError"], tuple[list[Drift]]]:
        return DriftError, (self.drifts,)


@torch.no_grad()
def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    raise_on_drift: bool = True,
    buffers: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> list[Drift]:
    """Compare all values that ranks should share, bit for bit; raise a DriftError if they differ.

        if step % 100 == 0:
            samestep.stress.check(model, optimizer)

    Collective: every rank calls it, after `step()` and before the next backward pass. It compares
    all parameters of the model, frozen ones too; of the optimizer its parameters, its options, the
    plan of who owns what, and the state that every rank keeps. While they agree, that costs a
    checksum of each and one all-reduce of a few bytes, the only thing that the host waits for.
    Where ranks differ, it finds out where. Parameters of a group with a `process_group` of its
    own are compared there. Of DTensors and their state, parts that several ranks hold are compared:
    along axes on which they are replicated, with an all-reduce each, and with ranks outside of
    their mesh, to which every rank sends 128 bytes. Without other ranks nothing is compared.

    Arguments:
        optimizer: samestep's; or torch's, as under DDP, of which all state is compared.
        raise_on_drift: False gives the list instead, the same on every rank. Ranks whose models
            or optimizers are not built alike raise a RanksDisagreeError in any case.
        buffers: compare buffers as well. Those of BatchNorm may differ for good reasons.
        process_group: the ranks to compare; default: those of the optimizer, or else all.
    """
    wait_for_anyone(model.parameters())
    ranks = optimizer.ranks if isinstance(optimizer, RuleOptimizer) else None
    if process_group is not None or ranks is None:
        ranks = rank_group(process_group)
    if ranks is None:
        return []
    entries: dict[RankGroup, list[_Entry]] = {ranks: []}
    for group, entry in _entries(model, optimizer, ranks, buffers):
        if group.size > 1:
            entries.setdefault(group, []).append(entry)
    outside = _outside(model, optimizer, ranks)
    if outside:
        entries[ranks].append(_Entry("plan", "of DTensors", "meshes leave out some ranks"))
    of_all, *of_some = [_Comparison(group, own) for group, own in entries.items()]
    drifts = _drifts(of_all, of_some)
    if outside:
        drifts += outside.drifts()
    if drifts and raise_on_drift:
        raise DriftError(drifts)
    return drifts


# --- what is compared ----------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A value that a group of ranks should have in common."""

    kind: Kind
    name: str
    value: Tensor | str

    @property
    def device(self) -> torch.device | None:
        return None if isinstance(self.value, str) else self.value.device

    @property
    def line(self) -> str:
        """Name, shape and dtype, which must agree before values can be compared."""
        if isinstance(self.value, str):
            return f"{self.kind} {self.name}"
        return f"{self.kind} {self.name}: {tuple(self.value.shape)} {self.value.dtype}"


def _entries(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: RankGroup, buffers: bool
) -> Iterator[tuple[RankGroup, _Entry]]:
    plain = unwrapped(model)
    names = _names(model, optimizer)
    groups = [] if optimizer is None else optimizer.param_groups
    held = optimizer.plan.placed if isinstance(optimizer, RuleOptimizer) else ()
    copied = [placement for placement in held if not placement.holds_parts]
    home = {param: placement.group for placement in copied for param in placement.params}
    for param, name in names.items():
        yield from _shared("parameter", name, param, home.get(param, ranks))
    for name, buffer in plain.named_buffers() if buffers else ():
        if _is_plain(buffer):
            yield ranks, _Entry("buffer", without_wrappers(name), buffer)
    if optimizer is None:
        return
    for placement in copied:
        members = f"of {len(placement.params)} parameters from {names[placement.params[0]]}"
        yield placement.group, _Entry("plan", members, "\n".join(placement.lines_here()))
        for name, key, tensor in placement.values.state_alike(optimizer.state):
            yield placement.group, _Entry("state", f"{name}.{key}", tensor)
    for index, group in enumerate(groups):
        for name, value in _options(f"param_groups[{index}]", optimizer, group):
            first = next(iter(group["params"]), None)
            yield ranks if first is None else home.get(first, ranks), _Entry("options", name, value)
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                if param not in home and isinstance(value, Tensor):
                    yield from _shared("state", f"{names[param]}.{key}", value, ranks)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[Tensor, str]:
    named = unwrapped(model).named_parameters()
    names: dict[Tensor, str] = {param: without_wrappers(name) for name, param in named}
    for _, name, param in members([] if optimizer is None else optimizer.param_groups):
        names.setdefault(param, name)
    return names


def _shared(
    kind: Kind, name: str, tensor: Tensor, ranks: RankGroup
) -> Iterator[tuple[RankGroup, _Entry]]:
    """Entries of one tensor; for a DTensor its local part, with the ranks of each replicated axis.

    Copies that agree along every axis agree everywhere.
    """
    if _is_plain(tensor):
        yield ranks, _Entry(kind, name, tensor)
    mesh = mesh_of(tensor)
    if mesh is None:
        return
    local = tensor.to_local()  # type: ignore[attr-defined]
    for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_replicate():
            yield registry.of(mesh.get_group(axis)), _Entry(kind, name, local)


def _outside(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: RankGroup
) -> "OutsideCopies | None":
    """DTensors that ranks outside of their mesh may hold copies of."""
    names = _names(model, optimizer)
    if all(mesh_of(param) is None for param in names):
        return None
    from samestep.lab.stress.outside_copies import OutsideCopies  # DTensors take long to import

    state = {} if optimizer is None else optimizer.state
    tensors: list[tuple[Kind, str, Tensor]] = []
    for param, name in names.items():
        tensors.append(("parameter", name, param))
        tensors += [
            ("state", f"{name}.{key}", value) for key, value in state.get(param, {}).items()
        ]
    return OutsideCopies(tensors, ranks)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is complete on this rank: neither a DTensor nor on the meta device."""
    lazy = nn.parameter.is_lazy(tensor)
    return not (lazy or tensor.is_meta or hasattr(tensor, "device_mesh")) and (
        tensor.layout == torch.strided
    )


def _options(
    name: str, optimizer: torch.optim.Optimizer, group: Group
) -> Iterator[tuple[str, Tensor | str]]:
    """The hyperparameters of a group, without keys of other code; tensors by value."""
    of_rules = (key for rule in RULES.values() for key in rule.defaults)
    known = {"rule", "maximize", *LAYOUT_KEYS, *of_rules, *optimizer.defaults}
    for key in sorted(known & group.keys()):
        yield from _option(f"{name}[{key!r}]", group[key])


def _option(name: str, value: Any) -> Iterator[tuple[str, Tensor | str]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value):
        for place, part in enumerate(value):
            yield from _option(f"{name}[{place}]", part)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    """Text that is equal for equal values in every process, which repr() does not ensure."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, float):
        return repr(float(value))
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return repr(value)
    return type(value).__qualname__


# --- comparing -----------------------------------------------------------------------------------


class _Comparison:
    """The values that a group of ranks compares: checksums, and a summary of fixed size.

    The summary is what is compared first. Ranks that have not the same list of things have
    different summaries, and none waits for the others with a vector of another length.
    """

    def __init__(self, group: RankGroup, entries: Iterable[_Entry]) -> None:
        self.group = group
        entries = list(entries)
        tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
        others = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
        self.device = next(others, torch.device("cpu"))
        own = [tensor for tensor in tensors if tensor.device == self.device]
        # What is there comes first; texts, and tensors elsewhere, give a number on the host.
        self.entries = sorted(entries, key=lambda entry: entry.device != self.device)
        numbers = [
            text_checksum(value) if isinstance(value, str) else int(checksum(value))
            for _, _, value in self.entries[len(own) :]
        ]
        self.lines = [entry.line for entry in self.entries]
        numbers.append(text_checksum("\n".join(self.lines)))
        on_gpu = self.device.type == "cuda"
        known = torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu)
        known = known.to(self.device, non_blocking=True)
        self.sums = torch.cat([checksums(own).to(self.device), known[:-1]])
        self.summary = torch.stack([known[-1], checksum(self.sums)])

    def agrees(self) -> Tensor:
        """A bool tensor (), whether all ranks of the group agree; the host does not wait for it."""
        return agreed(self.summary, self.group, NAME).all()

    def locate(self) -> list[Drift]:
        """Find the differences between ranks; raises on all if they compare different entries."""
        what = "list of things to compare"
        require_same_lines(what, self.lines, self.group, self.device)
        places = differing(self.sums, self.group, NAME)
        entries = [self.entries[place] for place in places]
        values = [entry.value for entry in entries]
        differences = locate(NAME, values, self.group, self.device)
        return [
            Drift(entry.name, entry.kind, **vars(difference), first_rank=self.group.members[0])
            for entry, difference in zip(entries, differences, strict=True)
            if difference is not None
        ]


def _drifts(of_all: _Comparison, of_some: Sequence[_Comparison]) -> list[Drift]:
    """Collect the differences of all groups, so that every rank has the same list."""
    agree = [comparison.agrees().to(of_all.device) for comparison in of_some]
    differs = torch.zeros(1, dtype=torch.int64, device=of_all.device)
    if agree:
        differs = (~torch.stack(agree).all()).long().reshape(1)
    same = agreed(torch.cat([of_all.summary, differs]), of_all.group, NAME)
    # The one place where the host waits. If all ranks have 1 there, they agree on that too.
    *same_of_all, same_of_some, differs_here = torch.cat([same, differs.bool()]).tolist()
    drifts: list[Drift] = []
    if differs_here or not same_of_some:
        drifts += _of_some(
            [c for c, alike in zip(of_some, agree, strict=True) if not alike], of_all
        )
    if not all(same_of_all):
        drifts = of_all.locate() + drifts
    return drifts


def _of_some(differing_here: Sequence[_Comparison], of_all: _Comparison) -> list[Drift]:
    """Send to all ranks the differences that only some of them have found."""
    problem, mine = None, []
    for comparison in differing_here:
        try:
            mine += comparison.locate()
        except RanksDisagreeError as error:  # the others wait to hear of it
            problem = str(error)
    texts = gather_texts(
        NAME, json.dumps([problem, list(map(astuple, mine))]), of_all.group, of_all.device
    )
    found: dict[str, Drift] = {}
    for problem, rows in map(json.loads, texts):
        if problem is not None:
            raise RanksDisagreeError(problem)
        for name, kind, ranks, largest, count, index, *rest in rows:
            drift = Drift(name, kind, tuple(ranks), largest, count, tuple(index), *rest)
            found.setdefault(repr(drift), drift)
    return list(found.values())
