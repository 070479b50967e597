"""What happens to a model between construction and step: followed, or refused by name."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import some, twin, twin_cases

KINDS = [samestep.Muon, samestep.AdamW]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))


def set_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


@kinds
def test_a_changed_shape_is_refused_before_anything_moves(kind):
    model = two_layers()
    opt = kind(model)
    model[1].weight.data = torch.zeros(8, 4)
    set_gradients(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"'1\.weight' is .*\(8, 4\) now, and the optimizer was built .*\(6, 4\)"
    ):
        opt.step()
    assert torch.equal(model[0].weight, before)


@kinds
def test_a_changed_precision_is_refused_before_anything_moves(kind):
    model = two_layers()
    opt = kind(model)
    model[1].double()
    set_gradients(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'1\.weight' is torch.float64.*build the optimizer"):
        opt.step()
    assert torch.equal(model[0].weight, before)


# --- parameters that a wrapper puts in the places of others ------------------------------------


def swap(model, opt, new_of):
    """What accelerate does to the groups when it has sharded a model."""
    for group in opt.param_groups:
        group["params"] = [new_of[param] for param in group["params"]]


def random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        param.grad = distribute(grad, param)


def distribute(tensor, like):
    """As the parameter is placed."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def steps(model, opt, seeds):
    for seed in seeds:
        random_gradients(model, seed)
        opt.step()


def test_swapped_parameters_go_on_with_their_state():
    model, plain = two_layers(), two_layers()
    opt, expected = (samestep.MuonAdamW(m, lr=0.1) for m in (model, plain))
    steps(model, opt, [1, 2])
    steps(plain, expected, [1, 2, 3])
    new_of = {}
    for layer in model:
        old, layer.weight = layer.weight, nn.Parameter(layer.weight.detach().clone())
        new_of[old] = layer.weight
    swap(model, opt, new_of)
    steps(model, opt, [3])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    found, wanted = opt.whole_state(), expected.whole_state()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n][k], wanted[n][k]) for n in wanted for k in wanted[n])


@twin
@pytest.mark.parametrize("first", [0, 2])
def test_a_model_that_is_sharded_after_its_optimizer_was_built(first):
    """As if it had been built afterwards; state so far is brought over."""
    options = {"lr": 0.1, "crossover": 1, "reduction": "ordered"}

    def job(rank):
        mesh = init_device_mesh("cpu", (2,))
        model, other = two_layers(), two_layers()
        opt = samestep.MuonAdamW(model, **options)
        steps(model, opt, range(first))
        state = opt.whole_state()
        old = list(model.parameters())
        fully_shard(model, mesh=mesh)
        swap(model, opt, dict(zip(old, model.parameters(), strict=True)))
        saved = opt.state_dict()  # whoever asks first finds what is there now
        assert "part" not in saved
        brought = opt.whole_state()
        assert all(torch.equal(brought[n][k], state[n][k]) for n in state for k in state[n])
        steps(model, opt, [7, 8, 9])

        steady = samestep.MuonAdamW(other, **options)
        steps(other, steady, range(first))
        part = steady.whole_state()
        fully_shard(other, mesh=mesh)
        steady = samestep.MuonAdamW(other, **options)
        for name, entries in part.items():
            for key, value in entries.items():
                steady.set_full_state(name, key, value)
        steps(other, steady, [7, 8, 9])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
        return True

    assert run_forked(2, job) == [True, True]


def test_another_parameter_is_no_swap():
    model = two_layers()
    opt = samestep.MuonAdamW(list(model.named_parameters()), lr=0.1)
    set_gradients(model)
    params = opt.param_groups[0]["params"]
    own = params[0]
    params[0] = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*shape \(3, 3\).*of shape \(4, 6\)"):
        opt.step()
    params[0] = own
    params.append(nn.Parameter(torch.ones(3, 3)))
    with pytest.raises(RuntimeError, match=r"built with 2 parameters and has 3 now"):
        opt.step()


def test_one_parameter_in_the_places_of_two():
    params = [("a", nn.Parameter(torch.ones(4, 4))), ("b", nn.Parameter(torch.ones(4, 4)))]
    opt = samestep.Muon(params)
    listed = opt.param_groups[0]["params"]
    both = "'a' and 'b' are now one parameter"
    for one in (nn.Parameter(torch.ones(4, 4)), params[0][1]):
        for steps_before in (0, 1, 2, 3):
            listed[:] = [param for _, param in params]
            for param in (one, *listed):
                param.grad = torch.ones(4, 4)
            for _ in range(steps_before):
                opt.step()
            listed[:] = [one, one]
            with pytest.raises(RuntimeError, match=both):
                opt.step()


