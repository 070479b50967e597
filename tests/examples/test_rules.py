"""The rules of examples/rules: their formulas, and every layout of the harness."""

import math
from typing import ClassVar

import pytest
import torch
from torch import nn

import samestep
from examples.rules.muonh import MuonH
from examples.rules.soap import SOAP
from samestep.lab.stress import reference
from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.models import Matrices
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks
from samestep.lab.stress.scenario import SetOptions
from samestep.lab.stress.scenarios import SCENARIOS_ON_REQUEST
from samestep.lab.stress.scenarios.recipes import ResumedMidrun
from samestep.rules import RULES
from samestep.rules.exact_sums import digits_of, sums_of_blocks, total_of
from tests.examples import rule_references
from tests.limits import HANG
from tests.ranks import run_cases
from tests.soak import SOAK
from tests.test_sharded import Net, fsdp, loss_of


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    for rule in (MuonH(), SOAP()):
        monkeypatch.setitem(RULES, rule.name, rule)
    rule_references.add(monkeypatch)


# --- formulas ------------------------------------------------------------------------------------

CASES = [
    ("muonh", {}, (12, 20)),
    ("muonh", {"radius": 3.0, "lr": 0.3}, (20, 12)),
    ("soap", {"precondition_frequency": 2}, (12, 12)),
    ("soap", {"betas": (0.9, 0.99), "shampoo_beta": 0.5, "max_precond_dim": 12}, (12, 30)),
    ("soap", {"max_precond_dim": 4}, (7, 9)),
]


