"""Sizes that tensor parallel does not divide: of a vocabulary parts differ, others are refused."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

import samestep
from samestep.mesh import build
from samestep.models.gpt import GPT, GPTConfig, gpt_plan
from samestep.parallel.stack import Stack
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, twin

SHAPE = {"context": 8, "width": 16, "heads": 4, "kv_heads": 4}
SHAPE["layers"] = 2 if SOAK else 1  # they do not know of the vocabulary
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.1, "overrides": {"head.weight": {"rule": "muon"}}}
STEPS = 2
ODD = GPTConfig(vocab_size=33, **SHAPE)
TINY = GPTConfig(vocab_size=5, **SHAPE)  # of four ranks one has one entry, and one has none
EVEN = GPTConfig(vocab_size=32, **{**SHAPE, "layers": 2})
EXPERTS = GPTConfig(vocab_size=32, experts=4, expert_size=8, **SHAPE)
# By name: the model, its mesh, and how it is laid out and trained.
LAYOUTS = {
    "fsdp": (ODD, {"tp": 2}, {}, {}),
    "sequence parallel": (ODD, {"tp": 2, "sequence_parallel": True}, {}, {}),
    "an empty part": (TINY, {"tp": 4}, {}, {}),
    "copies": (ODD, {"tp": 2}, {"fsdp": False}, {"sharding": "zero1"}),
    "pipeline": (replace(ODD, layers=2), {"tp": 2, "pp": 2}, {}, {}),
}
if not SOAK:
    del LAYOUTS["fsdp"]  # the next one has it, too
ROWS = {"an empty part": [2, 2, 1, 0], "copies": [17, 16, 17, 16]}  # of the head, by rank


def model(config):
    torch.manual_seed(0)
    return GPT(config)


def mean_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(config, step, rows=4, length=9):
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(config.vocab_size, (rows, length), generator=generator)
    return found[:, :-1], found[:, 1:]


@cache
def alone(config):
    whole = model(config)
    opt = samestep.MuonAdamW(whole, **OPTIONS)
    losses = []
    for step in range(STEPS):
        inputs, targets = tokens(config, step)
        loss = mean_loss(whole(inputs), targets)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, whole, opt


@twin
def test_a_vocabulary_of_any_size_trains_and_saves_as_in_one_process(tmp_path):
    def job(rank, name):
        config, mesh, laid_out, options = LAYOUTS[name]
        stack = Stack(model(config), gpt_plan(config), build(**mesh), loss=mean_loss, **laid_out)
        opt = stack.optimizer(**OPTIONS, **options)
        losses = []
        ranks = stack.mesh.degrees.batch_ranks
        for step in range(STEPS):
            own = [part.chunk(ranks)[stack.batch_place] for part in tokens(config, step)]
            losses.append(stack.backward(*own).item())
            opt.step()
            opt.zero_grad()
        samestep.save(tmp_path / name, stack.model, opt)
        head = dict(stack.model.named_parameters()).get("head.weight")  # not on every stage
        return losses, None if head is None else (tuple(head.shape), head.to_local().shape[0])

    for name, found in run_cases(4, LAYOUTS, job):
        config = LAYOUTS[name][0]
        losses, expected, of_expected = alone(config)
        mean = torch.tensor([own for own, _ in found]).mean(0)
        assert mean.tolist() == pytest.approx(losses, rel=1e-5), name
        heads = [head for _, head in found if head is not None]
        assert {shape for shape, _ in heads} == {(config.vocab_size, 16)}
        if name in ROWS:
            assert [rows for _, rows in heads] == ROWS[name]
        loaded = model(config)
        opt = samestep.MuonAdamW(loaded, **OPTIONS)
        samestep.load(tmp_path / name, loaded, opt)
        for param_name, param in expected.named_parameters():
            own = loaded.get_parameter(param_name)
            torch.testing.assert_close(own, param, rtol=0, atol=3e-5)
            for key, value in of_expected.state[param].items():
                torch.testing.assert_close(opt.state[own][key], value, rtol=1e-3, atol=1e-5)


def refusals(rank):
    """The error of each attempt, by name; all of them before anything is sent."""

    def attempt(config, length, mesh, plan=None, rows=4):
        whole, on = model(config), build(**mesh)
        try:
            stack = Stack(whole, plan or gpt_plan(config), on, loss=mean_loss)
            stack.backward(*tokens(config, 0, rows, length + 1))
        except ValueError as error:  # a PlanError is one
            return str(error)
        return "nothing was said"

    plan = gpt_plan(EXPERTS)
    inside = replace(plan, branches=(*plan.branches, "blocks.*.mlp"))
    in_sequence = {"tp": 2, "sequence_parallel": True}
    return {
        "positions": attempt(EVEN, 7, in_sequence),
        "positions of a pipeline": attempt(EVEN, 7, {**in_sequence, "pp": 2}),
        "experts in branches": attempt(EXPERTS, 8, {"tp": 2}, inside),
        "experts in branches, in sequence": attempt(EXPERTS, 8, in_sequence, inside),
        "tokens of whole experts": attempt(
            EXPERTS, 7, {"tp": 2, "expert_tensor_parallel": 1}, rows=1
        ),
    }


def test_what_cannot_be_shared_is_refused_with_sizes_on_every_rank():
    for found in run_forked(4, refusals):
        said = "7 positions, which 2 ranks of tensor parallel cannot share evenly: use sequences"
        assert f"'embedding' was given {said} of 6 or 8" in found["positions"]
        assert f"the pipeline was given {said} of 6 or 8" in found["positions of a pipeline"]
        for where in ("experts in branches", "experts in branches, in sequence"):
            assert "branches: 'blocks.0.mlp' holds experts" in found[where]
            assert "leave it out of branches" in found[where]
        assert "7 tokens, which its 2 ranks" in found["tokens of whole experts"]
        assert "use batches of 6 or 8 tokens" in found["tokens of whole experts"]
