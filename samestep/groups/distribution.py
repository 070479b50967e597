"""The user's options about ranks, and about where state stays, as one value."""

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
    """A whole number."""
    if type(value) is not int or value < least:
        raise ValueError(
            f"{name} must be a whole number from {least} on{or_none}, got {checks.shown(value)}"
        )


def _from_one_on(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and value >= 1):
        raise ValueError(f"{name} must be a number from 1 on, got {checks.shown(value)}")


def _dtype(name: str, value: Any) -> None:
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating torch.dtype, got {checks.shown(value)}")


def process_group(name: str, value: Any) -> None:
    """A process group of torch.distributed that has this rank."""
    if dist.is_available() and value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(  # what new_group() gives to ranks that are not in the group
            f"rank {dist.get_rank()} is not a member of the given {name}: every rank passes the "
            "group that it is in itself"
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
    """Raise unless every field of a dataclass has a value that its annotation takes."""
    for field in fields(options):
        annotation: Any = field.type
        taken_as(annotation)(field.name, getattr(options, field.name))


@cache
def taken_as(annotation: Any) -> checks.Check:
    """The check that an annotation stands for."""
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
    """The keywords of an optimizer that concern ranks, and where state stays.

    sharding: "zero2" and "zero1" give each rank a part of the state and of the update; zero2
        frees a full gradient once it is reduced. "none" keeps all on every rank. "auto" is
        zero2 where there are ranks to share with, and none beside DTensors.
    buffers: "flat" lays parameters end to end in buffers of which they are views, and gradients
        likewise, so that nothing is packed or copied around a collective.
    reduction: "ordered" adds gradients in rank order in fp32, so that the result does not
        depend on the layout; "fast" leaves the order to the backend.
    reduce_dtype: the dtype in which gradients travel; default: that of the parameter.
    overlap_grad_reduce: reduce inside backward, as buckets become complete.
    overlap_param_gather: return from the step while updated parameters are still on their way;
        modules wait for theirs before they run, and so does whoever else touches a parameter. For
        flat buffers, and for a model.
    poison_early_reads: parameters that are on their way are NaN until they are waited for, so that
        whoever reads their memory around torch's functions shows. For finding a fault: it costs a
        copy.
    grads: "local" gradients are averaged here; "reduced" ones already were, by DDP.
    grad_dtype: the dtype of gradients and of their accumulation, such as float32 for bfloat16
        parameters; default: that of the parameter. Set through `Tensor.grad_dtype`.
    process_group: the ranks that share state and updates; default: all. A group dict may have its
        own, and a "divisor" beside it.
    outer_group: ranks that do the same in other process groups, one of each: gradients are averaged
        over these too (reduce-scatter inside, all-reduce of this rank's part outside).
    stage_group: ranks of a pipeline, one of each stage, where `process_group` has those of this
        stage. Only scalars cross stages: norm, clipping and a skipped step are the whole model's,
        and if one stage cannot take a step, none does. What `metrics()` tells of groups is of this
        stage. "none": there are no other stages, and a norm of what `process_group` holds is meant.
    crossover: parameters with fewer elements are updated by every rank. A number, or the
        receipt that `samestep bench crossover` wrote.
    bucket_size: elements that travel together; default: few large buckets where there are many
        ranks, many small ones where there are few (`plan.links` has the formula).
    ranks_per_host: how many neighbouring ranks share a host; default: what torchrun says
        (LOCAL_WORLD_SIZE), otherwise all. Given here, ordered sums go host by host; torchrun's word
        leaves them in rank order.
    two_levels: buckets go inside hosts first, and across them then, so that everything crosses
        once; default: where that is faster by the figures in `plan.links`. For plain parameters.
    waves: parts of a step; the parameters of one travel while the next is computed.
    owners: how Muon's blocks are given to ranks.
    max_state_ratio: how much more state than the mean a rank may own to balance the work.
    muon_schedule: for DTensors: "parallel" gives every block one owner, to which its parts travel
        and from which the result comes back, in a pipeline; "gather" has every rank gather and
        compute all.
    chunk_size: for DTensors: elements of blocks that travel and are computed together; default: a
        chunk that fills a GPU (67 million), and `bucket_size` on CPU or where that was chosen.
    chunks_ahead: chunks of blocks that are collected ahead of the one that is computed; 0: no
        pipeline, every chunk is waited for, there and back.
    block_dtype: the dtype in which blocks travel; default: bfloat16 on a GPU, float32 on CPU.
    check_gradients: report a gradient that is not finite, with parameter and rank, before it is
        combined with those of other ranks: by the optimizer, or by FSDP2. The host waits for every
        gradient: for finding a fault. Not where others have averaged (DDP, grads="reduced").
    state_dict_form: what `state_dict()` gives where ranks share the state. "whole": all of it, on
        the rank where `consolidate_state_dict()`, which all ranks call, has gathered it; else it
        raises, since trainers save what one rank gives. "part": each rank its own part, which
        loads on the same rank of the same plan alone.
    deferred: make plans and state in the first step, or when state is loaded, and look for other
        ranks and for DDP then: for a model that somebody will move, wrap or shard after the
        optimizer was built, as trainers do. Until then `state_dict()` has no state, as torch's
        before a first step.
    strict: replicas that differ at construction are an error instead of being mended.
    offload: "state" keeps moments, momenta and master weights in the host's memory, and brings them
        to the GPU in the step, a window at a time. The bits are the same. None: beside parameters.
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
        """Combinations that are refused: whether one was given, and the error."""
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
            "overlap_grad_reduce, reduce_dtype and outer_group concern gradients that are "
            'averaged here, and grads="reduced" says (or a DistributedDataParallel model '
            "implies) that they already were: leave them out, or unwrap the model",
        )
        yield (
            self.grads == "reduced" and self.check_gradients,
            "check_gradients looks at each rank's own gradients before they are averaged, and "
            'grads="reduced" says (or a DistributedDataParallel model implies) that they already '
            "were: leave it out (max_grad_norm=math.inf skips a step with averages that are not "
            "finite), or unwrap the model and let the optimizer average",
        )
        yield (
            self.deferred and (self.overlap_grad_reduce or flat),
            "deferred=True makes plans in the first step, and overlap_grad_reduce and "
            'buffers="flat" need them before its backward: leave one of them out',
        )
        for given, what, why in (
            (self.sharding == "none", 'sharding="none"', "they are for sharing the update"),
            (
                self.grads == "reduced",
                'grads="reduced"',
                "DistributedDataParallel has its own buffers",
            ),
            (self.owners == "cyclic", 'owners="cyclic"', "blocks lie with those they belong to"),
            (self.max_state_ratio is not None, "max_state_ratio", "owners are balanced by FLOPs"),
        ):
            yield (
                flat and given,
                f'{what} does not go with buffers="flat" ({why}): leave it out, or take '
                'buffers="per_parameter"',
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
        """Whether full gradients are given back once they are reduced."""
        return self.sharding in ("auto", "zero2")

    @property
    def one_in_flight(self) -> bool:
        """Whether inside backward a bucket lands before the next one is launched."""
        return self.frees_gradients or self.buffers == "flat"

    def bucket_policy(
        self, ranks: int, outer: int, device: torch.device, *, uneven: bool, levels: int = 1
    ) -> CollectivePolicy:
        """The collectives of buckets between so many ranks, in so many groups that do the same."""
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
        """Whether the sum of a bucket may lie in a buffer that carried it."""
        return not (self.frees_gradients and (self.buffers == "flat" or policy.frugal))

    def chunk_elements(self, device: torch.device) -> int:
        """Elements of a chunk of blocks on a device."""
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
        """The option that spreads state over ranks, in words."""
        return (
            f"buffers={self.buffers!r}" if self.buffers == "flat" else f"sharding={self.sharding!r}"
        )

    def lines(self) -> list[str]:
        """The options that all ranks must have alike, as lines of text."""
        # Each rank has its handles; what a state dict has, and when plans are made, is no plan.
        own = ("process_group", "outer_group", "stage_group", "state_dict_form", "deferred")
        names = [field.name for field in fields(self) if field.name not in own]
        return [f"{name} = {getattr(self, name)}" for name in names]
