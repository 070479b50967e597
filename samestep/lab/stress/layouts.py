"""Layouts that the harness tests; a layout that registers here runs every scenario."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from samestep.shards.registry import KINDS, require_kind

if TYPE_CHECKING:
    from samestep.lab.stress.scenario import Scenario

# Where the parameters themselves are, by their kind in `shards.registry`.
Whole = Literal["plain", "two_optimizers", "spmd", "spmd_hybrid"]
Parts = Literal["fsdp2", "hsdp", "tp_fsdp2", "ep_fsdp2", "copies", "hybrid", "fsdp2_alone"]
KIND_OF: dict[str, str] = {
    **dict.fromkeys(get_args(Whole), "replicated"),
    **dict.fromkeys(get_args(Parts), "dtensor"),
}

PROGRAM_EACH = "ranks that compute different things would need a program each"


@dataclass(frozen=True)
class Layout:
    """A layout of parameters, gradients and state, as keywords of the optimizer.

    mesh: of "hybrid" ones, the arguments of `samestep.mesh.build`, of "spmd_hybrid" ones those of
        `build_spmd`; of "copies", the sizes of the axes that have parts.
    parameters: `sharded_training` tells what the kinds are.
    one_process: all ranks' gradients are averaged and applied by a single process.
    turn: of "copies", how the first parameter is cut; the next ones are in the other ways.
    """

    name: str
    story: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)
    parameters: Whole | Parts = "plain"
    one_process: bool = False
    turn: int = 0

    @property
    def kind(self) -> str:
        """Return the kind of parameters that this layout tests; it may have others beside them."""
        return KIND_OF[self.parameters]

    def reason_against(self, scenario: "type[Scenario]", world: int) -> str | None:
        """Return why a scenario cannot run in this layout on a number of ranks; None if it can."""
        odd = world < 4 or world % 2
        if self.parameters == "hsdp" and odd:
            return "two copies of a sharded model need an even number of ranks, four or more"
        if self.parameters == "fsdp2_alone" and odd:
            return "pairs of ranks with data of their own need an even number, four or more"
        if "ranks_per_host" in self.options and odd:
            return "hosts of two ranks need an even number of ranks, four or more"
        if self.parameters == "spmd":
            return self._reason_against_program(scenario, world)
        if self.parameters == "spmd_hybrid" and scenario.ranks_differ:
            return PROGRAM_EACH
        if self.parameters in ("hybrid", "spmd_hybrid"):
            return self._reason_against_mesh(scenario, world)
        least = prod(self.mesh.values()) if self.parameters == "copies" else 1
        if least > 2 and self.mesh_sizes(world)["data"] == world:
            return f"it needs a multiple of {least} ranks, and copies"
        if scenario.starts_differ and self.parameters != "plain":
            return "each rank begins with its own part: no start is common to all"
        return None

    def mesh_sizes(self, world: int) -> dict[str, int]:
        """Return the degrees of "copies" by axis; axes that would leave no copies have one rank."""
        inner, size = dict(self.mesh), prod(self.mesh.values())
        if world % size or (world == size and len(inner) == 1):
            inner, size = dict.fromkeys(inner, 1), 1
        return {"data": world // size, **inner}

    def _reason_against_program(self, scenario: "type[Scenario]", world: int) -> str | None:
        """Return why a scenario cannot run in one XLA program, which is equal for all devices."""
        if self.mesh and world % 2:
            return "parts need an even number of devices"
        if scenario.starts_differ:
            return "a program has one start: replicas cannot differ before it"
        if scenario.scales:
            return (
                "a GradScaler reads on the host whether a step was taken, which no step here does"
            )
        if scenario.loop == "closed":
            return PROGRAM_EACH
        if scenario.accumulation == "synchronize":
            return "gradients are global as they come: there are no ranks to synchronize"
        return None

    def _reason_against_mesh(self, scenario: "type[Scenario]", world: int) -> str | None:
        if not scenario.has_plan:
            return "its model has no plan that says what is cut"
        least: int = prod(self.mesh.get(name, 1) for name in ("pp", "replicate", "ep", "tp"))
        if self.mesh.get("replicate", 1) > 1:
            least *= 2  # copies are sharded, or sums have no order
        return f"it needs a multiple of {least} ranks" if world % least else None


LAYOUTS: dict[str, Layout] = {}  # what `all` means
# For scenarios that ask for them: too slow for every run.
LAYOUTS_ON_REQUEST: dict[str, Layout] = {}
EVERY_LAYOUT = ChainMap(LAYOUTS_ON_REQUEST, LAYOUTS)


def register(layout: Layout, *, on_request: bool = False) -> None:
    if layout.name in EVERY_LAYOUT:
        raise ValueError(f"there is a layout {layout.name!r} already")
    (LAYOUTS_ON_REQUEST if on_request else LAYOUTS)[layout.name] = layout


def require_layouts() -> None:
    """Raise if there is a kind of placement that `all` would not try on ranks."""
    tried = {layout.kind for layout in LAYOUTS.values() if not layout.one_process}
    for kind in KINDS:
        require_kind(kind.name, tried, "layout of the harness", f"LAYOUTS of {__name__}")


_ZERO1, _ZERO2 = {"sharding": "zero1"}, {"sharding": "zero2"}
_OVERLAP, _FLAT = {"overlap_grad_reduce": True}, {"buffers": "flat"}
_LATE = {"overlap_param_gather": True, "poison_early_reads": True}
for _layout in (
    Layout("one_process", "no other rank: gradients averaged by hand", one_process=True),
    Layout("none", "everything on every rank", {"sharding": "none"}),
    Layout("zero1", "state and update sharded", _ZERO1),
    Layout("zero2", "gradients freed once reduced", _ZERO2),
    Layout("zero1_overlap", "zero1, reduced inside backward", {**_ZERO1, **_OVERLAP}),
    Layout("zero2_overlap", "zero2, reduced inside backward", {**_ZERO2, **_OVERLAP}),
    Layout("flat_zero1", "flat buffers, gradients kept whole", {**_FLAT, **_ZERO1}),
    Layout(
        "flat_zero2_overlap",
        "flat buffers, gradients reduced inside backward and given back",
        {**_FLAT, **_ZERO2, **_OVERLAP},
    ),
    Layout(
        "flat_gather_overlap",
        "flat_zero2_overlap, gathered while the next forward runs, NaN until waited for",
        {**_FLAT, **_ZERO2, **_OVERLAP, **_LATE},
    ),
    Layout(
        "fsdp2_gather",
        "FSDP2, every rank gathers and computes all of Muon's blocks",
        {"muon_schedule": "gather"},
        parameters="fsdp2",
    ),
    Layout(
        "fsdp2_parallel",
        "FSDP2, each of Muon's blocks computed by one owner",
        {"muon_schedule": "parallel"},
        parameters="fsdp2",
    ),
    Layout("hsdp", "FSDP2 in two copies", parameters="hsdp"),
    Layout(
        "tp_fsdp2",
        "DTensors as of FSDP2 over tensor parallel, given gradients that were averaged in rank "
        "order on a plain copy",
        parameters="tp_fsdp2",
    ),
    Layout(
        "ep_fsdp2",
        "the same over expert parallel: stacks sharded by expert, all else in copies",
        parameters="ep_fsdp2",
    ),
):
    register(_layout)

# What must not go wrong, tried first; then the training goes on as one does it right.
for _layout in (
    Layout(
        "fsdp2_alone",
        "FSDP2 on halves of the ranks that have data of their own is refused; then hsdp",
        parameters="fsdp2_alone",
    ),
    Layout(
        "two_optimizers",
        "two optimizers that reduce inside one backward launch in one order; then zero2_overlap",
        {**_ZERO2, **_OVERLAP},
        parameters="two_optimizers",
    ),
):
    register(_layout, on_request=True)

# State in the host's memory, that comes to the device in windows.
_OFFLOAD = {"offload": "state"}
_OFFLOADED = (
    Layout("one_process_offload", "one_process, state on the host", _OFFLOAD, one_process=True),
    Layout("none_offload", "none, state on the host", {"sharding": "none", **_OFFLOAD}),
    Layout("zero2_offload", "zero2_overlap, state on the host", {**_ZERO2, **_OVERLAP, **_OFFLOAD}),
    Layout(
        "flat_offload",
        "flat_zero2_overlap, state on the host",
        {**_FLAT, **_ZERO2, **_OVERLAP, **_OFFLOAD},
    ),
    Layout("fsdp2_offload", "fsdp2_parallel, state on the host", _OFFLOAD, parameters="fsdp2"),
)
for _layout in _OFFLOADED:
    register(_layout, on_request=True)

# As if every two ranks shared a host. The first sums host by host too, in one level: sums in two
# levels have the same bits.
_HOSTS = {"ranks_per_host": 2}
_TWO_LEVELS = {**_HOSTS, "two_levels": True}
_IN_HOSTS = (
    Layout("hosts_zero2", "zero2, sums host by host", {**_ZERO2, **_HOSTS, "two_levels": False}),
    Layout(
        "hosts_zero2_two_levels",
        "zero2_overlap, inside hosts first and then across them",
        {**_ZERO2, **_OVERLAP, **_TWO_LEVELS},
    ),
    Layout(
        "hosts_flat_gather_overlap",
        "flat_gather_overlap, inside hosts first and then across them",
        {**_FLAT, **_ZERO2, **_OVERLAP, **_LATE, **_TWO_LEVELS},
    ),
)
for _layout in _IN_HOSTS:
    register(_layout, on_request=True)

# DTensors of which other meshes hold copies, that the optimizer averages.
_TENSOR, _EXPERT = {"model": 2}, {"expert": 2}
_PLAIN_TP = "tensor parallel, in copies along a data axis"
_PLAIN_EP = "experts on an axis of their own, in copies along a data axis"
_BOTH = {**_OVERLAP, **_LATE}
_copies = partial(Layout, parameters="copies")
_COPIES = (
    _copies("tp_dp_none", f"{_PLAIN_TP}; everything on every copy", {"sharding": "none"}, _TENSOR),
    _copies("tp_dp_zero1", f"{_PLAIN_TP}; zero1", _ZERO1, _TENSOR),
    _copies("tp_dp_zero2", f"{_PLAIN_TP}; zero2", _ZERO2, _TENSOR),
    _copies(
        "tp_dp_gather",
        f"{_PLAIN_TP}; every rank of a mesh computes all of its blocks",
        {**_ZERO2, "muon_schedule": "gather"},
        _TENSOR,
    ),
    _copies(
        "tp_dp_zero2_overlap",
        f"{_PLAIN_TP}; zero2, reduced inside backward",
        {**_ZERO2, **_OVERLAP},
        _TENSOR,
    ),
    _copies("tp_dp_flat_zero1", f"{_PLAIN_TP}; flat buffers, zero1", {**_FLAT, **_ZERO1}, _TENSOR),
    _copies("tp_dp_flat_zero2", f"{_PLAIN_TP}; flat buffers, zero2", {**_FLAT, **_ZERO2}, _TENSOR),
    _copies(
        "tp_dp_flat_gather_overlap",
        f"{_PLAIN_TP}; flat buffers, zero2, both overlaps, NaN until waited for",
        {**_FLAT, **_ZERO2, **_BOTH},
        _TENSOR,
    ),
    _copies("tp4_dp_zero2", "the same over meshes of four; zero2", _ZERO2, {"model": 4}),
    _copies("ep_dp_none", f"{_PLAIN_EP}; everything on every copy", {"sharding": "none"}, _EXPERT),
    _copies("ep_dp_zero1", f"{_PLAIN_EP}; zero1", _ZERO1, _EXPERT),
    _copies("ep_dp_zero2", f"{_PLAIN_EP}; zero2", _ZERO2, _EXPERT),
    _copies(
        "ep_dp_flat_gather_overlap",
        f"{_PLAIN_EP}; flat buffers, zero2, both overlaps, NaN until waited for",
        {**_FLAT, **_ZERO2, **_BOTH},
        _EXPERT,
    ),
    _copies(
        "ep_tp_dp_zero2",
        "experts cut twice, all else tensor parallel with copies along the expert axis too; zero2",
        _ZERO2,
        _EXPERT | _TENSOR,
    ),
    _copies(
        "ep_tp_dp_flat_gather_overlap",
        "the same with flat buffers, zero2, both overlaps, NaN until waited for",
        {**_FLAT, **_ZERO2, **_BOTH},
        _EXPERT | _TENSOR,
    ),
)
for _turn, _layout in enumerate(_COPIES):
    register(replace(_layout, turn=_turn), on_request=True)
# One program for all devices of XLA, each of which stands for a rank.
_spmd = partial(Layout, parameters="spmd")
_SPMD = (
    _spmd("xla_data", "one XLA program: parameters on every device, state in parts", {}, {}),
    _spmd("xla_none", "one XLA program: everything on every device", {"sharding": "none"}, {}),
    _spmd("xla_fsdp", "one XLA program: parameters and state in parts", {}, {"fsdp": 1}),
    _spmd(
        "xla_model",
        "one XLA program: matrices cut by rows and columns in turn over pairs of devices, in "
        "copies along a data axis that share the state",
        {},
        {"model": 2},
    ),
)
for _layout in _SPMD:
    register(_layout, on_request=True)

# Names for several layouts at once.
LAYOUT_SETS: dict[str, tuple[str, ...]] = {
    "copies": ("one_process", *(layout.name for layout in _COPIES)),
    "offload": tuple(layout.name for layout in _OFFLOADED),
    "hosts": tuple(layout.name for layout in _IN_HOSTS),
    "xla": tuple(layout.name for layout in _SPMD),
    "quick": (
        "one_process",
        "none",
        "zero2_overlap",
        "flat_gather_overlap",
        "fsdp2_parallel",
        "tp_fsdp2",
    ),
}  # fmt: skip


# The hybrid stack: every axis alone, pairs, and all of them. FSDP2 has the ranks that are left.
_TP, _TP_SP, _EP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"ep": 2}
_MESHES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tp", "tensor parallel", _TP),
    ("tp_sp", "tensor and sequence parallel", _TP_SP),
    ("ep", "expert parallel", _EP),
    (
        "ep_same_tokens",
        "expert parallel where ranks that share experts have the same tokens",
        {**_EP, "ep_carries_data": False},
    ),
    ("tp_sp_ep", "tensor, sequence and expert parallel", _TP_SP | _EP),
    (
        "hsdp_tp_sp",
        "two copies, each with tensor and sequence parallel",
        {"replicate": 2, **_TP_SP},
    ),
    ("pp_tp_sp", "two stages, each with tensor and sequence parallel", {"pp": 2, **_TP_SP}),
    ("pp_ep", "two stages, each with expert parallel", {"pp": 2, **_EP}),
    ("pp_tp_sp_ep", "all axes at once", {"pp": 2, **_TP_SP, **_EP}),
)
for _name, _story, _mesh in _MESHES:
    register(Layout(f"hybrid_{_name}", _story, parameters="hybrid", mesh=_mesh), on_request=True)

# The same meshes of one XLA program, which has no stages.
_SPMD_HYBRID = tuple(
    # Small as they are, copies share the state.
    Layout(f"xla_hybrid_{n}", f"one XLA program: {story}", {"crossover": 1}, mesh, "spmd_hybrid")
    for n, story, mesh in _MESHES
    if "pp" not in mesh
)
for _layout in _SPMD_HYBRID:
    register(_layout, on_request=True)
LAYOUT_SETS["xla_hybrid"] = tuple(layout.name for layout in _SPMD_HYBRID)
