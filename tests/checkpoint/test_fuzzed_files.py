"""Random files: what is read is data or is refused, never anything else, and never at any length.

`make soak` takes many more seeds.
"""

from __future__ import annotations

import copyreg
import json
import pickle
import pickletools
import random
import shutil
import sys
import tracemalloc

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import CheckpointError
from samestep.checkpoint.archive import NAMES, Shell, read_archive
from samestep.checkpoint.converting import convert
from samestep.checkpoint.foreign import safe
from samestep.checkpoint.formats import open_checkpoint
from samestep.checkpoint.inspect_command import contents
from samestep.checkpoint.plain_pickle import FLAT, Maker, PickleError, read_pickle
from samestep.checkpoint.storage import INDEX, _beside, _sha256_line
from samestep.checkpoint.torch_files import METADATA_TABLE, READ, _Note
from tests.checkpoint.hostile import (
    EXTENSION,
    archive,
    attacks,
    metadata_of,
    name,
    saved,
    short,
    text,
)
from tests.soak import SOAK, some

SEEDS = 400 if SOAK else 4
CASES = 500  # of each seed
OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
CONTAINERS = (dict, list, tuple, set, frozenset)
MADE = (*FLAT, *READ.values(), _Note, torch.Size, torch.dtype, torch.layout, torch.memory_format,
        Maker, torch.Tensor, Shell, complex)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def extension():
    copyreg.add_extension("builtins", "exec", EXTENSION)
    yield
    copyreg.remove_extension("builtins", "exec", EXTENSION)
    copyreg._extension_cache.pop(EXTENSION, None)


# --- what is made up ---------------------------------------------------------------------------


def fragments(mark):
    """Values, names that are known and names that are not, whole attacks without their ends."""
    known = [name(*pair) for pair in [*METADATA_TABLE.names, *NAMES]]
    other = [
        name(module, path)
        for module in ("os", "builtins", "torch", "torch.distributed.checkpoint.metadata")
        for path in ("system", "eval", "exec", "load", "Metadata.__init__.__globals__", "getattr")
    ]
    values = [pickle.dumps(value, 4)[2:-1] for value in (1, 2**40, "w", None, (), [], {}, (2, 3))]
    whole = [data[:-1] for data in attacks(mark).values()]
    tails = [b")\x81", b")R", b"}b", b"\x85R", b"\x86R", b"Q", b"\x94", b"h\x00", b"u", b"e", b"t"]
    return known, other, values, whole, tails


class Pickles:
    """Random pickles of one seed."""

    def __init__(self, seed, mark):
        self.chance = random.Random(seed)
        self.parts = fragments(mark)
        tensors = {"w": torch.ones(3, 2), "b": torch.ones(4)}
        objects = {"optimizer.param_groups": saved([{"lr": 0.1, "params": [0]}])}
        self.metadata = metadata_of(tensors, objects).metadata
        self.valid = [pickle.dumps(self.metadata, protocol) for protocol in (2, 3, 4, 5)]
        state = nn.Linear(2, 3).state_dict()
        self.state = saved({"model": state, "step": 3, "betas": (0.9, 0.99)})

    def opcodes(self):
        """A stream: any opcode with any argument, between fragments."""
        chance, out = self.chance, [b"\x80\x04"]
        for _ in range(chance.randrange(2, 40)):
            kind = chance.random()
            if kind < 0.5:
                out.append(chance.choice(self.parts[chance.randrange(len(self.parts))]))
            elif kind < 0.9:
                out.append(chance.choice(OPCODES) + chance.randbytes(chance.choice((0, 1, 4))))
            else:
                out += [short("x" * chance.randrange(5)), text("w")]
        return b"".join(out) + b"."

    def changed(self, data):
        """Something else in the place of some bytes."""
        chance, data = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(len(data))
            until = min(len(data), at + chance.choice((0, 1, 2, 8, 50)))
            source = chance.choice(self.parts[chance.randrange(len(self.parts))])
            noise = chance.randbytes(chance.randrange(1, 9))
            data[at:until] = chance.choice((b"", source, noise, data[at:until] * 2))
            if not data:
                break
        return bytes(data)

    def case(self):
        kind = self.chance.random()
        if kind < 0.4:
            return self.opcodes()
        if kind < 0.6:  # an attack inside of what is right
            data = self.chance.choice(self.valid)
            at = self.chance.randrange(2, len(data))
            return data[:at] + self.chance.choice(self.parts[3]) + data[at:]
        return self.changed(self.chance.choice(self.valid))


