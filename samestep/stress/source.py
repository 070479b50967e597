"""Which code a run is of: a digest of everything it could import from here, and the commit."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import samestep
from samestep.stress.scenario import MakeModel

PACKAGE = Path(samestep.__file__).parent
SUFFIXES = (".py", ".json")


def code_digest(make_model: MakeModel | None = None, folder: Path = PACKAGE) -> str:
    """Of the names and contents of a package's files, and of a user's model as it begins."""
    digest = _of_files(folder).copy()
    if make_model is not None:
        for name, param in make_model().named_parameters():
            digest.update(f"{name} {tuple(param.shape)}\n".encode())
            digest.update(param.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@cache  # what has been imported does not change with its file
def _of_files(folder: Path) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest


def commit(folder: Path = PACKAGE) -> str | None:
    """What git calls the code, with a + if files were changed since; None: it is not git's."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # not just inside a repository
        changed = _git(folder, "status", "--porcelain", "--", ".")
        return _git(folder, "rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=10
    ).stdout.strip()
