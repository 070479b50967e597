"""`compile=`: the same numbers, one graph per signature, and no recompilation for a schedule.

Two witnesses for the last: torch's stance "fail_on_recompile", which raises as soon as anything
is compiled inside it, and dynamo's own count of graphs. That both would see a Python number that
leaks into a graph is shown with rules that leak on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import samestep
from samestep.rules import RULES, Update, register_rule
from tests.limits import TEST
from tests.soak import SOAK, some


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs dynamo has made so far."""
    return counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def nothing_is_compiled() -> Iterator[None]:
    before = graphs()
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
    assert graphs() == before


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(draw(shape, seed)) for seed, shape in enumerate(shapes)]


def twins(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of the same values and strides."""
    return copy.deepcopy(list(params))


def give_gradients(
    step: int, *sides: Sequence[nn.Parameter], present: Sequence[bool] | None = None
) -> None:
    """The same fresh gradients to the parameters of every side; None where not present."""
    for index, same in enumerate(zip(*sides, strict=True)):
        gradient = draw(same[0].shape, 1000 + 50 * step + index, same[0].dtype)
        for param in same:
            param.grad = gradient.clone() if present is None or present[index] else None


def assert_same_bits(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    reference: torch.optim.Optimizer,
    expected: Sequence[nn.Parameter],
) -> None:
    for a, b in zip(params, expected, strict=True):
        assert torch.equal(a, b)
        for key, tensor in reference.state[b].items():
            assert torch.equal(optimizer.state[a][key], tensor), key


NS_STEPS = 5 if SOAK else 1  # a small graph
LIMIT = 3 if SOAK else 2  # of recompilations; torch's own is 8, and fewer shapes will do
Muon = functools.partial(samestep.Muon, ns_steps=NS_STEPS)


# --- Schedules -----------------------------------------------------------------------------

SHAPES = [(6, 4), (6, 4), (5,), (5,)]


def both_rules(params: Sequence[nn.Parameter], **options: Any) -> samestep.MuonAdamW:
    return samestep.MuonAdamW(
        [
            {"params": params[:2], "rule": "muon", "variance_beta2": 0.9, "cautious": True},
            {"params": params[2:], "rule": "adamw", "amsgrad": True},
        ],
        0.02,
        ns_steps=NS_STEPS,
        **options,
    )


def schedule(optimizer: torch.optim.Optimizer, step: int, as_tensor: bool = False) -> None:
    """Change everything that may be scheduled, to other numbers in every step."""
    muon, adamw = optimizer.param_groups
    x = step / 10
    for group in (muon, adamw):
        lr = 0.02 * (1 - x)
        group["lr"] = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr
        group["weight_decay"] = 0.1 + x
    muon["momentum"] = 0.85 + x / 10
    muon["variance_beta2"] = 0.9 - x / 3
    adamw["betas"] = (0.8 + x / 10, 0.95 + x / 30)
    adamw["eps"] = 1e-8 * (1 + step)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"] if SOAK else ["eager"])
def test_a_schedule_recompiles_nothing(backend):
    params = draw_parameters(SHAPES)
    expected = twins(params)
    optimizer, reference = both_rules(params, compile=backend), both_rules(expected)
    for step in range(10):
        give_gradients(step, params, expected)
        for each in (optimizer, reference):
            schedule(each, step)
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
        assert graphs() == 2  # one for the stack of both matrices, one for either vector
        if backend == "eager":
            assert_same_bits(optimizer, params, reference, expected)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_tensor_and_float_learning_rates_share_a_graph():
    params = draw_parameters(SHAPES)
    expected = twins(params)
    optimizer, reference = both_rules(params, compile="eager"), both_rules(expected)
    for step in range(6):
        give_gradients(step, params, expected)
        schedule(reference, step)
        schedule(optimizer, step, as_tensor=step % 3 < 2)  # also a new tensor in every step
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
    assert_same_bits(optimizer, params, reference, expected)


@pytest.mark.parametrize("make", [Muon, samestep.AdamW])
def test_a_learning_rate_filled_in_place(make):
    params = draw_parameters([(6, 4)])
    expected = twins(params)
    optimizer = make(params, lr=torch.tensor([0.5]), compile="eager")  # one element will do
    reference = make(expected, lr=0.5)
    for step in range(4):
        lr = optimizer.param_groups[0]["lr"].fill_(0.02 / (1 + step))
        reference.param_groups[0]["lr"] = lr.item()
        give_gradients(step, params, expected)
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
    assert_same_bits(optimizer, params, reference, expected)


class Leaky:
    """Gradient descent whose learning rate reaches the graph as a Python number."""

    kind = "elementwise"
    defaults = {"lr": 0.1}  # noqa: RUF012
    lr = 0.0

    def __init__(self, leak: str) -> None:
        self.name = f"test-leaky-{leak}"
        self.leak = leak
        # An option that is not declared as schedulable is handed over as it is.
        self.schedulable = frozenset() if leak == "option" else frozenset({"lr"})

    def check(self, options):
        pass

    def scalars(self, options):
        self.lr = options["lr"]
        return {"lr": options["lr"]}

    def state_shapes(self, shape, options):
        return {}

    def update(self, param, grad, state, scalars, options):
        lr = {"option": options.get("lr"), "attribute": self.lr, "none": scalars["lr"]}[self.leak]
        return Update(param - grad * lr, {})


@pytest.mark.parametrize("leak", ["option", "attribute", "none"])
def test_a_number_that_leaks_into_the_graph_would_be_seen(leak):
    rule = Leaky(leak)
    register_rule(rule)
    try:
        params = draw_parameters([(5,)])
        optimizer = samestep.MuonAdamW([{"params": params, "rule": rule.name}], compile="eager")
        give_gradients(0, params)
        optimizer.step()
        assert graphs() == 1
        optimizer.param_groups[0]["lr"] = 0.2
        if leak == "none":
            with nothing_is_compiled():
                optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="recompile"), nothing_is_compiled():
                optimizer.step()
            optimizer.step()
        assert graphs() == (1 if leak == "none" else 2)
    finally:
        del RULES[rule.name]


# --- Graphs --------------------------------------------------------------------------------


@torch._dynamo.config.patch(recompile_limit=LIMIT)
def test_more_shapes_than_torch_recompiles_one_function_for():
    """Past its limit torch would raise here, since every graph has to be whole."""
    count = LIMIT + 1
    params = draw_parameters([(2 + i, 3) for i in range(count)] + [(2 + i,) for i in range(count)])
    expected = twins(params)

    def make(params: Sequence[nn.Parameter], **options: Any) -> samestep.MuonAdamW:
        groups = [{"params": params[:count], "rule": "muon", "ns_steps": 1}]
        return samestep.MuonAdamW([*groups, {"params": params[count:], "rule": "adamw"}], **options)

    optimizer, reference = make(params, compile="eager"), make(expected)
    for step in range(2):
        give_gradients(step, params, expected)
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
    assert graphs() == 2 * count
    assert_same_bits(optimizer, params, reference, expected)


@torch._dynamo.config.patch(recompile_limit=LIMIT)
def test_the_limit_that_is_avoided_exists():
    """So that the test above can fail: one function for all shapes does hit the limit."""
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False, fullgraph=True)
    for size in range(2, 2 + LIMIT):
        compiled(torch.ones(size))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(torch.ones(2 + LIMIT))


@pytest.mark.skipif(not SOAK, reason="torch's own limit takes as many graphs: make soak")
def test_more_shapes_than_the_limit_as_it_is():
    """The same with torch's own limit; the graphs of AdamW are the cheaper ones."""
    params = draw_parameters([(2 + i,) for i in range(torch._dynamo.config.recompile_limit + 1)])
    optimizer = samestep.AdamW(params, compile="eager")
    give_gradients(0, params)
    optimizer.step()
    assert graphs() == len(params)


def test_absent_parameters():
    """A smaller stack is another shape: compiled when first seen, and never again."""
    params = draw_parameters([(6, 4)] * 3 + [(5,)] * 2)
    expected = twins(params)

    def make(params: Sequence[nn.Parameter], **options: Any) -> samestep.MuonAdamW:
        groups = [{"params": params[:3], "rule": "muon"}, {"params": params[3:], "rule": "adamw"}]
        return samestep.MuonAdamW(groups, 0.02, ns_steps=NS_STEPS, **options)

    optimizer, reference = make(params, compile="eager"), make(expected)
    patterns = [(1, 1, 1, 1, 1), (1, 0, 1, 0, 1), (0, 0, 1, 1, 0), (0, 0, 0, 0, 0)]
    again = [(1, 1, 1, 0, 1), (0, 1, 1, 1, 0), (0, 1, 0, 1, 1), (1, 1, 0, 0, 0)]
    seen = []
    for step, present in enumerate(patterns + again):
        give_gradients(step, params, expected, present=present)
        reference.step()
        with nothing_is_compiled() if present in again else contextlib.nullcontext():
            optimizer.step()
        seen.append(graphs())
        assert_same_bits(optimizer, params, reference, expected)
    assert seen[:4] == [2, 3, 4, 4]  # stacks of three, of two, of one; and the vectors


KINDS: dict[str, tuple[str, list[Tensor], dict[str, Any]]] = {
    "16 bits": (
        "both",
        [draw((6, 4), 0, torch.bfloat16), draw((6, 4), 1, torch.float16)],
        {"master_weights": False},
    ),
    "16 bits with masters": (
        "both",
        [draw((6, 4), 0, torch.bfloat16), draw((6, 4), 1, torch.float16)],
        {"master_weights": True},
    ),
    "64 bits": ("both", [draw((6, 4), 0, torch.float64)], {}),
    "strided": ("both", [draw((6, 4), 0).t(), draw((4, 6), 1), draw((9, 12), 2)[1:9:2, ::2]], {}),
    "empty": ("both", [draw((0, 4), 0), draw((6, 4), 1)], {}),
    "0-D": ("adamw", [draw((), 0)], {}),
    "maximized": ("both", [draw((6, 4), 0)], {"maximize": True}),
    "large": ("adamw", [draw((1 << 17,), 0)], {}),
    "fused and stacked": (
        "muon",
        [draw((6, 4), 0), draw((2, 6, 4), 1)],
        {"split_sizes": (3, 2, 1), "variance_beta2": 0.9},
    ),
    "convolution": (
        "muon",
        [draw((5, 3, 2, 2), 0), draw((5, 3, 2, 2), 1).to(memory_format=torch.channels_last)],
        {"flatten": True},
    ),
}


def rules_of(kind):
    """Where both can, they take turns: what is compiled is one function of either."""
    rules = KINDS[kind][0]
    both = ["muon", "adamw"]
    place = list(KINDS).index(kind)
    return [rules] if rules != "both" else both if SOAK else both[place % 2 :][:1]


@pytest.mark.parametrize(
    ("rule", "values", "options"),
    some(
        [
            pytest.param(rule, values, options, id=f"{kind} {rule}")
            for kind, (_, values, options) in KINDS.items()
            for rule in rules_of(kind)
        ]
    ),
)
def test_parameters_of_every_kind(rule, values, options):
    make = {"muon": Muon, "adamw": samestep.AdamW}[rule]
    params = [nn.Parameter(value.clone(memory_format=torch.preserve_format)) for value in values]
    expected = twins(params)
    optimizer = make(params, lr=0.02, compile="eager", **options)
    reference = make(expected, lr=0.02, **options)
    for step in range(2):
        give_gradients(step, params, expected)
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
    assert_same_bits(optimizer, params, reference, expected)


@pytest.mark.parametrize("make", [Muon, samestep.AdamW])
def test_an_option_changed_mid_run_counts(make):
    """Options are part of a graph, so each of their values has a graph of its own."""
    key, value = ("nesterov", False) if make is Muon else ("maximize", True)
    params = draw_parameters([(6, 4)])
    expected = twins(params)
    optimizer, reference = make(params, compile="eager"), make(expected)
    for step in range(3):
        give_gradients(step, params, expected)
        if step == 1:
            optimizer.param_groups[0][key] = reference.param_groups[0][key] = value
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, params, reference, expected)


