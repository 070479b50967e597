"""The named formats: each comes back to the bit, is checked, and says what it is."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import samestep
from samestep import cli
from tests.checkpoint.training import (
    Case,
    build,
    different,
    local_bits,
    same_bits,
    snapshot,
    spoil,
    train,
)
from tests.ranks import run_forked
from tests.soak import some

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning"),
    pytest.mark.usefixtures("no_torchrun"),
]
FORMATS = ["fully_reshardable", "fsdp_dtensor", "dp_local"]
FLAT, FSDP = Case("flat zero2", 2), Case("fsdp2", 2)


def folder_of(path, case, name):
    return path / f"{case.name} {name}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two layouts on two ranks in every format, saved at once and in the background."""
    path = tmp_path_factory.mktemp("formats")

    def job(rank):
        found = {}
        for case in (FLAT, FSDP):
            model, opt = build(case)
            train(model, opt, range(2))
            found[case] = snapshot(model, opt)
            for name in FORMATS:
                save = samestep.save if case is FLAT else samestep.async_save
                save(folder_of(path, case, name), model, opt, extra={"step": 2}, format=name)
            spoil(model, opt)  # while the last one may still be written
        samestep.load(folder_of(path, FSDP, "dp_local"), model, opt)  # waits for it
        return found

    return path, run_forked(2, job)[0]


@pytest.mark.parametrize("case", some([FLAT, FSDP]), ids=lambda case: case.layout)
def test_what_was_saved_comes_back(saved, case):
    """On the same ranks in the same layout, from every format."""
    path, expected = saved

    def job(rank):
        wrong = []
        model, opt = build(case, seed=2, lr=0.3)
        for name in FORMATS:
            spoil(model, opt)
            loaded = samestep.load(folder_of(path, case, name), model, opt)
            wrong += different(snapshot(model, opt), expected[case])
            facts = (loaded.extra, loaded.world_size, opt.param_groups[0]["lr"])
            wrong += [] if facts == ({"step": 2}, 2, 0.01) else [(name, facts)]
        return wrong

    assert run_forked(2, job) == [[], []]


def load_with_torch(folder, model, opt):
    of_model, of_opt = get_state_dict(model, opt)
    dcp.load({"model": of_model, "optimizer": of_opt}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_opt)


def test_fsdp_dtensor_is_what_torch_reads_and_writes(saved, tmp_path):
    """By torch's own recipe on three ranks; and what torch writes there is loaded as it is."""
    path, expected = saved

    def job(rank):
        model, opt = build(Case("fsdp2", 3), seed=2)
        load_with_torch(folder_of(path, FLAT, "fsdp_dtensor"), model, opt)
        wrong = different(snapshot(model, opt), expected[FLAT])
        of_model, of_opt = get_state_dict(model, opt)
        dcp.save({"model": of_model, "optimizer": of_opt}, checkpoint_id=tmp_path / "theirs")
        return wrong

    assert run_forked(3, job) == [[], [], []]
    for folder in (folder_of(path, FSDP, "fsdp_dtensor"), tmp_path / "theirs"):
        found = build(Case("one", 1), seed=3)
        samestep.load(folder, *found)
        source = FLAT if folder.parent == tmp_path else FSDP
        assert different(snapshot(*found), expected[source]) == []


ELSEWHERE = {
    Case("flat zero2", 3): ("2 ranks", "here are 3 ranks"),
    Case("zero2", 2): ("the layout differs", "buffers = flat", "buffers = per_parameter"),
    FSDP: ("the layout differs", "saved on 2 ranks"),
}


@pytest.mark.parametrize("world", [2, 3])
def test_dp_local_is_refused_elsewhere(saved, world):
    path, _ = saved

    def job(rank):
        texts = {}
        for case in ELSEWHERE:
            if case.world == world:
                model, opt = build(case, seed=2)
                before = local_bits(model, opt)
                with pytest.raises(samestep.CheckpointError) as caught:
                    samestep.load(folder_of(path, FLAT, "dp_local"), model, opt)
                assert same_bits(local_bits(model, opt), before)
                texts[case] = str(caught.value)
        return texts

    for texts in run_forked(world, job):
        for case, text in texts.items():
            way_out = ("samestep convert", "--to fully_reshardable", "dp_local")
            assert [word for word in (*ELSEWHERE[case], *way_out) if word not in text] == []


def test_dp_local_of_state_in_another_format_says_which(tmp_path):
    def job(rank):
        for kept, other in (({}, {"state_dtypes": "8bit"}), ({"state_dtypes": "8bit"}, {})):
            found = []
            for options in (kept, other):
                torch.manual_seed(0)
                model = torch.nn.Linear(64, 1001, bias=False)  # half of it is no whole row
                opt = samestep.AdamW(model, sharding="zero2", **options)
                model(torch.ones(1, 64)).sum().backward()
                opt.step()
                found.append((model, opt))
            path = tmp_path / f"of {len(kept)}"
            samestep.save(path, *found[0], format="dp_local")
            samestep.load(path, *found[0])
            with pytest.raises(samestep.CheckpointError) as caught:
                samestep.load(path, *found[1])
            yield str(caught.value)

    for texts in run_forked(2, lambda rank: list(job(rank))):
        for text, (there, here) in zip(
            texts, (("float32", "8bit/64"), ("8bit/64", "float32")), strict=True
        ):
            assert f"kept as {there} there and as {here} here (state_dtypes)" in text


