"""Files that would run code, lead out of their folder or claim what is not there are refused."""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import samestep
from samestep import cli
from samestep.checkpoint import CheckpointError
from samestep.checkpoint.converting import convert
from samestep.checkpoint.foreign import safe
from samestep.checkpoint.plain_pickle import Maker, PickleError, Table, read_pickle
from samestep.checkpoint.storage import INDEX, write_json
from samestep.checkpoint.torch_files import METADATA_TABLE
from tests.checkpoint import hostile
from tests.checkpoint.hostile import EXTENSION, archive, attacks, metadata_of, saved
from tests.ranks import run_forked

pytestmark = [
    pytest.mark.usefixtures("no_torchrun", "extension"),
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to save:UserWarning"),
]
plain_loads = pickle.loads


@pytest.fixture(scope="module")
def extension():
    """What an extension code stands for is looked up by no find_class once it was used."""
    copyreg.add_extension("builtins", "exec", EXTENSION)
    yield
    copyreg.remove_extension("builtins", "exec", EXTENSION)
    copyreg._extension_cache.pop(EXTENSION, None)


@pytest.fixture
def no_unpickler(monkeypatch):
    """Nothing is read by pickle or by torch.load."""

    def refuse(*_, **__):
        raise AssertionError("an unpickler was used")

    class Refused(pickle.Unpickler):
        __init__ = refuse

    for owner, own in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(owner, own, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refused)


@pytest.fixture
def found(tmp_path):
    """All attacks; what runs leaves a file in `marks`."""
    (tmp_path / "marks").mkdir()
    made = attacks(f"{tmp_path}/marks/")
    assert len(made) > 40
    return made


def ran(tmp_path):
    return {path.name for path in (tmp_path / "marks").iterdir()}


def built(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"w": nn.Linear(4, 6, bias=False)})
    return model, samestep.MuonAdamW(model)


class Ways:
    """Every call and command that reads a folder, each of which has to refuse it."""

    def __init__(self, tmp_path, capsys):
        self.model, self.opt = built()
        self.before = self.model["w"].weight.clone()
        self.target, self.capsys = tmp_path / "target", capsys

    def command(self, *words):
        if cli.main([*map(str, words)]) == 0:
            raise AssertionError(f"{words[0]} has accepted it")
        raise CheckpointError(self.capsys.readouterr().err)

    def of(self, folder):
        model, opt, target = self.model, self.opt, self.target
        return {
            "load": lambda: samestep.load(folder, model, opt),
            "load a part": lambda: samestep.load(folder, model, partial=True, verify=False),
            "load an optimizer": lambda: samestep.load(folder, optimizer=opt, partial=True),
            "convert": lambda: self.command("convert", folder, target),
            "convert again": lambda: convert(folder, target, to="torch", verify=False),
            "inspect": lambda: self.command("inspect", folder),
            "inspect as JSON": lambda: self.command("inspect", folder, "--verify", "--json"),
        }

    def refuse(self, folder, *words, which=None):
        for way, act in self.of(folder).items():
            if which is None or way in which:
                with pytest.raises(CheckpointError) as caught:
                    act()
                said = " ".join(str(caught.value).split())
                for word in words:
                    assert word in said, (way, said)
                assert not self.target.exists()
        assert torch.equal(self.model["w"].weight, self.before)


@pytest.fixture
def ways(tmp_path, capsys):
    return Ways(tmp_path, capsys)


READS_VALUES = ("load a part", "convert again")  # inspect looks at the metadata alone
READS_OPTIONS = ("load an optimizer", "convert again")


def write_folder(folder, metadata, data=b""):
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(data)
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content)
    return folder


# --- pickles ---------------------------------------------------------------------------------


def run_all(_, attacks):
    for data in attacks.values():
        try:
            plain_loads(data)
        except Exception:  # some end badly when they have run
            continue


