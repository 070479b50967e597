"""Runs steps with Triton kernels, on operands that they support."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor, float32

from samestep.kernels.adamw import AdamWTensors
from samestep.kernels.call import Gradients, Step, Table, codes_per_scale, has_two_levels
from samestep.kernels.launch import compile_ahead
from samestep.kernels.muon import MatrixStrides, MuonBlocks, muon_, strides_of
from samestep.kernels.norm import DTYPES
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule
from samestep.rules.noise import Origin
from samestep.rules.orthogonalize import kernels_run, step_coefficients
from samestep.rules.state import MASTER
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, code_dtype
from samestep.update.lanes import Batch, dealt, side_by_side, temporary_bytes
from samestep.update.plain import BATCH_ELEMENTS, GroupMath, Operand


class Job(NamedTuple):
    """The tensors of one kernel launch, and their places among the operands."""

    places: list[int]  # among the operands
    tensors: AdamWTensors | MuonBlocks


class KernelPlan:
    """The batches of a group's operands for kernels; rebuilt if tensors are replaced."""

    def __init__(self, math: GroupMath, operands: Sequence[Operand], most: int | None) -> None:
        self.params = [operand.param for operand in operands]
        self.states = [operand.state for operand in operands]
        self.dtypes = [operand.grad.dtype for operand in operands]
        mine = [place for place, operand in enumerate(operands) if _fits(operand)]
        self.others = sorted(set(range(len(operands))) - set(mine))
        self.batches: list[list[Job]] = []
        for alike in _by_kind(operands, mine):
            if type(math.rule) is AdamWRule:
                tensors = AdamWTensors(*self._of(alike), _origins(operands, alike))
                self.batches.append([Job(alike, tensors)])
            else:
                for batch in _batches(operands, alike, most or BATCH_ELEMENTS):
                    jobs = []
                    for same in batch:
                        first, origins = operands[same[0]], _origins(operands, same)
                        rows, lie = first.matrix[0], _strides(first)
                        jobs.append(Job(same, MuonBlocks(*self._of(same), rows, lie, origins)))
                    self.batches.append(jobs)
        self.lanes = dealt(self._blocks(), sparing=most is not None)

    def _of(self, places: Sequence[int]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        return [self.params[place] for place in places], [self.states[place] for place in places]

    def is_for(self, operands: Sequence[Operand]) -> bool:
        """Whether the plan still fits: no parameter or state was replaced since."""
        return (
            len(operands) == len(self.params)
            and all(map(operator.is_, self.states, [operand.state for operand in operands]))
            and all(map(operator.is_, self.params, [operand.param for operand in operands]))
            and [operand.grad.dtype for operand in operands] == self.dtypes
            and all(map(_grad_fits, operands))
        )

    def outliers(self) -> list[Tensor]:
        """Return the outlier flags of blocks, which kernels set, one tensor per launch."""
        jobs = [job.tensors for batch in self.batches for job in batch]
        return [blocks.outliers for blocks in jobs if isinstance(blocks, MuonBlocks)]

    def temporary_bytes(self) -> int:
        """Return the approximate bytes of temporaries of Muon blocks."""
        return temporary_bytes(self._blocks(), self.lanes)

    def _blocks(self) -> list[Batch]:
        """Return the number and shape of the blocks of each batch."""
        found = []
        for batch in self.batches:
            blocks = [job.tensors for job in batch if isinstance(job.tensors, MuonBlocks)]
            shape = (blocks[0].rows, blocks[0].cols) if blocks else (0, 0)
            found.append(Batch(sum(own.count for own in blocks), *shape))
        return found

    def gradients(self, operands: Sequence[Operand]) -> Iterator[list[Gradients]]:
        """Yield the gradients of each batch, as tables of addresses."""
        jobs = [job for batch in self.batches for job in batch]
        order = [place for job in jobs for place in job.places]
        table = Table([[operands[place].grad for place in order]])
        starts = accumulate((len(job.places) for job in jobs), initial=0)
        found = iter(
            Gradients(
                table.addresses[0, start:],
                table.aligned,
                DTYPES[self.dtypes[job.places[0]]],
                _writes([operands[place] for place in job.places]),
            )
            for start, job in zip(starts, jobs, strict=False)
        )
        for batch in self.batches:
            yield [next(found) for _ in batch]


OfGroup = tuple[GroupMath, int, Sequence[Operand]]  # index, and operands on one device
Plans = dict[object, KernelPlan]  # by group, device, and number and first of operands


def compile_kernels(groups: Sequence[OfGroup], plans: Plans, most: int | None = None) -> None:
    """Make the plans of some groups on one device, and compile the kernels of all of them.

    A step that begins without plans calls this first, so that groups compile in parallel.
    """
    runs: list[Callable[[], object]] = []
    device = groups[0][2][0].param.device
    for math, index, operands in groups:
        if can_run(math, device):
            plan, is_new = _plan_for(math, index, operands, plans, most)
            if is_new:
                runs.append(partial(_run_all, plan, math, operands))
    if runs and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        compile_ahead(lambda: [run() for run in runs], device)


def update_with_kernels(
    math: GroupMath,
    index: int,
    operands: Sequence[Operand],
    plans: Plans,
    most: int | None = None,
) -> list[Operand]:
    """Update operands with kernels; return the operands that kernels do not support.

    `most`: the most elements orthogonalized at once; None: `BATCH_ELEMENTS`.
    """
    device = operands[0].param.device
    if not can_run(math, device):
        return list(operands)
    plan, _ = _plan_for(math, index, operands, plans, most)
    if not plan.batches:
        return list(operands)
    done = _run_all(plan, math, operands, beside=True)
    for batch, squares in zip(plan.batches, done, strict=True):
        if math.sizes is not None:
            for job, of_job in zip(batch, squares, strict=True):
                math.sizes.add(index, [operands[place] for place in job.places], of_job.double())
    return [operands[place] for place in plan.others]


def _plan_for(
    math: GroupMath, index: int, operands: Sequence[Operand], plans: Plans, most: int | None
) -> tuple[KernelPlan, bool]:
    """Return the cached plan of operands, and whether it is new."""
    # A group may come in several buckets.
    key = index, operands[0].param.device, len(operands), id(operands[0].state)
    plan = plans.get(key)
    if plan is not None and plan.is_for(operands):
        return plan, False
    plan = plans[key] = KernelPlan(math, operands, most)
    if math.bounds is not None:
        math.bounds.watch(index, plan.outliers())
    return plan, True


def _run_all(
    plan: KernelPlan, math: GroupMath, operands: Sequence[Operand], *, beside: bool = False
) -> list[list[Tensor]]:
    """Run all batches of a plan in their lanes."""
    only_if = None if math.only_if is None else math.only_if.double()
    step = Step(math.scalars, math.options, math.factor, math.maximize, only_if)
    grads = list(plan.gradients(operands))

    def run(number: int) -> list[Tensor]:
        batch = plan.batches[number]
        if isinstance(batch[0].tensors, AdamWTensors):
            batch[0].tensors.step_(grads[number][0], step)
            return []
        blocks = [job.tensors for job in batch if isinstance(job.tensors, MuonBlocks)]
        parts = list(zip(blocks, grads[number], strict=True))
        return muon_(parts, step, measure=math.sizes is not None)

    lanes = plan.lanes if beside else [list(range(len(plan.batches)))]
    return side_by_side(lanes, run, operands[0].param.device)


def reason_against(math: GroupMath, operands: Sequence[Operand]) -> str | None:
    """Return the reason why kernels do not support all operands of a group; None if they do."""
    for operand in operands:
        if type(math.rule) is AdamWRule and math.sizes is not None:
            return "update_rms=True, which no kernel measures for AdamW"
        if not can_run(math, operand.param.device):
            return f"rule {math.rule.name!r} has no kernels for the options of its group"
        if not _fits(operand):
            return (
                f"a parameter of shape {tuple(operand.param.shape)} is not what kernels know: "
                "16 or 32 bits, contiguous like its gradient and state, not empty, and where state "
                "is rounded at random, no matrix in the gaps of others"
            )
    return None


# Every option of the rules that the kernels read. What is not here they would ignore, so a group
# with another option is plain torch's.
ADAMW_OPTIONS = frozenset({"amsgrad", "fused", "eps_hat", "cautious", "decay_form"})
DECAY_FORMS = ("decoupled", "independent", "l2")
MUON_OPTIONS = frozenset(
    {
        "momentum_form", "nesterov", "equilibrate", "orthogonalize", "ns_steps", "ns_coefficients",
        "execution", "eps", "eps_form", "renormalize", "adjust_lr", "cautious", "scale_decay",
        "compute_dtype", "norm_factor", "variance_axis", "variance_eps", "variance_eps_form",
        "update_scale", "decay_form", "ns_start",
    }
)  # fmt: skip
# Of those that name a form: the ones that kernels have.
MUON_VALUES = {
    "momentum_form": ("ema", "sum"),
    "ns_start": ("norm",),
    "eps_form": ("add", "clamp"),
    "variance_axis": ("long", "rows"),
    "variance_eps_form": ("add", "clamp"),
    "decay_form": ("decoupled", "independent"),
}


def can_run(math: GroupMath, device: torch.device) -> bool:
    """Whether kernels support a rule and its options."""
    options = math.options
    if type(math.rule) is AdamWRule:
        known = options.keys() <= ADAMW_OPTIONS and options["decay_form"] in DECAY_FORMS
        return known and math.sizes is None and not options["amsgrad"]
    if type(math.rule) is not MuonRule or not options.keys() <= MUON_OPTIONS:
        return False
    if any(options[key] not in known for key, known in MUON_VALUES.items()):
        return False
    table = step_coefficients(
        options["orthogonalize"], options["ns_steps"], options["ns_coefficients"]
    )
    return kernels_run(table, options["compute_dtype"] or torch.bfloat16, device)


def _fits(operand: Operand) -> bool:
    """Whether kernels support dtypes and strides of an operand."""
    known = operand.param.dtype in DTYPES and operand.grad.dtype in DTYPES and _grad_fits(operand)
    shape, strides = operand.param.shape, operand.param.stride()
    for tensor in (operand.param, *operand.state.values()):
        lies_alike = tensor.shape == shape and tensor.stride() == strides
        known &= tensor.is_contiguous() or (operand.rows is not None and lies_alike)
    known &= all(_is_known(operand, key) for key in operand.state) and _origin_fits(operand)
    return known and operand.param.numel() > 0


def _is_known(operand: Operand, key: str) -> bool:
    """Whether kernels support a format of state."""
    state, dtype = operand.state, operand.state[key].dtype
    is_random = operand.origin is not None and key in operand.origin.seeds
    if key == MASTER:
        return dtype == float32
    if key == REMAINDER_KEY:
        return operand.param.dtype == torch.bfloat16
    if key + SCALE_SUFFIX in state:
        codes, scale = state[key], state[key + SCALE_SUFFIX]
        # Neighbours of the last dim share a scale, not those of another where it is transposed.
        blocked = codes.shape[:-1] == scale.shape[:-1] and scale.numel() > 0
        return is_random and blocked and key in MOMENTS and dtype == code_dtype(key)
    if is_random:
        return key in MOMENTS and dtype == torch.bfloat16
    return dtype in DTYPES


MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # what kernels round at random


def _origin_fits(operand: Operand) -> bool:
    """Whether kernels support the stochastic rounding of an operand."""
    origin, sizes = operand.origin, _block_sizes(operand)
    if origin is None:
        return True
    placed = not origin.frame and has_two_levels(origin, operand.param.shape)
    return placed and operand.param.is_contiguous() and len(set(sizes.values())) <= 1


def _block_sizes(operand: Operand) -> dict[str, int]:
    """Return the number of codes per scale, by state key."""
    state = operand.state
    return {key: codes_per_scale(state, key) for key in state if key + SCALE_SUFFIX in state}


def _origins(operands: Sequence[Operand], places: Sequence[int]) -> list[Origin] | None:
    """Return the origins of operands for stochastic rounding; None without it."""
    origins = [operands[place].origin for place in places]
    return [origin for origin in origins if origin is not None and origin.seeds] or None


def _grad_fits(operand: Operand) -> bool:
    """Whether the strides of a gradient are supported."""
    if operand.rows is not None:
        return operand.grad.stride() == operand.param.stride()
    return operand.grad.is_contiguous()


def _strides(operand: Operand) -> MatrixStrides | None:
    """Return the strides of an interleaved matrix; None if it is contiguous."""
    if operand.rows is None or operand.param.is_contiguous():
        return None
    return strides_of(operand.param)


def _by_kind(operands: Sequence[Operand], places: Sequence[int]) -> list[list[int]]:
    """Group the places of operands by dtypes and rounding."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for place in places:
        operand = operands[place]
        dtypes = tuple((key, tensor.dtype) for key, tensor in operand.state.items())
        seeds = () if operand.origin is None else tuple(sorted(operand.origin.seeds))
        sizes = tuple(_block_sizes(operand).items())
        kinds[operand.param.dtype, operand.grad.dtype, dtypes, seeds, sizes].append(place)
    return list(kinds.values())


def _batches(
    operands: Sequence[Operand], places: Sequence[int], most: int
) -> Iterator[list[list[int]]]:
    """Yield batches of blocks of one shape, up to transposition, as places by launch."""
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place in places:
        by_shape[tuple(sorted(operands[place].matrix))].append(place)

    def kind(place: int) -> tuple[int, MatrixStrides | tuple[()]]:
        return operands[place].matrix[0], _strides(operands[place]) or ()

    for (short, long), members in by_shape.items():
        members.sort(key=kind)
        count = max(1, most // (short * long))
        for start in range(0, len(members), count):
            yield [list(same) for _, same in groupby(members[start : start + count], kind)]


def _writes(operands: Sequence[Operand]) -> Tensor | None:
    """Return the presence flags, (count,) float64; None: all operands are present."""
    if not [operand for operand in operands if operand.present is not None]:
        return None
    one = torch.ones((), dtype=torch.float64, device=operands[0].param.device)
    flags = [one if o.present is None else o.present.double() for o in operands]
    return torch.stack(flags)
