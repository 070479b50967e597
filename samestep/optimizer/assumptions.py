"""Assumptions of an optimizer about ranks and model, checked and printed by `explain()`.

One list. Each entry says in a sentence what is assumed, which function checks it, when that
runs and what it costs; and for an optimizer at hand whether it concerns that, and how.
`opt.explain()` prints the list for a run. What nobody checks is in it as well, and is told last.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from textwrap import wrap
from typing import Any, NamedTuple

from torch import Tensor, bfloat16, float16

from samestep.comm.groups import ranks_text
from samestep.groups.param_groups import members
from samestep.groups.step_options import GradLimit, limit_text
from samestep.layout.fused_rows import rows_in
from samestep.optimizer.optimizer_plan import OptimizerPlan
from samestep.rules.stored import REMAINDER
from samestep.shards.registry import kind_of
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.tooling.warn import some

WIDTH = 100


class ModelFacts(NamedTuple):
    """Everything the checks of assumptions may read."""

    kind: str  # name of its class
    plan: OptimizerPlan
    groups: Sequence[Mapping[str, Any]]
    max_grad_norm: GradLimit
    state_lines: Sequence[str]  # how state is kept, and where; none as usual


Here = Callable[[ModelFacts], str | None]


@dataclass(frozen=True)
class Assumption:
    """A condition for all ranks to take the same step.

    name: short, unique.
    taken_for_granted: a sentence.
    here: what it means for an optimizer at hand; None: it does not concern that.
    check: "module:function" or "module:Class.method", which holds it; None: nobody does.
    when: it runs, in words.
    cost: of the check, in words; where nobody checks, what helps or why nobody can.
    """

    name: str
    taken_for_granted: str
    here: Here
    check: str | None = None
    when: str = "never"
    cost: str = "negligible time on the CPU"

    def function(self) -> Callable[..., Any] | None:
        """The function that checks, without what is wrapped around it."""
        if self.check is None:
            return None
        module, _, path = self.check.partition(":")
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        function: Callable[..., Any] = inspect.unwrap(found)
        return function


def explain(facts: ModelFacts) -> str:
    """The register for one optimizer, as text."""
    where = "one process" if facts.plan.ranks is None else ranks_text(facts.plan.ranks.members)
    lines = [f"What {facts.kind} takes for granted ({where})", ""]
    told = [(entry, here) for entry in REGISTER if (here := entry.here(facts)) is not None]
    for entry, here in told:
        if entry.check is not None:
            checked = f"Checked {entry.when}; cost: {entry.cost} ({entry.check})"
            lines += _lines(entry, here, checked)
    unchecked = [(entry, here) for entry, here in told if entry.check is None]
    if unchecked:
        lines += ["What nobody checks", ""]
    for entry, here in unchecked:
        lines += _lines(entry, here, f"Not checked: {entry.cost}")
    if facts.state_lines:
        lines += ["How state is kept", ""]
    for text in facts.state_lines:
        lines += wrap(f"{text}.", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines).rstrip()


def _lines(entry: Assumption, here: str, checked: str) -> Iterator[str]:
    yield entry.name
    for text in (entry.taken_for_granted, f"Here: {here}.", f"{checked}."):
        yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield ""


# --- what entries say of a run -------------------------------------------------------------------


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _plain_params(facts: ModelFacts) -> str:
    """The parameters of which this optimizer shares copies, DTensors among them."""
    plain = sum(len(plan.params) for plan in facts.plan.shared if plan.mesh is None)
    parts = sum(len(plan.params) for plan in facts.plan.shared if plan.mesh is not None)
    kinds = {"plain parameter": plain, "DTensor": parts}
    return " and ".join(_many(count, noun) for noun, count in kinds.items() if count)


def _averages_here(facts: ModelFacts) -> bool:
    return bool(facts.plan.shared) and facts.plan.distribution.grads == "local"


def _who_averages(facts: ModelFacts) -> str | None:
    """Which ranks average the gradients of each parameter's copies."""
    found = []
    for plan in facts.plan.shared:
        what, ranks = _many(len(plan.params), "plain parameter"), ranks_text(plan.group.members)
        if plan.mesh is not None:
            parts = ranks_text(plan.mesh.layout.group.members)
            what = f"{_many(len(plan.params), 'DTensor')} on {parts}, of which others have copies,"
        if facts.plan.distribution.grads == "reduced":
            found.append(f'{what} on {ranks} averaged by somebody else (grads="reduced", or DDP)')
            continue
        outside = (
            ""
            if facts.plan.outer is None
            else f", then over {ranks_text(facts.plan.outer.members)}"
        )
        found.append(f"{what} averaged by samestep over {ranks}{outside}")
    by_fsdp = _managed_by_fsdp(facts)
    for sharded in facts.plan.sharded:
        names = sharded.layout.mesh.mesh_dim_names
        axes = f" (mesh axes {', '.join(names)})" if names else ""
        where = f"on {ranks_text(sharded.group.members)}{axes}"
        managed = sum(id(param) in by_fsdp for param in sharded.params)
        others = len(sharded.params) - managed
        if managed:
            found.append(f"{_many(managed, 'DTensor')} {where} averaged by FSDP2")
        if others:
            found.append(
                f"{_many(others, 'DTensor')} {where} combined by the layers that hold them, such "
                "as those of tensor parallel"
            )
    known = (*facts.plan.shared, *facts.plan.sharded)
    for placed in facts.plan.placed:
        if placed not in known:  # a kind of which nothing else is told here
            kind, by = kind_of(placed.params[0]), placed.averaged_by(placed.params[0])
            what = f"{_many(len(placed.params), 'parameter')} of the kind {kind.name!r}"
            found.append(f"{what} ({kind.about}) averaged by {by}")
    return "; ".join(found) or None


