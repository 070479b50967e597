"""Parameters of one process, which holds and updates all of each."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.presence import RankFailure
from samestep.groups.distribution import Distribution
from samestep.groups.group_checks import same_objects
from samestep.groups.mistakes import has_process_group
from samestep.groups.param_groups import Group, parameter_names, rule_of
from samestep.layout.blocks import Block, matrices
from samestep.layout.boxes import mesh_of
from samestep.plan.schedule import PlacementShape, Stage, WindowId
from samestep.rules.state import (
    MASTER,
    MASTERS,
    GlobalElementIndex,
    MatrixView,
    State,
    StoredTensors,
    block_states,
    global_element_index,
    initial_state,
    matrix_views,
    needs_master,
    state_shapes,
    stored_tensors,
)
from samestep.shards.not_finite import is_finite, not_finite
from samestep.shards.placement import Placement
from samestep.shards.values import ShardValues
from samestep.shards.windows import OffloadSlice, OffloadUnit, state_device
from samestep.update.plain import Operand

if TYPE_CHECKING:
    from samestep.xla.tiling import Lying


class LocalValues(ShardValues):
    """State and values of one process, which has all of every parameter."""

    def holds(self, param: Tensor) -> bool:
        """Whether a parameter is no DTensor."""
        return mesh_of(param) is None

    def gather_state(
        self, state: Mapping[Tensor, State], only: Sequence[Tensor] | None = None
    ) -> Callable[[], dict[Tensor, State]]:
        """See `ShardValues`: a copy of the state."""
        wanted = list(filter(self.holds, state)) if only is None else only
        return lambda: {
            param: {key: tensor.clone() for key, tensor in state[param].items()} for param in wanted
        }


@dataclass(eq=False)
class LocalParameters(Placement):
    """The placement of one process: one bucket and no communication.

    known: the groups, with the state that is theirs, as the last step found them.
    """

    shape = PlacementShape(bucket_sizes=(1,), agrees=False, reduces=False)

    blocks: Mapping[Tensor, list[Block] | None]
    master_weights: bool
    distribution: Distribution

    def __post_init__(self) -> None:
        self.values = LocalValues()
        self.known: list[KnownGroup] = []
        self._lying: dict[Tensor, Lying] = {}  # on XLA: where parameters and state have to stay

    # --- the step --------------------------------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: RankFailure | None) -> None:
        if self.distribution.check_gradients:
            self.problem = self._not_finite()
        if self.distribution.offload is not None:
            states = (own for group in self.known for own in group.states)
            self._keep_windows(states, self._units)

    def _not_finite(self) -> RankFailure | None:
        """The first gradient with NaN or inf."""
        for known in self.known:
            for name, param in zip(known.names, known.params, strict=True):
                if param.grad is not None and not is_finite(param.grad):
                    rank = dist.get_rank() if has_process_group() else None
                    return RankFailure(not_finite(name, rank, param.grad, "before the step"))
        return None

    def _units(self) -> dict[tuple[Stage, int], list[OffloadUnit]]:
        """Offload units: state by block or by parameter."""
        units = [unit for known in self.known for unit in known.units()]
        devices = sorted({str(unit.about.param.device) for unit in units})
        if len(devices) > 1:
            raise ValueError(
                f"offload={self.distribution.offload!r} needs all parameters on one "
                f"device, and they are on {' and '.join(devices)}: build an optimizer "
                "for each device"
            )
        return {("update", 0): units}

    def finish_step(self) -> None:
        """Keep the sharding of XLA tensors that were written."""
        if not self._lying:
            return
        from samestep.xla.tiling import stay

        for param in (param for group in self.known for param in group.params):
            if param.grad is not None:
                stay(self._lying.get(param, ()))

    # Lists, not generators: these take a good part of a short step's time.

    def operands(self, number: int, window: WindowId | None = None) -> list[tuple[int, Operand]]:
        """Every parameter with a gradient, in blocks, with the index of its group."""
        if window is not None:
            return self._operands_of(window)
        return [
            (index, operand)
            for index, group in enumerate(self.known)
            for operand in group.operands()
        ]

    def may_be_present(self, about: "_Held") -> bool:
        return about.param.grad is not None

    def _operands_of(self, window: WindowId) -> list[tuple[int, Operand]]:
        """Operands of one window of offloaded state."""
        assert self.windows is not None
        found = []
        for place, (part, state) in enumerate(self.arrived(window)):
            held: _Held = part.unit.about
            grad = held.param.grad
            if grad is not None:
                make = partial(held.views, part, state)
                views = self.windows.made(window, place, (state,), make)
                for own, (value, of_matrix, rows, origin) in zip(
                    held.cut(part, grad), views, strict=True
                ):
                    operand = Operand(value, own, of_matrix, rows=rows, origin=origin)
                    found.append((held.number, operand))
        return found

    def scale_gradients(self, factor: Tensor) -> None:
        for grad in self.gradients():
            grad.mul_(factor.to(grad))

    def gradients(self) -> list[Tensor]:
        """Whole gradients, not split into blocks."""
        grads = [param.grad for group in self.known for param in group.params]
        return [grad for grad in grads if grad is not None]

    def grouped_gradients(self) -> Iterator[tuple[int, Tensor]]:
        for index, group in enumerate(self.known):
            yield from ((index, param.grad) for param in group.params if param.grad is not None)

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """Group of each parameter, and whether it has a gradient."""
        return [
            (index, param.grad is not None)
            for index, group in enumerate(self.known)
            for param in group.params
        ]

    # --- groups and their state ------------------------------------------------------------

    def look_at(self, groups: Sequence[Group], state: MutableMapping[Tensor, State]) -> None:
        """Check whether tensors were replaced or state is missing."""
        del self.known[len(groups) :]
        for index, group in enumerate(groups):
            known = self.known[index : index + 1]
            if not known or not known[0].is_still(group, state):
                self.keep_state(plain(group), group, state)
                self._refuse_other_masters(index, group, state)
                known_group = KnownGroup(group, index, state, self.blocks)
                self.known[index : index + 1] = [known_group]
                self.windows = None  # whose parts are views of parameters too

    def _refuse_other_masters(
        self, index: int, group: Group, state: Mapping[Tensor, State]
    ) -> None:
        """Raise if a main parameter does not fit its parameter's dtype."""
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            key = next((key for key in MASTERS if key in state[param]), None)
            fits = needs_master(param, self.master_weights)
            if key is not None and not (fits and (key == MASTER or param.dtype == torch.bfloat16)):
                raise RuntimeError(
                    f"parameter {name!r} is {param.dtype} now, and its state has "
                    f"{key!r}, which fits another dtype: build the optimizer after "
                    "changing the dtype; to keep state, call samestep.save before the "
                    "change and samestep.load after it"
                )

    def make_missing_state(
        self, groups: Sequence[Group], state: MutableMapping[Tensor, State]
    ) -> None:
        """Create state for parameters that have none."""
        for group in groups:
            self.keep_state(group["params"], group, state)

    def keep_state(
        self, params: Iterable[Tensor], group: Group, state: MutableMapping[Tensor, State]
    ) -> None:
        """Move state to the device of its parameter, or start it afresh."""
        for param in params:
            own, masters = state[param], self.master_weights
            home = state_device(param.device, self.distribution.offload)
            if not own or (needs_master(param, masters) and not own.keys() & set(MASTERS)):
                # Without values first: state that stays on the host may have no room elsewhere.
                like = param if home.device == param.device else param.detach().to("meta")
                fresh = initial_state(rule_of(group), like, self.blocks[param], group, masters)
                if like is not param:
                    fresh = {k: home.zeros(t.shape, t.dtype) for k, t in fresh.items()}
                    if MASTER in fresh:
                        fresh[MASTER].copy_(param.detach())
                own = state[param] = {**fresh, **own}
            for key, tensor in own.items():
                if not home.has(tensor):
                    own[key] = home.copy_of(tensor)
            if param.device.type == "xla":
                self._lying[param] = self._laid(param, own)

    def _laid(self, param: Tensor, state: State) -> "Lying":
        from samestep.xla.tiling import lay_out

        distribution = self.distribution
        shares, crossover = distribution.sharding != "none", distribution.crossover
        return lay_out(param, state, shares=shares, crossover=crossover)


