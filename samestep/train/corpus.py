"""Bytes to train on, and every sequence of a run by its number.

By default the text is the source of the standard library of the Python that runs this, so there is
nothing to download.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# Not prose: tests, generated tables, installed packages.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
VALIDATION_EVERY_NTH_FILE = 10


@dataclass(frozen=True)
class Corpus:
    """Text as one tensor of bytes (uint8) per split, and the names of each split's files."""

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the text; the default text differs between Python releases."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.validation.numpy().tobytes())
        return digest.hexdigest()


def load_corpus(root: Path | None = None) -> Corpus:
    """Read Python files under ``root`` (the standard library); every tenth is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = sorted(python_files(root))
    held_out = names[VALIDATION_EVERY_NTH_FILE - 1 :: VALIDATION_EVERY_NTH_FILE]
    held_out_names = set(held_out)
    kept = [name for name in names if name not in held_out_names]
    if not held_out:
        raise ValueError(f"found {len(names)} Python source files under {root}, too few to train")
    return Corpus(read_bytes(root, kept), read_bytes(root, held_out), tuple(kept), tuple(held_out))


def load_file(path: Path) -> Corpus:
    """Read one file of any kind; its last tenth is for validation."""
    content = torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8)
    cut = len(content) - len(content) // VALIDATION_EVERY_NTH_FILE
    return Corpus(content[:cut], content[cut:], (path.name,), (path.name,))


def python_files(root: Path) -> Iterator[str]:
    """Yield the names of the Python files under ``root``, relative to it."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in files:
            # _sysconfigdata differs from one build of the same release to the next.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def read_bytes(root: Path, names: Sequence[str]) -> Tensor:
    """Return the files one after another, with the same line ends on every system."""
    text = b"".join((root / name).read_bytes().replace(b"\r\n", b"\n") for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (len(starts), context); targets are one byte later."""
    rows = data[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def validation_starts(data: Tensor, context: int, count: int) -> Tensor:
    """Return the starts of ``count`` windows that are spread evenly over the text."""
    return torch.linspace(0, len(data) - context - 1, count, dtype=torch.float64).long()


class Order:
    """The start of each sequence of a run, which depends on the sequence's number alone.

    The text is cut into windows, and every epoch goes through all of them in an order of its own.
    The start does not depend on ranks, batches or earlier random draws, so that a run can go on
    from any number, on any number of ranks.
    """

    def __init__(self, length: int, context: int, seed: int) -> None:
        self.windows = (length - 1) // context  # a window has one byte more, its last target
        self._context = context
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def starts(self, numbers: Tensor) -> Tensor:
        """Return the starts (n,) of the sequences with these numbers (n,)."""
        places = (divmod(number, self.windows) for number in numbers.tolist())
        chosen = [self._epoch(epoch)[place] for epoch, place in places]
        return torch.tensor(chosen, dtype=torch.int64) * self._context

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mixed(self._seed, "epoch", epoch))
        order: list[int] = torch.randperm(self.windows, generator=generator).tolist()
        return order


def mixed(*parts: object) -> int:
    """Return a seed that depends on all parts, and on nothing else."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
