"""Steps on XLA devices: one program for all of them, against one process on the CPU.

    make test-xla

Every test begins with a process of its own, since one that has used XLA cannot have another number
of devices.
"""

import copy
import math
import os

import pytest
import torch
from torch import nn

import samestep
from samestep.rules import RULES
from samestep.rules.muon import MuonRule
from samestep.xla import runtime
from samestep.xla.tiling import Tiling, annotate, lay, tiling_of
from tests.ranks import RanksFailed, run_forked
from tests.test_docs import DOCS, run_page

pytestmark = pytest.mark.xla
OPTIONS = {"lr": 0.02, "weight_decay": 0.125, "crossover": 64}


def on_devices(count, fn, *args):
    """What a function gives in a process with so many devices; it is given their common name."""
    return run_forked(1, lambda _: fn(runtime.start(count), *args), timeout=400.0)[0]


def model():
    torch.manual_seed(3)
    layers = [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 12)]
    return nn.Sequential(*layers)


def batch(step):
    """Other rows on every device."""
    generator = torch.Generator().manual_seed(step)
    draw = torch.randn(16, 36, generator=generator)
    return draw[:, :24], draw[:, 24:]


def rate(step):
    """From exactly 0 over exactly 1/64 back to exactly 0."""
    return math.sin(step % 6 / 6 * math.pi) / 64 if step % 6 else 0.0


def train(net, opt, steps, device=None, devices=1):
    """Steps under a schedule; on XLA one program each."""
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = rate(step)
        inputs, targets = batch(step)
        if device is not None:
            inputs, targets = inputs.to(device), targets.to(device)
            if devices > 1:
                rows = Tiling((1, 1), tuple(range(devices))).of_first_dim(2)
                annotate(inputs, rows)
                annotate(targets, rows)
        (net(inputs) - targets).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if device is not None:
            runtime.sync()


def cut(net, layout, devices):
    """Lay parameters over devices."""
    ids = tuple(range(devices))
    for place, param in enumerate(net.parameters()):
        if layout == "fsdp":
            lay(param, Tiling((1,), ids).of_first_dim(param.ndim))
        elif layout == "model" and param.ndim == 2:
            lay(param, Tiling((2, 1) if place % 4 else (1, 2), (*ids[::2], *ids[1::2])))


def trained(device, layout, devices, options):
    """How far the CPU is, programs and reads of 12 steps, and whether copies are the same."""
    reference, net = model(), model().to(device)
    if devices > 1:
        cut(net, layout, devices)
    expected = samestep.MuonAdamW(reference, **options)
    opt = samestep.MuonAdamW(net, **options)
    runtime.sync()
    train(reference, expected, 12)
    before = runtime.programs(), runtime.host_reads()
    train(net, opt, 12, device, devices)
    counted = runtime.programs() - before[0], runtime.host_reads() - before[1]
    pairs = list(zip(reference.parameters(), net.parameters(), strict=True))
    away = max((a - b.cpu()).abs().max().item() for a, b in pairs)
    seen = [runtime.seen_by(param) for param in net.parameters()]
    same = all(torch.equal(one, of_one[0]) for of_one in seen for one in of_one)
    return away, counted, same


@pytest.mark.parametrize(
    ("devices", "layout"),
    [(1, "data"), (2, "data"), (4, "data"), (4, "fsdp"), (4, "model"), (8, "fsdp")],
)
def test_the_steps_of_one_process(devices, layout):
    """With clipping and a schedule through 0; the second step adds to counts, the first begins."""
    away, (programs, reads), same = on_devices(
        devices, trained, layout, devices, {**OPTIONS, "max_grad_norm": 0.5}
    )
    assert away < 2e-6
    assert programs == 2
    assert reads == 0
    assert same


def test_options_of_rules():
    """Variance reduction, cautious decay, fused rows, without nesterov."""
    options = {
        **OPTIONS,
        "variance_beta2": 0.9,
        "cautious": True,
        "nesterov": False,
        "split_sizes": {"2.weight": (16, 24)},
    }
    away, (programs, reads), same = on_devices(4, trained, "data", 4, options)
    assert (away < 2e-5, programs, reads, same) == (True, 2, 0, True)


class OwnRule(MuonRule):
    """A matrix rule that is not in stages."""

    name = "own"
    prepare = None  # the protocol takes it for missing

    def update(self, param, grad, state, scalars, options):
        return MuonRule().update(param, grad, state, scalars, options)


def of_own_rule(device):
    RULES["own"] = OwnRule()
    options = {**OPTIONS, "overrides": {"2.weight": {"rule": "own"}}}
    return trained(device, "data", 2, options)