def test_attacks_do_run_through_pickle(found, tmp_path):
    """In a process of its own, since some change classes of torch."""
    run_forked(1, run_all, found)
    assert ran(tmp_path) == set(found)


@pytest.mark.usefixtures("no_unpickler")
def test_metadata_that_would_run_code(found, tmp_path, ways):
    for kind, data in found.items():
        folder = write_folder(tmp_path / "dcp", data)
        ways.refuse(
            folder,
            str(folder / ".metadata"),
            "no valid metadata of torch.distributed.checkpoint",
            "no code of it was run",
        )
        ways.refuse(folder, "load another checkpoint", which=["load", "inspect"])
        assert not ran(tmp_path), kind


@pytest.mark.usefixtures("no_unpickler")
def test_metadata_beside_an_index_of_ours(found, tmp_path, ways):
    """Whoever writes the metadata writes its checksum too."""
    samestep.save(tmp_path / "a", *built(), format="fsdp_dtensor")
    for kind, data in found.items():
        (tmp_path / "a" / ".metadata").write_bytes(data)
        index = edited(tmp_path / "a")
        index["files"][".metadata"] = len(data)
        index["checksums"][".metadata"] = checksum_of(tmp_path / "a" / ".metadata")
        rewrite(tmp_path / "a", index)
        ways.refuse(tmp_path / "a", ".metadata is no valid metadata", which=["load", "inspect"])
        assert not ran(tmp_path), kind


def checksum_of(path):
    from samestep.checkpoint.torch_files import _checksums

    return _checksums(path.parent, [path.name])[path.name]


@pytest.mark.usefixtures("no_unpickler")
def test_entries_that_would_run_code(found, tmp_path, ways):
    """Zips inside of files of torch.distributed.checkpoint: of a tensor, and of options."""
    tensors = {"w.weight": torch.ones(6, 4)}
    groups = {"optimizer.param_groups": b""}
    for kind, data in found.items():
        folder = tmp_path / "dcp"
        for body in (archive(data), data):
            made = metadata_of(tensors, bodies={"w.weight": body})
            write_folder(folder, made.metadata, made.data)
            ways.refuse(folder, "__0_0.distcp", "'w.weight'", which=READS_VALUES)
            groups = {"optimizer.param_groups": body}
            made = metadata_of(tensors, groups)
            write_folder(folder, made.metadata, made.data)
            ways.refuse(folder, "'optimizer.param_groups'", which=READS_OPTIONS)
            samestep.load(folder, *built()[:1])  # the model alone is not touched by them
        assert not ran(tmp_path), kind


@pytest.mark.usefixtures("no_unpickler")
def test_files_of_others_that_would_run_code(found, tmp_path, files_of_others):
    for kind, data in found.items():
        for whose, path, options in files_of_others:
            for content in (archive(data), data):
                path.write_bytes(content)
                with pytest.raises(CheckpointError) as caught:
                    convert(whose, tmp_path / "target", **options)
                assert str(path) in str(caught.value), kind
                assert not (tmp_path / "target").exists()
        assert not ran(tmp_path), kind


