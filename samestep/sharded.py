"""DTensors: every rank holds a part, and gradients come reduced (FSDP2, HSDP, tensor parallel).

Elementwise rules run on the local parts. Blocks of matrix rules come together on their owners,
chunk by chunk; only what needs the whole block is done there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.apply import GroupMath, GroupMaths, Operand, exact_value, put
from samestep.block_moves import BlockMoves
from samestep.comm.agreement import require_same_lines
from samestep.comm.collectives import gather_segments, maximum
from samestep.comm.meshes import held, mesh_group
from samestep.comm.presence import PresenceAgreement, Problem
from samestep.distribution import Distribution
from samestep.param_groups import Group, rule_of
from samestep.placement import Placement
from samestep.plan.block_exchange import (
    ExchangePlan,
    Key,
    Part,
    Route,
    ShardedSpec,
    plan_exchange,
    plan_gather,
)
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec
from samestep.rules.rule import Rule, StagedRule
from samestep.state import MASTER, State, block_states, initial_state, math_dtype, needs_master


class ShardedParameters(Placement):
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
        self.params = [param for param in params if isinstance(param, DTensor)]
        self.specs = tuple(specs)
        self.mesh = mesh
        self.group = self.held_by = self.sums_over = mesh_group(mesh)
        # Other meshes of the same kind hold copies: of sums over all `ranks` this is its share.
        self._share = self.group.size / ranks
        self.device = self.params[0].to_local().device
        self._held = []
        for param, spec in zip(self.params, specs, strict=True):
            try:
                self._held.append(held(param, self.group))
            except ValueError as error:
                raise ValueError(f"parameter {spec.name!r}: {error}") from None
        self.plan = self._planned(distribution)
        lines = [*distribution.lines(), *self.lines(), *option_lines]
        require_same_lines("plan", lines, self.group, self.device)
        self.shape = PlacementShape(
            bucket_sizes=(sum(param.to_local().numel() for param in self.params),),
            agrees=True,
            reduces=False,
            chunks=len(self.plan.chunks),
            gives_back=distribution.muon_schedule == "parallel",
        )
        self._block_dtype = distribution.block_dtype
        self._presence = PresenceAgreement([s.name for s in specs], [self.group], self.device)
        self._present: list[bool | Tensor] = []
        self._prepared: dict[int, dict[Key, Tensor]] = {}
        self._directions: dict[int, dict[Key, Tensor]] = {}

    def _planned(self, distribution: Distribution) -> ExchangePlan:
        specs = [
            ShardedSpec(spec.name, spec.shape, spec.blocks or (), of_param.boxes, of_param.replicas)
            for spec, of_param in zip(self.specs, self._held, strict=True)
        ]
        ranks, size = self.group.size, distribution.bucket_size
        if distribution.muon_schedule == "gather":
            return plan_gather(specs, ranks, chunk_elements=size)
        return plan_exchange(specs, ranks, chunk_elements=size, owners=distribution.owners)

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

    # --- state ---------------------------------------------------------------------------

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """State of the parameter's shape is sharded as it is; all other is on every rank."""
        self._groups = groups
        made: dict[Tensor, State] = {}
        for param, spec in zip(self.params, self.specs, strict=True):
            group = groups[spec.group]
            rule = rule_of(group)
            if spec.blocks is not None and not isinstance(rule, StagedRule):
                raise ValueError(
                    f"rule {rule.name!r} has no stages, and {spec.name!r} is a DTensor: give the "
                    "rule prepare(), transform() and finish(), or use plain parameters"
                )
            like = torch.empty(param.shape, dtype=param.dtype, device="meta")
            wanted = initial_state(rule, like, spec.blocks, group, master_weights=False)
            made[param] = {
                key: self._zeros(param, tensor, _is_elementwise(rule, key, group))
                for key, tensor in wanted.items()
            }
            if needs_master(param, master_weights):
                made[param][MASTER] = _beside(param, param.to_local().to(math_dtype(param)))
        self._moves = [
            self._moves_of(number, chunk, made) for number, chunk in enumerate(self.plan.chunks)
        ]
        return made

    def _zeros(self, param: DTensor, like: Tensor, sharded: bool) -> Tensor:
        if sharded:
            return _beside(param, torch.zeros_like(param.to_local(), dtype=like.dtype))
        return torch.zeros(like.shape, dtype=like.dtype, device=self.device)

    def _moves_of(
        self, number: int, chunk: Sequence[Route], made: Mapping[Tensor, State]
    ) -> BlockMoves:
        wide, extra = torch.float32, []
        for route in chunk:
            param = self.params[route.param]
            wide = torch.promote_types(wide, math_dtype(param))
            of_block = sum(t.numel() for t in self._whole_state(route, made[param]).values())
            extra.append(of_block if self.shape.gives_back else 0)
        dtype = self._block_dtype or (wide if self.device.type == "cpu" else torch.bfloat16)
        return BlockMoves(
            f"chunk {number}", chunk, extra, self.group, dtype=dtype, wide=wide, device=self.device
        )

    def _whole_state(self, route: Route, state: State) -> State:
        """Views of the state that belongs to a whole block, such as its variance."""
        spec = self.specs[route.param]
        group = self._groups[spec.group]
        plain = {key: tensor for key, tensor in state.items() if not isinstance(tensor, DTensor)}
        return block_states(rule_of(group), plain, spec.blocks or (), group)[route.number]

    def gather_state(
        self, state: Mapping[Tensor, State], groups: Sequence[Group], only: Tensor | None = None
    ) -> Callable[[], dict[Tensor, State]]:
        """All state as one process has it."""
        wanted = [i for i, param in enumerate(self.params) if only is None or param is only]
        return lambda: {
            self.params[i]: {
                key: self._whole(i, tensor) for key, tensor in state[self.params[i]].items()
            }
            for i in wanted
        }

    def holds(self, param: Tensor) -> bool:
        """Whether it is on this mesh."""
        return any(param is other for other in self.params)

    def put_state(
        self,
        state: Mapping[Tensor, State],
        groups: Sequence[Group],
        param: Tensor,
        key: str,
        whole: Mapping[str, Tensor],
    ) -> None:
        """Take this rank's part of a parameter's state out of the whole."""
        self._put_part(self._index(param), state[param][key], whole[key])

    def whole_value(self, param: Tensor) -> Tensor:
        """All of a parameter; collective."""
        return self._whole(self._index(param), param.detach())

    def put_value(self, param: Tensor, whole: Tensor) -> None:
        """Take this rank's part of a parameter out of the whole."""
        self._put_part(self._index(param), param, whole)

    def whole_gradient(self, param: Tensor) -> Tensor | None:
        """All of a gradient; None if no rank has one. Collective."""
        index = self._index(param)
        here = torch.tensor([param.grad is not None], dtype=torch.int64, device=self.device)
        whole = self._whole(index, _beside(self.params[index], self._grad(index)))
        return whole if bool(maximum("presence of a gradient", here, self.group).wait()) else None

    def put_gradient(self, param: Tensor, whole: Tensor) -> None:
        """Give a parameter its part of a gradient."""
        index = self._index(param)
        part = whole[self._held[index].boxes[self.group.rank].slices]
        param.grad = _beside(self.params[index], part.to(param.dtype).clone())

    def _index(self, param: Tensor) -> int:
        return next(i for i, other in enumerate(self.params) if other is param)

    def _put_part(self, index: int, tensor: Tensor, whole: Tensor) -> None:
        """Write this rank's part into a tensor that is sharded as a parameter is."""
        if isinstance(tensor, DTensor):
            whole = whole[self._held[index].boxes[self.group.rank].slices]
        _local(tensor).copy_(whole)

    def _whole(self, index: int, tensor: Tensor) -> Tensor:
        """All of a tensor that is sharded as a parameter is; collective."""
        if not isinstance(tensor, DTensor):
            return tensor.clone()
        boxes = self._held[index].boxes
        local = tensor.to_local().contiguous().view(-1)
        sizes = [box.numel for box in boxes]
        parts = gather_segments("gather of a DTensor", local, sizes, self.group).wait()
        whole = local.new_empty(tensor.shape)
        for box, part in zip(boxes, parts, strict=True):
            whole[box.slices] = part.view(box.sizes)
        return whole

    # --- the step ------------------------------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: Problem | None) -> None:
        """No gradient comes any more."""
        super().begin_step(state, problem)
        for param in self.params:
            _reduce_partial(param)
        self.problem = problem or self._gradient_problem()

    def _gradient_problem(self) -> Problem | None:
        for index, (param, spec) in enumerate(zip(self.params, self.specs, strict=True)):
            grad = param.grad
            found = grad.placements if isinstance(grad, DTensor) else "a plain tensor"
            if grad is not None and found != param.placements:
                message = (
                    f"the gradient of {spec.name!r} on rank {self.group.members[self.group.rank]} "
                    f"is {found}, and the parameter {param.placements}: redistribute it first"
                )
                return Problem(RuntimeError(message), index)
        return None

    def agree(self, problem: Problem | None) -> None:
        """Find out what is present anywhere; raises on all ranks if any has a problem."""
        here = [param.grad is not None for param in self.params]
        self._present = self._presence.agree(here, problem)

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it was present in the last step."""
        flags = self._present or [False] * len(self.params)
        return [(spec.group, flag) for spec, flag in zip(self.specs, flags, strict=True)]

    def operands(self, number: int) -> Iterator[tuple[int, Operand]]:
        """The local parts of elementwise parameters."""
        for index, (param, spec) in enumerate(zip(self.params, self.specs, strict=True)):
            present = self._present[index]
            if spec.blocks is None and present is not False:
                state = {key: _local(tensor) for key, tensor in self._state[param].items()}
                flag = present if isinstance(present, Tensor) else None
                operand = Operand(
                    param.to_local(),
                    self._grad(index),
                    state,
                    flag,
                    self._answers_for(index),
                    self._share,
                )
                yield spec.group, operand

    def gradients(self) -> Iterator[Tensor]:
        """Local gradients; of copies only the first."""
        for index in range(len(self.params)):
            if self._present[index] is not False and self._answers_for(index):
                yield self._grad(index)

    def _answers_for(self, index: int) -> bool:
        return self._held[index].replicas[self.group.rank] == 0

    def _grad(self, index: int) -> Tensor:
        param = self.params[index]
        return torch.zeros_like(param.to_local()) if param.grad is None else _local(param.grad)

    # --- chunks of blocks ----------------------------------------------------------------

    def collect(self, number: int, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        prepared: dict[Key, Tensor] = {}
        for route, part in self._mine(number):
            rule, of_group = self._staged(route, math)
            param = self.params[route.param]
            state = {
                key: self._slice(route, part, tensor)
                for key, tensor in self._state[param].items()
                if isinstance(tensor, DTensor) and key != MASTER
            }
            dtype = math_dtype(param)
            grad = of_group.gradient(self._grad(route.param)[self._slices(route, part)].to(dtype))
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
        for route, part in self._mine(number):
            rule, of_group = self._staged(route, math)
            param = self.params[route.param]
            if route.key in own:
                direction: Tensor | None = own[route.key][part.in_block.slices]
            else:
                direction = came[route.key][0]
            assert direction is not None
            state = {
                key: self._slice(route, part, tensor)
                for key, tensor in self._state[param].items()
                if key == MASTER
            }
            target = self._slice(route, part, param)
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

    def _mine(self, number: int) -> Iterator[tuple[Route, Part]]:
        """Every block of a chunk of which this rank holds a part, once."""
        seen = set()
        for route in self._moves[number].chunk:
            if route.key not in seen:
                seen.add(route.key)
                for part in route.parts:
                    if part.rank == self.group.rank:
                        yield route, part

    def _staged(self, route: Route, math: GroupMaths) -> tuple[StagedRule, GroupMath]:
        of_group = math(self.specs[route.param].group)
        assert isinstance(of_group.rule, StagedRule)
        return of_group.rule, of_group

    def _slices(self, route: Route, part: Part) -> tuple[slice, ...]:
        return part.in_param.within(self._held[route.param].boxes[self.group.rank]).slices

    def _slice(self, route: Route, part: Part, tensor: Tensor) -> Tensor:
        return _local(tensor)[self._slices(route, part)]

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


def _is_elementwise(rule: Rule, key: str, group: Group) -> bool:
    """Whether a state tensor has an element for each of the parameter's: then it is sharded too."""
    shape = (64, 48)
    return rule.state_shapes(shape, group)[key] == shape


def _reduce_partial(param: DTensor) -> None:
    """Add up a gradient of which the ranks of an axis have a summand each (sequence parallel).

    They have run the same graph, so all of them are here.
    """
    grad = param.grad
    if isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements):
        wanted = [
            own if found.is_partial() else found
            for found, own in zip(grad.placements, param.placements, strict=True)
        ]
        param.grad = grad.redistribute(placements=wanted)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _beside(param: DTensor, local: Tensor) -> DTensor:
    """A DTensor with other values, placed as a parameter is."""
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
