"""A scenario: a model, an optimizer for it, and what happens to both at each step on each rank.

Everything is a function of seed, world size, step and rank, so that every layout and the reference
see the same gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samestep.lab.stress.models import named_params

# 1 - lr wd is exact in fp32. Rounded, it pulls the same way at every step, by up to 3e-5 |p| in
# 1000 steps, torch's optimizers included: more than the limit that AdamW is held to.
RATES = {"lr": 2**-7, "weight_decay": 2**-3}

Gradients = dict[str, Tensor]  # by name
MakeModel = Callable[[], nn.Module]
Loop = Literal["open", "recorded", "closed"]
KEPT_ELEMENTS = 1 << 24  # of gradients
CLOSED_LOOP_STEPS = 100  # beyond, rounding has grown too much for any comparison but exact ones


@dataclass(frozen=True)
class SetOptions:
    """Give the groups of a rule other hyperparameters, as a scheduler does."""

    rule: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Train:
    """Parameters that are unfrozen, or frozen, from this step on."""

    names: tuple[str, ...]
    wanted: bool


@dataclass(frozen=True)
class AddGroup:
    """Parameters that are added to the optimizer at this step."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """Weights that are changed by other code, equally on every rank."""

    name: str
    value: Tensor = field(compare=False)


@dataclass(frozen=True)
class Resume:
    """The run is saved and resumed with a new optimizer that has loaded the state."""


Place = Literal["here", "elsewhere"]  # the same layout, or another one on as many ranks

Event = SetOptions | Train | AddGroup | Edit | Resume


def seeded(make: MakeModel, seed: int) -> nn.Module:
    """A model whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Scenario:
    """A pattern of gradients and events that tests an optimizer; `world` is the number of ranks.

    loop: "open": gradients do not depend on the parameters. "recorded": they are those of the
        reference's run. "closed": each layout has those of its own parameters, which amplifies
        rounding, so that only the first steps can be held against the reference.
    """

    name: ClassVar[str]
    story: ClassVar[str]
    loop: ClassVar[Loop] = "open"
    takes_any_model: ClassVar[bool] = False
    accumulation: ClassVar[Literal["no_sync", "synchronize"]] = "no_sync"
    churns: ClassVar[bool] = False  # memory is reused between launch and wait
    scales: ClassVar[bool] = False  # a GradScaler is in use
    starts_differ: ClassVar[bool] = False  # between ranks
    ranks_differ: ClassVar[bool] = False  # in the layers that they run
    saves: ClassVar[bool] = False  # checkpoints: `begun_alone` and `goes_on`
    begun_alone: ClassVar[int] = 0  # steps that one process takes first, and saves for all ranks
    has_plan: ClassVar[bool] = False  # its model can be cut over a mesh: `stress.sharded_training`
    layouts: ClassVar[tuple[str, ...] | None] = None  # what `all` means for it, if not LAYOUTS
    # How far parameters may be from the reference where state is rounded to few bits; None: as far
    # as 32 bits allow. State is not held against the reference then, which has other tensors.
    limits: ClassVar[Mapping[str, float] | None] = None

    def __init__(self, seed: int, world: int, make_model: MakeModel | None = None) -> None:
        self.seed = seed
        self.world = world
        self._make_model = make_model

    def model(self) -> nn.Module:
        """A new model, the same at every call."""
        return seeded(self._make_model or self.own_model, self.seed)

    def own_model(self) -> nn.Module:
        """The model for which the scenario was made."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Keywords of the optimizer that do not depend on the layout."""
        return dict(RATES)

    def events(self, step: int) -> Sequence[Event]:
        """The event before a step, if there is one."""
        return ()

    def goes_on(self, step: int) -> Place | None:
        """The folder through which the run is saved and resumed before a step, if it is.

        `one_process` never is: it stands for the run that was not interrupted.
        """
        return None

    def micro_batches(self, step: int) -> int:
        """The number of backward passes in a step, equal on every rank."""
        return 1

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """The loss of a rank; None: the rank has no gradient at all."""
        raise NotImplementedError

    def known_gradients(
        self, model: nn.Module, step: int, rank: int, micro: int
    ) -> Gradients | None:
        """The gradients of `loss`, where they are known without backward."""
        return None

    def broken_promise(self, params: Mapping[str, Tensor]) -> str | None:
        """A message if the parameters violate the scenario's promise; None if they hold it."""
        return None


