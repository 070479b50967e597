"""Facts derived from degrees that decide which code runs, equal on all ranks.

Every rank tells them in one line before the first step, all are compared, and the receipt has
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from samestep.comm.groups import ranks_text, registry
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.messages import gather_everywhere
from samestep.mesh.build import Mesh
from samestep.mesh.degrees import Degrees
from samestep.mesh.spmd import SpmdMesh


@dataclass(frozen=True)
class Predicates:
    """Features that are on."""

    pipeline_active: bool  # blocks are divided among ranks
    copies_active: bool  # whole copies of the sharded model exist (HSDP)
    data_sharded: bool  # FSDP2 has ranks to shard over
    tensor_parallel_active: bool  # matrices are cut
    sequence_parallel_on_block: bool  # between matrices each rank has a part of the sequence
    expert_parallel_active: bool  # experts are divided among ranks
    expert_lane: bool  # tokens travel to experts by all-to-all
    expert_tensor_parallel_active: bool  # experts' matrices are cut
    experts_share_tokens: bool  # ranks of tensor parallel bring different tokens to experts
    divisor: int  # of every sum of gradients


def predicates(degrees: Degrees, *, experts: bool, fsdp: bool = True) -> Predicates:
    """Derive the facts for a model with or without experts and FSDP2."""
    return Predicates(
        pipeline_active=degrees.pp > 1,
        copies_active=degrees.replicate > 1,
        data_sharded=fsdp and degrees.data * (degrees.ep if degrees.ep_carries_data else 1) > 1,
        tensor_parallel_active=degrees.tp > 1,
        sequence_parallel_on_block=degrees.sequence_parallel and degrees.tp > 1,
        expert_parallel_active=degrees.ep > 1,
        expert_lane=experts and degrees.ep > 1 and degrees.ep_carries_data,
        expert_tensor_parallel_active=experts and degrees.expert_tp > 1,
        experts_share_tokens=experts and degrees.tp > degrees.expert_tp,
        divisor=degrees.batch_ranks,
    )


def trace(
    mesh: Mesh,
    facts: Predicates,
    *,
    observed: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Print this rank's facts, compare them between ranks, and return the receipt's entry.

    Args:
        mesh: From `build`.
        facts: From `predicates`.
        observed: What was really done on this rank, under the same names: modules that send
            tokens, hooks that were left behind. It is told too. A name that `facts` has must
            have the same value; a stage without experts may leave out what concerns them.
        tell: Gets the line.

    Raises:
        RanksDisagreeError: On every rank, naming the fact and the ranks that differ.
    """
    place = ",".join(map(str, mesh.coordinates.values()))
    line, told = _line(f"rank={mesh.rank} mesh={mesh.name} at={place}", facts, observed)
    tell(line)
    of_ranks = {mesh.rank: (line, told)}
    if all(mesh.hosts):  # with torch's fake backend there is nobody to ask
        of_ranks = dict(enumerate(gather_everywhere((line, told), registry.of().handle)))
    return _compared(mesh, facts, observed, of_ranks, "rank {}")


def trace_program(
    mesh: SpmdMesh,
    facts: Predicates,
    *,
    observed: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Like `trace`, for one XLA program."""
    devices = ",".join(map(str, mesh.devices))
    line, told = _line(f"program mesh={mesh.name} devices={devices}", facts, observed)
    tell(line)
    return _compared(mesh, facts, observed, {0: (line, told)}, "the program")


Told = dict[str, Any]


def _line(start: str, facts: Predicates, observed: Mapping[str, Any] | None) -> tuple[str, Told]:
    """The facts as a line of text."""
    told = asdict(facts) | {f"seen.{name}": value for name, value in (observed or {}).items()}
    return " ".join([start, *(f"{name}={value}" for name, value in told.items())]), told


def _compared(
    mesh: Mesh | SpmdMesh,
    facts: Predicates,
    observed: Mapping[str, Any] | None,
    of_ranks: Mapping[int, tuple[str, Told]],
    who: str,
) -> dict[str, Any]:
    """The receipt's entry, after ranks were found to agree in facts and actions."""
    known = asdict(facts)
    problems = _differences({rank: told for rank, (_, told) in of_ranks.items()})
    for rank, (_, told) in of_ranks.items():
        problems += [
            f"{who.format(rank)} has {name}={told[name]}, and did {name}={did}"
            for name in known
            if (did := told.get(f"seen.{name}", told[name])) != told[name]
        ]
    if problems:
        raise RanksDisagreeError(
            f"ranks have decided differently: {'; '.join(problems)}. Build the mesh "
            "from the same arguments on every rank, and let only its degrees decide "
            "what runs"
        )
    return {
        "mesh": mesh.name,
        "degrees": asdict(mesh.degrees),
        "predicates": known,
        "observed": dict(observed or {}),
        "ranks": [line for line, _ in of_ranks.values()],
    }


def _differences(of_ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Facts that differ between ranks or from what the model shows."""
    found = []
    for name in dict.fromkeys(name for facts in of_ranks.values() for name in facts):
        by_value: dict[str, list[int]] = {}
        for rank, facts in of_ranks.items():
            if name in facts:
                by_value.setdefault(str(facts[name]), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{v} on {ranks_text(ranks)}" for v, ranks in by_value.items())
            found.append(f"{name} is {values}")
    return found
