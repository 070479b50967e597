"""Bugs that were reported to other projects, as patches of this one: docs/prove.md has links.

Those that others have too are in the files beside this one.
"""

from typing import Any

import torch
from torch import Tensor

import samestep
from samestep.comm import exchange
from samestep.comm.collectives import Pending
from samestep.groups import routing
from samestep.groups.routing import Role
from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.plan import placement_plan
from samestep.rules import muon
from samestep.rules.muon import MuonRule
from samestep.rules.rule import Direction
from samestep.shards.replicated import replicated
from samestep.shards.replicated.reduction import BucketReductions
from samestep.shards.replicated.replicated import ReplicatedShards
from samestep.update.plain import StepScalars


@mutant("state", RANDOM)
def matrices_partly_reduced() -> list[Any]:
    """a rank has the mean of its own slice of a matrix, and its own gradient for the rest of it"""
    # Gradients are reduced and scattered by flat slices that cut matrices, and taken for whole.
    before: dict[int, list[Tensor | None]] = {}

    def end_round(original: Any, self: BucketReductions, problem: Any) -> None:
        grads = [param.grad for param in self.local.params]
        before[id(self)] = [None if grad is None else grad.detach().clone() for grad in grads]
        original(self, problem)

    def average(original: Any, self: ReplicatedShards, number: int) -> None:
        original(self, number)
        for piece, grad in self._grads[number]:
            own = before[id(self.reductions)][piece.param]
            if piece.block is not None and own is not None:
                half = piece.start + (piece.stop - piece.start) // 2
                grad.view(-1)[half - piece.start :] = own.reshape(-1)[half : piece.stop]

    return [(BucketReductions, "end_round", end_round), (ReplicatedShards, "average", average)]


@mutant(
    "reference", "empty_expert", layout="fsdp2_parallel", steps=4, replaces=(routing, "role_of")
)
def routed_by_the_shape_of_a_shard(original: Any, *asked: Any) -> Role:
    """matrices are told by the shape of what a rank holds, which is flat, so none is Muon's"""
    found: Role = original(*asked)
    return Role("scalar", "flat") if found.name == "matrix" else found


@mutant("reference", RANDOM, layout="none", replaces=(muon, "orthogonalized"))
def orthogonalization_left_out(original: Any, blocks: Tensor, options: Any) -> Tensor:
    """Newton-Schulz never runs, so that Muon is SGD with momentum, and the loss still falls"""
    return blocks


@mutant("reference", "clipped", replaces=(MuonRule, "transform_stack"))
def updates_are_clipped(original: Any, self: MuonRule, prepared: Tensor, *rest: Any) -> Direction:
    """the norm of updates is clipped, not that of gradients, which shrinks every step of Muon"""
    found: Direction = original(self, prepared, *rest)
    norm = found.direction.norm(dim=(-2, -1), keepdim=True).clamp(min=1.0)
    return found._replace(direction=found.direction / norm)


@mutant("state", RANDOM, layout="flat_zero1", replaces=(MuonRule, "prepare"))
def flat_slices_have_no_momentum(
    original: Any, self: MuonRule, grad: Tensor, state: Any, *rest: Any
) -> Direction:
    """slices of a flat buffer go past what keeps the momentum of matrices"""
    return Direction(grad, {"momentum_buffer": state["momentum_buffer"]})


@mutant("replicas", "resume_midrun", layout="none", steps=10, replaces=(samestep, "load"))
def loaded_parameters_not_gathered(original: Any, path: Any, model: Any, *rest: Any) -> Any:
    """after a load every rank fills in the parameters it owns, and nobody gathers the others"""
    old = [param.detach().clone() for param in model.parameters()]
    loaded = original(path, model, *rest)
    owners = torch.distributed.get_world_size()
    with torch.no_grad():
        for number, (param, before) in enumerate(zip(model.parameters(), old, strict=True)):
            if number % owners != torch.distributed.get_rank():
                param.copy_(before)
    return loaded


