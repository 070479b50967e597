"""A plan over the axes of one program, against the same model in one process on the CPU."""

from dataclasses import replace

import pytest
import torch

import samestep
from samestep.mesh import SpmdMeshError, build_spmd
from samestep.mesh.replicate_list import ReplicateListError
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel.plan import PlanError
from samestep.parallel.router_losses import collect
from samestep.parallel.spmd import PartitionError, SpmdStack
from samestep.xla import runtime
from samestep.xla.tiling import clear, lay
from tests.xla.test_xla import on_devices, same, whole

pytestmark = pytest.mark.xla
CONFIG = GPTConfig(
    vocab_size=16, context=8, width=16, layers=1, heads=4, kv_heads=2, experts=4, expert_size=8
)
# Everything that a layer with experts may have, and one weight for queries, keys and values.
FULL = replace(
    CONFIG, fused_qkv=True, shared_experts=1, null_experts=1, balance_loss=0.01, z_loss=1e-3
)
OPTIONS = {
    "lr": 0.02,
    "max_grad_norm": 0.25,
    "crossover": 64,
    "overrides": {"*.experts.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}},
}


def new_model(config):
    torch.manual_seed(3)
    return GPT(config)


def batch(step):
    tokens = torch.randint(16, (16, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(device, config, mesh, fsdp, path):
    """Both ways at once: how far they are apart, what was counted, and what was saved."""
    stack = SpmdStack(
        new_model(config).to(device), gpt_plan(config), build_spmd(**mesh), loss=mean_loss,
        fsdp=fsdp,
    )  # fmt: skip
    reference = new_model(config)
    told = []
    facts = stack.trace(tell=told.append)
    opt = stack.optimizer(**OPTIONS)
    blocks = gpt_plan(config).split_sizes(reference) or None
    expected = samestep.MuonAdamW(reference, **OPTIONS, split_sizes=blocks)
    runtime.sync()
    before = runtime.programs(), runtime.host_reads()
    losses = []
    for step in range(4):
        losses.append(stack.backward(*batch(step)))
        opt.step()
        opt.zero_grad()
        runtime.sync()
    counted = runtime.programs() - before[0], runtime.host_reads() - before[1]
    for step in range(4):
        inputs, targets = batch(step)
        loss = mean_loss(reference(inputs), targets)
        loss.backward()
        expected.step()
        expected.zero_grad()
        losses[step] = abs(losses[step].item() - loss.item())
    stack.check()
    models = stack.model, reference
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    counts = list(zip(*map(loads, models), strict=True))
    seen = [runtime.seen_by(param) for param in stack.model.parameters()]
    samestep.save(path, stack.model, opt)
    return {
        "losses": max(losses),
        "parameters": max((a.cpu() - b).abs().max().item() for a, b in pairs),
        "counted": counted,
        "copies": all(torch.equal(one, of_one[0]) for of_one in seen for one in of_one),
        "loads": [torch.equal(a.cpu(), b) for a, b in counts],
        "router_losses": [collect(model).cpu() for model in models],
        "overflow": sum(int(b) for n, b in stack.model.named_buffers() if n.endswith("overflow")),
        "facts": facts["observed"],
        "told": told,
        "values": whole(stack.model, opt),
    }


def loads(model):
    return [b for name, b in model.named_buffers() if name.endswith("load")]


MESHES = {
    "data2.expert2.model2": (8, CONFIG, {"tp": 2, "ep": 2, "sequence_parallel": True}, True),
    "expert2.model2 of all": (4, FULL, {"tp": 2, "ep": 2, "expert_tensor_parallel": 1}, True),
    "copies2.expert2": (4, FULL, {"ep": 2, "ep_carries_data": False}, False),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_steps_of_one_process(name, tmp_path):
    devices, config, mesh, fsdp = MESHES[name]
    found = on_devices(devices, trained, config, mesh, fsdp, tmp_path / "saved")
    assert found["losses"] < 2e-6
    assert found["parameters"] < 2e-5
    assert found["counted"] == (2, 0)  # programs, reads of the host
    assert found["copies"]
    assert found["loads"] == [True]
    assert found["overflow"] == 0
    torch.testing.assert_close(*found["router_losses"])
    assert found["facts"]["expert_parallel_active"]
    assert found["facts"]["expert_lane"] == mesh.get("ep_carries_data", True)
    assert len(found["told"]) == 1
    # And what was saved goes on here, with the same bits.
    model = new_model(config)
    options = {**OPTIONS, "split_sizes": gpt_plan(config).split_sizes(model) or None}
    opt = samestep.MuonAdamW(model, **options)
    samestep.load(tmp_path / "saved", model, opt)
    assert same(found["values"], whole(model, opt))


def of_refusals(device):
    """Everything that one program refuses: each with its sentence."""
    import torch_xla.distributed.spmd as xs

    found = {}

    def refused(name, error, ask):
        with pytest.raises(error) as caught:
            ask()
        found[name] = str(caught.value)

    wrong = xs.Mesh(list(range(4)), (4, 1), ("data", "model"))
    right = xs.Mesh([0, 2, 1, 3], (2, 2), ("model", "data"))
    refused("mesh", SpmdMeshError, lambda: build_spmd(tp=2, mesh=wrong))
    mesh = build_spmd(tp=2, mesh=right)
    assert mesh.devices == (0, 1, 2, 3)
    assert mesh.xla.axis_names == ("data", "model")
    config = replace(CONFIG, experts=0)
    stack = SpmdStack(new_model(config).to(device), gpt_plan(config), mesh, loss=mean_loss)
    rows = batch(0)[0][:3]
    refused("rows", PlanError, lambda: stack.backward(rows, rows))
    norm, head = stack.model.norm.weight, stack.model.head.weight
    clear(norm)
    lay(norm, mesh.tiling((("model",),)))
    refused("norm", ReplicateListError, stack.check)
    clear(norm)
    lay(norm, mesh.tiling(stack.specs["norm.weight"]))
    stack.check()
    clear(head)
    lay(head, build_spmd().tiling((("data",), ())))
    refused("head", PartitionError, stack.check)
    return found


def test_what_one_program_refuses():
    found = on_devices(4, of_refusals)
    assert "its axis 'data' has 4 devices, and it needs 2" in found["mesh"]
    assert "a batch of 3 rows cannot be shared evenly by 2 devices" in found["rows"]
    assert "is on the replicate list (norms and QK-norm)" in found["norm"]
    assert "'head.weight' lies as" in found["head"]


def without_spmd(device):
    with pytest.raises(RuntimeError) as caught:
        build_spmd()
    return str(caught.value)


def test_one_device_is_no_mesh():
    assert "call torch_xla.runtime.use_spmd() before" in on_devices(1, without_spmd)