@pytest.fixture
def files_of_others(tmp_path):
    """What convert reads: folder or file, the file in it that is attacked, and options."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    for name in ("deepspeed/step", "universal/zero/w", "trainer", "bin", "megatron"):
        (tmp_path / name).mkdir(parents=True)
    torch.save({"module": {}, "param_shapes": []}, tmp_path / "deepspeed" / "a_model_states.pt")
    torch.save(
        {"module": {}, "param_shapes": [{"w": (2,)}]}, tmp_path / "universal" / "a_model_states.pt"
    )
    for name in ("trainer", "bin"):
        (tmp_path / name / "trainer_state.json").write_text("{}")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "bin" / "optimizer.pt")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "megatron", no_dist=True)
    (tmp_path / "megatron" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    path = tmp_path
    return [
        (path / "a.pt", path / "a.pt", {}),
        (path / "model.pt", path / "o.pt", {"optimizers": [path / "o.pt"]}),
        (path / "deepspeed", path / "deepspeed" / "a_optim_states.pt", {"kind": "deepspeed"}),
        (path / "universal", path / "universal" / "zero" / "w" / "fp32.pt", {"only": "model"}),
        (path / "trainer", path / "trainer" / "optimizer.pt", {"kind": "trainer"}),
        (path / "bin", path / "bin" / "pytorch_model.bin", {"kind": "trainer"}),
        (path / "megatron", path / "megatron" / "common.pt", {"kind": "megatron"}),
    ]


def test_zips_of_other_forms(tmp_path):
    """Compressed, without or with two data.pkl, and records that are not there."""
    good = pickle.dumps({"a": 1}, 2)
    two = archive(good, {"../other/data.pkl": good, "x/data.pkl": good})
    assert safe.load(written(tmp_path, archive(good))) == {"a": 1}
    cases = {
        "not stored as torch.save does": archive(good, method=zipfile.ZIP_DEFLATED),
        "byte order": archive(good).replace(b"little", b"big   "),
        "0 entries named data.pkl": archive(good).replace(b"data.pkl", b"data.pkk"),
        "not in it": saved(torch.ones(3)).replace(b"/data/0", b"/data/9"),
    }
    for words, content in cases.items():
        with pytest.raises(CheckpointError, match=words):
            safe.load(written(tmp_path, content))
    assert safe.load(written(tmp_path, two)) == {"a": 1}  # others are in folders of their own


def written(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    return tmp_path / "a.pt"


def test_what_torch_saves_comes_back(tmp_path):
    """Views, dtypes, parameters, empty and strided tensors, and the plain values beside them."""
    torch.manual_seed(0)
    base = torch.randn(5, 7)
    layer = nn.Linear(3, 2)
    value = {
        "views": [base[1:3], base.T, base[:, ::2], base],
        "dtypes": [torch.randn(4).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)],
        "whole": [torch.arange(3), torch.tensor(True), torch.empty(0, 4), torch.tensor(2.5)],
        "unsigned": torch.arange(4).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "layer": layer.state_dict(keep_vars=True),
        "plain": [1, -(2**70), 2**31, 1.5, None, True, "text", b"\xffbytes", (1, 2, 3, 4), {3}],
        "torch": [torch.float16, torch.Size([2, 3]), torch.strided],
        "device": torch.device("cpu"),
    }
    for protocol in (2, 3, 4, 5):
        torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
        found = safe.load(tmp_path / "a.pt")
        assert set(found) == set(value)
        for key in ("views", "dtypes", "whole"):
            for ours, theirs in zip(found[key], value[key], strict=True):
                assert ours.dtype == theirs.dtype
                assert ours.shape == theirs.shape
                assert torch.equal(ours.float(), theirs.float())
        assert found["views"][0].data_ptr() == found["views"][3][1:3].data_ptr()  # one storage
        assert torch.equal(found["unsigned"], value["unsigned"])
        assert torch.equal(found["complex"], value["complex"])
        assert torch.equal(found["layer"]["weight"], layer.weight)
        assert found["plain"] == value["plain"]
        assert found["torch"] == value["torch"]
        assert found["device"] == "cpu"


def test_archives_that_claim_more_than_they_have(tmp_path):
    """Tensors behind their storage, storages behind their bytes, elements told many times."""
    content = saved(torch.ones(3))
    pkl = zipfile.ZipFile(written(tmp_path, content)).read("archive/data.pkl")
    values = {"data/0": torch.ones(3).numpy().tobytes()}
    assert torch.equal(safe.load(written(tmp_path, archive(pkl, values))), torch.ones(3))
    size, count = b"K\x03\x85", b"K\x03t"  # the shape, and the elements of the storage
    assert pkl.count(size) == 1
    assert pkl.count(count) == 1
    stride = b"K\x01\x85"
    for claim, edited_pkl in {
        "shape (4,)": pkl.replace(size, b"K\x04\x85"),
        "instead of 16": pkl.replace(count, b"K\x04t"),
        "shape": pkl.replace(size, b"\x8a\x07" + (10**15).to_bytes(7, "little") + b"\x85"),
        "for a size": pkl.replace(size, b"J\xff\xff\xff\xff\x85"),
        "elements of a tensor": pkl.replace(
            size, (b"\x8a\x07" + bytes([255] * 6 + [1])) * 2 + b"\x86"
        ),
        "in a storage of 3": pkl.replace(stride, b"K\x02\x85"),
        "shape (3000,)": pkl.replace(size, b"M\xb8\x0b\x85").replace(stride, b"K\x00\x85"),
    }.items():
        assert edited_pkl != pkl
        with pytest.raises(CheckpointError) as caught:
            safe.load(written(tmp_path, archive(edited_pkl, values)))
        assert claim in str(caught.value)


def test_arguments_that_are_used_again_and_again():
    """A short pickle may not make values that are long: 3000 sets of the same 3000 elements."""
    elements = b"".join(b"M" + number.to_bytes(2, "little") for number in range(3000))
    both = hostile.name("builtins", "set") + b"q\x00](" + elements + b"eq\x01"
    data = b"\x80\x04](" + both + b"h\x00h\x01\x85R" * 3000 + b"e."
    started = [0]
    table = Table({("builtins", "set"): Maker("set", lambda items: started.append(len(items)))}, {})
    with pytest.raises(PickleError, match="expands to more values than its size allows"):
        read_pickle(data, table)
    assert sum(started) < 20 * len(data)


def test_values_that_nest_deep():
    """Their hash would recurse without end; as values they are left alone."""
    deep = b")" + b"\x85" * 2000
    for data in (b"}" + deep + b"Ns.", b"\x8f(" + deep + b"\x90.", b"(" + deep + b"\x91."):
        with pytest.raises(PickleError, match="has a tuple as the key"):
            read_pickle(b"\x80\x04" + data, METADATA_TABLE)
    assert len(read_pickle(b"\x80\x04" + deep + b".", METADATA_TABLE)) == 1


# --- names that lead out of the folder ---------------------------------------------------------


def edited(folder):
    return json.loads((folder / INDEX).read_text())


def rewrite(folder, index):
    for name in (INDEX, f"{INDEX}.sha256"):
        (folder / name).unlink()
    write_json(folder / INDEX, index)


@pytest.mark.parametrize("name", ["../../secret.bin", "/etc/hostname", "x/../../../secret.bin", ""])
def test_names_in_an_index(tmp_path, ways, name):
    """As files of the list, and as the file of a box."""
    folder = tmp_path / "runs" / "a"
    samestep.save(folder, *built())
    (tmp_path / "secret.bin").write_bytes((folder / "rank_0.bin").read_bytes())
    text = (folder / INDEX).read_text()
    rewrite(folder, json.loads(text.replace('"rank_0.bin"', json.dumps(name))))
    ways.refuse(folder, str(folder / INDEX), "invalid contents", "leads out of")
    index = json.loads(text)
    next(iter(index["tensors"].values()))["boxes"][0]["file"] = name
    rewrite(folder, index)
    ways.refuse(folder, str(folder / INDEX), "or has no file")


@pytest.mark.parametrize("name", ["../other/step_1", "/tmp", "..", ".", "", "a\0b", "x" * 5000])
def test_names_in_latest(tmp_path, ways, name):
    samestep.save(tmp_path / "other" / "step_1", *built())
    samestep.save(tmp_path / "runs" / "step_1", *built())
    (tmp_path / "runs" / "LATEST").write_text(name)
    ways.refuse(tmp_path / "runs", "LATEST")


@pytest.mark.parametrize("what", ["LATEST", "step_1", INDEX, "rank_0.bin", f"{INDEX}.sha256"])
def test_links_that_lead_out(tmp_path, ways, what):
    """Links inside of the folder are followed, and those to elsewhere are refused."""
    samestep.save(tmp_path / "runs" / "step_1", *built())
    place = tmp_path / "runs" / ("" if what in ("LATEST", "step_1") else "step_1") / what
    inside = place.with_name(f"real_{what}")
    place.rename(inside)
    place.symlink_to(inside.name)
    samestep.load(tmp_path / "runs", *built(1))
    inside.rename(tmp_path / what)
    place.unlink()
    place.symlink_to(tmp_path / what)
    ways.refuse(tmp_path / "runs", "is a symbolic link to", "replace the link by a copy")


def test_a_folder_that_is_a_link_itself(tmp_path):
    """What the user names may be one."""
    samestep.save(tmp_path / "step_1", *built())
    (tmp_path / "best").symlink_to("step_1")
    assert samestep.load(tmp_path / "best", *built(1)).path == tmp_path / "best"


def test_names_in_folders_of_torch(tmp_path, ways):
    """A name, a link and a pipe, which would be waited for."""
    made = metadata_of({"w.weight": torch.ones(6, 4)})
    folder = write_folder(tmp_path / "runs", made.metadata, made.data)
    real = (folder / "__0_0.distcp").rename(tmp_path / "secret.bin")
    (folder / "__0_0.distcp").symlink_to(real)
    ways.refuse(folder, "__0_0.distcp is a symbolic link to")
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    ways.refuse(folder, "__0_0.distcp is missing")
    place = next(iter(made.metadata.storage_data.values()))
    for name in ("../secret.bin", str(real)):
        place.relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(made.metadata))
        ways.refuse(folder, "leads out of", ".metadata")


def test_names_in_folders_of_others(tmp_path, files_of_others):
    """`latest` of DeepSpeed and Megatron, parameters of DeepSpeed, and files of Trainer."""
    torch.save({"param": torch.ones(2)}, tmp_path / "fp32.pt")
    torch.save(
        {"module": {}, "param_shapes": [{"../..": (2,)}]},
        tmp_path / "universal" / "a_model_states.pt",
    )
    (tmp_path / "universal" / "zero" / "w" / "fp32.pt").write_bytes(b"")
    (tmp_path / "bin" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../secret.safetensors"}})
    )
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "latest").write_text("../deepspeed")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "latest_checkpointed_iteration.txt").write_text("../megatron")
    for folder, kind in (("universal", "deepspeed"), ("bin", "trainer"), ("one", "deepspeed"),
                         ("two", "megatron"), ("one", None), ("two", None)):  # fmt: skip
        with pytest.raises(CheckpointError, match="leads out of"):
            convert(tmp_path / folder, tmp_path / "target", kind=kind)


# --- what an index claims ----------------------------------------------------------------------


def claims(index):
    """Ways to lie in an index: each changes it, and has words of the refusal."""
    name = next(name for name in index["tensors"] if name.startswith("model."))
    entry = index["tensors"][name]
    (box,) = entry["boxes"]
    yield "the shape of", lambda: entry.update(shape=[1 << 62, 1 << 62])
    yield "elements", lambda: entry.update(shape=[6, 1 << 40])
    yield "elements", lambda: entry.update(shape=[7, 4])
    yield "has shape", lambda: entry.update(shape=[24])
    yield "has shape", lambda: box.update(offsets=[1, 0])
    yield "has shape", lambda: entry.update(shape=[5, 4])
    yield "bytes from", lambda: box.update(sizes=[5, 4])
    yield "-1", lambda: box.update(offsets=[-1, 0])
    yield "elements", lambda: entry.update(boxes=[])
    yield "more bytes than", lambda: entry.update(boxes=[box, box])
    yield "dtype", lambda: entry.update(dtype="os.system")
    yield "bytes from", lambda: entry.update(dtype="float64")
    yield "behind", lambda: box.update(start=1 << 40)
    yield "bytes from", lambda: box.update(start=box["start"] + 4)
    yield "bytes from", lambda: box.update(size=1 << 60)
    yield "is -1", lambda: box.update(size=-1)
    yield "is 1.5", lambda: box.update(start=1.5)
    yield "checksum", lambda: box.update(checksum="x")
    yield "for a box", lambda: entry.update(boxes=[7])
    yield "'boxes'", lambda: entry.pop("boxes")
    yield "'tensors'", lambda: index.update(tensors=[])
    yield "'tensors'", lambda: index.pop("tensors")
    yield "'files'", lambda: index.pop("files")
    yield "the size of", lambda: index.update(files={"rank_0.bin": "x"})
    yield "world_size", lambda: index.update(world_size=0)
    yield "world_size", lambda: index.update(world_size=None)
    yield "'groups'", lambda: index.update(groups={})
    yield "a group", lambda: index.update(groups=[7])
    yield "'rule'", lambda: index["groups"][0]["options"].pop("rule")
    yield "an option", lambda: index["groups"][0]["options"].update(x={"a": 1})
    yield "the dtype", lambda: index["groups"][0]["options"].update(x={"dtype": "nothing"})
    yield "nested", lambda: index["groups"][0]["options"].update(x=nested(50))
    yield "parameters", lambda: index["groups"][0].update(params=[1])
    yield "'extra'", lambda: index.pop("extra")
    yield "'layout'", lambda: index.update(layout=["\x1b[2J"])
    yield "the name", lambda: index["tensors"].update({"model.\x1b[2J": entry})


def nested(levels):
    return [nested(levels - 1)] if levels else []


def test_claims_of_an_index(tmp_path, ways):
    samestep.save(tmp_path / "a", *built())
    text = (tmp_path / "a" / INDEX).read_text()
    for number in range(len(list(claims(json.loads(text))))):
        index = json.loads(text)
        words, lie = list(claims(index))[number]
        lie()
        rewrite(tmp_path / "a", index)
        ways.refuse(
            tmp_path / "a",
            INDEX,
            "invalid contents",
            "another checkpoint",
            which=["load", "inspect"],
        )
        with pytest.raises(CheckpointError) as caught:
            samestep.load(tmp_path / "a", *built())
        assert words in str(caught.value), number
    for content in ("[]", "[" * 100_000, "7", "9" * 5000, '{"format": 1}'):
        for name in (INDEX, f"{INDEX}.sha256"):
            (tmp_path / "a" / name).unlink()
        write_text_with_sum(tmp_path / "a" / INDEX, content)
        ways.refuse(tmp_path / "a", INDEX, "invalid contents", which=["load", "inspect"])


def write_text_with_sum(path, text):
    from samestep.checkpoint.storage import _beside, _sha256_line

    path.write_text(text)
    _beside(path).write_bytes(_sha256_line(path, text.encode()))


def test_claims_of_parts(tmp_path, ways):
    """`dp_local`: as many parts as ranks, and each of them as its own index says."""
    folder = tmp_path / "a"
    samestep.save(folder, *built(), format="dp_local")
    text = (folder / INDEX).read_text()
    for key, value in {"world_size": 10**15, "parts": [], "files": {"../x": 1}}.items():
        rewrite(folder, {**json.loads(text), key: value})
        ways.refuse(folder, INDEX, which=["convert", "inspect"])
    rewrite(folder, json.loads(text))
    shutil.copytree(folder / "rank_0", tmp_path / "rank_0")
    shutil.rmtree(folder / "rank_0")
    (folder / "rank_0").symlink_to(tmp_path / "rank_0")
    ways.refuse(folder, "is a symbolic link to")


def test_claims_of_metadata(tmp_path, ways):
    """Sizes, places and dtypes of torch's metadata against the files and the entries in them."""
    key = "w.weight"

    def chunk(metadata):
        return metadata.state_dict_metadata[key].chunks[0]

    def place(metadata):
        return next(iter(metadata.storage_data.values()))

    at_once = {
        "behind": lambda m: setattr(place(m), "offset", 1 << 40),
        "ends behind": lambda m: setattr(place(m), "length", 1 << 60),
        "the offset": lambda m: setattr(place(m), "offset", -1),
        "too few": lambda m: setattr(place(m), "length", 10),
        "missing": lambda m: setattr(place(m), "relative_path", "other"),
        "int for relative_path": lambda m: setattr(place(m), "relative_path", 7),
        "has shape": lambda m: setattr(m.state_dict_metadata[key], "size", torch.Size([5, 4])),
        "elements": lambda m: setattr(m.state_dict_metadata[key], "size", torch.Size([1 << 50, 4])),
        "lies outside of it": lambda m: setattr(chunk(m), "sizes", torch.Size([1 << 50, 4])),
        "more or less": lambda m: m.state_dict_metadata[key].chunks.clear(),
        "list for sizes": lambda m: setattr(chunk(m), "sizes", [6, 4]),
        "lacks the file of": lambda m: m.storage_data.clear(),
        "is a str": lambda m: m.state_dict_metadata.update({"b": "text"}),
        "has a str": lambda m: m.state_dict_metadata[key].chunks.append("text"),
        "str for dtype": lambda m: setattr(m.state_dict_metadata[key].properties, "dtype", "x"),
        "other things": lambda m: m.storage_data.update({"b": 7}),
        "more bytes than": lambda m: m.storage_data.update({MetadataIndex("b"): place(m)}),
    }
    when_read = {
        "as (6, 4) torch.int32": lambda m: setattr(
            m.state_dict_metadata[key].properties, "dtype", torch.int32
        ),
        "as (4, 6)": lambda m: (
            setattr(m.state_dict_metadata[key], "size", torch.Size([4, 6])),
            setattr(chunk(m), "sizes", torch.Size([4, 6])),
        ),
    }
    loose = {"more or less": "elements", "str for dtype": "properties of a tensor"}
    for words, lie in {**at_once, **when_read}.items():
        made = metadata_of({key: torch.ones(6, 4)})
        lie(made.metadata)
        folder = write_folder(tmp_path / "a", made.metadata, made.data)
        which = None if words in at_once else ["convert", "convert again"]
        ways.refuse(folder, "another checkpoint", loose.get(words, words), which=which)