def _among_ranks(facts: ModelFacts) -> str | None:
    if not facts.plan.shared:
        return None
    groups = dict.fromkeys(plan.group.members for plan in facts.plan.shared)
    return f"{_plain_params(facts)} on " + "; ".join(map(ranks_text, groups))


def _plans(facts: ModelFacts) -> str | None:
    count = len(facts.plan.placed)
    return _many(count, "plan") if count else None


def _dtensors(facts: ModelFacts) -> str | None:
    return (
        _many(sum(len(s.params) for s in facts.plan.sharded), "DTensor")
        if facts.plan.sharded
        else None
    )


def _dtensors_with_copies(facts: ModelFacts) -> str | None:
    count = sum(len(plan.params) for plan in facts.plan.shared if plan.mesh is not None)
    return _many(count, "DTensor") if count else None


def _compared_copies(facts: ModelFacts) -> str | None:
    count = sum(plan.compares_copies for plan in facts.plan.placed)
    return _many(count, "plan") if count else None


def _outside_of_meshes(facts: ModelFacts) -> str | None:
    """DTensors whose meshes leave out ranks."""
    if facts.plan.ranks is None:
        return None
    found = [
        f"{some([spec.name for spec in sharded.specs], 4)} on {ranks_text(sharded.group.members)}"
        for sharded in facts.plan.sharded
        if not set(facts.plan.ranks.members) <= set(sharded.group.members)
    ]
    return "; ".join(found) or None


def _groups(facts: ModelFacts) -> str | None:
    return _many(len(facts.groups), "group")


def _reduced_gradients(facts: ModelFacts) -> str | None:
    if not facts.plan.shared or facts.plan.distribution.grads == "local":
        return None
    return _plain_params(facts)


def _overlapped(facts: ModelFacts) -> str | None:
    if not (_averages_here(facts) and facts.plan.distribution.overlap_grad_reduce):
        return None
    return f"{_plain_params(facts)}, reduced inside backward (overlap_grad_reduce)"


def _on_their_way(facts: ModelFacts) -> str | None:
    if not (facts.plan.shared and facts.plan.distribution.overlap_param_gather):
        return None
    return f"{_plain_params(facts)}, still on their way after the step (overlap_param_gather)"


