"""Checkpoints go through the doors of torch.distributed.checkpoint in both directions."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import samestep
from samestep.checkpoint import CheckpointError, Writer, reader, storage
from tests.checkpoint.training import Case, build
from tests.ranks import run_forked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole_model(model) -> dict[str, torch.Tensor]:
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def test_what_dcp_saves_is_loaded_by_samestep_and_by_dcp(tmp_path):
    def job(rank):
        torch.manual_seed(0)
        model, _ = build(Case("none", 2))
        saved = {name: value.clone() for name, value in whole_model(model).items()}
        dcp.save(saved, storage_writer=Writer(tmp_path / "a", extra={"step": 3}, keep=1))
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        loaded = samestep.load(tmp_path, model)
        assert (loaded.extra, loaded.world_size) == ({"step": 3}, 2)
        into = {name: torch.zeros_like(value) for name, value in saved.items()}
        dcp.load(into, storage_reader=reader(tmp_path))
        for name, value in whole_model(model).items():
            assert torch.equal(value, saved[name]), name
            assert torch.equal(into[name], saved[name]), name
        return True

    assert run_forked(2, job) == [True, True]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] != []
    samestep.checkpoint.convert(tmp_path / "a", tmp_path / "b", dry_run=True)  # checksums are right


def test_state_that_ranks_share_is_read_whole_by_dcp(tmp_path):
    def job(rank):
        model, opt = build(Case("zero2", 2))
        samestep.save(tmp_path / "a", model, opt)
        return {name: value.clone() for name, value in whole_model(model).items()}

    saved, _ = run_forked(2, job)
    stored = reader(tmp_path / "a")
    into = {name: torch.zeros(entry.size) for name, entry in stored.tensors.items()}
    assert len(into) > len(saved)
    dcp.load(into, storage_reader=stored)
    for name, value in saved.items():
        assert torch.equal(into[name], value), name


def test_what_is_no_tensor_is_refused_by_its_name(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match=r"'step' is no tensor.*extra="):
        dcp.save({"w": torch.ones(2), "step": 3}, storage_writer=Writer(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_on_one_rank_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    def job(rank):
        tensors = {"w": torch.full((4,), float(rank))} if rank else {"w": torch.zeros(4)}
        tensors[f"own{rank}"] = torch.ones(3)
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(storage, "_append", lambda *_: (_ for _ in ()).throw(OSError("full")))
            with pytest.raises(dcp.api.CheckpointException, match="full"):
                dcp.save(tensors, storage_writer=Writer(tmp_path / "a"))
        gc.collect()  # the error held the writer
        dist.barrier()
        left = sorted(path.name for path in tmp_path.iterdir())
        dist.barrier()
        dcp.save(tensors, storage_writer=Writer(tmp_path / "a"))
        return left, sorted(reader(tmp_path / "a").tensors)

    assert run_forked(2, job) == [([], ["own0", "own1", "w"])] * 2


def test_a_damaged_index_is_told_by_the_reader(tmp_path):
    dcp.save({"model.w": torch.ones(2)}, storage_writer=Writer(tmp_path / "a"))
    (tmp_path / "a" / "rank_0.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="was truncated or changed"):
        reader(tmp_path / "a")
