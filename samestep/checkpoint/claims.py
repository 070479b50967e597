"""Checks what the files of a checkpoint say of themselves before anything is allocated."""

import stat
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from samestep.layout.boxes import Box

LARGEST = 1 << 63  # no tensor has as many elements


class ClaimError(ValueError):
    """The contents of a checkpoint are contradictory or invalid; the message has what and why."""


# --- files -----------------------------------------------------------------------------------


def inside(folder: Path, name: object) -> Path:
    """The path of a file that an index names, refused if it leaves the folder.

    Raises:
        ClaimError: It is elsewhere, by its name or by a link.
    """
    path = by_name(folder, name)
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ClaimError(f"{path} is a broken link ({error})") from None
    if not real.is_relative_to(home):
        raise ClaimError(
            f"{path} is a symbolic link to {real}, outside of the checkpoint: nothing "
            "was read. If you trust that file, replace the link by a copy"
        )
    return path


def by_name(folder: Path, name: object) -> Path:
    """The size of a file, following links, which caches of downloads consist of."""
    if not isinstance(name, str) or not all(map(_is_plain, name.split("/"))):
        raise ClaimError(f"it names {name!r:.80}, which leads out of {folder}")
    return folder / name


def _is_plain(part: str) -> bool:
    odd = part in ("", ".", "..") or "\\" in part or len(part.encode(errors="replace")) > 255
    return part.isprintable() and not odd


def file_size(path: Path) -> int | None:
    """Size of a regular file in bytes; None if it is missing or no regular file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


# --- boxes -----------------------------------------------------------------------------------


def whole(value: object, what: str) -> int:
    """Check a count or an offset: a whole number of at least 0."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ClaimError(f"{what} is {value!r:.40}")
    return value


def sizes_from(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > 64:
        raise ClaimError(f"{what} is {value!r:.40}")
    sizes = tuple(whole(size, what) for size in value)
    whole(prod(max(1, size) for size in sizes), f"{what}, all of it,")
    return sizes


def check_box(name: str, shape: Sequence[int], box: Box) -> None:
    """Raise unless the box lies inside a tensor of this shape."""
    fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
        at + size <= of for at, size, of in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fits:
        raise ClaimError(
            f"{name!r} has shape {tuple(shape)}, and a shard of sizes {box.sizes} at "
            f"offsets {box.offsets} lies outside of it"
        )


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return the reason that boxes miss or repeat elements of a tensor; "" if they do not."""
    wanted, there = prod(shape), sum(box.numel for box in boxes)
    if there != wanted:
        return f"{there} of its {wanted} elements"
    boxes = [box for box in boxes if box.numel]
    if len(boxes) < 2:
        return ""
    # Along the dim that is cut most, few boxes are beside each other.
    along = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    beside: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        start = box.offsets[along]
        beside = [other for other in beside if other.offsets[along] + other.sizes[along] > start]
        for other in beside:
            if box.overlap(other).numel:
                return f"some elements twice, at {box.offsets} and {other.offsets}"
        beside.append(box)
    return ""


# --- the index -------------------------------------------------------------------------------


def entry_of(content: object, key: str, kind: type, what: str = "the index") -> Any:
    """An entry of a JSON object, checked to have this type."""
    if not isinstance(content, Mapping) or key not in content:
        raise ClaimError(f"{what} has no {key!r}")
    if type(content[key]) is not kind:
        raise ClaimError(f"{key!r} of {what} is {content[key]!r:.40}")
    return content[key]


def check_facts(content: Mapping[str, Any], dtypes: Mapping[str, Any]) -> None:
    """Raise unless an index has all required entries beside its tensors, with the right types."""
    for name, size in entry_of(content, "files", dict).items():
        whole(size, f"the size of {name!r}")
    if "world_size" not in content:  # the part of one rank
        return
    if whole(content["world_size"], "world_size") < 1:
        raise ClaimError("world_size is 0")
    for key in ("samestep", "torch", "fingerprint", "written_as"):
        if key in content and not entry_of(content, key, str).isprintable():
            raise ClaimError(f"{key!r} is {content[key][:40]!r}")  # a terminal would obey it
    for key in ("layout", "parts"):
        for line in entry_of(content, key, list) if key in content else ():
            if type(line) is not str or not line.removesuffix("\n").isprintable():
                raise ClaimError(f"{key!r} has {line!r:.40}")
    if "extra" not in content:
        raise ClaimError("the index has no 'extra'")
    for group in entry_of(content, "groups", list):
        names = entry_of(group, "params", list, "a group")
        if not all(type(name) is str for name in names):
            raise ClaimError(f"a group has the parameters {names!r:.80}")
        options = entry_of(group, "options", dict, "a group")
        entry_of(options, "rule", str, "a group")
        _check_option(options, dtypes, 8)


def _check_option(value: object, dtypes: Mapping[str, Any], levels: int) -> None:
    """Check one option; dicts must be those that `plain_options` makes, such as a dtype."""
    if levels == 0:
        raise ClaimError("the options of a group are nested too deeply")
    inner: Sequence[object] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = list(value.values())
    for entry in inner:
        if isinstance(entry, dict):
            if "dtype" in entry:
                if type(entry["dtype"]) is not str or entry["dtype"] not in dtypes:
                    raise ClaimError(f"an option is the dtype {entry['dtype']!r:.40}")
            elif type(entry.get("entries")) is not dict:
                raise ClaimError(f"an option is {entry!r:.40}")
            else:
                _check_option(entry["entries"], dtypes, levels - 1)
        else:
            _check_option(entry, dtypes, levels - 1)