@pytest.mark.parametrize("make", [Muon, samestep.AdamW])
def test_saved_loaded_and_copied(make):
    params = draw_parameters([(6, 4)])
    optimizer = make(params, compile="eager")
    give_gradients(0, params)
    optimizer.step()
    loaded_params = twins(params)
    loaded = make(loaded_params, compile="eager")
    loaded.load_state_dict(optimizer.state_dict())
    copied_params, copied = copy.deepcopy((params, optimizer))
    plain_params = twins(params)
    plain = make(plain_params)
    plain.load_state_dict(optimizer.state_dict())
    give_gradients(1, params, loaded_params, copied_params, plain_params)
    for each in (optimizer, loaded, copied, plain):
        each.step()
    assert graphs() == 3  # a copy is compiled too, and graphs are not copied
    for each, its_params in (
        (optimizer, params),
        (loaded, loaded_params),
        (copied, copied_params),
    ):
        assert_same_bits(each, its_params, plain, plain_params)


def test_a_step_inside_a_compiled_function_is_left_to_itself():
    """No graph, and no trace of it either; whoever wants one graph is told what to do."""
    params, expected = draw_parameters(SHAPES), draw_parameters(SHAPES)
    optimizer, reference = both_rules(params), both_rules(expected)

    def training_step() -> Tensor:
        optimizer.step()
        return torch.ones(2) * 2

    compiled = torch.compile(training_step, backend="eager")
    for step in range(2):
        give_gradients(step, params, expected)
        assert compiled().tolist() == [2, 2]
        reference.step()
        assert_same_bits(optimizer, params, reference, expected)
    torch._dynamo.reset()
    whole = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give the optimizer compile=True"):
        whole()


# --- The real compiler ---------------------------------------------------------------------


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="compile=True needs a C++ compiler on CPU, and none is found",
)
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch about torch
@pytest.mark.skipif(not SOAK, reason="takes a minute: make soak")
@pytest.mark.timeout(TEST)
def test_inductor_over_a_schedule(monkeypatch):
    """Fused kernels round elsewhere: 1e-5, where a step moves 4e-3 (and 1.2e-7 was seen)."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # its workers would stay
    params = draw_parameters(SHAPES)
    expected = twins(params)
    optimizer, reference = both_rules(params, compile=True), both_rules(expected)
    for step in range(10):
        give_gradients(step, params, expected)
        for each in (optimizer, reference):
            schedule(each, step)
        reference.step()
        with nothing_is_compiled() if step else contextlib.nullcontext():
            optimizer.step()
        assert graphs() == 2
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
