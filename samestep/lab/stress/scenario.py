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
    """Parameters of the optimizer that need a gradient from here on, or no more."""

    names: tuple[str, ...]
    wanted: bool


@dataclass(frozen=True)
class AddGroup:
    """Parameters that the optimizer did not have are trained from here on."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """Weights are changed from outside, alike on every rank."""

    name: str
    value: Tensor = field(compare=False)


@dataclass(frozen=True)
class Resume:
    """The run is saved, and goes on with a new optimizer that has loaded what was saved."""


Place = Literal["here", "elsewhere"]  # the same layout, or another one on as many ranks

Event = SetOptions | Train | AddGroup | Edit | Resume


def seeded(make: MakeModel, seed: int) -> nn.Module:
    """A model whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Scenario:
    """One way in which training stresses an optimizer. `world` is the number of ranks.

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
        """Keywords of the optimizer that have nothing to do with the layout."""
        return dict(RATES)

    def events(self, step: int) -> Sequence[Event]:
        """An event before a step."""
        return ()

    def goes_on(self, step: int) -> Place | None:
        """The folder, if before a step the run is saved, ended, and loaded into a new one.

        `one_process` never is: it stands for the run that was not interrupted.
        """
        return None

    def micro_batches(self, step: int) -> int:
        """Backward passes of a step, the same number on every rank."""
        return 1

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """The loss that a rank sends backward; None: this rank has no gradient at all."""
        raise NotImplementedError

    def known_gradients(
        self, model: nn.Module, step: int, rank: int, micro: int
    ) -> Gradients | None:
        """The gradients of backward from `loss`, where they are known without it."""
        return None

    def broken_promise(self, params: Mapping[str, Tensor]) -> str | None:
        """The broken promise of the scenario about the parameters, if there is one."""
        return None


class Wanted(NamedTuple):
    """A gradient that is asked for: of which parameter, and whose in which step."""

    name: str
    place: int  # of the parameter in the model
    param: Tensor
    step: int
    rank: int
    micro: int


class GradientScenario(Scenario):
    """A scenario that says which gradient each parameter has, instead of computing a loss."""

    def __init__(self, seed: int, world: int, make_model: MakeModel | None = None) -> None:
        super().__init__(seed, world, make_model)
        self._known: dict[tuple[int, int, int], Gradients] = {}
        self._room = KEPT_ELEMENTS

    def gradient(self, of: Wanted) -> Tensor | None:
        """The gradient that the scenario gives; None: the parameter has none."""
        raise NotImplementedError

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """Gives the gradients, in an order that ranks do not share."""
        names = list(grads := self.known_gradients(model, step, rank, micro))
        turn = (7 * rank + step) % max(len(names), 1)
        return loss_with(model, {name: grads[name] for name in names[turn:] + names[:turn]})

    def known_gradients(self, model: nn.Module, step: int, rank: int, micro: int) -> Gradients:
        """The gradients of parameters that are trained and have one; nobody may change them.

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
        """One of a rank's own."""
        return self.random(of.param.shape, of.place, of.step, of.rank)

    def random(self, shape: Sequence[int], *key: int) -> Tensor:
        """Normal numbers of full rank, the same for the same key."""
        number = self.seed
        for part in key:
            number = (number * 1_000_003 + part + 1) % (1 << 62)
        generator = torch.Generator().manual_seed(number)
        return torch.randn(tuple(shape), generator=generator)


class Recorded(Scenario):
    """A scenario whose gradients are those that a run of it had: `gradients[step][rank]`."""

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
    """Something of which backward gives these gradients; None if there are none."""
    if not grads:
        return None
    params = named_params(model)
    # Views, so that gradients arrive in an order: the last parameter's first.
    return loss_giving(list(grads.values()), [params[name].view_as(params[name]) for name in grads])


def loss_giving(grads: Sequence[Tensor], members: Sequence[Tensor]) -> Tensor:
    """Something of which backward gives these gradients to these tensors."""
    loss: Tensor = _Given.apply(grads, *members)  # type: ignore[no-untyped-call]
    return loss


class _Given(torch.autograd.Function):
    """One node instead of a product and a sum per parameter: 0.15 ms less per small step."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = scale  # on the device; gradients are on the host
        return None, *(grad.to(factor.device) * factor for grad in ctx.grads)
