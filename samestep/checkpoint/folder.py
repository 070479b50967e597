"""Checkpoint folders that become visible only when complete, and a LATEST file naming the newest.

Nothing is removed but what carries a mark of ours: the index of a checkpoint with its checksum, or
the owner file of a partial folder (`savers`). It is looked at right before, and links are never
followed.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from samestep.checkpoint.claims import ClaimError, inside
from samestep.checkpoint.savers import OWNER, PARTIAL, TURN, Saver, is_alive, owner_in
from samestep.checkpoint.storage import FORMAT, INDEX, CheckpointError, read_json, sync
from samestep.tooling.warn import some, warn_user

LATEST = "LATEST"
METADATA = ".metadata"  # what folders of torch.distributed.checkpoint have
REMOVED = ".removed"
POINTER = f".{LATEST}"  # in a folder until it is moved to LATEST beside it
SUM = f"{INDEX}.sha256"
SUM_SIZE = 64 + len(f"  {INDEX}\n")
POINTER_MOST = 4096  # bytes of what LATEST can be
HIDDEN = re.compile(rf"\..*\.[0-9a-f]{{32}}(?P<kind>{PARTIAL}|{REMOVED})", re.DOTALL)
ABANDONED_S = 3600.0  # without a change: a partial folder of which nobody can tell whose it is


class Unfinished:
    """A partial folder beside its final name, locked by the process that writes it."""

    def __init__(self, path: Path) -> None:
        _check_name(path)
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_pointer(path.parent)
            _refuse_existing(path)
            self._saver = Saver(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        self.folder = self._saver.folder
        try:
            with self._saver.turn():
                try:
                    self._remove_leftovers()
                    _refuse_existing(path)
                except BaseException:  # gone before another one looks who writes
                    _delete_partial(self.folder)
                    raise
        except OSError as error:
            self.abandon()
            raise _unwritable(path, error) from None
        except BaseException:
            self.abandon()
            raise

    def commit(self, keep: int | None) -> None:
        """Rename the folder, update LATEST, and delete old checkpoints."""
        is_there = is_named = False
        removed: list[Path] = []
        try:
            pointer = self.folder / POINTER
            with pointer.open("xb") as file:
                file.write(os.fsencode(f"{self.path.name}\n"))
            sync(pointer)
            sync(self.folder)
            with self._saver.turn():
                removed += self._move_to_its_place()
                is_there = True
                self._name_it()
                is_named = True
                if keep is not None:
                    removed += _move_away_all_but(keep, self.path)
        except OSError as error:
            if not is_there:
                self.abandon()
                raise _unwritable(self.path, error) from None
            if not is_named:
                raise self._not_named(error) from None
            _warn_once(
                self.path,
                (
                    f"{self.path} is saved, but older checkpoints were not deleted "
                    f"(keep={keep}): {error}"
                ),
            )
        finally:
            if is_there:
                self._saver.release()
        for old in removed:
            _delete(old)
            if os.path.lexists(old):
                _warn_once(
                    old,
                    (
                        f"{old} is an old checkpoint and could not be deleted completely: "
                        "delete it by hand"
                    ),
                )

    def _move_to_its_place(self) -> list[Path]:
        """Rename the folder; return where the remains of a killed save were moved, if any."""
        replaced = []
        _refuse_existing(self.path)
        if not self._saver.has_mark:
            raise CheckpointError(
                f"{self.folder} was deleted or changed by another process during the save: "
                "save again"
            )
        self._saver.check_turn()
        if os.path.lexists(self.path):
            replaced = [_hidden(self.path, REMOVED)]
            os.rename(self.path, replaced[0])
        try:
            os.rename(self.folder, self.path)
        except OSError:
            for old in replaced:
                os.rename(old, self.path)
            raise
        return replaced

    def _name_it(self) -> None:
        """Update LATEST; until then a pointer in the folder says that it may be incomplete."""
        sync(self.path.parent)
        (self.path / OWNER).unlink()
        self._saver.check_turn()
        os.replace(self.path / POINTER, self.path.parent / LATEST)
        sync(self.path.parent)

    def _not_named(self, error: OSError) -> CheckpointError:
        for name in (POINTER, OWNER):  # finished, so that nobody may replace it
            with suppress(OSError):
                (self.path / name).unlink(missing_ok=True)
        return CheckpointError(
            f"{self.path} is written and complete, but {self.path.parent / LATEST} "
            f"could not be updated to name it ({error.strerror or error}): load it by "
            "its own name"
        )

    def abandon(self) -> None:
        """Delete the files of a failed save, the lock last."""
        if self._saver.has_mark:
            _delete_partial(self.folder)
        self._saver.release()
        with suppress(OSError):  # NFS keeps an open file under another name
            self.folder.rmdir()

    def _remove_leftovers(self) -> None:
        """Delete remains of killed saves; raises if another process writes the same checkpoint."""
        now = (self.folder / OWNER).stat().st_mtime  # by the clock of the disk
        for path in self.path.parent.iterdir():
            if path == self.folder or not path.name.endswith((PARTIAL, REMOVED)):
                continue
            kind = HIDDEN.fullmatch(path.name)
            if kind is None or not _is_folder(path):
                _tell_of_older(path)
            elif kind["kind"] == REMOVED:
                _delete(path)
            else:
                with suppress(FileNotFoundError):  # its saver removes it
                    self._remove_if_left(path, now)

    def _remove_if_left(self, path: Path, now: float) -> None:
        mark = path / OWNER
        owner, alive = owner_in(mark), is_alive(mark)
        if owner is None:  # killed, or looked at, before it could write its mark
            if alive is not True and _is_empty_but_for_a_mark(path):
                _delete_partial(path)
        elif not path.name.endswith(f".{owner.token}{PARTIAL}"):
            return
        elif alive is False or (alive is None and now - _last_change(path) > ABANDONED_S):
            _delete_partial(path)
        elif alive and owner.name == self.path.name:
            raise CheckpointError(
                f"{self.path} is being written by {owner}: wait for it, or save under another name"
            )


def checkpoints_beside(newest: Path) -> Iterator[Path]:
    """Complete checkpoints of samestep in a folder, without links."""
    for path in newest.parent.iterdir():
        hidden = path.name.startswith(".")
        if path != newest and not hidden and own_files(path, tell=True) is not None:
            yield path


def own_files(path: Path, *, tell: bool = False) -> list[str] | None:
    """Files of a checkpoint by its index; None if it is incomplete or not of samestep.

    `tell` warns once of a folder that seems to be ours and is not in order.
    """
    if not (_is_folder(path) and _size_of(path / INDEX) and _size_of(path / SUM) == SUM_SIZE):
        return None
    wrong = ""
    try:
        files = _files_of(path)
        changed = [name for name, size in files.items() if _at(path, name) != size]
        wrong = f"these files differ from what was saved: {some(changed)}" if changed else ""
    except (CheckpointError, OSError, ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        if tell:
            _warn_once(
                path,
                (
                    f"{path} is not counted by keep= and was not deleted, because it is no "
                    f"complete checkpoint: {wrong}"
                ),
            )
        return None
    return [*files]


_known: dict[tuple[int, ...], Mapping[str, int]] = {}


def _files_of(path: Path) -> Mapping[str, int]:
    """Names and sizes of the files of a checkpoint; ValueError unless samestep wrote it.

    An index is read once, wherever it is moved: it is large where there are many tensors.
    """
    files = [(path / name).lstat() for name in (INDEX, SUM)]
    same = tuple(fact for f in files for fact in (f.st_dev, f.st_ino, f.st_mtime_ns, f.st_size))
    if same not in _known:
        _known[same] = _files_in(read_json(path / INDEX))
    return _known[same]


def _files_in(content: Any) -> Mapping[str, int]:
    index = content if isinstance(content, dict) else {}
    if index.get("format") != FORMAT or not isinstance(index.get("samestep"), str):
        raise ValueError(f"its index does not have format {FORMAT}")
    files = index.get("files")
    if not isinstance(files, dict) or not all(map(_is_plain, files)):
        raise ValueError("its index names files outside of the folder")
    return files


def _is_plain(name: str) -> bool:
    """Whether a name is a normalized path of a file in the folder or a direct subfolder."""
    parts = PurePosixPath(name).parts
    return 0 < len(parts) < 3 and ".." not in parts and name == "/".join(parts) and "\0" not in name


def _at(folder: Path, name: str) -> int | None:
    """Size of a file that is reached without links."""
    file = folder / name
    return _size_of(file) if _is_folder(file.parent) else None


def find(path: Path) -> Path:
    """The checkpoint at a path: the folder itself, or the one that its LATEST names."""
    if (path / INDEX).is_file():
        return path
    pointer = path / LATEST
    if pointer.is_file():
        named = pointed(path, LATEST)
        if (named / INDEX).is_file():
            return named
        raise CheckpointError(
            f"{pointer} names {named.name!r}, which is no checkpoint: give the path of "
            "the checkpoint itself"
        )
    if (path / METADATA).is_file():
        return path
    what = f"is no checkpoint: it has no {INDEX} and no {LATEST}"
    raise CheckpointError(f"{path} {what if path.exists() else 'does not exist'}")


def pointed(path: Path, name: str) -> Path:
    """The subfolder that LATEST names; raises if the name leads outside."""
    try:
        with inside(path, name).open(errors="replace") as file:
            return inside(path, file.read(4096).strip())
    except ClaimError as error:
        raise CheckpointError(
            f"{path / name} has invalid contents ({error}); nothing was loaded. Give "
            "the path of the checkpoint itself"
        ) from None


def _refuse_existing(path: Path) -> None:
    """Raise if the target exists, except as the remains of a killed save."""
    if os.path.lexists(path) and not (_size_of(path / POINTER) and own_files(path) is not None):
        raise CheckpointError(f"{path} exists: save under another name, or remove it first")


def _check_name(path: Path) -> None:
    """Raise unless the name fits on a line of LATEST and is not reserved."""
    name = path.name
    if name in ("", "..", LATEST, TURN) or name != name.strip() or not name.isprintable():
        raise CheckpointError(
            f"{str(path)!r} cannot be the name of a checkpoint, because {LATEST} stores "
            "it as one line of text: choose another name"
        )


def _check_pointer(parent: Path) -> None:
    """Raise if a file named LATEST exists and samestep cannot have written it."""
    pointer = parent / LATEST
    with suppress(FileNotFoundError):
        found = pointer.lstat()
        is_file = stat.S_ISREG(found.st_mode) and found.st_size <= POINTER_MOST
        if not is_file and not stat.S_ISLNK(found.st_mode):  # a link is replaced, not what it names
            raise CheckpointError(
                f"{pointer} is no file of samestep, and saving here would overwrite it: "
                "move it, or save in another folder"
            )


# --- removing --------------------------------------------------------------------------------


def _move_away_all_but(keep: int, newest: Path) -> list[Path]:
    """Move all but the newest checkpoints away, and return where they wait for deletion."""
    others = sorted(checkpoints_beside(newest), key=_age)
    removed = []
    for path in others[: max(0, len(others) - keep + 1)]:
        try:
            removed += _moved_away(path)
        except OSError as error:
            _warn_once(
                path,
                (
                    f"keep={keep}: the old checkpoint {path} cannot be deleted: "
                    f"{error.strerror or error}"
                ),
            )
    return removed


def _moved_away(path: Path) -> list[Path]:
    """Rename a checkpoint out of sight, so that a half-deleted one is never loaded.

    What else somebody has put into its folder stays where it is.
    """
    files = own_files(path)
    if files is None:
        return []
    hidden = _hidden(path, REMOVED)
    ours = {*files, INDEX, SUM, OWNER, POINTER}
    folders = {name.partition("/")[0] for name in files if "/" in name}
    others = [
        name
        for base in (path, *(path / name for name in sorted(folders)))
        for name in (str(found.relative_to(path)) for found in base.iterdir())
        if name not in ours and name not in folders
    ]
    if not others:
        os.rename(path, hidden)
        return [hidden]
    hidden.mkdir()
    for name in folders:
        (hidden / name).mkdir()
    for name in (INDEX, SUM, *files, OWNER, POINTER):  # without an index it is no checkpoint
        with suppress(FileNotFoundError):
            os.rename(path / name, hidden / name)
    for name in folders:
        with suppress(OSError):
            (path / name).rmdir()
    _warn_once(
        path, f"{path} was deleted, except for files that samestep has not written: {some(others)}"
    )
    return [hidden]


def _delete(hidden: Path) -> None:
    """Delete a checkpoint that was moved away, and no other files."""
    with suppress(OSError, CheckpointError, ValueError, RecursionError):
        if _size_of(hidden / INDEX):
            files = _files_of(hidden)
            for name in (*files, OWNER, POINTER):
                if _at(hidden, name) is not None:
                    (hidden / name).unlink()
            for folder in {name.partition("/")[0] for name in files if "/" in name}:
                if _is_folder(hidden / folder):
                    (hidden / folder).rmdir()
            (hidden / INDEX).unlink()
        left = [path.name for path in hidden.iterdir()]
        if left == [SUM] and _size_of(hidden / SUM) == SUM_SIZE:
            (hidden / SUM).unlink()
        hidden.rmdir()


def _delete_partial(folder: Path) -> None:
    """Delete a partial folder, its lock last."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name == OWNER:
                continue
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        (folder / OWNER).unlink(missing_ok=True)
        folder.rmdir()


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name[:40]}.{uuid4().hex}{kind}")


def _is_empty_but_for_a_mark(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    return not names or (names == [OWNER] and (folder / OWNER).lstat().st_size == 0)


def _last_change(folder: Path) -> float:
    """Time of the last change in a folder, which may disappear meanwhile."""
    times = [folder.lstat().st_mtime]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder and no link."""
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def _size_of(file: Path) -> int | None:
    """Size of a regular file; None for anything else."""
    with suppress(OSError):
        found = file.lstat()
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None


def _tell_of_older(path: Path) -> None:
    """Warn of unmarked partial folders, which earlier versions left behind."""
    seems_ours = _size_of(path / OWNER) is not None or _size_of(path / INDEX)
    if path.name.startswith(".") and _is_folder(path) and seems_ours:
        _warn_once(
            path,
            f"{path} may be left over from a save that was killed; it was not deleted, "
            "because nothing in it says so: delete it if you do not need it",
        )


_told: set[Path] = set()


def _warn_once(path: Path, message: str) -> None:
    if path not in _told:
        _told.add(path)
        warn_user(message)


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror or error}")