@pytest.mark.parametrize(("rule", "options", "shape"), CASES)
def test_formula(rule, options, shape):
    """In float64 the rule is its reference but for rounding; eight steps."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    group = {"rule": rule, "params": [("w", param)], **options}
    if rule == "muonh":
        group["compute_dtype"] = torch.float64
    opt = samestep.MuonAdamW([group])
    expected = reference.Reference({"w": param}, [{"rule": rule, "param_names": ["w"], **options}])
    for _ in range(8):
        param.grad = torch.randn(shape, dtype=torch.float64)
        expected.step({"w": [param.grad]}, divisor=1.0)
        opt.step()
        away = (param.detach() - expected.params["w"]).abs().max()
        assert 0 <= away < 1e-11


def test_the_norm_stays():
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(16, 24))
    before = param.detach().double().norm()
    opt = samestep.MuonAdamW([{"rule": "muonh", "params": [param], "lr": 0.1}])
    for _ in range(30):
        param.grad = torch.randn(16, 24)
        last = param.detach().clone()
        opt.step()
        cosine = nn.functional.cosine_similarity(param.detach().flatten(), last.flatten(), dim=0)
        assert cosine < 0.9999
    assert abs(param.detach().double().norm() / before - 1) < 1e-6
    stays = param.detach().clone()
    for own in opt.state[param].values():
        own.zero_()
    param.grad = torch.zeros(16, 24)
    opt.step()  # no direction: nothing moves
    assert (param.detach() - stays).abs().max() < 1e-6


# --- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_sums_do_not_depend_on_who_has_which_terms(scale):
    torch.manual_seed(0)
    terms = torch.randn(999).double() * torch.randn(999).double().mul(20).exp2() * scale
    expected = total_of(digits_of(terms[None])[None])
    assert abs(float(expected) / math.fsum(terms.tolist()) - 1) < 1e-14
    for cuts in ((1,), (500, 500, 998), (333, 666)):
        shuffled = terms[torch.randperm(999)]
        parts = torch.stack([digits_of(p[None]) for p in torch.tensor_split(shuffled, cuts)])
        assert torch.equal(total_of(parts), expected)


def test_sums_of_what_is_empty_huge_or_broken():
    terms = torch.tensor(
        [[0.0, 0.0], [1e308, 1e308], [1.0, math.nan], [math.inf, -1.0], [5e-324, 1.0]],
        dtype=torch.float64,
    )
    (found,) = sums_of_blocks({"x": terms[:, :, None]}).values()
    assert found.shape == (5, 1, 1)
    zero, huge, no_number, infinite, one = found.flatten().tolist()
    assert (zero, huge, one) == (0.0, math.inf, 1.0)
    assert math.isnan(no_number)
    assert math.isnan(infinite)
    assert sums_of_blocks({"x": torch.zeros(2, 0, 3)})["x"].flatten().tolist() == [0.0, 0.0]


def test_a_slice_has_no_owner():
    class Elementwise(SOAP):
        name = "test-elementwise-soap"
        kind = "elementwise"

    with pytest.raises(ValueError, match=r"elementwise and defines owned_state\(\)"):
        samestep.register_rule(Elementwise())


# --- layouts -------------------------------------------------------------------------------------


class OwnRules(ResumedMidrun):
    """Both rules on matrices, fused rows and a stack, saved and loaded between layouts."""

    name = "own_rules"
    story = "the rules of examples/rules, begun in one process and resumed in other layouts"
    # In 32 bits eigenvectors of nearly equal eigenvalues turn freely; `test_formula` has 64.
    limits: ClassVar = {"adam": 2e-5, "mu_a": 1.0, "mu_b": 1.0}
    if not SOAK:
        begun_alone = 2

        def goes_on(self, step):
            return {3: "here", 5: "elsewhere", 7: "here"}.get(step)

    def own_model(self):
        shapes = {
            "adam": (23, 9), "soap_0": (16, 12), "soap_1": (12, 12), "soap_fused": (24, 10),
            "ball_0": (16, 12), "ball_1": (8, 20), "ball_stack": (4, 10, 6), "ball_gaps": (6, 10),
            "soap_stack": (4, 6, 5),
        }  # fmt: skip
        return Matrices(shapes)

    def options(self):
        soap = {"precondition_frequency": 3, "split_sizes": {"soap_fused": (6, 6, 12)}}
        ball = {"lr": 2**-5, "split_sizes": {"ball_gaps": "interleaved:3x1"}}
        groups = [
            {"params": ["adam"], "rule": "adamw"},
            {"params": ["soap_*"], "rule": "soap", **soap},
            {"params": ["ball_[0sg]*"], "rule": "muonh", **ball},
            {
                "params": ["ball_1"],
                "rule": "muonh",
                "radius": 2.0,
            },  # tells how large sums are
        ]
        return {**super().options(), "groups": groups}

    def events(self, step):
        low = step % 20 == 4
        if step % 10 != 4:
            return ()
        rates = {"lr": 2**-8 if low else 2**-7}
        return SetOptions("soap", rates), SetOptions("muonh", rates), SetOptions("adamw", rates)


FAST = {
    2: ["one_process", "zero2_overlap", "fsdp2_parallel"],
    4: ["one_process", "hsdp", "ep_dp_zero2"],
}
ALL = [name for name in EVERY_LAYOUT if not name.startswith(("xla", "hybrid"))]


@pytest.mark.parametrize("world", [2, 3, 4] if SOAK else [2, 4])
def test_every_layout_is_exact(world, monkeypatch):
    """Replicas, layouts and one process to the bit, through checkpoints and other layouts."""
    monkeypatch.setitem(SCENARIOS_ON_REQUEST, OwnRules.name, OwnRules)
    names = ["one_process", *ALL] if SOAK else FAST[world]
    steps = (16, 8) if SOAK else (8, 4)
    cases = [Case(OwnRules.name, name, world, *steps) for name in dict.fromkeys(names)]
    results = []
    Campaign(ForkedRanks(world, HANG)).run_all(cases, results.append)
    assert len(results) == len(cases)
    for result in results:
        if result.status != "does_not_apply":
            assert (result.status, result.findings) == ("exact", []), result.case


# --- what owners have ----------------------------------------------------------------------------


def shapes_of(state):
    return {(name, key): tuple(t.shape) for name, own in state.items() for key, t in own.items()}


def owners_have(rank, schedule):
    """Elements of state here, what state_dict() says, and whether a gathered one is whole."""
    model = fsdp(Net())
    soap = {"rule": "soap"}
    own = {"*.up.weight": {**soap, "split_sizes": (9, 10, 14)}, "*.down.weight": soap}
    soap = {**own, "experts": soap}
    opt = samestep.MuonAdamW(model, lr=1e-2, overrides=soap, muon_schedule=schedule)
    loss_of(model, rank, 0).backward()
    opt.step()
    here = {
        (name, key): opt.state[param][key].numel()
        for group in opt.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
        if group["rule"] == "soap"
        for key in opt.state[param]
    }
    try:
        opt.state_dict()
        said = ""
    except RuntimeError as error:
        said = str(error)
    whole = opt.whole_state()
    opt.consolidate_state_dict()
    found, me = None, torch.distributed.new_subgroups(1)[0]
    if rank == 0 and said:
        other = samestep.MuonAdamW(Net(), lr=1e-2, overrides=soap, process_group=me)
        other.load_state_dict(opt.state_dict())
        found = shapes_of(other.whole_state()) == shapes_of(whole) and all(
            torch.equal(tensor, whole[name][key])
            for name, own in other.whole_state().items()
            for key, tensor in own.items()
        )
    return here, said, {key: math.prod(shape) for key, shape in shapes_of(whole).items()}, found


def test_owners_alone_have_the_state_of_blocks():
    for schedule, of_ranks in run_cases(2, ["parallel", "gather"], owners_have):
        copies = 1 if schedule == "parallel" else 2
        whole = of_ranks[0][2]
        for key in of_ranks[0][0]:
            assert sum(here[key] for here, *_ in of_ranks) == copies * whole[key]
        for _, said, _, _ in of_ranks:
            assert ("samestep.save" in said and "'soap'" in said) == (schedule == "parallel")
        assert of_ranks[0][3] is (True if copies == 1 else None)
