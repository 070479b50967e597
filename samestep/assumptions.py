"""The register of assumptions: what an optimizer takes for granted of the world around it.

One list. Each entry says in a sentence what is assumed, which function checks it, when that
runs and what it costs; and for an optimizer at hand whether it concerns that, and how.
`opt.explain()` prints the list for a run. What nobody checks is in it as well, and is told last.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from samestep.comm.groups import RankGroup, ranks_text
from samestep.distribution import Distribution

if TYPE_CHECKING:
    from samestep.replicated import ReplicatedParameters
    from samestep.sharded_blocks import ShardedParameters

When = Literal["construction", "first step", "every step", "stress.check", "never"]

WIDTH = 100


class Facts(NamedTuple):
    """What an optimizer knows of its run; entries of the register read nothing else."""

    kind: str  # name of its class
    ranks: RankGroup | None  # those that hold copies of plain parameters; None: one process
    outer: RankGroup | None
    stages: RankGroup | None
    distribution: Distribution
    replicated: "Sequence[ReplicatedParameters]"
    sharded: "Sequence[ShardedParameters]"
    groups: Sequence[Mapping[str, Any]]
    max_grad_norm: float | None


Here = Callable[[Facts], str | None]


@dataclass(frozen=True)
class Assumption:
    """Something that must be true for every rank to take the same step.

    name: short, unique.
    taken_for_granted: a sentence.
    check: "module:function" or "module:Class.method", which holds it; None: nobody does.
    when: it runs.
    cost: of the check, in words.
    here: what it means for an optimizer at hand; None: it does not concern that.
    """

    name: str
    taken_for_granted: str
    check: str | None
    when: When
    cost: str
    here: Here

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


def explain(facts: Facts) -> str:
    """The register for one optimizer, as text."""
    where = "one process" if facts.ranks is None else ranks_text(facts.ranks.members)
    lines = [f"What {facts.kind} takes for granted ({where})", ""]
    told = [(entry, here) for entry in REGISTER if (here := entry.here(facts)) is not None]
    for entry, here in told:
        if entry.check is not None:
            checked = f"checked ({_when(entry.when)}) by {entry.check}; {entry.cost}"
            lines += _lines(entry, here, checked)
    unchecked = [(entry, here) for entry, here in told if entry.check is None]
    if unchecked:
        lines += ["Not checked by anybody:", ""]
    for entry, here in unchecked:
        lines += _lines(entry, here, entry.cost)
    return "\n".join(lines).rstrip()


def _when(when: When) -> str:
    return {
        "construction": "at construction",
        "first step": "in the first step",
        "every step": "in every step",
        "stress.check": "where you call samestep.stress.check",
        "never": "never",
    }[when]


def _lines(entry: Assumption, here: str, checked: str) -> Iterator[str]:
    yield entry.name
    for text in (
        entry.taken_for_granted,
        f"Here: {here}.",
        checked[:1].upper() + checked[1:] + ".",
    ):
        yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield ""


# --- what entries say of a run -------------------------------------------------------------------


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _plain_params(facts: Facts) -> int:
    return sum(len(plan.params) for plan in facts.replicated)


def _who_averages(facts: Facts) -> str | None:
    """Who averages the gradients of what."""
    found = []
    for plan in facts.replicated:
        what = _many(len(plan.params), "plain parameter")
        ranks = ranks_text(plan.group.members)
        if facts.distribution.grads == "reduced":
            found.append(f'{what}: averaged by somebody else over {ranks}, as grads="reduced" says')
            continue
        outside = "" if facts.outer is None else f", then over {ranks_text(facts.outer.members)}"
        found.append(f"{what}: averaged by samestep over {ranks}{outside}")
    for sharded in facts.sharded:
        what = _many(len(sharded.params), "DTensor")
        names = sharded.mesh.mesh_dim_names
        axes = "" if not names else f" (mesh axes {', '.join(names)})"
        found.append(
            f"{what}: reduced before they come here, by FSDP2 or tensor parallel, over "
            f"{ranks_text(sharded.group.members)}{axes}"
        )
    if not found:
        return None if facts.ranks is None else "nothing is shared"
    return "; ".join(found)


def _among_ranks(facts: Facts) -> str | None:
    if not facts.replicated:
        return None
    groups = dict.fromkeys(plan.group.members for plan in facts.replicated)
    return f"{_many(_plain_params(facts), 'parameter')} on " + "; ".join(map(ranks_text, groups))


def _any_sharing(facts: Facts) -> str | None:
    plans = len(facts.replicated) + len(facts.sharded)
    return _many(plans, "plan") if plans else None


def _dtensors(facts: Facts) -> str | None:
    return _many(sum(len(s.params) for s in facts.sharded), "DTensor") if facts.sharded else None


def _all_groups(facts: Facts) -> str | None:
    return _many(len(facts.groups), "group")


def _averages_local(facts: Facts) -> bool:
    return bool(facts.replicated) and facts.distribution.grads == "local"


def _overlapped(facts: Facts) -> str | None:
    if not (_averages_local(facts) and facts.distribution.overlap_grad_reduce):
        return None
    return f"{_many(_plain_params(facts), 'parameter')}, reduced inside backward"


def _same_loss(facts: Facts) -> str | None:
    if not _averages_local(facts):
        return None
    return "ranks with fewer tokens count as much as others"


def _finite(facts: Facts) -> str | None:
    if facts.max_grad_norm is None:
        return None
    return f"max_grad_norm={facts.max_grad_norm:g} skips the step on all ranks if not"


def _not_finite(facts: Facts) -> str | None:
    if facts.max_grad_norm is not None:
        return None
    return "without max_grad_norm (math.inf: only the check) they reach parameters and state"


def _after_construction(facts: Facts) -> str | None:
    if facts.ranks is None and not facts.sharded:
        return None
    return "weights, options and state that one rank changes by itself are found there"


def _alone(facts: Facts) -> str | None:
    """Of an optimizer that knows of this process only, and has gradients to average."""
    if facts.ranks is not None or facts.sharded or facts.distribution.grads == "reduced":
        return None
    return "this process trains alone"


def _all_params(facts: Facts) -> str | None:
    return _many(sum(len(group["params"]) for group in facts.groups), "parameter")


def _narrow(facts: Facts) -> str | None:
    params = [param for group in facts.groups for param in group["params"]]
    narrow = [param for param in params if param.dtype.itemsize < 4]
    return f"{len(narrow)} of {_many(len(params), 'parameter')} are narrower" if narrow else None


def _local(facts: Facts) -> str | None:
    if not _averages_local(facts):
        return None
    return f"{_many(_plain_params(facts), 'parameter')} with gradients of each rank's own data"


def _edited(facts: Facts) -> str | None:
    return None if facts.distribution.overlap_grad_reduce else _local(facts)


# --- the register --------------------------------------------------------------------------------

REGISTER: tuple[Assumption, ...] = (
    Assumption(
        "same plan",
        "All ranks that share parameters have built the same model and optimizer.",
        "samestep.comm.agreement:require_same_lines",
        "construction",
        "32 bytes from every rank",
        _any_sharing,
    ),
    Assumption(
        "equal start",
        "Copies of a parameter have the same values when training begins and when a state is "
        "loaded.",
        "samestep.replicated:ReplicatedParameters.mend_replicas",
        "construction",
        "a checksum of every parameter, 8 bytes of each travel",
        _among_ranks,
    ),
    Assumption(
        "unchanged parameters",
        "Parameters are those that the optimizer was built with, in the same shape, dtype and "
        "memory layout; options that decide the state stay as they were.",
        "samestep.group_checks:GroupChecks.check",
        "every step",
        "a look at each parameter on the host",
        _all_groups,
    ),
    Assumption(
        "missing gradients",
        "A rank may lack a gradient that others have; then zeros stand for it.",
        "samestep.comm.presence:PresenceAgreement.agree",
        "every step",
        "8 bytes for each parameter travel",
        _any_sharing,
    ),
    Assumption(
        "gradients placed alike",
        "The gradient of a DTensor is placed as the DTensor is.",
        "samestep.sharded:ShardedTensors._gradient_problem",
        "every step",
        "a look at each gradient on the host",
        _dtensors,
    ),
    Assumption(
        "gradients left alone",
        "Nobody changes a gradient after it was reduced inside backward.",
        "samestep.buffers.reduction:GradientReducer._changed_gradient",
        "every step",
        "a look at each gradient on the host",
        _overlapped,
    ),
    Assumption(
        "keys of groups",
        "Every key of a group is read by its rule, or is somebody else's and changes nothing.",
        "samestep.group_keys:refuse_lost_keys",
        "construction",
        "a look at each key; one of a library that is not in the list is kept without a word",
        _all_groups,
    ),
    Assumption(
        "process group first",
        "Ranks that were started together have a process group when the optimizer is built.",
        "samestep.mistakes:warn_of_missing_group",
        "construction",
        "a look at RANK and WORLD_SIZE in the environment; ranks started otherwise are not seen",
        _alone,
    ),
    Assumption(
        "no process group later",
        "No process group of several ranks is made after the optimizer.",
        "samestep.mistakes:refuse_late_group",
        "every step",
        "a question to torch on the host",
        _alone,
    ),
    Assumption(
        "whole parameters",
        "A plain parameter is all of that parameter, not a flattened shard of FSDP1.",
        "samestep.mistakes:refuse_flat_parameter",
        "construction",
        "a look at each parameter",
        _all_params,
    ),
    Assumption(
        "updates that count",
        "Parameters have enough bits for their updates, have a 32-bit copy, or lose them on "
        "purpose.",
        "samestep.mistakes:warn_of_lost_updates",
        "construction",
        "a look at each dtype; a model that is turned to 16 bits later is not seen",
        _narrow,
    ),
    Assumption(
        "the model's parameters",
        "What the model trains is what the optimizer has; none came, was unfrozen or replaced.",
        "samestep.mistakes:TrainingWatch.look_at_model",
        "first step",
        "a walk over the model, and again before steps 2, 4, 8, ...; not seen if the optimizer was "
        "given parameters in place of a model",
        _all_params,
    ),
    Assumption(
        "gradients come",
        "Steps come after backward, and gradients are not cleared in between.",
        "samestep.mistakes:TrainingWatch.look_at_gradients",
        "first step",
        "a look at what is present, until a gradient was seen; three empty steps are told",
        _all_params,
    ),
    Assumption(
        "averaged once",
        "Nobody else averages gradients that are averaged here.",
        "samestep.mistakes:warn_of_ddp",
        "first step",
        "a look at live DistributedDataParallel modules; one that is made after the first step, "
        "and gradients averaged by hand, are not seen",
        _local,
    ),
    Assumption(
        "unedited before averaging",
        "Nobody clips or edits gradients by what one rank sees before they are averaged.",
        "samestep.mistakes:GradientEdits.look",
        "first step",
        "a hook on each parameter that is taken away after two steps; only edits of all gradients, "
        "where they lie, are told, and later ones are not seen",
        _edited,
    ),
    Assumption(
        "finite gradients",
        "Averaged gradients are finite.",
        "samestep.gradient_norm:square_sum",
        "every step",
        "one reading of every gradient, 8 bytes travel",
        _finite,
    ),
    Assumption(
        "equal ever after",
        "Copies stay equal between steps.",
        "samestep.stress.check:check",
        "stress.check",
        "a checksum of every parameter and one all-reduce of a few bytes",
        _after_construction,
    ),
    Assumption(
        "finite gradients, unchecked",
        "Averaged gradients are finite.",
        None,
        "never",
        "max_grad_norm or check_gradients=True looks",
        _not_finite,
    ),
    Assumption(
        "equal weight of ranks",
        "The loss of every rank is a mean over as many samples or tokens as on other ranks: the "
        "mean of gradients is taken over ranks.",
        None,
        "never",
        "it is not to be seen in gradients",
        _same_loss,
    ),
)