class Wanted(NamedTuple):
    """A request for the gradient of a parameter on a rank in a step."""

    name: str
    place: int  # of the parameter in the model
    param: Tensor
    step: int
    rank: int
    micro: int


class GradientScenario(Scenario):
    """A scenario that gives gradients directly instead of computing a loss."""

    def __init__(self, seed: int, world: int, make_model: MakeModel | None = None) -> None:
        super().__init__(seed, world, make_model)
        self._known: dict[tuple[int, int, int], Gradients] = {}
        self._room = KEPT_ELEMENTS

    def gradient(self, of: Wanted) -> Tensor | None:
        """The gradient of a parameter; None: it has none."""
        raise NotImplementedError

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """A loss whose backward yields the gradients, in an order that differs by rank."""
        names = list(grads := self.known_gradients(model, step, rank, micro))
        turn = (7 * rank + step) % max(len(names), 1)
        return loss_with(model, {name: grads[name] for name in names[turn:] + names[:turn]})

    def known_gradients(self, model: nn.Module, step: int, rank: int, micro: int) -> Gradients:
        """Gradients of the trained parameters that have one; read-only.

        All layouts want the same ones, so small ones are kept: forked ranks find them made.
        """
        key = (step, rank, micro)
        if key in self._known:
            return self._known[key]
        found = {}
        for place, (name, param) in enumerate(named_params(model).items()):
            if param.requires_grad:
                grad = self.gradient(Wanted(name, place, param, *key))
                if grad is not None:
                    found[name] = grad
        size = sum(grad.numel() for grad in found.values())
        if size <= self._room:
            self._known[key] = found
            self._room -= size
        return found

    def drawn(self, of: Wanted) -> Tensor:
        """A random gradient of one rank."""
        return self.random(of.param.shape, of.place, of.step, of.rank)

    def random(self, shape: Sequence[int], *key: int) -> Tensor:
        """Normally distributed numbers of full rank, determined by the key."""
        number = self.seed
        for part in key:
            number = (number * 1_000_003 + part + 1) % (1 << 62)
        generator = torch.Generator().manual_seed(number)
        return torch.randn(tuple(shape), generator=generator)


class Recorded(Scenario):
    """A scenario with the recorded gradients of another run: `gradients[step][rank]`."""

    def __init__(self, inner: Scenario, gradients: Sequence[Sequence[Mapping[str, Tensor]]]):
        super().__init__(inner.seed, inner.world)
        self.inner, self.gradients = inner, gradients
        same = ("name", "story", "loop", "churns", "scales", "starts_differ")
        for name in (*same, "model", "options", "events", "broken_promise"):
            setattr(self, name, getattr(inner, name))

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        return loss_with(model, self.known_gradients(model, step, rank, micro))

    def known_gradients(self, model: nn.Module, step: int, rank: int, micro: int) -> Gradients:
        return dict(self.gradients[step][rank])


def on_device_of(model: nn.Module, tensor: Tensor) -> Tensor:
    return tensor.to(next(model.parameters()).device)


def loss_with(model: nn.Module, grads: Mapping[str, Tensor]) -> Tensor | None:
    """A loss whose backward yields these gradients; None if there are none."""
    if not grads:
        return None
    params = named_params(model)
    # Views, so that gradients arrive in an order: the last parameter's first.
    return loss_giving(list(grads.values()), [params[name].view_as(params[name]) for name in grads])


def loss_giving(grads: Sequence[Tensor], members: Sequence[Tensor]) -> Tensor:
    """A loss whose backward gives these gradients to these tensors."""
    loss: Tensor = _Given.apply(grads, *members)  # type: ignore[no-untyped-call]
    return loss


class _Given(torch.autograd.Function):
    """An autograd function that yields given gradients in one node, faster than products."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = scale  # on the device; gradients are on the host
        return None, *(grad.to(factor.device) * factor for grad in ctx.grads)
