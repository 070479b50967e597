"""The kernels on a GPU, and what the optimizer promises there."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

import samestep
import samestep.optimizer.recorded_step
from samestep.kernels import choice
from samestep.update import lanes
from tests.gpu import needs_gpu, no_host_wait
from tests.splits import FUSED, RATES, values

pytestmark = [needs_gpu, pytest.mark.own_process]

if torch.cuda.is_available():
    from samestep.kernels.orthogonalize import orthogonalize_blocks
    from tests.inside.kernels.cases import *  # noqa: F403


def model(width=128, layers=3, dtype=torch.float32):
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Embedding(500, width),
        *(torch.nn.Linear(width, 4 * width) for _ in range(layers)),
        *(torch.nn.Linear(4 * width, width) for _ in range(layers)),
        *(torch.nn.Linear(width, width) for _ in range(layers)),
    )
    return made.to("cuda", dtype)


def give_gradients(model, step, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(step)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator, device="cuda")
        param.grad = (noise * scale).to(param.dtype)


def without_kernels(monkeypatch):
    monkeypatch.setenv(choice.SWITCH, "0")
    choice.missing.cache_clear()
    choice.missing_products.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch):
    yield
    monkeypatch.undo()
    choice.missing.cache_clear()
    choice.missing_products.cache_clear()


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weights_move_as_separate_ones_do(dtype, graph, rates):
    """Matrices in the gaps of others get the bits of contiguous ones, by kernels."""
    options = {**RATES[rates], "lr": 0.05, "master_weights": True, "cuda_graph": graph}
    named, apart = {}, {}
    for name, tensor in values(0).items():
        named[name] = torch.nn.Parameter(tensor.to("cuda", dtype))
        for number, matrix in enumerate(FUSED[name].apart(tensor)):
            matrix = matrix.contiguous().to("cuda", dtype)
            apart[f"{name} {number}"] = torch.nn.Parameter(matrix)
    overrides = {name: {"rule": "muon", **FUSED[name].options} for name in named}
    opt = samestep.MuonAdamW(named.items(), overrides=overrides, **options)
    separate = samestep.MuonAdamW(apart.items(), overrides={"*": {"rule": "muon"}}, **options)
    for step in range(1, 5):
        for name, grad in values(step).items():
            named[name].grad = grad.to("cuda", dtype)
            for number, matrix in enumerate(FUSED[name].apart(grad)):
                apart[f"{name} {number}"].grad = matrix.contiguous().to("cuda", dtype)
        opt.step()
        separate.step()
    plans = opt._runner.rules.kernel_plans.values()
    assert plans
    assert not [place for plan in plans for place in plan.others]
    for name, of in FUSED.items():
        for number, matrix in enumerate(of.apart(named[name].detach())):
            assert torch.equal(matrix, apart[f"{name} {number}"]), (name, number)


@pytest.mark.parametrize("preset", [None, "nanochat", "moonlight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_is_that_of_plain_torch(preset, dtype, monkeypatch):
    ended = []
    for kernels in (True, False):
        if not kernels:
            without_kernels(monkeypatch)
        net = model(dtype=dtype)
        start = [param.detach().float().clone() for param in net.parameters()]
        optimizer = samestep.MuonAdamW(net, preset=preset, max_grad_norm=1.0, master_weights=True)
        for step in range(5):
            give_gradients(net, step)
            optimizer.step()
        # Of narrow parameters their masters: rounding alone would be a tenth of the way.
        ends = [optimizer.state[p].get("master_weight", p.detach()) for p in net.parameters()]
        ended.append([end - begin for end, begin in zip(ends, start, strict=True)])
    for found, wanted in zip(*ended, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_the_host_never_waits():
    net = model()
    optimizer = samestep.MuonAdamW(net, max_grad_norm=1.0)
    for step in range(2):
        give_gradients(net, step)
        optimizer.step()
    torch.cuda.synchronize()
    give_gradients(net, 3)
    with no_host_wait():
        optimizer.step()


def test_a_step_with_an_infinite_gradient_changes_nothing():
    net = model()
    optimizer = samestep.MuonAdamW(net, max_grad_norm=1.0)
    give_gradients(net, 0)
    optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    state = [t.clone() for p in net.parameters() for t in optimizer.state[p].values()]
    give_gradients(net, 1)
    next(net.parameters()).grad[0, 0] = torch.inf
    optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))
    after = [t for p in net.parameters() for t in optimizer.state[p].values()]
    assert all(map(torch.equal, state, after))


def test_state_that_was_loaded_is_the_one_that_is_used():
    nets = [model(), model()]
    optimizers = [samestep.MuonAdamW(net, max_grad_norm=1.0) for net in nets]
    for step in range(3):
        give_gradients(nets[0], step)
        optimizers[0].step()
    give_gradients(nets[1], 7)
    optimizers[1].step()  # its plans are made
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for net, optimizer in zip(nets, optimizers, strict=True):
        for step in range(3, 6):
            give_gradients(net, step)
            optimizer.step()
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


@pytest.mark.parametrize("options", [{}, {"preset": "nanochat"}, {"compute_dtype": torch.float16}])
def test_a_recorded_step_is_the_same_step(options):
    """With gradients elsewhere every time, a schedule, a step that is skipped, loaded state."""
    nets = [model(), model()]
    pair = [
        samestep.MuonAdamW(net, max_grad_norm=1.0, cuda_graph=graph, **options)
        for net, graph in zip(nets, (False, True), strict=True)
    ]
    kept = []  # so that no gradient comes back to an old address
    for step in range(12):
        for net, optimizer in zip(nets, pair, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + step % 5)
            give_gradients(net, step)
            kept += [param.grad for param in net.parameters()]
            if step == 6:
                next(net.parameters()).grad[0, 0] = torch.inf
            optimizer.step()
        if step == 8:
            nets[1].load_state_dict(nets[0].state_dict())
            pair[1].load_state_dict(pair[0].state_dict())
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters())), step
        numbers = [optimizer.metrics() for optimizer in pair]
        assert numbers[0].keys() == numbers[1].keys()
        for key in numbers[0]:
            assert torch.equal(*(n[key].nan_to_num() for n in numbers)), (key, step)
    states = [
        [t for entry in optimizer.state.values() for t in entry.values()] for optimizer in pair
    ]
    assert all(map(torch.equal, *states))
    assert pair[1]._runner._recorded._graph is not None


@pytest.mark.parametrize("graph", [False, True])
def test_a_norm_that_is_begun_ahead_is_the_norm(graph):
    """Gradients that stay where they are, one that moves, one that is not finite."""
    nets = [model(), model()]
    pair = [samestep.MuonAdamW(net, max_grad_norm=1.0, cuda_graph=graph) for net in nets]
    pair[1]._runner.norm_begun = lambda *_, **__: nullcontext()
    for step in range(9):
        generator = torch.Generator("cuda").manual_seed(step)
        for net in nets:
            generator.manual_seed(step)
            for param in net.parameters():
                noise = torch.randn(param.shape, generator=generator, device="cuda")
                param.grad = noise if step in (0, 5) or param.grad is None else param.grad
                param.grad.copy_(noise)
            if step == 7:
                next(net.parameters()).grad[0, 0] = torch.inf
        for optimizer in pair:
            with no_host_wait() if step > 2 else nullcontext():
                optimizer.step()
        first, second = (optimizer.metrics()["grad_norm"] for optimizer in pair)
        assert torch.equal(first, second), step
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters())), step
    ahead = [optimizer._runner._norm_ahead for optimizer in pair]
    assert (ahead[0]._graph is not None) == graph
    assert ahead[1]._square is None


def test_a_recorded_step_measures_muon():
    nets = [model(), model()]
    pair = [
        samestep.Muon(
            [layer.weight for layer in net[1:]],
            max_grad_norm=1.0,
            update_rms=True,
            cuda_graph=graph,
        )
        for net, graph in zip(nets, (False, True), strict=True)
    ]
    for step in range(5):
        for net, optimizer in zip(nets, pair, strict=True):
            give_gradients(net, step)
            optimizer.step()
        first, second = (optimizer.metrics()["update_rms"] for optimizer in pair)
        assert torch.equal(first, second)
        assert float(first) > 0
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_a_recorded_step_refuses_to_measure_adamw():
    net = model()
    optimizer = samestep.MuonAdamW(net, update_rms=True, cuda_graph=True)
    give_gradients(net, 0)
    with pytest.raises(RuntimeError, match="update_rms=True, which no kernel measures for AdamW"):
        optimizer.step()


def test_a_recorded_step_takes_the_scale_of_a_grad_scaler():
    nets = [model(), model()]
    pair = [samestep.MuonAdamW(nets[graph], cuda_graph=bool(graph)) for graph in range(2)]
    scalers = [samestep.GradScaler("cuda", init_scale=2.0**10, growth_interval=2) for _ in pair]
    for step in range(8):
        for net, optimizer, scaler in zip(nets, pair, scalers, strict=True):
            scaler.scale(torch.ones((), device="cuda"))
            give_gradients(net, step, scale=float(scaler.get_scale()))
            if step == 4:
                next(net.parameters()).grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters())), step


@pytest.mark.parametrize("graph", [None, True])
def test_a_recorded_step_takes_gradients_that_come_and_go(graph):
    nets = [model(), model()]
    pair = [
        samestep.MuonAdamW(nets[0], cuda_graph=False),
        samestep.MuonAdamW(nets[1], cuda_graph=graph),
    ]
    for step in range(24):
        for net, optimizer in zip(nets, pair, strict=True):
            give_gradients(net, step)
            for place, param in enumerate(net.parameters()):
                if step % 12 in (3, 7, 8, 9, 10) and (place + step // 12) % 3 == 0:
                    param.grad = None
            optimizer.step()
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters())), step
    assert pair[1]._runner._recorded is not None
    assert pair[1]._runner._recorded._recordings >= 2  # also of the step with fewer gradients


def test_a_graph_that_nobody_asked_for_keeps_little_memory(monkeypatch):
    monkeypatch.setattr(samestep.optimizer.recorded_step, "SHARE", 1e-9)
    net = model()
    optimizer = samestep.MuonAdamW(net)
    for step in range(4):
        give_gradients(net, step)
        optimizer.step()
    assert optimizer._runner._recorded is not None
    assert optimizer._runner._recorded._recordings == 0


def test_a_recorded_step_is_replayed_without_waiting():
    net = model()
    optimizer = samestep.MuonAdamW(net, max_grad_norm=1.0, cuda_graph=True)
    for step in range(4):
        give_gradients(net, step)
        torch.cuda.synchronize()
        with no_host_wait() if step == 3 else nullcontext():
            optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_captured_by_others_is_refused():
    net = model()
    optimizer = samestep.MuonAdamW(net, max_grad_norm=1.0)
    give_gradients(net, 0)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="cuda_graph=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_a_block_does_not_depend_on_its_company():
    """Bit for bit: what makes layouts with other batches agree."""
    from samestep.rules.orthogonalize import orthogonalize

    for rows, cols in ((256, 256), (768, 3072), (3072, 768), (2048, 2048)):
        blocks = torch.randn(6, rows, cols, device="cuda")
        together = orthogonalize(blocks)
        alone = torch.stack([orthogonalize(block) for block in blocks])
        assert torch.equal(together, alone)


@pytest.mark.parametrize("graph", [False, True])
def test_batches_beside_each_other_give_the_same_bits(graph, monkeypatch):
    """Three shapes, of which two share a lane; large enough to run at the same time."""
    found = []
    for most in (lanes.MOST, 0):
        monkeypatch.setattr(lanes, "MOST", most)
        net = model(width=512, layers=4)
        net.append(torch.nn.Linear(512, 96, device="cuda"))
        torch.nn.init.zeros_(net[-1].weight)
        opt = samestep.MuonAdamW(net, lr=0.02, max_grad_norm=1.0, cuda_graph=graph)
        for step in range(12):
            give_gradients(net, step)
            opt.step()
        plans = opt._runner.rules.kernel_plans.values()
        assert max(len(plan.lanes) for plan in plans) == (2 if most else 1)
        found.append([param.detach().clone() for param in net.parameters()])
    assert all(map(torch.equal, *found))


def test_small_blocks_are_recorded_while_other_threads_use_the_device():
    """As gloo's threads do, which copy between host and device whenever they like."""
    ended, done = threading.Event(), []

    def others():
        while not ended.is_set():
            room = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
            done.append(room.to("cuda").sum().item())
            torch.cuda.empty_cache()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for width in range(80, 320, 16):  # a graph each
            blocks = torch.randn(2, width, 2 * width, device="cuda")
            table = samestep.rules.orthogonalize.step_coefficients("polar-express", 5)
            norm = {"norm_factor": 1.01, "eps": 1e-7, "eps_form": "add"}
            found = orthogonalize_blocks(blocks, table, "gram", dtype=torch.bfloat16, **norm)
            assert torch.isfinite(found).all()
    finally:
        ended.set()
        thread.join()
    assert done