def test_boxes_that_lie_on_each_other(tmp_path, ways):
    """As many elements as the tensor has, and a hole all the same."""
    samestep.save(tmp_path / "a", *built())
    index = edited(tmp_path / "a")
    name = next(name for name in index["tensors"] if name.startswith("model."))
    entry = index["tensors"][name]
    (box,) = entry["boxes"]
    half = {**box, "sizes": [3, 4], "size": 48}
    entry["boxes"] = [half, {**half, "offsets": [2, 0]}]
    rewrite(tmp_path / "a", index)
    ways.refuse(tmp_path / "a", "some elements twice", which=["load", "inspect"])


def test_safetensors_that_claim_more_than_they_have(tmp_path):
    def content(entry, more=b""):
        header = json.dumps({"w": entry}).encode()
        return len(header).to_bytes(8, "little") + header + bytes(8) + more

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert safe.safetensors(written(tmp_path, content(good)))["w"].tolist() == [0.0, 0.0]
    lies = [{"shape": [3]}, {"shape": [-1]}, {"shape": [1 << 62, 4]}, {"data_offsets": [0, 16]},
            {"data_offsets": [-8, 0]}, {"data_offsets": [8]}, {"dtype": "os"}]  # fmt: skip
    contents = [content({**good, **lie}) for lie in lies]
    contents += [content([]), (1 << 60).to_bytes(8, "little") + b"{}", b"", b"{}"]
    for wrong in contents:
        with pytest.raises(CheckpointError, match="no file of safetensors"):
            safe.safetensors(written(tmp_path, wrong))