def _narrow_sums(facts: ModelFacts) -> str | None:
    """Gradients that are reduced in float16."""
    if not _averages_here(facts):
        return None
    asked = facts.plan.distribution.reduce_dtype
    params = [param for plan in facts.plan.shared for param in plan.params]
    narrow = sum((asked or gradient_dtype(param)) == float16 for param in params)
    return f"{_many(narrow, 'gradient')} of float16" if narrow else None


def _equal_weight(facts: ModelFacts) -> str | None:
    if not _averages_here(facts):
        return None
    return "ranks with fewer tokens count as much as others"


def _finite(facts: ModelFacts) -> str | None:
    if facts.max_grad_norm is None:
        return None
    return f"{limit_text(facts.max_grad_norm)} skips the step on all ranks if they are not"


def _own_finite(facts: ModelFacts) -> str | None:
    if not facts.plan.distribution.check_gradients:
        return None
    return "check_gradients=True raises on all ranks if they are not, with parameter and rank"


def _clipped_among_ranks(facts: ModelFacts) -> str | None:
    if facts.max_grad_norm is None or not facts.plan.placed:
        return None
    stages = facts.plan.stages
    beyond = "" if stages is None else f", and over the stages of {ranks_text(stages.members)}"
    return f"{limit_text(facts.max_grad_norm)} over {_among_placed(facts)}{beyond}"


def _among_placed(facts: ModelFacts) -> str:
    groups = dict.fromkeys(placed.group.members for placed in facts.plan.placed)
    return "; ".join(map(ranks_text, groups))


def _finite_unasked(facts: ModelFacts) -> str | None:
    distribution = facts.plan.distribution
    if facts.max_grad_norm is not None or distribution.check_gradients:
        return None
    own = " or check_gradients=True (each rank's own)" if distribution.grads == "local" else ""
    return (
        "NaN or inf gradients are not caught before they reach parameters and state. To catch "
        "them, pass max_grad_norm= (math.inf checks without clipping; it looks at the averaged "
        f"gradients){own}"
    )


def _other_ranks(facts: ModelFacts) -> str | None:
    if facts.plan.ranks is None:
        return None
    return f"parameters, options and state on {ranks_text(facts.plan.ranks.members)}"


def _fused_and_cut(facts: ModelFacts) -> str | None:
    """Fused weights whose rows are sharded by more than FSDP2."""
    by_fsdp = _managed_by_fsdp(facts)
    found = [
        name
        for group, name, param in members(facts.groups)
        if group.get("split_sizes")
        and param.dim() == 2
        and rows_in(name) is None
        and _row_cuts(param) > (id(param) in by_fsdp)
    ]
    return some(found, 4) if found else None


def _managed_by_fsdp(facts: ModelFacts) -> set[int]:
    """The DTensors that FSDP2 manages, by id."""
    if not facts.plan.sharded:
        return set()
    from samestep.shards.dtensor.fsdp_units import managed_beside  # DTensors take long to import

    params = [param for sharded in facts.plan.sharded for param in sharded.params]
    return set(map(id, managed_beside(params)))


def _row_cuts(param: Tensor) -> int:
    """Number of mesh axes that shard the rows."""
    placements = getattr(param, "placements", ())
    return sum(getattr(placement, "dim", None) == 0 for placement in placements)


def _alone(facts: ModelFacts) -> str | None:
    """A line for an optimizer without a process group."""
    if (
        facts.plan.ranks is not None
        or facts.plan.sharded
        or facts.plan.distribution.grads == "reduced"
    ):
        return None
    return "this process trains alone"


def _all_params(facts: ModelFacts) -> str | None:
    return _many(sum(len(group["params"]) for group in facts.groups), "parameter")


def _narrow(facts: ModelFacts) -> str | None:
    params = [param for group in facts.groups for param in group["params"]]
    narrow = [param for param in params if param.dtype.itemsize < 4]
    return f"{len(narrow)} of {_many(len(params), 'parameter')} are narrower" if narrow else None


