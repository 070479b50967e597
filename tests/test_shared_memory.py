"""Parameters in the same memory are refused, in one process and in every layout.

torch's optimizers take them for two, and update that memory once with each. Parameters that lie
beside each other in one buffer share nothing.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.layout.memory import overlap
from tests.ranks import run_forked
from tests.soak import twin

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero2, overlap": {"sharding": "zero2", "overlap_grad_reduce": True},
    "flat": {"buffers": "flat"},
    "flat zero1, overlap": {
        "buffers": "flat",
        "sharding": "zero1",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "reduced": {"grads": "reduced"},
}


def model(**params):
    """A module with these parameters."""
    found = nn.Module()
    for name, value in params.items():
        setattr(found, name, nn.Parameter(value))
    return found


def values(*shape):
    torch.manual_seed(0)
    return torch.randn(shape)


def tied_by_data():
    torch.manual_seed(0)
    head, embedding = nn.Linear(8, 12, bias=False), nn.Embedding(12, 8)
    head.weight.data = embedding.weight.data
    return nn.ModuleDict({"embedding": embedding, "head": head})


def convolution_as_matrix():
    convolution, linear = nn.Conv1d(8, 8, 1), nn.Linear(8, 8)
    linear.weight.data = convolution.weight.data.view(8, 8)
    return nn.ModuleDict({"convolution": convolution, "linear": linear})


def transposed():
    one = values(8, 8)
    return model(one=one, other=one.T)


def partly():
    both = values(96)
    return model(one=both[:64].view(8, 8), other=both[32:].view(8, 8))


def inside():
    """One that others lie between: not next to each other by where they begin."""
    whole = values(256)
    return model(one=whole.view(16, 16), between=values(8, 8), other=whole[64:128].view(8, 8))


SHARED = [tied_by_data, convolution_as_matrix, transposed, partly, inside]


def neighbours():
    """Views of one buffer, as of a flat model."""
    both = values(128)
    return model(one=both[:64].view(8, 8), other=both[64:].view(8, 8))


def one_parameter():
    torch.manual_seed(0)
    head, embedding = nn.Linear(8, 12, bias=False), nn.Embedding(12, 8)
    head.weight = embedding.weight
    return nn.ModuleDict({"embedding": embedding, "head": head})


def refusal(build):
    with pytest.raises((ValueError, RuntimeError)) as raised:
        build()
    return str(raised.value)


def test_elements_in_common_count_and_not_storages():
    whole = values(8, 16)
    left, right = whole[:, :8], whole[:, 8:]
    assert overlap([("left", left), ("right", right)]) is None  # columns between each other
    assert overlap([("left", left), ("right", right), ("row", whole[3])]) == ("left", "row")
    assert overlap([("left", left), ("some", whole[:, 6:10])]) == ("left", "some")
    assert overlap([("even", whole[::2]), ("odd", whole[1::2])]) is None
    assert overlap([("even", whole[::2]), ("three", whole[::3])]) == ("even", "three")
    assert overlap([("whole", whole), ("bits", whole.view(torch.int32))]) == ("whole", "bits")
    assert overlap([("a", whole[:0]), ("b", whole)]) is None
    assert overlap([("a", torch.empty(3, device="meta")), ("b", whole)]) is None
    assert overlap([("right", right)], [("one", left), ("other", left)]) is None
    assert overlap([("right", right)], [("some", whole)]) == ("right", "some")


def names_of(build):
    return [
        name for name, _ in build().named_parameters() if "bias" not in name and "betw" not in name
    ]


@pytest.mark.parametrize("build", SHARED)
def test_one_process(build):
    for kind in (samestep.MuonAdamW, samestep.AdamW):
        text = refusal(lambda k=kind: k(build()))
        assert "lie in the same memory" in text
        assert all(repr(name) in text for name in names_of(build))


@twin
def test_every_layout_on_every_rank():
    def job(rank):
        for build in SHARED:
            for layout, options in LAYOUTS.items():
                text = refusal(lambda b=build, o=options: samestep.MuonAdamW(b(), **o))
                assert all(repr(name) in text for name in names_of(build)), (layout, text)
        for build in (neighbours, one_parameter):
            for options in LAYOUTS.values():
                samestep.MuonAdamW(build(), **options)
        # On one rank alone, and in a group that is added.
        build = neighbours if rank else partly
        text = refusal(lambda: samestep.MuonAdamW(build()))
        assert "plan differs between ranks" in text
        assert "lie in the same memory" in text
        whole = tied_by_data()
        opt = samestep.MuonAdamW(whole["embedding"])
        added = {"params": [("head", whole["head"].weight)], "rule": "muon"}
        assert "lie in the same memory" in refusal(lambda: opt.add_param_group(added))
        assert len(opt.param_groups) == 1
        return True

    assert all(run_forked(2, job))


def step_of(opt):
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    opt.step()


def test_memory_that_is_shared_after_construction_is_found_before_a_step():
    """Before steps 1, 2, 4, 8, ..., on every rank, also if one rank alone has done it."""

    def job(rank):
        for options in ({}, {"sharding": "none"}):
            for who in ((0, 1), (1,)):
                part = neighbours()
                opt = samestep.MuonAdamW(part, **options)
                step_of(opt)
                if rank in who:
                    part.other.data = part.one.data
                text = refusal(lambda o=opt: step_of(o))
                assert "lie in the same memory" in text or rank not in who
                assert "'one' and 'other'" in text or "could not take the step" in text
        return True

    assert all(run_forked(2, job))
    part = neighbours()
    opt = samestep.MuonAdamW(part)
    part.other.data = part.one.data
    assert "lie in the same memory" in refusal(lambda: step_of(opt))


def test_parts_of_dtensors_in_the_same_memory():
    def job(rank):
        part = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        fully_shard(part)
        samestep.MuonAdamW(part)
        part[1].weight._local_tensor = part[0].weight._local_tensor
        text = refusal(lambda: samestep.MuonAdamW(part))
        assert "'0.weight' and '1.weight' lie in the same memory" in text
        return True

    assert all(run_forked(2, job))


def test_flat_buffers_part_no_parameter_from_what_is_not_trained():
    """A frozen parameter or a buffer of the model would stay behind."""

    def frozen():
        found = tied_by_data()
        found["head"].weight.requires_grad_(False)
        return found

    def buffer():
        found = model(one=values(8, 8))
        found.register_buffer("same", found.one.data[2:])
        return found

    def job(rank):
        for build, names in ((frozen, "'embedding.weight'"), (buffer, "'same'")):
            text = refusal(lambda b=build: samestep.MuonAdamW(b(), buffers="flat"))
            assert "flat buffers would part them" in text
            assert names in text
            part = build()
            opt = samestep.MuonAdamW(part)  # they follow
            for param in part.parameters():
                param.grad = torch.ones_like(param) if param.requires_grad else None
            opt.step()
        return torch.equal(part.same, part.one[2:])

    assert all(run_forked(2, job))