# --- what is right loads all the same ------------------------------------------------------------


def test_metadata_as_versions_of_torch_write_it(tmp_path):
    """All dtypes, layouts and memory formats, notes of others, and paths as Pythons have them."""
    dtypes = [d for d in vars(torch).values() if isinstance(d, torch.dtype) and not d.itemsize > 8]
    tensors = {f"{place}": torch.empty(4, 2, dtype=torch.int8) for place in range(len(dtypes))}
    made = metadata_of(tensors, {"note": saved(1.5)}).metadata
    for dtype, entry in zip(dtypes, made.state_dict_metadata.values(), strict=False):
        entry.properties.dtype = dtype
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    for memory_format, entry in zip(formats, made.state_dict_metadata.values(), strict=False):
        entry.properties.memory_format = memory_format
        entry.properties.layout = torch.sparse_coo
        entry.properties.requires_grad = True
    made.planner_data = {"w": ("model", 0, "w")}
    made.storage_meta = StorageMeta(tmp_path, "a", None, ["torch"])
    made.version = "1.0.0"
    chunk = TensorWriteData(
        ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), TensorProperties(), torch.Size([2])
    )
    item = WriteItem(MetadataIndex("w", (0,), 3), WriteItemType.SHARD, None, chunk)
    other = WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, BytesIOWriteData(7))
    made.all_local_plans = [SavePlan([item, other], _StoragePrefix("__0_"), {"a": ("a",)})]
    for place in made.storage_data.values():
        place.length += 8 * 8  # of the widest dtype
        place.transform_descriptors = None if place.offset else []
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(made, protocol)
        for module in (b"pathlib", b"pathlib._local"):  # of Python 3.13 alone
            found = read_pickle(moved(data, module), METADATA_TABLE)
            assert found.planner_data == made.planner_data
            assert found.state_dict_metadata == made.state_dict_metadata
            assert list(found.storage_data) == list(made.storage_data)
            for index, place in made.storage_data.items():
                assert vars(found.storage_data[index]) == vars(place)