class KnownGroup:
    """A group with cached views of its blocks and their state.

    Made once, unless a parameter or a state tensor is replaced: that takes longer than a small
    step itself.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        state: Mapping[Tensor, State],
        blocks: Mapping[Tensor, list[Block] | None],
    ) -> None:
        self._all = list(group["params"])
        self._group = group
        self.params = plain(group)
        self.states = [state[param] for param in self.params]
        self._all_states = list(state.values())
        self._tensors = [tensor for entry in self.states for tensor in entry.values()]
        self._addresses = [param.data_ptr() for param in self.params]
        self._has_no_addresses = any(param.device.type == "xla" for param in self.params)
        self.blocks = [blocks[param] for param in self.params]
        names = dict(zip(map(id, self._all), parameter_names(group, index), strict=True))
        self.names = [names[id(param)] for param in self.params]
        of_params = zip(self.params, self.states, self.blocks, strict=True)
        # By parameter: what state belongs to, and that.
        self._held = [
            list(_held(name, param, own, blocks, group, index))
            for name, (param, own, blocks) in zip(self.names, of_params, strict=True)
        ]
        self._cut = [
            (param, blocks is None or _is_whole(blocks), blocks or [], views)
            for param, blocks, held in zip(self.params, self.blocks, self._held, strict=True)
            for views in [[view for one, own in held for view in one.views(None, own)]]
        ]

    def is_still(self, group: Group, state: Mapping[Tensor, State]) -> bool:
        """Whether nothing was replaced since; never true for XLA tensors."""
        return (
            not self._has_no_addresses
            and same_objects(group["params"], self._all)
            and same_objects(list(state.values()), self._all_states)  # looking them up is slow
            and same_objects([t for entry in self.states for t in entry.values()], self._tensors)
            and [param.data_ptr() for param in self.params] == self._addresses
        )

    def units(self) -> list[OffloadUnit]:
        """Offload units: state by block or by parameter."""
        return [
            OffloadUnit(held, own, held.param.numel(), held.param.is_contiguous())
            if held.block is None
            else OffloadUnit(held, own, held.block.rows * held.block.cols)
            for of_param in self._held
            for held, own in of_param
        ]

    def operands(self) -> list[Operand]:
        """Blocks, or whole parameters, that have a gradient."""
        found = []
        for param, whole, blocks, known in self._cut:
            grad = param.grad
            if grad is None:
                continue
            if whole:
                value, state, _, origin = known[0]
                own = grad if grad.ndim else grad.view(1)
                found.append(Operand(value, own, state, origin=origin))
            else:
                found += [
                    Operand(value, of_matrix, state, rows=rows, origin=origin)
                    for of_matrix, (value, state, rows, origin) in zip(
                        matrices(blocks, grad), known, strict=True
                    )
                ]
        return found


class _Held(NamedTuple):
    """The parameter or block that an offload unit belongs to."""

    number: int  # of the group
    options: Group
    param: Tensor
    block: Block | None
    is_whole: bool  # the block is all of the parameter
    stored: StoredTensors
    where: GlobalElementIndex | None  # of the parameter, if some of its state is rounded at random

    def views(self, part: OffloadSlice | None, state: State) -> list[MatrixView]:
        """Matrices of a block or elements of a parameter, with their state.

        `part`: of a window of state; None: all of it.
        """
        param, where = self.param.detach(), self.where
        if self.block is not None:
            rule, block, value = rule_of(self.options), self.block, self.block.view(param)
            if where is not None:
                where = where.at(block.view(where.elements).view(block.shape))
            return matrix_views(rule, block, value, state, self.options, self.stored, where)
        if part is None or part.is_whole:
            value = param if param.ndim else param.view(1)
            if where is not None:
                where = where.at(where.elements.view(value.shape))
        else:
            value = param.view(-1)[part.start : part.stop]
            where = None if where is None else where.stretch(part.start, part.stop)
        return [MatrixView(value, state, None, None if where is None else where.origin())]

    def cut(self, part: OffloadSlice, grad: Tensor) -> Sequence[Tensor]:
        """The gradient, divided as `views` is."""
        if self.block is None:
            if part.is_whole:
                return [grad if grad.ndim else grad.view(1)]
            return [grad.reshape(-1)[part.start : part.stop]]
        own = grad if self.is_whole else self.block.view(grad)
        return [own] if self.block.form is None else self.block.form.views(own)


def _is_whole(blocks: list[Block]) -> bool:
    """Whether a block is the whole parameter."""
    return len(blocks) == 1 and blocks[0].matrix is None and blocks[0].form is None


def _held(
    name: str, param: Tensor, state: State, blocks: list[Block] | None, group: Group, number: int
) -> Iterator[tuple[_Held, State]]:
    """A whole parameter or each of its blocks, with state."""
    rule, masters = rule_of(group), bool(state.keys() & set(MASTERS))
    stored = stored_tensors(rule, param, blocks, group, master_weights=masters)
    where = global_element_index(name, tuple(param.shape), stored)
    whole = _Held(number, group, param, None, True, stored, where)
    if blocks is None:
        if param.ndim == 0:  # as a vector of one: 0-D tensors are scalars to torch
            shapes = state_shapes(rule, (1,), group, stored)
            state = {key: tensor.view(shapes[key]) for key, tensor in state.items()}
        yield whole, state
        return
    for block, own in zip(blocks, block_states(rule, state, blocks, group, stored), strict=True):
        yield whole._replace(block=block, is_whole=_is_whole(blocks)), own


def plain(group: Group) -> list[Tensor]:
    """Parameters of a group that are no DTensors."""
    return [param for param in group["params"] if mesh_of(param) is None]
