"""The register of assumptions: its checks exist and run when it says; what it says of a run."""

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import samestep
from samestep.optimizer.assumptions import REGISTER
from samestep.stress import check
from tests.ranks import run_forked

PHASES = {
    "at construction": {"construction"},
    "in the first step": {"first step"},
    "in every step": {"first step", "second step"},
    "where you call samestep.stress.check": {"stress.check"},
}


class Calls:
    """Names of all functions that were called, phase by phase."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        names = self.seen.setdefault(phase, set())

        def note(frame, event, _):
            if event == "call":
                names.add(_name(frame.f_code))

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)


def _name(code) -> str:
    return f"{code.co_filename}:{code.co_qualname}"


def net(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 48, bias=False), nn.Tanh(), nn.Linear(48, 8, bias=False), nn.LayerNorm(8)
    return nn.Sequential(*layers).to(dtype)


def copies_of_parts(mesh) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(net(), mesh["model"], plan)


def tensor_parallel(mesh) -> nn.Module:
    return fully_shard(copies_of_parts(mesh), mesh=mesh["data"])


ALONE = "one process"
FUSED = {"0.weight": {"split_sizes": (16, 16, 16)}}
RUNS = {
    "overlap": (net, {"overlap_grad_reduce": True, "max_grad_norm": 1.0}),
    "float16": (lambda: net(torch.float16), {"sharding": "none", "max_grad_norm": math.inf}),
    "remainders": (
        lambda: net(torch.bfloat16),
        {"master_weights": True, "state_dtypes": {"master_weight": "remainder"}},
    ),
    "reduced": (net, {"grads": "reduced"}),
    "flat": (net, {"buffers": "flat", "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tensor parallel": (tensor_parallel, {"overrides": FUSED, "check_gradients": True}),
    "copies of parts": (copies_of_parts, {}),
}
ON_MESH = ("tensor parallel", "copies of parts")


def observed(calls, model, options, data) -> str:
    """Two steps and a check, seen by `calls`; what `explain` says."""
    with warnings.catch_warnings(), calls.during("construction"):
        warnings.filterwarnings("ignore", message=".* are float16")  # as the register says
        opt = samestep.MuonAdamW(model, **options)
    for phase in ("first step", "second step"):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(data))
        model(x.to(next(model.parameters()).dtype)).pow(2).mean().backward()
        with calls.during(phase):
            opt.step()
        opt.zero_grad()
    with calls.during("stress.check"):
        check(model, opt)
    return opt.explain()


def run(rank):
    """Every run on four ranks: what was called, and what was said."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    calls, texts = Calls(), {}
    for name, (make, options) in RUNS.items():
        model = make(mesh) if name in ON_MESH else make()
        data = 0 if name == "reduced" else rank // 2
        texts[name] = observed(calls, model, options, data)
    return calls.seen, texts


@pytest.fixture(scope="module")
def ranks():
    """The same with a run in one process, where some checks have their place."""
    alone = Calls()
    text = observed(alone, net(), {}, 0)
    return [
        ({phase: names | alone.seen[phase] for phase, names in seen.items()}, texts | {ALONE: text})
        for seen, texts in run_forked(4, run)
    ]


@pytest.mark.parametrize("entry", REGISTER, ids=lambda entry: entry.name)
def test_a_check_exists_and_runs_when_the_register_says(ranks, entry):
    function = entry.function()
    if function is None:
        assert entry.when == "never"
        return
    for seen, _ in ranks:
        for phase in PHASES[entry.when]:
            assert _name(function.__code__) in seen[phase]


def test_entries_have_names_of_their_own_and_say_something():
    assert len({entry.name for entry in REGISTER}) == len(REGISTER)
    for entry in REGISTER:
        assert entry.taken_for_granted.endswith(".")
        assert entry.cost


def test_every_entry_concerns_some_run(ranks):
    """So that none is dead; and those about ranks do not concern one process."""
    _, texts = ranks[0]
    for entry in REGISTER:
        concerned = {name for name, text in texts.items() if f"\n{entry.name}\n" in text}
        assert concerned, entry.name
    for name in ("same plan", "equal start", "averages", "one order of launches"):
        assert f"\n{name}\n" not in texts[ALONE]


def test_who_averages_what(ranks):
    _, texts = ranks[1]
    told = {name: " ".join(text.split()) for name, text in texts.items()}
    assert "\naverages\n" not in texts[ALONE]
    everyone = "over ranks 0, 1, 2, 3."
    assert f"4 plain parameters averaged by samestep {everyone}" in told["overlap"]
    assert "4 plain parameters on ranks 0, 1, 2, 3 averaged by somebody else" in told["reduced"]
    cut = told["tensor parallel"]
    assert "2 DTensors on ranks 0, 1, 2, 3 (mesh axes data, model) averaged by FSDP2" in cut
    assert "2 DTensors on ranks 1, 3 (mesh axes data) averaged by FSDP2" in cut
    assert "copies beside a mesh" in cut
    assert "Here: 3.weight, 3.bias on ranks 1, 3." in cut
    assert "4 gradients of float16" in told["float16"]
    parts = told["copies of parts"]
    assert "2 DTensors on ranks 0, 1, of which others have copies, averaged by samestep" in parts
    assert "2 plain parameters averaged by samestep over ranks 0, 1, 2, 3" in parts


def test_what_nobody_checks_comes_last_and_is_called_so(ranks):
    _, texts = ranks[0]
    for text in texts.values():
        checked, _, unchecked = text.partition("\nWhat nobody checks\n")
        assert "Not checked" not in checked
        assert "  Checked " not in unchecked
    assert "projections in one weight" in texts["tensor parallel"]
    assert "Here: 0.weight." in texts["tensor parallel"]
    assert "4 parameters whose 32-bit copy is kept" in texts["remainders"]
    assert "pass max_grad_norm= (math.inf checks" in " ".join(texts["reduced"].split())
    for name in ("reduced", ALONE, "flat"):  # averages of others are too late for the check
        assert ("check_gradients=True" in texts[name]) == (name != "reduced")
    for name in ("overlap", "tensor parallel"):
        assert "finite gradients, unchecked" not in texts[name]


def test_lines_are_short(ranks):
    for _, texts in ranks:
        for text in texts.values():
            assert max(map(len, text.splitlines())) <= 100