@twin_cases("2")
@pytest.mark.parametrize("first", [0, 2])
def test_a_model_is_adopted_by_name(first):
    """Sharded after its optimizer was built, by somebody who does not know of that."""
    options = {"lr": 0.1, "crossover": 1, "reduction": "ordered"}
    alone = two_layers()
    expected = samestep.MuonAdamW(alone, **options)
    steps(alone, expected, [*range(first), 7, 8])

    def job(rank):
        model = two_layers()
        opt = samestep.MuonAdamW(model, **options)
        steps(model, opt, range(first))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if first == 0:
            with pytest.raises(RuntimeError, match=r"no parameter .* call opt\.adopt\(model\)"):
                steps(model, opt, [7])
        opt.adopt(model)
        assert opt.param_groups[0]["params"][0] is model[0].weight
        steps(model, opt, [7, 8])
        return [param.full_tensor() for param in model.parameters()], opt.whole_state()

    for found, state in run_forked(2, job):
        pairs = zip(found, alone.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)
        for name, entries in expected.whole_state().items():
            for key, value in entries.items():
                assert torch.allclose(state[name][key], value, rtol=0, atol=1e-6), (name, key)


def test_what_cannot_be_adopted_changes_nothing():
    """On any rank: all raise, and training goes on as before."""

    def job(rank):
        model = two_layers()
        opt = samestep.MuonAdamW(model, lr=0.1, crossover=1)
        own = [list(group["params"]) for group in opt.param_groups]
        others = two_layers()
        if rank == 1:
            others[0] = nn.Linear(3, 3)
        with pytest.raises(RuntimeError) as caught:
            opt.adopt(others)
        with pytest.raises((ValueError, RuntimeError)) as missing:
            opt.adopt(nn.Sequential(nn.Linear(6, 4)))
        assert [list(group["params"]) for group in opt.param_groups] == own
        steps(model, opt, [7])
        return str(caught.value), str(missing.value)

    (there, missing), (here, _) = run_forked(2, job)
    assert "rank 1 could not take the step" in there
    assert re.search(r"'0\.weight'.*shape \(3, 3\).*of shape \(4, 6\)", here)
    assert "the model has no 1.weight" in missing
    nameless = samestep.Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ValueError, match="has parameters without names"):
        nameless.adopt(two_layers())


@kinds
def test_cleared_state_starts_afresh(kind):
    """`opt.state.clear()` is how people reset momentum."""
    model, fresh = two_layers(), two_layers()
    opt = kind(model)
    set_gradients(model)
    opt.step()
    opt.state.clear()
    with torch.no_grad():
        for param, other in zip(model.parameters(), fresh.parameters(), strict=True):
            other.copy_(param)
    set_gradients(fresh)
    opt.step()
    kind(fresh).step()
    for param, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(param, other)


def test_an_override_that_its_rule_does_not_read_is_refused():
    with pytest.raises(ValueError, match=r"'0\.bias' follows rule 'adamw', and 'momentum' is"):
        samestep.MuonAdamW(nn.Sequential(nn.Linear(3, 3)), overrides={"0.bias": {"momentum": 0.5}})
    with pytest.raises(ValueError, match="'initial_lr' is no option"):
        samestep.MuonAdamW(nn.Sequential(nn.Linear(3, 3)), overrides={"*": {"initial_lr": 1.0}})


def replace_parameters(model, opt, layers=(0, 1)):
    new_of = {param: param for param in model.parameters()}
    for layer in layers:
        old = model[layer].weight
        new_of[old] = model[layer].weight = nn.Parameter(old.detach().clone())
    swap(model, opt, new_of)


def backward(model, rank, step):
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().sum().backward()


OVERLAP = {"overlap_grad_reduce": True, "sharding": "zero2"}


