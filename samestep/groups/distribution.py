"""Which ranks do what, and where state stays: what the user asked for, as one value."""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist

from samestep.plan.links import LEAST_ELEMENTS
from samestep.plan.sharding import OwnerStrategy
from samestep.plan.transfers import BucketPolicy

Sharding = Literal["auto", "none", "zero1", "zero2"]
Reduction = Literal["fast", "ordered"]
Grads = Literal["local", "reduced"]
Buffers = Literal["per_parameter", "flat"]
MuonSchedule = Literal["parallel", "gather"]
StateDictForm = Literal["whole", "part"]
Offload = Literal["state"]

FILLS_A_GPU = 1 << 26  # elements: ten blocks of 1280 x 5120, forty of 1280 x 1280


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
        modules wait for theirs before they run. For flat buffers, and for a model. Whoever else
        reads parameters calls `wait_for_parameters()` first.
    poison_early_reads: parameters that are on their way are NaN until they are waited for, so that
        a read that comes too early shows. For finding a fault: it costs a copy.
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
        stage.
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
        averaged with others. Reads every gradient on the host: for finding a fault.
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
    stage_group: dist.ProcessGroup | None = None
    crossover: int = 1024
    bucket_size: int | None = None
    ranks_per_host: int | None = None
    two_levels: bool | None = None
    waves: int = 4
    owners: OwnerStrategy = "balanced"
    max_state_ratio: float | None = None
    muon_schedule: MuonSchedule = "parallel"
    chunk_size: int | None = None
    chunks_ahead: int = 1
    block_dtype: torch.dtype | None = None
    check_gradients: bool = False
    state_dict_form: StateDictForm = "whole"
    deferred: bool = False
    strict: bool = False
    offload: Offload | None = None

    def __post_init__(self) -> None:
        for key, allowed in (
            ("sharding", get_args(Sharding)),
            ("buffers", get_args(Buffers)),
            ("reduction", get_args(Reduction)),
            ("grads", get_args(Grads)),
            ("owners", get_args(OwnerStrategy)),
            ("muon_schedule", get_args(MuonSchedule)),
            ("state_dict_form", get_args(StateDictForm)),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key} {value!r} is not supported; choose one of {list(allowed)}")
        if self.offload not in (None, *get_args(Offload)):
            raise ValueError(
                f"offload {self.offload!r} is not supported; choose one of "
                f"{list(get_args(Offload))}, or leave it out"
            )
        for key, least in ("crossover", 1), ("waves", 1), ("chunks_ahead", 0):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise ValueError(f"{key} must be a whole number from {least} on, got {value!r}")
        for key in "bucket_size", "chunk_size", "ranks_per_host":
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{key} must be a whole number from 1 on, or None, got {value!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                raise TypeError(f"{field.name} must be True or False, got {value!r}")
        if self.two_levels is not None and type(self.two_levels) is not bool:
            raise TypeError(f"two_levels must be True, False or None, got {self.two_levels!r}")
        for key in ("reduce_dtype", "grad_dtype", "block_dtype"):
            value = getattr(self, key)
            if value is not None and not (
                isinstance(value, torch.dtype) and value.is_floating_point
            ):
                raise TypeError(f"{key} must be a floating torch.dtype, got {value!r}")
        if self.grad_dtype is not None and not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(
                f"grad_dtype needs a newer torch than {torch.__version__}: leave it out"
            )
        dtype, ratio = self.reduce_dtype, self.max_state_ratio
        if self.outer_group is not None and self.process_group is None:
            raise ValueError(
                "outer_group averages over several process groups: give process_group= too, the "
                "ranks that share this rank's state"
            )
        if self.stage_group is not None and self.process_group is None:
            raise ValueError(
                "stage_group has ranks of other pipeline stages, which hold other parameters: give "
                "process_group= too, the ranks of this stage (also if it is this rank alone)"
            )
        if ratio is not None and not (isinstance(ratio, int | float) and ratio >= 1):
            raise ValueError(f"max_state_ratio must be a number from 1 on, got {ratio!r}")
        if self.grads == "reduced" and (
            self.overlap_grad_reduce or dtype is not None or self.outer_group is not None
        ):
            raise ValueError(
                "overlap_grad_reduce, reduce_dtype and outer_group concern gradients that are "
                'averaged here, and grads="reduced" says (or a DistributedDataParallel model '
                "implies) that they already were: leave them out, or unwrap the model"
            )

        if self.deferred and (self.overlap_grad_reduce or self.buffers == "flat"):
            raise ValueError(
                "deferred=True makes plans in the first step, and overlap_grad_reduce and "
                'buffers="flat" need them before its backward: leave one of them out'
            )
        if self.buffers == "flat":
            self._check_flat()
        elif self.overlap_param_gather:
            raise ValueError('overlap_param_gather needs buffers="flat"')
        if self.poison_early_reads and not self.overlap_param_gather:
            raise ValueError("poison_early_reads concerns overlap_param_gather, which is off")

    def _check_flat(self) -> None:
        """Raise for what flat buffers do not go with."""
        reasons = {
            'sharding="none"': (self.sharding == "none", "they are for sharing the update"),
            'grads="reduced"': (
                self.grads == "reduced",
                "DistributedDataParallel has its own buffers",
            ),
            'owners="cyclic"': (self.owners == "cyclic", "blocks lie with those they belong to"),
            "max_state_ratio": (self.max_state_ratio is not None, "owners are balanced by FLOPs"),
        }
        for what, (given, why) in reasons.items():
            if given:
                raise ValueError(
                    f'{what} does not go with buffers="flat" ({why}): leave it out, or take '
                    'buffers="per_parameter"'
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
    ) -> BucketPolicy:
        """How buckets travel between so many ranks, in so many groups that do the same."""
        frugal = ranks > 2 if self.buffers == "flat" else self.frees_gradients
        return BucketPolicy(
            ranks,
            outer,
            ordered=self.reduction == "ordered",
            frugal=self.overlap_grad_reduce and frugal,
            on_cpu=device.type == "cpu",
            uneven=uneven,
            levels=levels,
        )

    def sums_in_place(self, policy: BucketPolicy) -> bool:
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
        """What "auto" means for plain parameters of a model that has DTensors."""
        if self.sharding == "auto" and self.buffers == "per_parameter":
            return replace(self, sharding="none")
        return self

    def kept_by(self) -> str:
        """Which option spreads state over ranks."""
        return (
            f"buffers={self.buffers!r}" if self.buffers == "flat" else f"sharding={self.sharding!r}"
        )

    def lines(self) -> list[str]:
        """What all ranks must have alike, as text."""
        # Each rank has its handles; what a state dict has, and when plans are made, is no plan.
        own = ("process_group", "outer_group", "stage_group", "state_dict_form", "deferred")
        names = [field.name for field in fields(self) if field.name not in own]
        return [f"{name} = {getattr(self, name)}" for name in names]
