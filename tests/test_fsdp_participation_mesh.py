"""Ranks of a data axis use different modules, with FSDP2 over tensor and expert parallel."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from samestep.fsdp import skip, take_part
from tests.ranks import run_forked

# By step and data rank: the blocks that it uses. Nobody uses the last one; in one step nobody any.
USED = (((0,), (0, 1)), ((1,), (1,)), ((), (0,)), ((), ()), ((0, 1), (1,)))
BLOCKS = 3
EXPERTS = {"*.experts": {"rule": "muon"}}


class Block(nn.Module):
    """An MLP with a norm, and a stack of experts whose answers are added up."""

    axis: DeviceMesh | None = None  # has the experts

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.up(self.norm(x)).tanh())
        experts, seen = self.experts, x
        if self.axis is not None:  # a rank has some of them, and a summand of what they say
            experts = experts.to_local()
            whole = DTensor.from_local(x, self.axis, [Replicate()], run_check=False)
            seen = whole.to_local(grad_placements=[Partial()])
        said = torch.einsum("eij,bj->bi", experts, seen)
        if self.axis is not None:
            said = DTensor.from_local(said, self.axis, [Partial()], run_check=False).full_tensor()
        return hidden + said.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, used, leave_out) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x) if number in used else leave_out(block, x)
        return x


def batch(step, data):
    generator = torch.Generator().manual_seed(100 * step + data)
    return torch.randn(4, 8, generator=generator, requires_grad=True)


def one_process():
    model = Net()
    opt = samestep.MuonAdamW(model, lr=0.05, overrides=EXPERTS)
    for step, of_ranks in enumerate(USED):
        for data, used in enumerate(of_ranks):
            if used:
                out = model(batch(step, data), used, lambda _, x: x)
                (out.pow(2).mean() / len(of_ranks)).backward()
        opt.step()
        present = opt.metrics()["present"].clone()
        opt.zero_grad()
    return model, present


def test_blocks_that_only_some_data_ranks_use():
    """Means count what is missing as zeros; what nobody has used is left as it was, bit for bit."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model = Net()
        for block in model.blocks:
            parallelize_module(block, mesh["model"], {"up": ColwiseParallel()})
            parallelize_module(block, mesh["model"], {"down": RowwiseParallel()})
            spread = distribute_tensor(block.experts.detach(), mesh["model"], [Shard(0)])
            block.experts, block.axis = nn.Parameter(spread), mesh["model"]
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        take_part(model)
        opt = samestep.MuonAdamW(model, lr=0.05, overrides=EXPERTS)
        data = mesh.get_local_rank("data")
        for step, of_ranks in enumerate(USED):
            out = model(batch(step, data), of_ranks[data], skip)
            out.pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        names = [name for name, _ in model.named_parameters()]
        return {name: opt.full_parameter(name) for name in names}, opt.metrics()["present"]

    model, counted = one_process()
    start, expected = Net().state_dict(), model.state_dict()
    for found, present in run_forked(4, job):
        assert found.keys() == expected.keys()
        assert torch.equal(present, counted)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5)
            untouched = name.startswith(f"blocks.{BLOCKS - 1}.")
            assert torch.equal(value, start[name]) == untouched, name