def test_dp_local_of_a_model_alone(tmp_path):
    """Without an optimizer it is what ranks hold that tells."""

    def job(rank):
        model, _ = build(FSDP)
        samestep.save(tmp_path / "a", model, format="dp_local")
        samestep.load(tmp_path / "a", build(FSDP, seed=2)[0])
        with pytest.raises(samestep.CheckpointError, match=r"holds other parts of model\."):
            samestep.load(tmp_path / "a", build(FLAT)[0])

    run_forked(2, job)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("dp_local", "fully_reshardable"),
        ("dp_local", "fsdp_dtensor"),
        ("fsdp_dtensor", "fully_reshardable"),
    ],
)
def test_convert(saved, tmp_path, name, to):
    path, expected = saved
    source = folder_of(path, FLAT, name)
    assert cli.main(["convert", str(source), str(tmp_path / "new"), "--to", to]) == 0
    found = build(Case("one", 1), seed=2, lr=0.3)
    assert samestep.load(tmp_path, *found).extra == {"step": 2}
    assert different(snapshot(*found), expected[FLAT]) == []
    assert found[1].param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", FORMATS)
def test_inspect(saved, capsys, name):
    path, _ = saved
    folder = str(folder_of(path, FLAT, name))
    assert cli.main(["inspect", folder, "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["written_as"], facts["world_size"], facts["verified"]) == (name, 2, True)
    assert facts["extra"] == {"step": 2}
    head = facts["parameters"]["head.weight"]
    assert (head["rule"], head["shape"]) == ("adamw", [13, 5])
    assert head["bytes"] == 4 * (13 * 5 * 3 + 1)
    assert cli.main(["inspect", folder]) == 0
    assert f"format {name}, saved by 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fsdp_dtensor", "dp_local"])
def test_damage(saved, tmp_path, name, capsys):
    """In every file one byte flipped, one cut off, and the file gone."""
    path, _ = saved
    source = folder_of(path, FLAT, name)
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    assert len(files) == {"fsdp_dtensor": 5, "dp_local": 8}[name]
    for file in files:
        for how in ("flipped", "short", "gone"):
            if (str(file), how) == ("index.json", "gone"):
                continue  # then it is torch's, or nothing
            folder = tmp_path / f"{str(file).replace('/', ' ')} {how}"
            shutil.copytree(source, folder)
            data = bytearray((folder / file).read_bytes())
            data[len(data) // 3] ^= 4
            if how == "gone":
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(data if how == "flipped" else data[:-1])
            assert cli.main(["inspect", str(folder), "--verify"]) == 2, folder
            text = " ".join(capsys.readouterr().err.split())
            assert "load another checkpoint" in text, text
            assert file.name.removesuffix(".sha256") in text.replace(" ", ""), text


def test_load_compares_checksums(saved, tmp_path):
    """On the rank whose file it is, and all raise."""
    path, _ = saved
    for name, file in (("fsdp_dtensor", "__1_0.distcp"), ("dp_local", "rank_1/rank_1.bin")):
        shutil.copytree(folder_of(path, FLAT, name), tmp_path / name)
        with (tmp_path / name / file).open("r+b") as opened:
            opened.seek(1000)
            opened.write(b"\xff\xfe\xfd\xfc")

    def job(rank):
        model, opt = build(FLAT, seed=2)
        before, texts = local_bits(model, opt), []
        for name in ("fsdp_dtensor", "dp_local"):
            with pytest.raises(samestep.CheckpointError) as caught:
                samestep.load(tmp_path / name, model, opt)
            texts.append(str(caught.value))
        assert same_bits(local_bits(model, opt), before)
        return texts

    for texts in run_forked(2, job):
        assert "__1_0.distcp is damaged" in texts[0]
        assert "rank_1.bin is damaged" in texts[1]


def test_a_name_of_megatrons_is_ours(tmp_path):
    model, opt = build(Case("one", 1))
    for name in ("fully_reshardable", "fully_sharded_model_space"):
        samestep.save(tmp_path / name, model, opt, format=name)
    files = {path.name for path in (tmp_path / "fully_reshardable").iterdir()}
    other = tmp_path / "fully_sharded_model_space"
    assert {path.name for path in other.iterdir()} == files
    fresh, of_fresh = build(Case("one", 1), seed=2)
    samestep.load(other, fresh, of_fresh)
    assert same_bits(local_bits(fresh, of_fresh), local_bits(model, opt))


def test_what_is_refused(saved, tmp_path):
    path, _ = saved
    model, opt = build(Case("one", 1))
    with pytest.raises(samestep.CheckpointError, match=r"format must be one of .*, got 'zip'"):
        samestep.save(tmp_path / "a", model, opt, format="zip")
    part = folder_of(path, FLAT, "dp_local") / "rank_0"
    with pytest.raises(samestep.CheckpointError, match="is the part of one rank: load"):
        samestep.load(part, model, opt)
    assert list(tmp_path.iterdir()) == []


def test_the_part_of_another_checkpoint(saved, tmp_path, capsys):
    """Right in itself, but not what was saved here."""
    path, _ = saved
    shutil.copytree(folder_of(path, FLAT, "dp_local"), tmp_path / "a")
    own = tmp_path / "a" / "rank_1"
    text = (own / "index.json").read_text()
    (own / "index.json").write_text(text.replace('"checksum": ', '"checksum":-', 1))
    line = f"{sha256((own / 'index.json').read_bytes()).hexdigest()}  index.json\n"
    (own / "index.json.sha256").write_text(line)
    assert cli.main(["inspect", str(tmp_path / "a")]) == 2
    assert "belongs to another checkpoint" in " ".join(capsys.readouterr().err.split())
