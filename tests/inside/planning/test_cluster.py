"""What the command guesses of a model is what the hybrid stack would do with it."""

from dataclasses import replace

import pytest
import torch

from samestep import cli
from samestep.groups.routing import Elsewhere
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Job, Settings, guessed_shares, plan_shares
from samestep.lab.estimate.decoder import SHAPES, build
from samestep.lab.estimate.figures import stage_figures
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.model import Model, load_model, stage_of
from samestep.lab.estimate.options import not_counted
from samestep.mesh.degrees import Degrees
from samestep.models.gpt import GPT, GPTConfig, gpt_plan
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.stages import cut
from tests.soak import SOAK, twin

DENSE = GPTConfig(layers=7)
EXPERTS = GPTConfig(layers=7, experts=8, expert_size=16)


def on_meta(config):
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_names_tell_how_parameters_are_cut(config):
    model = on_meta(config)
    for shared in (False, True):
        degrees = Degrees(4, tp=2, ep=2, sequence_parallel=shared)
        shares, guess = plan_shares(model, gpt_plan(config), degrees), guessed_shares(degrees)
        for name, param in model.named_parameters():
            assert guess(name, param) == shares(name, param), name


def test_stages_have_the_layers_of_the_stack():
    for stage in range(3):
        theirs = on_meta(EXPERTS)
        cut(theirs, GPT_STAGES, 3, [stage])
        mine = stage_of(on_meta(EXPERTS), stage, 3)
        assert [n for n, _ in mine.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for rank in range(3):
        theirs = on_meta(EXPERTS)
        cut(theirs, GPT_STAGES, 6, [rank, rank + 3])
        mine = stage_of(on_meta(EXPERTS), rank, 3, per_rank=2)
        assert [n for n, _ in mine.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_a_stage_is_routed_as_a_part_of_the_whole():
    """A head is one because an embedding of its shape is somewhere, if only in another stage."""

    class Unnamed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(64, 16)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(2))
            self.last = torch.nn.Linear(16, 64, bias=False)

    with torch.device("meta"):
        model = Model("unnamed", "", Unnamed(), None)
    plan = Job(model, Degrees(4, pp=2), Settings(), PRESETS["h200x8"]).grid_plan(1)
    rules = {name: g["rule"] for g in plan.groups for name in g["param_names"]}
    assert rules == {"layers.1.weight": "muon", "last.weight": "adamw"}


def test_a_module_beside_the_layers_may_have_parameters_and_modules():
    class Patches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.position = torch.nn.Parameter(torch.empty(4, 16))
            self.project = torch.nn.Linear(8, 16, bias=False)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.token = torch.nn.Parameter(torch.empty(16))
            self.patches = Patches()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(2))
            self.last = torch.nn.Linear(16, 64, bias=False)

    with torch.device("meta"):
        model = Whole()
    before, stages = dict(model.named_parameters()), [stage_of(model, n, 2) for n in range(2)]
    first, last = ([name for name, _ in stage.named_parameters()] for stage in stages)
    assert first == ["token", "patches.position", "patches.project.weight", "layers.0.weight"]
    assert last == ["layers.1.weight", "last.weight"]
    away = [name for name, module in stages[1].named_modules() if isinstance(module, Elsewhere)]
    assert away == ["patches", "layers.0"]
    assert dict(model.named_parameters()) == before


def test_a_shape_may_tell_active_experts_of_none():
    """As that of DeepSeek-V3's dense layers does."""
    shape = replace(SHAPES["nanochat-d20"], vocabulary=64, layers=1, active_experts=8)
    model = Model("dense", "", build(shape, torch.bfloat16), shape)
    units = Job(model, Degrees(2), Settings(sharding="zero3"), PRESETS["h200x8"]).units(0)
    assert [unit.brings_tokens for unit in units] == [1, 1]
    assert model.active_share == 1