def test_a_matrix_rule_of_ones_own():
    away, (programs, reads), same = on_devices(2, of_own_rule)
    assert (away < 2e-6, programs, reads, same) == (True, 2, 0, True)


def with_masters(device):
    net = model().to(torch.bfloat16).to(device)
    opt = samestep.MuonAdamW(net, **OPTIONS, master_weights=True)
    for step in range(3):
        inputs, targets = (each.to(torch.bfloat16).to(device) for each in batch(step))
        (net(inputs) - targets).square().mean().backward()
        opt.step()
        opt.zero_grad()
        runtime.sync()
    return {
        (name, key): (tuple(runtime.held_by(tensor)[0].shape), tensor.dtype)
        for name, param in net.named_parameters()
        for key, tensor in opt.state[param].items()
    }


def test_master_weights_are_divided_too():
    held = on_devices(4, with_masters)
    assert held["2.weight", "master_weight"] == ((10, 40), torch.float32)
    assert held["2.weight", "momentum_buffer"] == ((10, 40), torch.float32)
    assert held["2.bias", "master_weight"] == ((40,), torch.float32)  # below the crossover


def replaced(device):
    net, reference = model().to(device), model()
    opts = [samestep.MuonAdamW(each, **OPTIONS) for each in (net, reference)]
    train(net, opts[0], 2, device)
    train(reference, opts[1], 2)
    for each in (net, reference):
        for param in each.parameters():
            param.data = param.data * 2
    train(net, opts[0], 2, device)
    train(reference, opts[1], 2)
    pairs = zip(reference.parameters(), net.parameters(), strict=True)
    return max((a - b.cpu()).abs().max().item() for a, b in pairs)


def test_data_that_was_replaced_is_stepped():
    """A tensor of XLA has no address by which that is seen."""
    assert on_devices(1, replaced) < 2e-6


def missing_gradients(device):
    net = model().to(device)
    opt = samestep.MuonAdamW(net, **OPTIONS)
    runtime.sync()
    start = net[2].weight.detach().cpu()
    counts = []
    for step in range(9):
        before = runtime.programs()
        for place, param in enumerate(net.parameters()):
            if place % 2 == step % 2 and place != 2:
                param.grad = torch.full(param.shape, 0.5).to(device)
        opt.step()
        opt.zero_grad()
        runtime.sync()
        counts.append(runtime.programs() - before)
    untouched = torch.equal(net[2].weight.cpu(), start)
    return counts, untouched, opt.state[net[2].weight]["momentum_buffer"].cpu().any().item()


def test_presence_that_settles_compiles_no_more():
    """Two kinds of steps, each for the first time and with counts to add to."""
    counts, untouched, moved = on_devices(2, missing_gradients)
    assert sum(counts) <= 4
    assert counts[4:] == [0] * 5
    assert untouched
    assert not moved


def not_finite(device):
    net = model().to(device)
    opt = samestep.MuonAdamW(net, **OPTIONS, max_grad_norm=math.inf)
    train(net, opt, 2, device, 2)
    before = [
        (p.cpu().clone(), {k: t.cpu() for k, t in opt.state[p].items()}) for p in net.parameters()
    ]
    reads = runtime.host_reads()
    for param in net.parameters():
        param.grad = torch.full(param.shape, 0.5).to(device)
    net[0].bias.grad[3] = math.nan
    opt.step()
    runtime.sync()
    reads = runtime.host_reads() - reads
    after = [(p.cpu(), {k: t.cpu() for k, t in opt.state[p].items()}) for p in net.parameters()]
    same = [
        torch.equal(a, b) and all(torch.equal(s[k], t[k]) for k in s)
        for (a, s), (b, t) in zip(before, after, strict=True)
    ]
    return all(same), reads, opt.metrics()["grad_norm"].item()


def test_a_step_that_is_not_finite_changes_nothing():
    same, reads, norm = on_devices(2, not_finite)
    assert same
    assert reads == 0
    assert math.isnan(norm)


# --- memory ----------------------------------------------------------------------------------


def gpt_shapes():
    """A GPT of width 64, without its forward."""
    net = nn.Module()
    shapes = {"embed": (512, 64), "head": (512, 64), "norm": (64,)}
    for layer in range(4):
        shapes |= {f"query_{layer}": (192, 64), f"out_{layer}": (64, 64), f"up_{layer}": (256, 64)}
        shapes |= {f"down_{layer}": (64, 256), f"scale_{layer}": (64,)}
    for name, shape in shapes.items():
        net.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return net


