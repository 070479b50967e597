"""Runs of the trainer with all that experts and blocks can be asked for."""

import pytest
import torch

from samestep.parallel import router_losses
from samestep.train import trainer
from tests.ranks import run_forked
from tests.soak import SOAK, twin
from tests.train.runs import losses, rows, run_all, text_file, train, words

pytestmark = pytest.mark.usefixtures("no_torchrun")

STEPS = 2
SHAPE = {
    "layers": 2 if SOAK else 1, "heads": 4, "kv_heads": 2, "context": 8, "steps": STEPS,
    "save_every": STEPS, "eval_every": STEPS, "log_every": STEPS, "experts": 4, "expert_size": 8,
    "active_experts": 3,
    "shared_experts": 1, "null_experts": 2, "z_loss": 0.05,
}  # fmt: skip
# Four sequences, or seven, of which ranks have 4 and 3, and then parts of 2 + 2 and 2 + 1.
EVEN = {**SHAPE, "batch_size": 4, "eval_sequences": 4, "micro_batch": 4}
UNEVEN = {**SHAPE, "batch_size": 7, "eval_sequences": 5, "micro_batch": 2}


def logged(out):
    return {key: losses(out, key) for key in ("loss", "balance_loss", "z_loss", "grad_norm")}


def expect_the_same(found, expected):
    for key, values in expected.items():
        assert len(values) == STEPS
        assert found[key] == pytest.approx(values, rel=1e-5, abs=1e-5), key


@twin
def test_router_losses_on_meshes_are_those_of_one_process(tmp_path):
    """Expert parallel; tensor, sequence and expert parallel: the joint batch, in one piece."""
    data = text_file(tmp_path)
    shape = {**EVEN, "balance_loss": 0.1}
    assert train(1, words(tmp_path / "alone", data, **shape)) == [0]
    alone = logged(tmp_path / "alone")
    # Not even, and not a loss that is there by chance.
    assert all(value > 1.0001 for value in alone["balance_loss"].values())
    two = words(tmp_path / "ep", data, **shape, ep=2)
    four = [*words(tmp_path / "all", data, **shape, ep=2, tp=2), "--sp", "--recompute", "full"]
    assert run_forked(2, run_all, [two]) == [[0]] * 2
    assert run_forked(4, run_all, [four]) == [[0]] * 4
    expect_the_same(logged(tmp_path / "ep"), alone)
    expect_the_same(logged(tmp_path / "all"), alone)


def test_parts_of_a_batch_count_by_their_tokens(tmp_path):
    """The z loss is a mean over tokens: the same however ranks and micro-batches divide them."""
    data = text_file(tmp_path)
    assert train(1, words(tmp_path / "alone", data, **{**UNEVEN, "micro_batch": 7})) == [0]
    two = [words(tmp_path / layout, data, **UNEVEN, layout=layout) for layout in ("zero2", "fsdp2")]
    assert run_forked(2, run_all, two) == [[0, 0]] * 2
    alone = logged(tmp_path / "alone")
    del alone["balance_loss"]  # micro-batches have one each
    for layout in ("zero2", "fsdp2"):
        expect_the_same(logged(tmp_path / layout), alone)


def test_a_wrong_share_is_seen(tmp_path, monkeypatch):
    data = text_file(tmp_path)
    assert train(1, words(tmp_path / "alone", data, **{**UNEVEN, "micro_batch": 7})) == [0]
    monkeypatch.setattr(trainer, "set_share", lambda model, share: None)
    assert train(1, words(tmp_path / "mutant", data, **UNEVEN)) == [0]
    found, expected = logged(tmp_path / "mutant"), logged(tmp_path / "alone")
    assert found["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-4)


def test_recomputation_ends_with_the_same_bits(tmp_path):
    """With dropout, in layouts with plain parameters too."""
    data = text_file(tmp_path)
    shape = {**UNEVEN, "balance_loss": 0.1, "dropout": 0.1, "capacity": 1.0}
    commands = []
    for layout, what in (("flat", "selective"), ("fsdp2", "full")):
        commands.append(words(tmp_path / layout, data, **shape, layout=layout))
        again = words(tmp_path / f"{layout} again", data, **shape, layout=layout)
        commands.append([*again, "--recompute", what])
    assert run_forked(2, run_all, commands) == [[0] * 4] * 2
    for layout in ("flat", "fsdp2"):
        found = logged(tmp_path / f"{layout} again")
        assert found == logged(tmp_path / layout)
        expected = losses(tmp_path / layout, "val_loss")
        assert losses(tmp_path / f"{layout} again", "val_loss") == expected
        errors = losses(tmp_path / f"{layout} again", "capacity_errors")
        assert errors == losses(tmp_path / layout, "capacity_errors")
        assert errors[STEPS] > 0


def test_without_router_losses_the_log_has_none(tmp_path):
    data = text_file(tmp_path)
    assert train(1, words(tmp_path, data, **{**EVEN, "z_loss": 0})) == [0]
    assert not any("z_loss" in row for row in rows(tmp_path) if "loss" in row)
    assert router_losses.collect(torch.nn.Linear(1, 1)) is None
