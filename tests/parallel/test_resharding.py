"""Checkpoints of any mesh load into any other, and into one process: every tensor, bit for bit."""

import torch
from torch.distributed.tensor import DTensor

import samestep
from samestep.lab.stress.matrix import Case, mean_loss, new_model, optimizer_keywords, tokens_of
from samestep.mesh import build
from samestep.models.gpt import GPTConfig, gpt_plan
from samestep.parallel.stack import Stack
from tests.checkpoint.training import spoil
from tests.ranks import run_forked
from tests.soak import SOAK, twin

SP = {"tp": 2, "sequence_parallel": True}
MESHES = {
    "fsdp": {},
    "tp sp ep": {**SP, "ep": 2},
    "ep 4": {"ep": 4},
    "ep hsdp": {"ep": 2, "replicate": 2},
    "tp pp": {"tp": 2, "pp": 2},
    "tp 4, whole experts": {"tp": 4, "expert_tensor_parallel": 1},
}
if not SOAK:  # every axis is in one of the others
    del MESHES["fsdp"], MESHES["ep hsdp"], MESHES["ep 4"]
GPT = GPTConfig(
    vocab_size=32, context=8, width=16, layers=2, heads=4, kv_heads=4, experts=4, expert_size=8
)


def values(opt):
    """Parameters and state of this rank by name, whole; put together by torch, not by us."""
    found = {}
    for group in opt.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found[name] = whole(param)
            found |= {f"{name}: {key}": whole(value) for key, value in opt.state[param].items()}
    return found


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def laid_out(name, seed):
    case = Case(name, 4, GPT, MESHES[name], sequences=4, steps=1, seed=seed)
    mesh = build(**case.mesh)
    stack = Stack(new_model(case), gpt_plan(GPT), mesh, loss=mean_loss)
    return case, stack, stack.optimizer(**optimizer_keywords(case))


def sources_of(name):
    """What a mesh loads: everything, or the checkpoint of the one that comes after it."""
    names = list(MESHES)
    return names if SOAK else [names[(names.index(name) + 1) % len(names)]]


def save_all(rank, folder):
    found = {}
    for name in MESHES:
        case, stack, opt = laid_out(name, seed=0)
        rows = case.sequences // stack.mesh.degrees.batch_ranks
        for step in range(2 if SOAK else 1):
            tokens = tokens_of(case, step)[rows * stack.batch_place :][:rows]
            stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            opt.step()
            opt.zero_grad()
        samestep.save(folder / name, stack.model, opt)
        found[name] = values(opt)
    return found


def load_all(rank, folder):
    found = {}
    for name in MESHES:
        _, stack, opt = laid_out(name, seed=7)
        for source in sources_of(name):
            spoil(stack.model, opt)
            samestep.load(folder / source, stack.model, opt)
            found[source, name] = values(opt)
    return found


def merged(of_ranks, key):
    return {name: value for own in of_ranks for name, value in own[key].items()}


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@twin
def test_every_mesh_loads_every_other(tmp_path):
    def job(rank):
        return save_all(rank, tmp_path), load_all(rank, tmp_path)

    saved, loaded = zip(*run_forked(4, job), strict=True)
    for source in MESHES:
        wanted = merged(saved, source)
        assert any("momentum_buffer" in name for name in wanted)
        for name in [name for name in MESHES if source in sources_of(name)]:
            for own in loaded:  # every rank, not only the last that has a name
                part = own[source, name]
                assert differing(part, {key: wanted[key] for key in part}) == [], (source, name)
            assert merged(loaded, (source, name)).keys() == wanted.keys(), (source, name)
        case = Case("alone", 1, GPT, {}, sequences=4, steps=1, seed=9)
        model = new_model(case)
        opt = samestep.MuonAdamW(model, **optimizer_keywords(case))
        samestep.load(tmp_path / source, model, opt)
        assert differing(values(opt), wanted) == [], source
