"""Each mistake is told, and docs/troubleshooting.md has a row for it; no mistake, no word."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.groups import mistakes
from tests.ranks import run_forked

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
# The first column of the table of messages: parts of messages.
QUOTED = [
    part
    for row in re.findall(r"^\| (`.*?) \|", PAGE.split("## Messages")[1].split("## It")[0], re.M)
    for part in re.findall(r"`([^`]+)`", row)
]


def on_the_page(message: object) -> bool:
    """Whether one part of a message on the page is in it, and no other."""
    return sum(part in str(message) for part in QUOTED) == 1


def test_the_page_has_a_row_for_each():
    """Each of these is asserted below: a message that is dropped leaves the page too."""
    assert len(QUOTED) == len(set(QUOTED)) == 18


def heard(action: Callable[[], object]) -> list[str]:
    """The warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def backward(model: nn.Module, rank: int = 0, step: int = 0) -> None:
    """Gradients of a rank's own data."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(3, 4, generator=generator)).square().sum().backward()


def train(model: nn.Module, opt: torch.optim.Optimizer, rank: int = 0, steps: int = 5) -> None:
    for step in range(steps):
        backward(model, rank, step)
        opt.step()
        opt.zero_grad()


# --- ranks that do not know of each other --------------------------------------------------------


def test_ranks_of_torchrun_without_a_process_group_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (message,) = heard(lambda: samestep.MuonAdamW(small_model()))
    assert on_the_page(message)
    samestep.MuonAdamW(small_model(), grads="reduced")  # meant to train separately
    monkeypatch.setenv("WORLD_SIZE", "1")
    samestep.MuonAdamW(small_model())


def test_an_optimizer_that_is_older_than_the_process_group_is_refused():
    model = small_model()
    built_before = [samestep.MuonAdamW(model), samestep.AdamW(model, grads="reduced")]
    built_before.append(copy.deepcopy(built_before[0]))
    of_a_copy = pickle.dumps(built_before[0])

    def on_rank(rank: int) -> list[str]:
        said = []
        for opt in built_before:
            try:
                train(model, opt, rank, steps=1)
                said.append("trained")
            except RuntimeError as error:
                said.append(str(error))
        train(model, pickle.loads(of_a_copy), rank, steps=1)  # made now, for one process
        fresh = small_model()
        train(fresh, samestep.MuonAdamW(fresh), rank)
        return said

    for refused, apart, copied in run_forked(2, on_rank):
        assert on_the_page(refused)
        assert apart == "trained"
        assert copied == refused


def test_a_process_group_of_one_rank_that_comes_later_is_no_mistake():
    model = small_model()
    opt = samestep.MuonAdamW(model)
    run_forked(1, lambda rank: train(model, opt))


# --- parameters that are not what they seem ------------------------------------------------------


def test_parameters_that_are_tied_by_their_data_are_refused():
    model = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6)})
    model["head"].weight.data = model["embedding"].weight.data
    with pytest.raises(ValueError, match="same memory") as caught:
        samestep.MuonAdamW(model)
    assert on_the_page(caught.value)


def test_a_stage_that_would_clip_by_its_own_norm_is_refused():
    def on_rank(rank: int) -> str:
        alone_here = [dist.new_group([other]) for other in range(2)][rank]
        with pytest.raises(ValueError, match="whole model") as caught:
            samestep.MuonAdamW(small_model(), process_group=alone_here, max_grad_norm=1.0)
        return str(caught.value)

    assert on_the_page(run_forked(2, on_rank)[0])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool):
    def on_rank(rank: int) -> list[str]:
        model = FullyShardedDataParallel(
            small_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        said = []
        for given in (model, model.parameters()):
            with pytest.raises(ValueError, match=r"belongs to FullyShardedDataParallel") as caught:
                samestep.AdamW(given)
            said.append(str(caught.value))
        return said

    for of_model, of_params in run_forked(2, on_rank):
        assert use_orig_params or on_the_page(of_model)
        assert "parameter 'param_groups[0][0]'" in of_params


@pytest.mark.parametrize("kind", [samestep.MuonAdamW, samestep.Muon, samestep.AdamW])
def test_16_bit_parameters_without_a_word_on_master_weights_are_told(kind: Any):
    def model() -> Any:
        if kind is samestep.Muon:
            return [nn.Parameter(torch.ones(4, 4, dtype=torch.float16))]
        return nn.Linear(4, 4).bfloat16()

    (message,) = heard(lambda: kind(model()))
    assert on_the_page(message) or kind is samestep.Muon
    if kind is samestep.Muon:
        assert "parameters are float16" in message
    kind(model(), master_weights=True)
    opt = kind(model(), master_weights=False)
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    named: Any = param if kind is samestep.Muon else ("late", param)
    rule = "muon" if kind is samestep.Muon else "adamw"
    opt.add_param_group({"params": [named], "rule": rule})
    if kind is not samestep.Muon:
        wide = kind(nn.Linear(4, 4))
        (message,) = heard(lambda: wide.add_param_group({"params": [named], "rule": rule}))
        assert "1 of 1 parameters are bfloat16 (late)" in message


# --- a model that was changed, a step in the wrong place -----------------------------------------


def test_a_model_that_got_other_parameters_is_told():
    model = small_model()
    for param in model[0].parameters():
        param.requires_grad_(False)
    opt = samestep.MuonAdamW(model)
    train(model, opt, steps=3)
    model[0].requires_grad_(True)
    (message,) = heard(lambda: train(model, opt, steps=8))
    assert on_the_page(message)
    new_head = small_model()
    opt = samestep.MuonAdamW(new_head)
    new_head[1] = nn.Linear(4, 4)
    (message,) = heard(lambda: train(new_head, opt))
    assert message.startswith("1.weight, 1.bias have gradients, but the optimizer does not")


def test_the_warning_names_a_call_that_trains_what_was_missing_and_comes_again_for_others():
    model = nn.Sequential(*small_model(), nn.Linear(4, 4))
    model[:2].requires_grad_(False)
    opt = samestep.MuonAdamW(model)
    model[0].requires_grad_(True)
    (message,) = heard(lambda: train(model, opt, steps=4))  # looked at three times
    assert message.startswith("0.weight, 0.bias have gradients")
    with pytest.raises(ValueError) as caught:
        opt.add_param_group({"params": [("0.weight", model[0].weight)]})
    assert on_the_page(caught.value)
    opt.add_param_group({"params": [("0.weight", model[0].weight)], "rule": "muon"})
    (message,) = heard(lambda: train(model, opt, steps=8))
    assert message.startswith(
        "0.bias has gradients, but the optimizer does not have it, so it is not trained: it came "
        "into the model, or was unfrozen, after the optimizer was built. "
    )
    opt.add_param_group({"params": [("0.bias", model[0].bias)], "rule": "adamw"})
    before = copy.deepcopy(model[0].state_dict())
    train(model, opt, steps=8)  # in silence
    assert all(not torch.equal(before[name], value) for name, value in model[0].named_parameters())
    model[1].requires_grad_(True)
    (message,) = heard(lambda: train(model, opt, steps=16))
    assert message.startswith("1.weight, 1.bias have gradients")


def test_an_optimizer_of_one_rule_is_not_told_of_another():
    model = small_model()
    model[0].requires_grad_(False)
    opt = samestep.AdamW(model)
    model[0].requires_grad_(True)
    (message,) = heard(lambda: train(model, opt))
    assert message.endswith('or add them: opt.add_param_group({"params": [("name", p)]})')
    opt.add_param_group({"params": [(f"0.{name}", p) for name, p in model[0].named_parameters()]})
    train(model, opt, steps=8)


def test_adapters_that_came_later_beside_frozen_parameters_are_refused():
    model = small_model()
    opt = samestep.MuonAdamW(model)
    model.requires_grad_(False)
    model.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError) as caught:
        train(model, opt)
    assert on_the_page(caught.value)


def test_a_model_that_was_sharded_after_construction_is_refused_on_every_rank():
    def on_rank(rank: int) -> str:
        model = small_model()
        opt = samestep.MuonAdamW(model)
        fully_shard(model)
        with pytest.raises(RuntimeError, match="no parameter that this optimizer has") as caught:
            train(model, opt, rank)
        return str(caught.value)

    for message in run_forked(2, on_rank):
        assert on_the_page(message)


def test_a_model_of_which_one_rank_lost_all_parameters_is_refused_on_every_rank():
    def on_rank(rank: int) -> str:
        model = small_model()
        opt = samestep.MuonAdamW(model)
        if rank == 1:
            for name, module in small_model().named_children():
                setattr(model, name, module)
        with pytest.raises(RuntimeError) as caught:
            train(model, opt, rank)
        return str(caught.value)

    other, own = run_forked(2, on_rank)
    assert on_the_page(own)
    assert "rank 1 could not take the step" in other


def test_steps_without_any_gradient_are_told_once():
    model = small_model()
    opt = samestep.MuonAdamW(model)

    def wrong_order() -> None:
        for step in range(6):
            backward(model, step=step)
            opt.zero_grad()
            opt.step()

    (message,) = heard(wrong_order)
    assert on_the_page(message)


@pytest.mark.parametrize("sharding", ["none", "zero2", "fsdp2"])
def test_frozen_models_are_told_on_every_rank(sharding: str):
    def on_rank(rank: int) -> list[str]:
        model = small_model()
        if sharding == "fsdp2":
            fully_shard(model)
        options = {} if sharding == "fsdp2" else {"sharding": sharding}
        opt = samestep.MuonAdamW(model, **options)
        model.requires_grad_(False)

        def step() -> None:
            for _ in range(5):
                opt.step()

        return heard(step)

    for said in run_forked(2, on_rank):
        (message,) = said
        assert on_the_page(message)


def test_few_steps_without_gradients_are_no_mistake():
    model = small_model()
    opt = samestep.MuonAdamW(model)
    for _ in range(2):
        opt.step()
    train(model, opt, steps=1)
    for _ in range(10):
        opt.step()


def test_a_rank_that_never_has_a_gradient_is_no_mistake():
    def on_rank(rank: int) -> None:
        model = small_model()
        opt = samestep.MuonAdamW(model)
        for step in range(5):
            if rank == 0:
                backward(model, step=step)
            opt.step()
            opt.zero_grad()

    run_forked(2, on_rank)


def test_flags_of_a_device_are_read_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch):
    """The way of a GPU, with a tensor that says it is there and an event that passes when told."""

    class OnDevice(Tensor):
        is_cuda = True

    passed: list[bool] = []
    monkeypatch.setattr(mistakes, "has_passed", lambda event: bool(passed))
    monkeypatch.setattr(mistakes, "recorded_event", lambda device: "event")
    own_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, dtype, pin_memory: own_empty(*shape, dtype=dtype)
    )
    params = [{"params": [nn.Parameter(torch.ones(2))]}]

    def step(watch: mistakes.TrainingWatch, present: bool) -> None:
        flag = torch.tensor(present).as_subclass(OnDevice)
        watch.look_at_gradients([flag, False], params, 2)

    silent = mistakes.TrainingWatch(None)
    for _ in range(6):
        step(silent, False)  # nothing is known yet
    passed.append(True)
    (message,) = heard(lambda: step(silent, False))
    assert message.startswith("no parameter had a gradient in the first 6 steps on any of 2 ranks")
    assert not silent.waits
    trained = mistakes.TrainingWatch(None)
    step(trained, False)
    step(trained, True)
    assert trained.waits
    step(trained, False)
    assert not trained.waits


# --- gradients that were edited, or averaged already ---------------------------------------------


def clipping(rank: int, **options: Any) -> tuple[list[str], int]:
    """Warnings of a training with clip_grad_norm_, and hooks that are left on a parameter."""
    model = small_model()
    opt = samestep.MuonAdamW(model, **options)

    def loop() -> None:
        for step in range(5):
            backward(model, rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

    said = heard(loop)
    return said, len(model[0].weight._post_accumulate_grad_hooks or ())


@pytest.mark.parametrize(
    "options",
    [{"sharding": "none"}, {"sharding": "zero2"}, {"sharding": "zero1", "buffers": "flat"}],
)
def test_clipping_local_gradients_is_told_once(options: dict[str, Any]):
    for said, hooks in run_forked(2, lambda rank: clipping(rank, **options)):
        (message,) = said
        assert on_the_page(message)
        assert hooks == ("buffers" in options)  # flat buffers have one of their own


def test_clipping_what_was_reduced_inside_backward_is_an_error():
    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            clipping(rank, overlap_grad_reduce=True, sharding="none")
        return str(caught.value)

    assert on_the_page(run_forked(2, on_rank)[0])


def test_clipping_what_was_given_back_is_an_error_on_every_rank():
    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            clipping(rank, overlap_grad_reduce=True)
        return str(caught.value)

    assert all(on_the_page(text) for text in run_forked(2, on_rank))


def test_one_rank_that_drops_what_was_reduced_is_an_error_on_every_rank():
    def on_rank(rank: int) -> str:
        model = small_model()
        opt = samestep.MuonAdamW(model, overlap_grad_reduce=True)
        backward(model, rank)
        if rank == 1:
            opt.zero_grad()
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        return str(caught.value)

    assert all(on_the_page(text) for text in run_forked(2, on_rank))


def test_hooks_that_look_for_edits_are_gone_after_two_steps():
    def on_rank(rank: int) -> list[int]:
        model = small_model()
        opt = samestep.MuonAdamW(model)
        left = []
        for step in range(3):
            left.append(len(model[0].weight._post_accumulate_grad_hooks or ()))
            backward(model, rank, step)
            if step == 2:  # too late to be seen, and some edits alone are no sign of clipping
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model[0].bias.grad.mul_(2)
            opt.step()
            opt.zero_grad()
        return left

    assert run_forked(2, on_rank) == [[1, 1, 0]] * 2


def given_ways(model: nn.Module) -> dict[str, Callable[[], samestep.MuonAdamW]]:
    """Ways in which DistributedDataParallel and an optimizer have the same parameters."""

    def by_name() -> samestep.MuonAdamW:
        ddp = DistributedDataParallel(model)
        kept.append(ddp)
        return samestep.MuonAdamW(ddp.module.named_parameters())

    def inner() -> samestep.MuonAdamW:
        kept.append(DistributedDataParallel(model))
        return samestep.MuonAdamW(model)

    def later() -> samestep.MuonAdamW:
        opt = samestep.MuonAdamW(model)
        kept.append(DistributedDataParallel(model))
        return opt

    def partly() -> samestep.MuonAdamW:
        kept.append(DistributedDataParallel(model))
        others = [(f"other.{name}", param) for name, param in small_model().named_parameters()]
        return samestep.MuonAdamW([*model.named_parameters(), *others])

    def local() -> samestep.MuonAdamW:
        kept.append(DistributedDataParallel(model))
        return samestep.MuonAdamW(model, grads="local")

    def in_groups() -> samestep.MuonAdamW:
        kept.append(DistributedDataParallel(model))
        named = list(model.named_parameters())
        return samestep.MuonAdamW(
            [
                {"params": [pair for pair in named if pair[1].ndim == 2], "rule": "muon"},
                {"params": [pair for pair in named if pair[1].ndim == 1], "rule": "adamw"},
            ]
        )

    def imported_later() -> samestep.MuonAdamW:
        kept.append(DistributedDataParallel(model))
        mistakes._ddp_modules.clear()
        mistakes.find_ddp()
        return samestep.MuonAdamW(model)

    kept: list[nn.Module] = []
    model.kept = kept
    return {
        "by name": by_name,
        "inner": inner,
        "in groups": in_groups,
        "imported later": imported_later,
        "later": later,
        "partly": partly,
        "local": local,
    }


@pytest.mark.parametrize("way", ["local", "later", "partly"])
def test_parameters_that_ddp_averages_too_are_told(way: str):
    def on_rank(rank: int) -> list[str]:
        model = small_model()
        opt = given_ways(model)[way]()
        return heard(lambda: train(model.kept[0], opt, rank))

    for said in run_forked(2, on_rank):
        (message,) = said
        assert on_the_page(message) or way == "partly"


@pytest.mark.parametrize("way", ["by name", "inner", "in groups", "imported later"])
def test_a_ddp_that_wraps_all_parameters_is_known_at_construction(way: str):
    """As Lightning has it: `configure_optimizers` sees the model inside."""

    def on_rank(rank: int) -> str:
        model = small_model()
        opt = given_ways(model)[way]()
        train(model.kept[0], opt, rank)  # in silence
        return opt.plan.distribution.grads

    assert run_forked(2, on_rank) == ["reduced"] * 2


def test_a_ddp_that_is_gone_does_not_count():
    def on_rank(rank: int) -> None:
        model = small_model()
        DistributedDataParallel(model)
        gc.collect()
        train(model, samestep.MuonAdamW(model), rank)

    run_forked(2, on_rank)


# --- keys that would do nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups",
    [
        [{"rule": "muon"}, {"rule": "adamw", "momentum": 0.9}],
        [{"rule": "muon", "mu": 0.9}],
        [{"rule": "muon", "max_grad_norm": 1.0}],
    ],
)
def test_keys_that_would_do_nothing_are_refused(groups: list[dict[str, Any]]):
    given = [{"params": [nn.Parameter(torch.ones(4, 4))], **own} for own in groups]
    with pytest.raises(ValueError) as caught:
        samestep.MuonAdamW(given)
    assert on_the_page(caught.value)


def test_a_typo_is_told_in_a_group_and_refused_in_overrides():
    model, typo = nn.Linear(4, 4), {"momentun": 0.9}
    given = [{"params": [model.weight], "rule": "muon", **typo}]
    (message,) = heard(lambda: samestep.MuonAdamW(given))
    assert on_the_page(message)
    with pytest.raises(ValueError) as caught:
        samestep.MuonAdamW(model, overrides={"weight": typo})
    assert on_the_page(caught.value)


# --- no mistake, not a word ----------------------------------------------------------------------
# pytest makes errors of warnings, and forked ranks inherit that.


def test_ddp_with_clipping_is_silent_and_reduced_once():
    def on_rank(rank: int) -> tuple[str, Tensor]:
        model = DistributedDataParallel(small_model())
        opt = samestep.MuonAdamW(model, sharding="none")
        for step in range(5):
            backward(model, rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        return opt.plan.distribution.grads, model.state_dict().popitem()[1]

    (grads, value), (_, other) = run_forked(2, on_rank)
    assert grads == "reduced"
    assert torch.equal(value, other)


def test_a_compiled_ddp_model_is_known_to_be_reduced():
    def on_rank(rank: int) -> str:
        compiled = nn.Module()  # as torch.compile makes it, which takes ten seconds to import
        compiled._orig_mod = DistributedDataParallel(small_model())
        return samestep.MuonAdamW(compiled).plan.distribution.grads

    assert run_forked(2, on_rank) == ["reduced"] * 2


def test_fsdp2_with_clipping_is_silent():
    def on_rank(rank: int) -> None:
        model = small_model()
        fully_shard(model)
        opt = samestep.MuonAdamW(model)
        for step in range(5):
            backward(model, rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

    run_forked(2, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_backbone_is_silent(ranks: int):
    def on_rank(rank: int) -> None:
        model = small_model()
        model[0].requires_grad_(False)
        opt = samestep.MuonAdamW(model)
        train(model, opt, rank)
        model[1].bias.requires_grad_(False)  # and one more
        train(model, opt, rank)

    run_forked(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_optimizers_of_a_gan_are_silent(ranks: int):
    def on_rank(rank: int) -> None:
        both = small_model()
        generator, critic = both
        of_generator, of_critic = samestep.MuonAdamW(generator), samestep.MuonAdamW(critic)
        for step in range(5):
            noise = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            critic(generator(noise).detach()).mean().backward()
            of_critic.step()
            of_critic.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            of_generator.step()
            both.zero_grad()

    run_forked(ranks, on_rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradient_accumulation_is_silent(overlap: bool):
    def on_rank(rank: int) -> None:
        model = small_model()
        opt = samestep.MuonAdamW(model, overlap_grad_reduce=overlap)
        for step in range(4):
            with opt.no_sync():
                backward(model, rank, 2 * step)
            backward(model, rank, 2 * step + 1)
            opt.step()
            opt.zero_grad()

    run_forked(2, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closure_is_silent(ranks: int):
    def on_rank(rank: int) -> None:
        model = small_model()
        opt = samestep.MuonAdamW(model)

        def closure() -> float:
            opt.zero_grad()
            loss = model(torch.full((2, 4), float(rank + 1))).square().mean()
            loss.backward()
            return loss.item()

        assert all(math.isfinite(opt.step(closure)) for _ in range(5))

    run_forked(ranks, on_rank)


@pytest.mark.parametrize("kind", [samestep.GradScaler, torch.amp.GradScaler])
def test_a_grad_scaler_is_silent(kind: Any):
    model = small_model()
    opt = samestep.MuonAdamW(model)
    scaler = kind("cpu", init_scale=8.0)
    for step in range(5):
        scaler.scale(model(torch.full((2, 4), step + 1.0)).square().mean()).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def test_a_grad_scaler_on_two_ranks_is_silent():
    def on_rank(rank: int) -> None:
        model = small_model()
        opt = samestep.MuonAdamW(model, max_grad_norm=1.0)
        scaler = samestep.GradScaler("cpu", init_scale=8.0)
        for step in range(5):
            scaler.scale(model(torch.full((2, 4), rank + step + 1.0)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    run_forked(2, on_rank)


def test_warnings_are_errors_in_forked_ranks():
    """Or the tests above would pass in vain."""

    def on_rank(rank: int) -> None:
        assert dist.get_world_size() == 2
        with pytest.raises(UserWarning):
            warnings.warn("loud", stacklevel=1)

    run_forked(2, on_rank)


def test_clipping_twice_under_lightning():
    """Its module has the trainer; a property that raises while there is none."""

    class Module(nn.Linear):
        arguments: dict[str, Any] | None = None

        @property
        def trainer(self) -> Any:
            if self.arguments is None:
                raise RuntimeError("is not attached to a `Trainer`")
            return type("Trainer", (), self.arguments)

    def build(limit: float | None, arguments: dict[str, Any] | None) -> None:
        module = Module(4, 4)
        module.arguments = arguments
        samestep.MuonAdamW(module, max_grad_norm=limit)

    for limit, value, by in [
        (1.0, None, None),
        (None, 0.5, None),
        (math.inf, 0.5, "norm"),
        (1.0, 0.5, "value"),
    ]:
        build(limit, {"gradient_clip_val": value, "gradient_clip_algorithm": by})
    build(1.0, None)
    with pytest.raises(ValueError, match=r"max_grad_norm=1 here and by gradient_clip_val=0\.5 of"):
        build(1.0, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": None})