def _remainders(facts: ModelFacts) -> str | None:
    """Parameters whose main parameters are stored as remainders."""
    kept = [
        param
        for group in facts.groups
        if isinstance(chosen := group.get("state_dtypes"), Mapping)
        and chosen.get("master_weight") == REMAINDER
        for param in group["params"]
        if param.dtype == bfloat16
    ]
    return (
        f"{_many(len(kept), 'parameter')} whose 32-bit copy is kept as a remainder"
        if kept
        else None
    )


def _local(facts: ModelFacts) -> str | None:
    if not _averages_here(facts):
        return None
    return f"{_plain_params(facts)} with gradients of each rank's own data"


def _edited(facts: ModelFacts) -> str | None:
    return None if facts.plan.distribution.overlap_grad_reduce else _local(facts)


# --- the register --------------------------------------------------------------------------------

REGISTER: tuple[Assumption, ...] = (
    Assumption(
        "averages",
        "The copies of every parameter are averaged by somebody, and by one only.",
        _who_averages,
        "samestep.shards.copies:refuse_copies_nobody_averages",
        "at construction",
        "nothing where a mesh has all ranks, else 64 bytes and two bits for each rank, from each "
        "rank",
    ),
    Assumption(
        "same plan",
        "All ranks that share parameters have built the same model and optimizer.",
        _plans,
        "samestep.comm.integrity.agreement:require_same_lines",
        "at construction",
        "32 bytes from every rank",
    ),
    Assumption(
        "equal start",
        "Copies of a parameter have the same values when training begins and when a state is "
        "loaded.",
        _among_ranks,
        "samestep.shards.replicated.replicated:ReplicatedShards.mend_replicas",
        "at construction",
        "a checksum of every parameter, of which 8 bytes travel",
    ),
    Assumption(
        "unchanged groups",
        "Parameters are those that the optimizer was built with, in the same shape and dtype, and "
        "options that decide the state stay as they were.",
        _groups,
        "samestep.groups.group_checks:GroupChecks.check",
        "in every step",
    ),
    Assumption(
        "unchanged memory",
        "Parameters in flat buffers stay there, or are brought back; no parameter is expanded.",
        _among_ranks,
        "samestep.shards.replicated.local_tensors:LocalTensors.changed",
        "in every step",
    ),
    Assumption(
        "missing gradients",
        "A rank may lack a gradient that others have (zeros stand for it), or may be unable to "
        "take the step (then no rank takes it).",
        _plans,
        "samestep.comm.presence:PresenceAgreement.agree",
        "in every step",
        "8 bytes for each parameter travel",
    ),
    Assumption(
        "same hyperparameters",
        "Ranks that hold copies or shards of the same parameters have the same learning rates and "
        "other options of their groups, bit for bit.",
        _plans,
        "samestep.groups.hyperparameters:HyperparameterReader.read",
        "in every step",
        "a digest, made anew for groups in which something was set, of which 16 bytes for each "
        "plan travel with presence; on a GPU it is told in a later step",
    ),
    Assumption(
        "gradients of all copies",
        'Where nobody averages any more (grads="reduced", a DTensor along the axes of its mesh '
        "that replicate it), ranks with copies of the same values have the same gradients: all of "
        "them or none.",
        _compared_copies,
        "samestep.comm.replicated_votes:ReplicatedHere.refuse_difference",
        "in every step",
        "16 bytes for each such set of ranks and some 50 parameters travel; on a GPU it is told in "
        "a later step",
    ),
    Assumption(
        "gradients placed alike",
        "The gradient of a DTensor is placed as the DTensor is.",
        _dtensors,
        "samestep.shards.dtensor.sharded:ShardedParameters._gradient_problem",
        "in every step",
    ),
    Assumption(
        "gradients of copies placed alike",
        "The gradient of a DTensor that samestep averages is placed as the DTensor is, or is a "
        "summand of it, and stays what it was in the first step.",
        _dtensors_with_copies,
        "samestep.shards.replicated.reduction:BucketReductions._look_at_placements",
        "in every step",
        "negligible time on the CPU; 8 bytes for each parameter until it is known of all",
    ),
    Assumption(
        "one order of launches",
        "An optimizer that has not met another in one backward in its first step does not later: "
        "on ranks that lack a gradient their reductions would meet in another order.",
        _overlapped,
        "samestep.shards.replicated.inside_backward:LaunchOrder.rival",
        "in every step",
    ),
    Assumption(
        "gradients left alone",
        "Nobody changes a gradient after it was reduced inside backward.",
        _overlapped,
        "samestep.shards.replicated.sent_gradients:SentGradients.changed",
        "in every step",
    ),
    Assumption(
        "keys of groups",
        "Every key of a group is read by its rule, or is somebody else's and changes nothing.",
        _groups,
        "samestep.groups.group_keys:refuse_lost_keys",
        "at construction",
        "negligible time on the CPU; keys from libraries that samestep does not know are kept "
        "silently",
    ),
    Assumption(
        "process group first",
        "Ranks that were started together have a process group when the optimizer is built.",
        _alone,
        "samestep.groups.mistakes:warn_of_missing_group",
        "at construction",
        "negligible time on the CPU; known from RANK and WORLD_SIZE in the environment, so "
        "ranks started otherwise are not seen",
    ),
    Assumption(
        "no process group later",
        "No process group of several ranks is made after the optimizer.",
        _alone,
        "samestep.groups.mistakes:has_process_group",
        "in every step",
    ),
    Assumption(
        "whole parameters",
        "A plain parameter is all of that parameter, not a flattened shard of FSDP1.",
        _all_params,
        "samestep.groups.mistakes:refuse_flat_parameters",
        "at construction",
    ),
    Assumption(
        "memory of its own",
        "No element of memory belongs to two parameters; views beside each other in one buffer do "
        "not share any.",
        _all_params,
        "samestep.optimizer.optimizer_plan:OptimizerPlan.shared_memory",
        "at construction",
        "negligible time on the CPU, again before steps 1, 2, 4, 8, ...; where some lie in between "
        "each other, as columns of one matrix, a map of their bytes is made",
    ),
    Assumption(
        "norm of the whole model",
        "The norm that clips is of all parameters of the model: other ranks have copies, other "
        "parts, or stages that are named (stage_group=).",
        _clipped_among_ranks,
        "samestep.optimizer.optimizer_plan:OptimizerPlan.refuse_norm_of_a_part",
        "at construction",
        "nothing where process_group or a mesh has all ranks, else 32 bytes from every rank",
    ),
    Assumption(
        "updates that count",
        "Parameters have enough bits for their updates, have a 32-bit copy, or lose them on "
        "purpose.",
        _narrow,
        "samestep.groups.mistakes:warn_of_lost_updates",
        "at construction",
        "negligible time on the CPU; a model that is turned to 16 bits later is not seen",
    ),
    Assumption(
        "the model's parameters",
        "What the model trains is what the optimizer has; none came, was unfrozen or replaced.",
        _all_params,
        "samestep.groups.mistakes:TrainingWatch.look_at_model",
        "in the first step",
        "negligible time on the CPU, again before steps 2, 4, 8, ...; not seen if the "
        "optimizer was given parameters in place of a model",
    ),
    Assumption(
        "gradients come",
        "Steps come after backward, and gradients are not cleared in between.",
        _all_params,
        "samestep.groups.mistakes:TrainingWatch.look_at_gradients",
        "in the first step",
        "negligible time on the CPU, until a gradient was seen; warns after three steps "
        "without gradients",
    ),
    Assumption(
        "averaged once",
        "Nobody else averages gradients that are averaged here.",
        _local,
        "samestep.groups.mistakes:warn_of_ddp",
        "in the first step",
        "negligible time on the CPU; a DistributedDataParallel that is made after the first "
        "step, and gradients averaged by hand, are not seen",
    ),
    Assumption(
        "unedited before averaging",
        "Nobody clips or edits gradients by what one rank sees before they are averaged.",
        _edited,
        "samestep.groups.mistakes:GradientEdits.look",
        "in the first step",
        "a hook on each parameter that is taken away after two steps; warns only if all gradients "
        "were edited in place, and later edits are not seen",
    ),
    Assumption(
        "room for sums",
        "Sums of gradients fit into the dtype in which a backend adds them up; those of float16 "
        "are divided first.",
        _narrow_sums,
        "samestep.plan.transfers:divides_first",
        "at construction",
        "in every step one more pass over float16 gradients, nothing for others",
    ),
    Assumption(
        "finite gradients",
        "Averaged gradients are finite.",
        _finite,
        "samestep.update.metrics:square_sum",
        "in every step",
        "one reading of every gradient, 8 bytes travel",
    ),
    Assumption(
        "own finite gradients",
        "Gradients of each rank are finite before they are combined with those of others.",
        _own_finite,
        "samestep.shards.not_finite:is_finite",
        "in every step",
        "one reading of every gradient, for which the host waits; nothing travels",
    ),
    Assumption(
        "equal ever after",
        "Ranks change parameters and state in step() alone, or all of them in the same way.",
        _other_ranks,
        "samestep.lab.stress.check:check",
        "where you call samestep.stress.check",
        "a checksum of every parameter and one all-reduce of a few bytes",
    ),
    Assumption(
        "copies beside a mesh",
        "Ranks that hold copies of a DTensor outside of its mesh see the same data, as along a "
        "tensor parallel axis, and so have the same gradients: nobody averages them.",
        _outside_of_meshes,
        "samestep.lab.stress.outside_copies:OutsideCopies.drifts",
        "where you call samestep.stress.check",
        "a checksum of what is held, and 128 bytes from every rank",
    ),
    # What nobody checks.
    Assumption(
        "reduced gradients",
        "Gradients of plain parameters come averaged, the same on every rank.",
        _reduced_gradients,
        cost="samestep.stress.check finds the copies that drift apart if they do not",
    ),
    Assumption(
        "equal weight of ranks",
        "The loss of every rank is a mean over as many samples or tokens as on other ranks, since "
        "the mean of gradients is taken over ranks.",
        _equal_weight,
        cost="gradients do not tell",
    ),
    Assumption(
        "nothing in between",
        "Between backward and step() nobody else launches collectives on the same process group: a "
        "rank that lacks a gradient launches its reductions in step() alone, and so does the first "
        "step beside another optimizer. A second optimizer without overlap steps after this one.",
        _overlapped,
        cost="a collective that fails names the rank and the collective it was in",
    ),
    Assumption(
        "reads after arrival",
        "Parameters wait for themselves when torch's functions are given them. Whoever reads their "
        "memory around these (C++ code, a view that was kept since before the step) calls "
        "wait_for_parameters() first.",
        _on_their_way,
        cost="poison_early_reads=True shows reads that come too early",
    ),
    Assumption(
        "edits that are told",
        "Whoever edits parameters outside of step() calls refresh_master_weights() afterwards, or "
        "uses set_full_parameter and scale_parameters: what a remainder belongs to is gone.",
        _remainders,
        cost="a weight and a remainder do not tell that they do not belong together",
    ),
    Assumption(
        "projections in one weight",
        "Where tensor parallel cuts the rows of a weight that holds several projections "
        "(split_sizes), the model's forward knows which rows it has: the update is right in any "
        "case, a forward that splits its part into three is not.",
        _fused_and_cut,
        cost="samestep.parallel refuses such a plan; a model that was cut by others is not looked "
        "into",
    ),
    Assumption(
        "finite gradients, unchecked",
        "Averaged gradients are finite.",
        _finite_unasked,
        cost="it would cost one reading of every gradient",
    ),
)
