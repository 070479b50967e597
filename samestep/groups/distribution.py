"""Options about ranks and the place of state, as one dataclass."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
import torch.distributed as dist

from samestep.plan.links import LEAST_ELEMENTS
from samestep.plan.sharding import OwnerStrategy
from samestep.plan.transfers import CollectivePolicy
from samestep.rules import checks

Sharding = Literal["auto", "none", "zero1", "zero2"]
Reduction = Literal["fast", "ordered"]
Grads = Literal["local", "reduced"]
Buffers = Literal["per_parameter", "flat"]
MuonSchedule = Literal["parallel", "gather"]
StateDictForm = Literal["whole", "part"]
Offload = Literal["state"]

FILLS_A_GPU = 1 << 26  # elements: ten blocks of 1280 x 5120, forty of 1280 x 1280


def whole_number(name: str, value: Any, least: int = 1, or_none: str = "") -> None:
    """Return a check for a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}{or_none}, got {checks.shown(value)}"
        )


def _from_one_on(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and value >= 1):
        raise ValueError(f"{name} must be a number of at least 1, got {checks.shown(value)}")


def _dtype(name: str, value: Any) -> None:
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating torch.dtype, got {checks.shown(value)}")


def process_group(name: str, value: Any) -> None:
    """Check that a process group contains this rank."""
    if dist.is_available() and value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(  # what new_group() gives to ranks that are not in the group
            f"rank {dist.get_rank()} is not a member of the given {name}: give each "
            "rank a group that contains it"
        )
    if not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        hint = "; mesh.get_group(name) gives one" if type(value).__name__ == "DeviceMesh" else ""
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, got {checks.shown(value)} of type "
            f"{type(value).__name__}{hint}"
        )


def _stage_group(name: str, value: Any) -> None:
    if isinstance(value, str):
        checks.one_of(name, value, ("none",), others=", or give a process group")
    elif value is not None:
        process_group(name, value)


def check_fields(options: Any) -> None:
    """Check every field of a dataclass by its annotation."""
    for field in fields(options):
        annotation: Any = field.type
        taken_as(annotation)(field.name, getattr(options, field.name))


@cache
def taken_as(annotation: Any) -> checks.Check:
    """The check that belongs to an annotation."""
    if get_origin(annotation) is Annotated:
        check: checks.Check = get_args(annotation)[1]
        return check
    is_optional = NoneType in get_args(annotation)
    kind = get_args(annotation)[0] if is_optional else annotation
    if kind is bool:
        return checks.boolean_or_none if is_optional else checks.boolean
    or_none = ", or None" if is_optional else ""
    if get_origin(kind) is Literal:
        others = ", or leave it out" if is_optional else ""
        check = partial(checks.one_of, allowed=get_args(kind), others=others)
    elif kind is int:
        check = partial(whole_number, or_none=or_none)
    else:
        by_kind = {float: _from_one_on, torch.dtype: _dtype, dist.ProcessGroup: process_group}
        check = by_kind[kind]
    return checks.optional(check) if is_optional else check