@twin
def test_experts_are_gathered_by_those_who_have_the_same():
    model = load_model("deepseek-v3", torch.bfloat16)
    degrees, settings = Degrees(128, pp=16, ep=4), Settings(sharding="zero3")
    figures, _, _ = stage_figures(Job(model, degrees, settings, PRESETS["h800x8"]), 8)
    sent = {(t.axes, t.kind): t.mean_sent for t in figures.traffic if t.by == "FSDP2"}
    layers = [layer for layer in stage_of(model.module, 8, 16).layers if hasattr(layer, "experts")]
    stacks = 2 * sum(p.numel() for layer in layers for p in layer.experts.parameters())
    # Half of a quarter from the other rank with the same experts, as often as there are passes.
    assert sent["data", "reduce_scatter"] == stacks / 4 / 2
    assert sent["data", "all_gather"] >= 17 * stacks / 4 / 2
    assert ("data x expert", "reduce_scatter") in sent


@twin
def test_copies_of_parts_are_averaged_over_data_ranks():
    """Llama-70B as Megatron's template has it: bytes that follow from its shape, and FSDP2's."""
    model, degrees = load_model("llama-70b", torch.bfloat16), Degrees(64, tp=4, pp=4)
    sent, kept = {}, {}
    for name, settings in {
        "zero2": Settings(),
        "flat": Settings(sharding="zero1", buffers="flat"),
        "zero3": Settings(sharding="zero3"),
    }.items():
        figures, _, _ = stage_figures(Job(model, degrees, settings, PRESETS["h200x8"]), 1)
        sent[name] = {(t.axes, t.kind): t.mean_sent for t in figures.traffic}
        kept[name] = figures.memory.stays
        assert figures.memory.peak < PRESETS["h100x8"].device_memory
    part = 2 * figures.parameters / 4  # bytes that a rank holds; norms are whole
    for name in ("zero2", "flat"):
        assert sent[name]["data", "reduce_scatter"] == pytest.approx(part * 3 / 4, rel=1e-3)
        assert sent[name]["data", "all_gather"] == pytest.approx(part * 3 / 4, rel=1e-3)
        # Of the blocks that a data rank answers for, parts go to their owners and back, in 16 bit.
        assert sent[name]["model", "all_to_all"] == pytest.approx(2 * part / 4 * 3 / 4, rel=1e-3)
        assert sum(sent[name].values()) < 0.4 * sum(sent["zero3"].values())
        # Parameters whole, main copies and momentum of the blocks that it answers for.
        assert kept[name] == pytest.approx(part + 4 * part / 4, rel=0.01)


@pytest.mark.parametrize("data", [1, 2] if SOAK else [2])
def test_experts_compute_on_the_tokens_that_choose_them(data):
    """Whoever averages them: FSDP2, the optimizer, or nobody."""
    model, degrees = load_model("deepseek-v3", torch.bfloat16), Degrees(128 * data, pp=16, ep=8)
    batch = Batch(4096, 16, "none", 1)
    busy = []
    for sharding in ("zero1", "zero3"):
        settings = Settings(sharding=sharding)
        hardware = PRESETS["h200x8"]
        _, _, timeline = stage_figures(Job(model, degrees, settings, hardware, batch), 8)
        busy.append(float(timeline.computing.mean()))
    assert busy[0] == pytest.approx(busy[1], rel=0.02)


def test_what_is_not_counted_is_told(capsys):
    assert cli.main(["plan", "gpt2-xl", "--mesh", "dp=2,tp=2,pp=2", "--sharding", "zero3"]) == 0
    model = load_model("gpt2-xl", torch.bfloat16)
    lines = not_counted(model, Degrees(8, tp=2, pp=2), "zero3")
    shown = capsys.readouterr().out
    assert all(f"not counted: {line}" in shown for line in lines)
    assert any("under tp=2, pp=2" in line for line in lines)
    assert len(not_counted(model, Degrees(8), "zero2")) == 1
    assert not_counted(model, Degrees(8, tp=2, pp=2), "zero3", Batch(64, 2)) == []
    unknown = Model("of a factory", "", model.module, None)
    assert len(not_counted(unknown, Degrees(8, tp=2), "none", Batch(64))) == 2