def bytes_of_state(device, devices, layout):
    net = gpt_shapes().to(device)
    cut(net, layout, devices)
    opt = samestep.MuonAdamW(net, overrides={"embed": {"rule": "adamw"}, "head": {"rule": "adamw"}})
    for _ in range(3):
        for param in net.parameters():
            param.grad = torch.full(param.shape, 0.5).to(device)
        opt.step()
        opt.zero_grad()
        runtime.sync()
    held, whole = [0] * devices, 0
    for entries in opt.state.values():
        for tensor in entries.values():
            whole += tensor.numel() * tensor.element_size()
            for place, part in enumerate(runtime.held_by(tensor)):
                held[place] += part.numel() * part.element_size()
    return held, whole


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("layout", ["data", "fsdp", "model"])
def test_state_is_divided_evenly(devices, layout):
    """4 bytes per element of Muon's, 8 of AdamW's, over the number of devices."""
    held, whole = on_devices(devices, bytes_of_state, devices, layout)
    matrices = 4 * 64 * (192 + 64 + 256 + 256)
    formula = (4 * matrices + 8 * (2 * 512 * 64 + 5 * 64)) / devices
    assert whole == pytest.approx(formula * devices, rel=0.001)  # and a step count each
    assert max(held) == pytest.approx(formula, rel=0.05)
    assert min(held) == max(held)


# --- checkpoints -----------------------------------------------------------------------------


def whole(net, opt):
    return (
        {name: param.detach().cpu() for name, param in net.named_parameters()},
        {
            name: {key: tensor.cpu() for key, tensor in entries.items()}
            for name, entries in opt.whole_state().items()
        },
    )


def same(one, other):
    assert one[0].keys() == other[0].keys()
    assert one[1].keys() == other[1].keys()
    for name, param in one[0].items():
        assert torch.equal(param, other[0][name]), name
    for name, entries in one[1].items():
        assert entries.keys() == other[1][name].keys()
        for key, tensor in entries.items():
            assert torch.equal(tensor, other[1][name][key]), (name, key)
    return True


def run_and_save(device, path, layout):
    net = model().to(device)
    cut(net, layout, 4)
    opt = samestep.MuonAdamW(net, **OPTIONS)
    train(net, opt, 3, device, 4)
    samestep.save(path, net, opt)
    return whole(net, opt)


def load_on_rank(_, path, onwards, sharding):
    torch.manual_seed(99)
    net = nn.Sequential(*[copy.deepcopy(layer) for layer in model()])
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1.0)
    opt = samestep.MuonAdamW(net, **OPTIONS, sharding=sharding)
    samestep.load(path, net, opt)
    samestep.save(onwards, net, opt)
    return whole(net, opt)


def load_on_xla(device, path, layout):
    net = model().to(device)
    cut(net, layout, 4)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1.0)
    opt = samestep.MuonAdamW(net, **OPTIONS)
    samestep.load(path, net, opt)
    found = whole(net, opt)
    train(net, opt, 1, device, 4)  # and it goes on, where it was laid
    return found, [str(tiling_of(p)) for p in net.parameters()]


@pytest.mark.parametrize(("layout", "sharding"), [("data", "zero2"), ("fsdp", "none")])
def test_checkpoints_to_cpu_ranks_and_back(tmp_path, layout, sharding):
    saved = on_devices(4, run_and_save, tmp_path / "xla", layout)
    of_ranks = run_forked(
        2, load_on_rank, tmp_path / "xla", tmp_path / "cpu", sharding, timeout=60.0
    )
    assert all(same(saved, one) for one in of_ranks)
    found, tilings = on_devices(4, load_on_xla, tmp_path / "cpu", "fsdp")
    assert same(saved, found)
    assert all("4" in tiling for tiling in tilings)


# --- what is refused -------------------------------------------------------------------------


def refused(device, options):
    with pytest.raises(ValueError) as error:
        samestep.MuonAdamW(model().to(device), **options)
    return str(error.value)


def test_compile_is_refused():
    message = on_devices(1, refused, {"compile": True})
    assert message.startswith("compile has no use for '0.weight', which is on an XLA")


def test_a_process_group_is_refused():
    def fn(_):
        return refused(runtime.start(1), {})

    try:
        messages = run_forked(2, fn, timeout=60.0)
    except RanksFailed as failed:
        pytest.fail(str(failed))
    assert all(
        "is on an XLA device, and there is a process group of 2 ranks" in each for each in messages
    )


def rank_of_the_page(_):
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", **runtime.QUIET}
    return run_page(DOCS / "xla.md")


def test_the_code_of_the_page():
    """The blocks of docs/xla.md, one after the other, on four devices."""
    assert run_forked(1, rank_of_the_page, timeout=400.0) == [[]]