@dataclass(frozen=True)
class Distribution:
    """Keywords of an optimizer about ranks and about the place of state.

    sharding: "zero1" and "zero2" give each rank a part of the state and of the update; "zero2" also
        frees gradients once they are reduced. "none" keeps all on every rank. "auto" is "zero2" on
        several ranks, and "none" beside DTensors.
    buffers: "flat" makes parameters and gradients views of contiguous buffers, so that nothing is
        copied around a collective; "per_parameter" does not.
    reduction: "ordered" adds gradients in rank order in fp32, with the same result in every layout;
        "fast" leaves the order to the backend.
    reduce_dtype: dtype in which gradients travel. None: the parameter's.
    overlap_grad_reduce: reduce buckets during backward.
    overlap_param_gather: return from `step()` while updated parameters are being gathered; reading
        one waits for it. For flat buffers of a model.
    poison_early_reads: for finding a fault: parameters are NaN until their gather is waited for.
    grads: "local" gradients are averaged here; "reduced" ones already were, as by DDP.
    grad_dtype: dtype in which gradients are accumulated, such as float32 for bfloat16 parameters.
        None: the parameter's.
    process_group: ranks that share state and updates. None: all. A group dict may have its own.
    outer_group: ranks with the same shard in other process groups, over which gradients are
        averaged too (reduce-scatter inside, all-reduce outside).
    stage_group: in a pipeline one rank of each stage: norm, clipping and skipped steps are then the
        whole model's. "none": there are no other stages.
    crossover: parameters with fewer elements are updated by every rank. A number, or a file of
        `samestep bench crossover`.
    bucket_size: elements that travel together. None: by the number of ranks and the links.
    ranks_per_host: neighbouring ranks that share a host. None: LOCAL_WORLD_SIZE, otherwise all. If
        given, ordered sums go host by host.
    two_levels: reduce inside hosts first, then across them. None: where `plan.links` says that it
        is faster. For plain parameters.
    waves: parts of a step; the parameters of one travel while the next is computed.
    owners: Muon's blocks go to ranks by FLOPs ("balanced"), or in turn ("cyclic").
    max_state_ratio: state that a rank may own, in multiples of the mean, to balance the work. None:
        no limit.
    muon_schedule: for DTensors: "parallel" sends the parts of a block to one owner and the result
        back; "gather" lets every rank gather and compute all blocks.
    chunk_size: for DTensors: elements of blocks that travel together. None: 67 million on a GPU;
        `bucket_size` on CPU, or where that was chosen.
    chunks_ahead: for DTensors: chunks that are gathered ahead of the computed one.
    block_dtype: for DTensors: dtype in which blocks travel. None: bfloat16 on a GPU, float32 on
        CPU.
    check_gradients: for finding a fault: a gradient that is not finite raises with parameter and
        rank. The host waits for every gradient. Refused where DDP averages.
    state_dict_form: "whole": `state_dict()` has all state, after `consolidate_state_dict()` on all
        ranks. "part": each rank's part, which loads on the same rank of the same plan alone.
    deferred: make plans and state in the first step, for a model that a trainer moves, wraps or
        shards after construction.
    strict: replicas that differ at construction raise, instead of getting rank 0's values.
    offload: "state" keeps state and main parameters in the host's memory, and brings them to the
        GPU in the step. The bits are the same.
    """

    sharding: Sharding = "auto"
    buffers: Buffers = "per_parameter"
    reduction: Reduction = "fast"
    reduce_dtype: torch.dtype | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    poison_early_reads: bool = False
    grads: Grads = "local"
    grad_dtype: torch.dtype | None = None
    process_group: dist.ProcessGroup | None = None
    outer_group: dist.ProcessGroup | None = None
    stage_group: Annotated[dist.ProcessGroup | Literal["none"] | None, _stage_group] = None
    crossover: int = 1024
    bucket_size: int | None = None
    ranks_per_host: int | None = None
    two_levels: bool | None = None
    waves: int = 4
    owners: OwnerStrategy = "balanced"
    max_state_ratio: float | None = None
    muon_schedule: MuonSchedule = "parallel"
    chunk_size: int | None = None
    chunks_ahead: Annotated[int, partial(whole_number, least=0)] = 1
    block_dtype: torch.dtype | None = None
    check_gradients: bool = False
    state_dict_form: StateDictForm = "whole"
    deferred: bool = False
    strict: bool = False
    offload: Offload | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for given, why in self._conflicts():
            if given:
                raise ValueError(why)

    def _conflicts(self) -> Iterator[tuple[bool, str]]:
        """Forbidden combinations of options: whether each was given, and its error."""
        flat, alone = self.buffers == "flat", self.process_group is None
        yield (
            self.grad_dtype is not None and not hasattr(torch.Tensor, "grad_dtype"),
            f"grad_dtype needs a newer torch than {torch.__version__}: leave it out",
        )
        yield (
            self.outer_group is not None and alone,
            "outer_group averages over several process groups: give process_group= too, the "
            "ranks that share this rank's state",
        )
        yield (
            self.stage_group not in (None, "none") and alone,
            "stage_group has ranks of other pipeline stages, which hold other parameters: give "
            "process_group= too, the ranks of this stage (also if it is this rank alone)",
        )
        of_sums = (self.reduce_dtype, self.outer_group)
        yield (
            self.grads == "reduced" and (self.overlap_grad_reduce or of_sums != (None, None)),
            "overlap_grad_reduce, reduce_dtype and outer_group concern gradients that "
            'the optimizer averages, and with grads="reduced" (which a '
            "DistributedDataParallel model implies) they are averaged before: leave "
            "these keywords out, or give the optimizer the unwrapped model",
        )
        yield (
            self.grads == "reduced" and self.check_gradients,
            "check_gradients looks at each rank's own gradients before the optimizer "
            'averages them, and with grads="reduced" (which a DistributedDataParallel '
            "model implies) they are averaged before: leave it out "
            "(max_grad_norm=math.inf skips a step whose averages are not finite), or "
            "give the optimizer the unwrapped model",
        )
        yield (
            self.deferred and (self.overlap_grad_reduce or flat),
            "deferred=True plans in the first step, and overlap_grad_reduce and "
            'buffers="flat" need the plan before the first backward: leave deferred or '
            "the others out",
        )
        for given, what, why in (
            (self.sharding == "none", 'sharding="none"', "flat buffers exist to shard the update"),
            (
                self.grads == "reduced",
                'grads="reduced"',
                "DistributedDataParallel has its own buffers",
            ),
            (
                self.owners == "cyclic",
                'owners="cyclic"',
                "flat buffers keep the blocks of one parameter together",
            ),
            (self.max_state_ratio is not None, "max_state_ratio", "flat buffers are cut by FLOPs"),
        ):
            yield (
                flat and given,
                f'{what} cannot be combined with buffers="flat" ({why}): leave it out, '
                'or give buffers="per_parameter"',
            )
        yield (
            self.overlap_param_gather and not flat,
            'overlap_param_gather needs buffers="flat"',
        )
        yield (
            self.poison_early_reads and not self.overlap_param_gather,
            "poison_early_reads concerns overlap_param_gather, which is off",
        )

    @property
    def frees_gradients(self) -> bool:
        """Whether whole gradients are freed once they are reduced."""
        return self.sharding in ("auto", "zero2")

    @property
    def one_in_flight(self) -> bool:
        """Whether during backward a bucket must arrive before the next is launched."""
        return self.frees_gradients or self.buffers == "flat"

    def bucket_policy(
        self, ranks: int, outer: int, device: torch.device, *, uneven: bool, levels: int = 1
    ) -> CollectivePolicy:
        """The policy that chooses bucket sizes for a number of ranks."""
        frugal = ranks > 2 if self.buffers == "flat" else self.frees_gradients
        return CollectivePolicy(
            ranks,
            outer,
            ordered=self.reduction == "ordered",
            frugal=self.overlap_grad_reduce and frugal,
            on_cpu=device.type == "cpu",
            uneven=uneven,
            levels=levels,
        )

    def sums_in_place(self, policy: CollectivePolicy) -> bool:
        """Whether sums of a bucket may be stored in the buffer that carried it."""
        return not (self.frees_gradients and (self.buffers == "flat" or policy.frugal))

    def chunk_elements(self, device: torch.device) -> int:
        """Elements per chunk of blocks on a device."""
        if self.chunk_size is not None:
            return self.chunk_size
        if self.bucket_size is not None:
            return self.bucket_size
        return LEAST_ELEMENTS if device.type == "cpu" else FILLS_A_GPU

    def beside_dtensors(self) -> "Distribution":
        """The distribution for plain parameters of a model that has DTensors."""
        if self.sharding == "auto" and self.buffers == "per_parameter":
            return replace(self, sharding="none")
        return self

    def kept_by(self) -> str:
        """The option that shards state over ranks, as text."""
        return (
            f"buffers={self.buffers!r}" if self.buffers == "flat" else f"sharding={self.sharding!r}"
        )

    def lines(self) -> list[str]:
        """Options that must agree between ranks, as lines of text."""
        # Each rank has its handles; what a state dict has, and when plans are made, is no plan.
        own = ("process_group", "outer_group", "stage_group", "state_dict_form", "deferred")
        names = [field.name for field in fields(self) if field.name not in own]
        return [f"{name} = {getattr(self, name)}" for name in names]