@twin_cases("layers0-False-options0")
@pytest.mark.parametrize(
    ("layers", "asks_first", "options"),
    some([([1], False, {}), ([1], True, {}), ([1], False, OVERLAP), ([0, 1], False, OVERLAP)]),
)
def test_parameters_that_one_rank_alone_has_swapped(layers, asks_first, options):
    """All raise, naming rank and parameter; when the others follow, training goes on."""

    def ask(opt, rank):
        if asks_first and rank == 1:
            opt.state_dict()  # where it is noticed first
        opt.step()

    def job(rank, swaps):
        model, text = two_layers(), None
        opt = samestep.MuonAdamW(model, lr=0.1, **options)
        for step in range(4):
            if swaps and step in (1, 2) and (rank == 1) == (step == 1):
                replace_parameters(model, opt, layers)
            if swaps or step != 1:
                backward(model, rank, step)
            if swaps and step == 1:
                with pytest.raises(RuntimeError) as caught:
                    ask(opt, rank)
                text = str(caught.value)
            elif step != 1:
                opt.step()
            opt.zero_grad()
        return text, [param.detach() for param in model.parameters()]

    swapped, plain = run_forked(3, job, True), run_forked(3, job, False)
    for (text, found), (_, expected) in zip(swapped, plain, strict=True):
        assert f"'{layers[0]}.weight'" in text
        assert "on rank 1 and not on rank 2" in text
        assert all(map(torch.equal, found, expected))


def test_a_swap_after_gradients_were_added_up():
    """They would be lost: refused on every rank, by name."""

    def job(rank):
        model = two_layers()
        opt = samestep.MuonAdamW(model, lr=0.1)
        if rank == 0:
            backward(model, rank, 0)
        opt.synchronize()
        replace_parameters(model, opt, [0])
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        return str(caught.value)

    first, other = run_forked(2, job)
    assert re.search(r"'0\.weight' on rank 0.*opt\.adopt\(model\)", first)
    assert "rank 0 could not take the step" in other


@pytest.mark.parametrize("who", some(["all", "one"]))
def test_a_model_that_is_moved_or_converted_on_several_ranks(who):
    """Refused on every rank, by name, before anything moves, in every layout."""
    layouts = [
        {"sharding": s, "buffers": b} for s in ("zero1", "zero2") for b in ("per_parameter", "flat")
    ]
    layouts += [{"sharding": "none"}, OVERLAP, {"mesh": "cpu"}]

    def build(options):
        model = two_layers()
        if "mesh" not in options:
            return model, samestep.MuonAdamW(model, lr=0.1, **options)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, samestep.MuonAdamW(model, lr=0.1)

    def convert(model, to):
        if to == "meta" and not isinstance(model[0].weight, DTensor):
            for param in model.parameters():  # a parameter keeps its identity when it goes to a GPU
                torch.utils.swap_tensors(param, nn.Parameter(param.to("meta")))
        else:
            model.to(to)

    def job(rank, case):
        options, to = case
        model, opt = build(options)
        backward(model, rank, 0)
        opt.step()
        opt.zero_grad()
        before = [param.detach().clone() for param in model.parameters()]
        if who == "all" or rank == 1:
            convert(model, to)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        pairs = zip(before, model.parameters(), strict=True)
        same = to == "meta" or all(torch.equal(old.to(new.dtype), new) for old, new in pairs)
        return str(caught.value), same

    cases = [(layout, to) for layout in layouts for to in (torch.bfloat16, torch.float64)]
    cases += [(layout, "meta") for layout in ({"sharding": "none"}, {"mesh": "cpu"})]
    for (_, to), ranks in run_cases(2, cases, job):
        for rank, (text, same) in enumerate(ranks):
            assert same
            if who == "one" and rank == 0:
                assert re.search("rank 1 could not take the step", text)
            else:
                assert re.search(rf"'0.weight' is {to if to != 'meta' else ''}.*optimizer", text)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda group: group.update(params=iter(group["params"])), "a list_iterator now"),
        (lambda group: group.pop("params"), "a NoneType now"),
        (lambda group: group["params"].clear(), "0 now"),
    ],
)
def test_parameters_of_a_group_that_were_replaced_or_lost_are_told(index, change, found):
    """In a later step, in which nothing is looked at anew."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = samestep.MuonAdamW(net)
    for step in range(3):
        net(torch.ones(2, 4)).square().sum().backward()
        if step < 2:
            opt.step()
    change(opt.param_groups[index])
    with pytest.raises(RuntimeError, match=rf"param_groups\[{index}\] was built with .*{found}"):
        opt.step()