def moved(data, module):
    """With the module of paths under this name."""
    for old, new in ((b"\x8c\x07", b"\x8c" + bytes([len(module)])), (b"c", b"c")):
        data = data.replace(old + b"pathlib", new + module)
    if data[1] < 4:
        return data
    return data[:3] + (len(data) - 11).to_bytes(8, "little") + data[11:]


@pytest.mark.parametrize("written_as", ["fully_reshardable", "fsdp_dtensor", "dp_local"])
def test_formats_of_ours_stay_readable(tmp_path, written_as, capsys):
    """None of the refusals meets what `save` writes; empty and 0-dim tensors are in it."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.randn(4, 3), "e": torch.randn(0, 3), "s": torch.randn(())})
    opt = samestep.AdamW(list(model.named_parameters()), lr=0.1)
    sum(param.sum() for param in model.values()).backward()
    opt.step()
    samestep.save(
        tmp_path / "runs" / "step 1", model, opt, extra={"a": [1, None]}, format=written_as
    )
    before = {name: param.detach().clone() for name, param in model.items()}
    with torch.no_grad():
        for param in model.values():
            param.add_(1)
    samestep.load(tmp_path / "runs", model, opt)
    for name, param in model.items():
        assert torch.equal(param, before[name]), name
    assert cli.main(["inspect", str(tmp_path / "runs"), "--verify"]) == 0
    capsys.readouterr()
    convert(tmp_path / "runs", tmp_path / "b", to="torch")
    samestep.load(tmp_path / "b", model, opt)