@mutant("replicas", RANDOM, replaces=(replicated, "gather_stretch"))
def gathered_from_freed_memory(original: Any, transfer: Any, segment: Tensor, *how: Any, **to: Any):  # type: ignore[no-untyped-def]
    """what a rank sends of updated parameters is freed at launch, and something else is sent"""
    # Its own part stays right, and stale bytes come to the others.
    stale = segment.clone() if to.get("into") is None else segment
    stale[segment.numel() // 2 :] = 0.0
    return original(transfer, stale, *how, **to)


@mutant("replicas", RANDOM, replaces=(ReplicatedShards, "_place"))
def updated_parameters_not_placed(original: Any, self: ReplicatedShards, number: int) -> None:
    """each rank updates what it owns, and keeps the old values of what the others have updated"""
    if number in self._gathers:
        self._gathers.pop(number).wait()


@mutant("hang", RANDOM, layout="fsdp2_parallel", world=3, replaces=(exchange, "move_parts"))
def empty_shards_skip_the_exchange(
    original: Any, transfer: Any, buffer: Tensor, outgoing: Any, incoming: Any, group: Any
) -> Pending[Tensor]:
    """a rank whose shard of a matrix is empty does not take part in the exchange of its block"""
    # Sizes are asked of the rank's own part, which for it are none.
    if sum(outgoing):
        found: Pending[Tensor] = original(transfer, buffer, outgoing, incoming, group)
        return found
    return Pending(None, (buffer,), lambda: buffer.new_zeros(sum(incoming)))


@mutant(
    "error",
    RANDOM,
    layout="fsdp2_parallel",
    world=3,
    steps=1,
    replaces=(placement_plan, "blocks_to_owners"),
)
def shards_have_to_divide(original: Any, specs: Any, held: Any, ranks: int, **how: Any) -> Any:
    """rows of a matrix have to be a multiple of the ranks, which 72 rows on 16 ranks are not"""
    for spec in specs:
        assert spec.shape[0] % ranks == 0, f"{spec.name}: {spec.shape[0]} rows on {ranks} ranks"
    return original(specs, held, ranks, **how)


@mutant("reference", "frozen_and_added", replaces=(RuleOptimizer, "add_param_group"))
def options_of_groups_discarded(original: Any, self: RuleOptimizer, group: Any) -> None:
    """the learning rate and decay of a group are dropped for those of the whole optimizer"""
    original(
        self, {key: value for key, value in group.items() if key not in ("lr", "weight_decay")}
    )


@mutant("reference", "schedules", replaces=(StepScalars, "refill"))
def one_rate_for_all_groups(
    original: Any, self: StepScalars, group: int, device: Any, values: Any
) -> Any:
    """a scheduler writes one learning rate over those of all groups"""
    first = self.__dict__.setdefault("first_rate", values["lr"])
    if group == 0:
        first = self.__dict__["first_rate"] = values["lr"]
    return original(self, group, device, {**values, "lr": first})


@mutant("reference", RANDOM, replaces=(BucketReductions, "end_round"))
def matrix_without_an_optimizer(original: Any, self: BucketReductions, problem: Any) -> None:
    """one predicate leaves a matrix to AdamW and another one to Muon, so that nobody updates it"""
    matrices = [param for param in self.local.params if param.dim() == 2]
    matrices[-1].grad = None
    original(self, problem)


@mutant("reference", RANDOM, replaces=(muon, "lr_factor"))
def scale_of_padded_rows(original: Any, rows: int, cols: int, *asked: Any) -> float:
    """the scale of an update is that of the matrix with the rows that were padded for alignment"""
    return float(original(-(-rows // 32) * 32, cols, *asked))


@mutant("state", RANDOM, replaces=(MuonRule, "prepare"))
def momentum_normalized_in_place(original: Any, self: MuonRule, *asked: Any) -> Direction:
    """what Newton-Schulz begins with is normalized in place, and that is the momentum itself"""
    found: Direction = original(self, *asked)
    momentum = found.state["momentum_buffer"]
    norm = momentum.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    return found._replace(state={"momentum_buffer": momentum / norm})
