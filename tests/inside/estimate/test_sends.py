"""What layers and stages send each other is foreseen, call by call, against real ranks."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.lab.estimate.activations import Batch, LayerMemory
from samestep.lab.estimate.cluster import plan_shares, stack_grid, stack_units
from samestep.lab.estimate.decoder import gpt_shape
from samestep.lab.estimate.fsdp import fsdp_collectives
from samestep.lab.estimate.sends import LayerSends
from samestep.lab.estimate.slots import passes_of
from samestep.mesh import Degrees, build
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.stack import Stack
from samestep.parallel.stages import cut
from tests.inside.estimate.test_activations import MOE, ROOM, SMALL, SP, recomputing
from tests.ranks import run_cases
from tests.soak import SOAK, some, twin

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "recv_"}  # what is received others have sent


class Calls(TorchDispatchMode):
    """Everything that is sent: kind, bytes at least, and ranks. What it does not know raises."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what they do inside comes here again
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.found.append(_sent(KINDS[name], name, args))
        return func(*args, **(kwargs or {}))


def _sent(kind, name, args):
    if isinstance(args[-1], str):  # functional collectives name their group
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    else:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
    ranks, given = tuple(dist.get_process_group_ranks(group)), args[0]
    if name in ("allgather_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        given = args[1]  # after what is to be filled
    given = given[0] if isinstance(given, list) else given
    size, count = given.numel() * given.element_size(), len(ranks)
    if kind == "all_to_all":
        splits = args[4] if name == "alltoall_base_" else args[2]
        own = splits[group.rank()] if splits else given.shape[0] // count  # (): evenly
        return kind, size - own * (size // max(1, given.shape[0])), ranks
    share = {"all_gather": count - 1, "send": 1, "all_reduce": 2 * (count - 1) / count}
    return kind, round(size * share.get(kind, (count - 1) / count)), ranks


def measured(rank, case):
    """All that one rank sends in the second of two backward passes."""
    mesh, more, recompute, micro_batches = case
    torch.set_num_threads(1)
    config = GPTConfig(**{**vars(SMALL), **more})
    torch.manual_seed(0)
    model = GPT(config)
    stack = Stack(
        model, gpt_plan(config), build(**mesh), loss=mean_loss,
        micro_batches=micro_batches * ("pp" in mesh),
        schedule="interleaved" if micro_batches == 4 else "1f1b",
    )  # fmt: skip
    recomputing(model, recompute)
    torch.manual_seed(stack.batch_place)
    tokens, targets = torch.randint(config.vocab_size, (2, 2 * micro_batches, 32))
    stack.backward(tokens, targets)
    with Calls() as calls:
        stack.backward(tokens, targets)
    return calls.found


def foreseen(case, rank, world):
    mesh, more, recompute, micro_batches = case
    config, degrees = GPTConfig(**{**vars(SMALL), **more}), Degrees(world, **mesh)
    stage = degrees.coordinates(rank)["pipe"]
    grid = stack_grid(degrees, stage)
    per_rank = 2 if micro_batches == 4 else 1
    tokens = 64
    if degrees.pp == 1:
        tokens, micro_batches = 64 * micro_batches, 1
    batch = Batch(tokens, micro_batches, recompute, per_rank)
    memory = LayerMemory(gpt_shape(config), degrees, batch, torch.float32, on_cpu=True)
    sends = LayerSends(memory).of_rank(stage)
    layers = [layer for of_stage in sends.layers.values() for layer in of_stage]
    launched = [each for layer in layers for each in layer.forward]
    launched += [each for layer in reversed(layers) for each in layer.in_backward(recompute)]
    launched *= micro_batches
    with torch.device("meta"):
        model = GPT(config)
    if degrees.pp > 1:
        cut(model, GPT_STAGES, degrees.pp * per_rank, [*sends.layers])
    plan = gpt_plan(config)
    units = stack_units(
        model, dict(plan.named(model, "blocks")), plan_shares(model, plan, degrees), degrees
    )
    passes = "".join(each.kind for each in passes_of(stage, degrees.pp, micro_batches, per_rank))
    launched += fsdp_collectives(units, passes=passes)
    found = []
    for each in launched:
        place = grid.place(rank % grid.ranks, each.peers)
        sent = each.of(0).sent(place, each.peers.size)
        found.append((each.traffic.kind, sent, tuple(degrees.peers(rank, *each.peers.axes))))
    if degrees.pp > 1:
        pipe = tuple(degrees.peers(rank, "pipe"))
        found += [("send", sends.boundary, pipe)] * sends.neighbours * micro_batches
        loss = round(8 * (len(pipe) - 1) / len(pipe))  # which all ranks of a pipeline get
        found.append(("all_reduce", loss, pipe))
    return found


PAIRS = [
    ({"tp": 2}, {}, "none", 1),
    (SP, MOE, "full", 1),
    ({"tp": 2, "expert_tensor_parallel": 1}, MOE, "none", 1),
    ({"ep": 2}, ROOM, "full", 1),
    ({"ep": 2, "ep_carries_data": False}, MOE, "none", 1),
    ({"pp": 2}, {}, "none", 3),
    ({"pp": 2}, {"layers": 4}, "none", 4),
]
FOURS = [({"pp": 2, **SP}, {}, "none", 2), ({"ep": 2, **SP}, ROOM, "none", 1)]
if SOAK:
    PAIRS += [
        ({"tp": 2}, MOE, "none", 1),
        (SP, {}, "full", 1),
        (SP, {}, "none", 1),
        (SP, MOE, "none", 1),
        ({**SP, "expert_tensor_parallel": 1}, MOE, "none", 1),
        ({"ep": 2}, ROOM, "none", 1),
        ({"ep": 2, "ep_carries_data": False}, MOE, "full", 1),
    ]
    FOURS += [
        ({"ep": 2, "tp": 2}, ROOM, "none", 1),
        ({"ep": 2, "tp": 2}, ROOM, "full", 1),
        ({"ep": 2, "tp": 2, "ep_carries_data": False}, MOE, "none", 1),
        ({"ep": 2, **SP, "ep_carries_data": False}, MOE, "none", 1),
        ({"ep": 2, "tp": 2, "ep_carries_data": False, "expert_tensor_parallel": 1}, MOE, "none", 1),
        ({"pp": 2, "tp": 2}, MOE, "none", 3),
        ({"pp": 4}, {"layers": 8}, "none", 4),
    ]


@pytest.mark.parametrize(("world", "cases"), some([(2, PAIRS), (4, FOURS)]))
def test_every_call_of_forward_and_backward_is_foreseen(world, cases):
    for case, ranks in run_cases(world, cases, measured):
        for rank, found in enumerate(ranks):
            expected = foreseen(case, rank, world)
            assert Counter(found) == Counter(expected), (case, rank)
            assert len(found) > 2, case
            if not case[0].keys() & {"pp", "ep"}:  # nobody gathers parameters meanwhile
                assert found == expected, (case, rank)


@twin
def test_tokens_that_choose_freely_travel_as_expected():
    """Every call is foreseen, and bytes are about those of experts chosen equally often."""
    case = ({"ep": 2}, MOE, "none", 16)
    ((_, ranks),) = run_cases(2, [case], measured)
    for rank, calls in enumerate(ranks):
        planned = [sent for kind, sent, _ in foreseen(case, rank, 2) if kind == "all_to_all"]
        found = [sent for kind, sent, _ in calls if kind == "all_to_all"]
        assert len(found) == len(planned) == 2 * 5
        assert sum(found) == pytest.approx(sum(planned), rel=0.1)
        assert [sent for sent in found if sent < 100] == [16, 16]  # how many come


def test_as_much_comes_as_goes():
    """A link is as busy as its busier direction: of these, both are alike."""
    degrees = Degrees(8, ep=4, tp=2, sequence_parallel=True)
    shape = gpt_shape(GPTConfig(**{**vars(SMALL), **MOE}))
    sends = LayerSends(LayerMemory(shape, degrees, Batch(64)))
    for layer in (sends.embedding(), sends.block(0), sends.head()):
        for each in (*layer.forward, *layer.backward):
            assert each.received_by_all().tolist() == each.sent_by_all().tolist(), each.name