def assert_plain(value):
    """Only what the tables make, all the way down."""
    seen, todo = set(), [value]
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if type(found) in CONTAINERS:
            todo += found
            todo += found.values() if type(found) is dict else ()
        else:
            assert isinstance(found, MADE), type(found)
            todo += vars(found).values() if type(found) in READ.values() else ()


# --- pickles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pickles(seed, tmp_path):
    """Data, or a refusal; no class changes, nothing is imported, and memory is that of the file."""
    (tmp_path / "marks").mkdir()
    made = Pickles(seed, f"{tmp_path}/marks/")
    classes = {kind: dict(vars(kind)) for kind in READ.values()}
    modules = set(sys.modules)
    outcomes = {"data": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(CASES):
            data = made.case()
            try:
                assert_plain(read_pickle(data, METADATA_TABLE))
                outcomes["data"] += 1
            except PickleError:
                outcomes["refused"] += 1
            try:
                assert_plain(read_archive(memoryview(bytearray(archive(data)))))
            except PickleError:
                outcomes["refused"] += 1
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 0, outcomes
    assert not list((tmp_path / "marks").iterdir())
    assert {kind: dict(vars(kind)) for kind in READ.values()} == classes
    new = set(sys.modules) - modules
    assert not [module for module in new if not module.startswith("encodings.")]  # of zipfile


@pytest.mark.parametrize("seed", range(SEEDS))
def test_archives(seed, tmp_path):
    """Files of torch.save with bytes changed anywhere, also in the zip."""
    (tmp_path / "marks").mkdir()
    made = Pickles(seed, f"{tmp_path}/marks/")
    path, said = tmp_path / "a.pt", list[str]()
    for _ in range(CASES // 5):
        path.write_bytes(made.changed(made.state))
        try:
            assert_plain(safe.load(path))
        except CheckpointError as error:
            said.append(str(error))
    assert all(str(path) in text for text in said)
    assert not list((tmp_path / "marks").iterdir())


# --- indices -----------------------------------------------------------------------------------

ODD = (
    None, True, -1, 0, 7, 2**63, 2**200, 1.5, float("nan"), "", "x", "../x", "/", [], [1], {},
    {"a": 1}, [[]], [-1, 2], [2**40, 2**40], "float64", "rank_0.bin", "\x1b[2J",
)  # fmt: skip


def places(value, path=()):
    """Where something is in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in inner:
            yield from places(entry, (*path, key))


def lie(index, chance):
    """Change, remove or double an entry anywhere."""
    *way, last = chance.choice(list(places(index)))
    for key in way:
        index = index[key]
    kind = chance.random()
    if kind < 0.7:
        index[last] = chance.choice(ODD)
    elif kind < 0.85 and isinstance(index, dict):
        del index[last]
    elif isinstance(index, list):
        index.append(index[last])
    else:
        index[f"{last}x"] = index[last]


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize("written_as", some(["fully_reshardable", "dp_local", "fsdp_dtensor"]))
def test_indices(written_as, tmp_path):
    """Loading, inspecting and converting end well, or say what is wrong and change nothing."""
    chance = random.Random(0)
    torch.manual_seed(0)
    model = nn.ModuleDict({"w": nn.Linear(3, 2), "e": nn.Embedding(4, 3)})
    opt = samestep.MuonAdamW(model)
    folder = tmp_path / "a"
    samestep.save(folder, model, opt, extra={"step": [1]}, format=written_as)
    inner = folder / "rank_0" if written_as == "dp_local" else folder
    texts = {path: (path / INDEX).read_text() for path in {folder, inner}}
    before = [param.clone() for param in model.parameters()]
    outcomes, said = {"read": 0, "refused": 0}, list[str]()
    for _ in range(CASES * SEEDS // 60):
        where = chance.choice(sorted(texts))
        index = json.loads(texts[where])
        for _ in range(chance.choice((1, 1, 3))):
            lie(index, chance)
        for path, own in {**texts, where: json.dumps(index)}.items():
            (path / INDEX).write_text(own)
            _beside(path / INDEX).write_bytes(_sha256_line(path / INDEX, own.encode()))
        for act in (
            lambda: samestep.load(folder, model, opt),
            lambda: contents(open_checkpoint(folder)),
            lambda: convert(folder, tmp_path / "b", to="torch"),
        ):
            try:
                act()
                outcomes["read"] += 1
            except CheckpointError as error:
                outcomes["refused"] += 1
                said.append(str(error))
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        for param, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, was)
    assert min(outcomes.values()) > 3, outcomes
    assert all(str(tmp_path) in text or text.startswith(("parameter '", "model.")) for text in said)
