"""The rooms of samestep/ and the imports between them, before the redesign and now, as a picture.

    python docs/house.py                # in a clone: writes docs/house.svg, prints what is counted

A room is a folder of the package, or a module beside the folders. Rooms stand in an order in which
few imports run upwards: now the one of pyproject.toml, before one that is found here. Imports that
are for type checkers alone do not count, as import-linter does not count them.
"""

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("house.svg")
BEFORE = "ce6ddff"  # the last commit before rooms were made
FACE = ("samestep", "__main__", "version")  # everything meets there
Arrows = dict[tuple[str, str], int]  # how many modules of a room import from another

STYLE = "text { font: 12px system-ui, sans-serif; fill: #1b1f3b } .title { font-weight: 600 }"
LINE, WIDTH = 17, 360
DOWN, BACK = "#8a8fa8", "#d1495b"


def sources(revision: str | None) -> dict[str, str]:
    """The package's modules by path; None: as they are in the working tree."""
    if revision is None:
        paths = sorted((ROOT / "samestep").rglob("*.py"))
        return {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    listed = _git("ls-tree", "-r", "--name-only", revision, "samestep").splitlines()
    paths = [path for path in listed if path.endswith(".py")]
    return {path: _git("show", f"{revision}:{path}") for path in paths}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def arrows(files: dict[str, str]) -> Arrows:
    """Between rooms: from who imports to what is imported."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path, text in files.items():
        here = _room(path.removesuffix(".py").replace("/", "."))
        for module in _imported(ast.parse(text)):
            there = _room(module)
            if here != there and not {here, there} & set(FACE):
                found[here, there].add(path)
    return {pair: len(paths) for pair, paths in found.items()}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep"):
            if node.module == "samestep":
                yield from (f"samestep.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("samestep"))
        yield from _imported(node)


def _room(module: str) -> str:
    parts = module.removesuffix(".__init__").split(".")
    if parts[1:2] == ["lab"] and len(parts) > 2:
        return f"lab.{parts[2]}"
    return parts[1] if len(parts) > 1 else parts[0]


def ordered(found: Arrows) -> list[str]:
    """Rooms such that few arrows run upwards: sinks go to the end, sources to the front.

    Where there is neither, the room that is imported least for what it imports is next (the
    heuristic of Eades, Lin and Smyth).
    """
    left = {room for pair in found for room in pair}
    first: list[str] = []
    last: list[str] = []
    while left:
        pairs = {pair: count for pair, count in found.items() if set(pair) <= left}
        out = {room: sum(n for (a, _), n in pairs.items() if a == room) for room in left}
        into = {room: sum(n for (_, b), n in pairs.items() if b == room) for room in left}
        sinks = sorted(room for room in left if not out[room])
        if sinks:
            last = [*sinks, *last]
            left -= set(sinks)
            continue
        room = max(sorted(left), key=lambda room: (not into[room], out[room] - into[room]))
        first.append(room)
        left.remove(room)
    return first + last


def layers() -> list[str]:
    """The order that import-linter holds; the laboratory is four rooms, of which one is below."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rooms, inside = (c["layers"] for c in config["contracts"] if "layers" in c)
    of_lab = [f"lab.{room}" for layer in inside for room in layer.split(" | ")]
    order = [own for room in rooms for own in (of_lab if room == "lab" else [room])]
    return [room for room in order if room not in FACE]


def running_back(found: Arrows, order: Sequence[str]) -> list[tuple[str, str]]:
    place = {room: number for number, room in enumerate(order)}
    return sorted(pair for pair in found if place[pair[0]] > place[pair[1]])


def floors(found: Arrows, order: Sequence[str]) -> int:
    """Rooms on the longest way down."""
    below = dict.fromkeys(order, 1)
    for room in reversed(order):
        under = [below[b] for a, b in found if a == room and order.index(b) > order.index(a)]
        below[room] = 1 + max(under, default=0)
    return max(below.values())


def drawn(title: str, found: Arrows, order: Sequence[str], x: float) -> Iterator[str]:
    """A column of rooms; imports as arcs beside it, those that run upwards on the left."""
    place = {room: 48 + LINE * number for number, room in enumerate(order)}
    middle, back = x + WIDTH / 2 - 20, running_back(found, order)
    count = f"{title}: {len(order)} rooms, {len(found)} arrows, {len(back)} of them run back"
    yield f'<text class="title" x="{x + 8}" y="20">{count}</text>'
    for pair in sorted(found, key=lambda pair: pair in back):
        top, end = place[pair[0]] - 4, place[pair[1]] - 4
        bend = 6 + abs(end - top) * 0.22
        side = middle - 60 if pair in back else middle + 60
        far = side - bend if pair in back else side + bend
        colour, wide = (BACK, 1.6) if pair in back else (DOWN, 0.6)
        yield (
            f'<path fill="none" stroke="{colour}" stroke-width="{wide}" d="M{side:.0f} {top} '
            f'C{far:.0f} {top} {far:.0f} {end} {side:.0f} {end}"/>'
        )
    for room, y in place.items():
        yield f'<text x="{middle}" y="{y}" text-anchor="middle">{room}</text>'


def main() -> None:
    before, now = arrows(sources(BEFORE)), arrows(sources(None))
    rooms = {room for pair in now for room in pair}
    order = [room for room in layers() if room in rooms]
    body: list[str] = []
    tall = 0
    pictures = [("before", before, ordered(before)), ("now", now, order)]
    for number, (title, found, rows) in enumerate(pictures):
        body += drawn(title, found, rows, number * WIDTH)
        tall = max(tall, 60 + LINE * len(rows))
        counts = f"{len(rows)} rooms on {floors(found, rows)} floors, {len(found)} arrows"
        back = ", ".join(f"{a} -> {b}" for a, b in running_back(found, rows))
        sys.stdout.write(f"{title}: {counts}; these run back: {back}\n")
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {tall}" '
        f'width="{2 * WIDTH}" height="{tall}" role="img" '
        'aria-label="rooms of samestep and imports between them, before and now">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" rx="7" fill="#f7f7fb"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
