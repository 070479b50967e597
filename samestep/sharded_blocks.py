"""Blocks of DTensors: they come together on their owners, chunk by chunk, and go back.

Only what needs the whole block is done by the owner; `docs/dtensors.md` has the algorithm.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.apply import GroupMath, GroupMaths, Operand, exact_value, is_staged, put
from samestep.block_moves import BlockMoves
from samestep.comm.agreement import require_same_lines
from samestep.distribution import Distribution
from samestep.kernels.choice import line_of
from samestep.param_groups import Group, rule_of
from samestep.plan.block_exchange import (
    ExchangePlan,
    Key,
    Route,
    ShardedSpec,
    plan_exchange,
    plan_gather,
)
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec
from samestep.rules.rule import StagedRule
from samestep.sharded import ShardedTensors, local_part
from samestep.state import MASTER, State, block_states, math_dtype

Slices = tuple[slice, ...]


class _HeldPart(NamedTuple):
    """What this rank holds of a block: where it is in the local tensors, and in the block."""

    route: Route
    here: Slices
    in_block: Slices

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is placed as the parameter is."""
        return local_part(tensor)[self.here]


class ShardedParameters(ShardedTensors):
    """The DTensors of one mesh: those of a construction or of one added group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        option_lines: Sequence[str],
        mesh: DeviceMesh,
        distribution: Distribution,
        ranks: int,
    ) -> None:
        super().__init__(params, specs, mesh, ranks)
        self.plan = self._planned(distribution)
        lines = [*distribution.lines(), *self.lines(), *option_lines, line_of(self.device)]
        require_same_lines("plan", lines, self.group, self.device)
        held = sum(param.to_local().numel() for param in self.params)
        self.shape = shape_of(self.plan, distribution, held)
        self._distribution = distribution
        self._prepared: dict[int, dict[Key, Tensor]] = {}
        self._directions: dict[int, dict[Key, Tensor]] = {}

    def _planned(self, distribution: Distribution) -> ExchangePlan:
        specs = [
            ShardedSpec(spec.name, spec.shape, spec.blocks or (), of_param.boxes, of_param.replicas)
            for spec, of_param in zip(self.specs, self._held, strict=True)
        ]
        return planned(specs, self.group.size, distribution)

    def lines(self) -> list[str]:
        """Who holds and owns what, as text."""
        lines = [f"mesh {tuple(self.mesh.shape)} of ranks {self.mesh.mesh.flatten().tolist()}"]
        for spec, param in zip(self.specs, self.params, strict=True):
            what = f"{spec.shape} {spec.dtype}, group {spec.group}, {spec.rule}"
            lines.append(f"{spec.name}: {what}, {param.placements}")
        for number, chunk in enumerate(self.plan.chunks):
            for route in chunk:
                senders = [part.rank for part in route.parts if part.sent]
                lines.append(
                    f"chunk {number}: block {route.number} of {self.specs[route.param].name} from "
                    f"{senders} on {route.owner}"
                )
        return lines

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """State, and what blocks need to travel."""
        made = super().make_state(groups, master_weights)
        self._moves = [
            self._moves_of(number, chunk, made) for number, chunk in enumerate(self.plan.chunks)
        ]
        self._mine = [self._held_parts(chunk) for chunk in self.plan.chunks]
        return made

    def _moves_of(
        self, number: int, chunk: Sequence[Route], made: Mapping[Tensor, State]
    ) -> BlockMoves:
        extra = []
        for route in chunk:
            param = self.params[route.param]
            of_block = sum(t.numel() for t in self._whole_state(route, made[param]).values())
            extra.append(of_block if self.shape.gives_back else 0)
        dtypes = (math_dtype(self.params[route.param]) for route in chunk)
        dtype, wide = travel_dtypes(dtypes, self._distribution, self.device)
        return BlockMoves(
            f"chunk {number}", chunk, extra, self.group, dtype=dtype, wide=wide, device=self.device
        )

    def _whole_state(self, route: Route, state: State) -> State:
        """Views of the state that belongs to a whole block, such as its variance."""
        spec = self.specs[route.param]
        group = self._groups[spec.group]
        plain = {key: tensor for key, tensor in state.items() if not isinstance(tensor, DTensor)}
        return block_states(rule_of(group), plain, spec.blocks or (), group)[route.number]

    # --- chunks of blocks ----------------------------------------------------------------

    def collect(self, number: int, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        prepared: dict[Key, Tensor] = {}
        for part in self._mine[number]:
            route = part.route
            rule, of_group = self._staged(route, math)
            param = self.params[route.param]
            state = {
                key: part.of(tensor)
                for key, tensor in self._state[param].items()
                if isinstance(tensor, DTensor) and key != MASTER
            }
            dtype = math_dtype(param)
            grad = of_group.gradient(self._grad(route.param)[part.here].to(dtype))
            wide = {key: tensor.to(dtype) for key, tensor in state.items()}
            prepared[route.key], new = rule.prepare(grad, wide, of_group.scalars, of_group.options)
            self._put(route, of_group, ((state[key], new[key]) for key in state))
        self._moves[number].collect(prepared)
        self._prepared[number] = prepared

    def transform(self, number: int, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        moves = self._moves[number]
        blocks = moves.blocks(self._prepared.pop(number))
        stacks: dict[object, list[Route]] = {}
        for route in moves.chunk:
            if route.owner == self.group.rank:
                spec = self.specs[route.param]
                stacks.setdefault((route.block.shape, spec.group, spec.dtype), []).append(route)
        directions: dict[Key, Tensor] = {}
        for routes in stacks.values():
            rule, of_group = self._staged(routes[0], math)
            params = [self.params[route.param] for route in routes]
            states = [
                self._whole_state(route, self._state[param])
                for route, param in zip(routes, params, strict=True)
            ]
            found, new = rule.transform(
                torch.stack(
                    [
                        blocks[route.key].view(route.block.shape).to(math_dtype(params[0]))
                        for route in routes
                    ]
                ),
                {key: torch.stack([state[key] for state in states]) for key in states[0]},
                of_group.scalars,
                of_group.options,
            )
            for place, route in enumerate(routes):
                directions[route.key] = found[place].view(route.box.sizes)
                pairs = [(states[place][key], new[key][place]) for key in states[place]]
                self._put(route, of_group, pairs)
        self._directions[number] = directions

    def give_back(self, number: int) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        moves = self._moves[number]
        extra = {}
        for route in moves.chunk:
            if route.owner == self.group.rank:
                state = self._whole_state(route, self._state[self.params[route.param]])
                if state:
                    extra[route.key] = torch.cat([t.reshape(-1) for t in state.values()])
        moves.give_back(self._directions[number], extra)

    def apply(self, number: int, math: GroupMaths) -> None:
        """Step in the directions, on the parts held here."""
        moves = self._moves[number]
        came = moves.parts() if self.shape.gives_back else {}
        own = self._directions.pop(number)
        for route in moves.chunk:  # what was decided with the whole block in sight
            extra = came.get(route.key, (None, None))[1]
            if extra is not None:
                state = self._whole_state(route, self._state[self.params[route.param]])
                sizes = [tensor.numel() for tensor in state.values()]
                for tensor, values in zip(state.values(), torch.split(extra, sizes), strict=True):
                    tensor.copy_(values.view(tensor.shape))
        for part in self._mine[number]:
            route = part.route
            rule, of_group = self._staged(route, math)
            param = self.params[route.param]
            if route.key in own:
                direction: Tensor | None = own[route.key][part.in_block]
            else:
                direction = came[route.key][0]
            assert direction is not None
            state = {
                key: part.of(tensor) for key, tensor in self._state[param].items() if key == MASTER
            }
            target = part.of(param)
            value = exact_value(target, state)
            new = rule.finish(
                value, direction.to(value.dtype), route.block.shape, of_group.scalars,
                of_group.options,
            )  # fmt: skip
            self._put(route, of_group, [(target, new), *((old, new) for old in state.values())])
            if of_group.sizes is not None and self._present[route.param] is not False:
                self._count(route, of_group, direction)

    def _count(self, route: Route, of_group: GroupMath, direction: Tensor) -> None:
        present = self._present[route.param]
        flag = present if isinstance(present, Tensor) else None
        counted = self._answers_for(route.param)
        operand = Operand(direction, direction, {}, flag, counted, self._share)
        square = direction.square().sum(dtype=torch.float64).reshape(1)
        assert of_group.sizes is not None
        of_group.sizes.add(self.specs[route.param].group, [operand], square)

    def _held_parts(self, chunk: Sequence[Route]) -> list[_HeldPart]:
        """Every block of a chunk of which this rank holds a part, once."""
        rank, blocks, found = self.group.rank, dict[Key, Route](), []
        for route in chunk:
            blocks.setdefault(route.key, route)
        for route in blocks.values():
            box = self._held[route.param].boxes[rank]
            for part in route.parts:
                if part.rank == rank:
                    here = part.in_param.within(box).slices
                    found.append(_HeldPart(route, here, part.in_block.slices))
        return found

    def _staged(self, route: Route, math: GroupMaths) -> tuple[StagedRule, GroupMath]:
        of_group = math(self.specs[route.param].group)
        assert is_staged(of_group.rule)
        return of_group.rule, of_group

    def _put(
        self, route: Route, of_group: GroupMath, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Write new values, unless the parameter is absent or the step is skipped."""
        present, only_if = self._present[route.param], of_group.only_if
        if present is False:
            return
        if isinstance(present, Tensor):
            only_if = present if only_if is None else only_if & present
        for old, value in pairs:
            put(old, value, only_if)


def planned(specs: Sequence[ShardedSpec], ranks: int, distribution: Distribution) -> ExchangePlan:
    """The plan that some keywords ask for."""
    size = distribution.bucket_size
    if distribution.muon_schedule == "gather":
        return plan_gather(specs, ranks, chunk_elements=size)
    return plan_exchange(specs, ranks, chunk_elements=size, owners=distribution.owners)


def shape_of(plan: ExchangePlan, distribution: Distribution, held: int) -> PlacementShape:
    """What a schedule depends on; `held`: elements of this rank."""
    return PlacementShape(
        bucket_sizes=(held,),
        agrees=True,
        reduces=False,
        chunks=len(plan.chunks),
        gives_back=distribution.muon_schedule == "parallel",
    )


def travel_dtypes(
    wide: Iterable[torch.dtype], distribution: Distribution, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """In which blocks of a chunk travel and are computed, from the math dtypes of its blocks."""
    widest = torch.float32
    for dtype in wide:
        widest = torch.promote_types(widest, dtype)
    usual = widest if device.type == "cpu" else torch.bfloat16
    return distribution.block_dtype or usual, widest
