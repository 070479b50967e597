"""Small mistakes in the core, one at a time, and whether the tests that run a line see it.

    python -m pytest --lanes 3 --cov --cov-context=test    # what runs each line
    python -m tests.mutation --data .coverage --count 100 --out out/mutation.json

A mistake is a swapped comparison, a negated condition, a number that is one off, a sum for a
difference, a call that is left out. Tests are collected once; every mistake gets a process of its
own, forked from there, in which the code of one function is exchanged. It is caught when a test
fails that passes without it, or when a test does not end. Survivors are printed, to be looked at:
some are the same program in other words.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import json
import os
import random
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from coverage import CoverageData

from samestep.launch.forked import end_with
from tests.limits import limit
from tests.ranks import prepare

ROOT = Path(__file__).parent.parent
PACKAGES = ("rules", "layout", "plan", "comm")
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SUMS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


@dataclass(frozen=True)
class Mutant:
    """A mistake in a file: which one of those that its syntax tree has, and where."""

    file: str
    number: int
    line: int
    what: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: caught by a test, timeout, survived, or run by no test."""

    mutant: Mutant
    outcome: str
    by: str
    tried: int
    covering: int
    seconds: float


# --- mistakes ------------------------------------------------------------------------------------


def mistakes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    """Where, what, and how the tree is changed; the same in every copy of a tree.

    Inside functions alone, and not in texts of errors: what else there is runs at import.
    """
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                yield from _of_statement(statement)


def _of_statement(node: ast.AST) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)):
        return  # a function within is gone through by itself
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "call left out", _setter(node, "value", ast.Constant(None))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, "negated", _setter(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        what = f"{type(node.ops[0]).__name__} -> {other.__name__}"
        yield node, what, _setter(node, "ops", [other(), *node.ops[1:]])
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        other = SUMS[type(node.op)]
        yield node, f"{type(node.op).__name__} -> {other.__name__}", _setter(node, "op", other())
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield node, f"to {other.__name__}", _setter(node, "op", other())
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        wrong = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, f"{node.value} -> {wrong}", _setter(node, "value", wrong)
    for field, child in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from _of_statement(each)


def _setter(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def mutants_of(path: Path) -> list[Mutant]:
    """All of a file, in order."""
    file = str(path.relative_to(ROOT))
    found = mistakes(ast.parse(path.read_text()))
    return [Mutant(file, n, where.lineno, what) for n, (where, what, _) in enumerate(found)]


def code_of(mutant: Mutant) -> tuple[CodeType, CodeType]:
    """The module of a mutant, compiled as it is and with the mistake."""
    path = ROOT / mutant.file
    tree = ast.parse(path.read_text())
    wrong = copy.deepcopy(tree)
    _, _, change = list(mistakes(wrong))[mutant.number]
    change()
    ast.fix_missing_locations(wrong)
    return tuple(compile(one, str(path), "exec", dont_inherit=True) for one in (tree, wrong))


def apply(mutant: Mutant) -> int:
    """Give every function of the module its code with the mistake; how many changed."""
    right, wrong = code_of(mutant)
    pairs: dict[CodeType, CodeType] = {}

    def compare(left: CodeType, other: CodeType) -> None:
        if left != other:
            pairs[left] = other
            nested = [
                [const for const in code.co_consts if isinstance(const, CodeType)]
                for code in (left, other)
            ]
            for one, two in zip(*nested, strict=True):
                compare(one, two)

    compare(right, wrong)
    changed = 0
    gc.unfreeze()
    for found in gc.get_objects():
        # Not isinstance, which asks the object for its class: one of torch's warns then.
        if type(found) is FunctionType and found.__code__ in pairs:
            if found.__code__.co_filename == right.co_filename:
                found.__code__ = pairs[found.__code__]
                changed += 1
        elif type(found) is functools._lru_cache_wrapper and str(
            getattr(found, "__module__", "")
        ).startswith("samestep"):
            found.cache_clear()
    return changed


# --- tests that reach a line ---------------------------------------------------------------------


class Reached:
    """Which tests run a line, as `--cov-context=test` wrote it down."""

    def __init__(self, data: Path) -> None:
        self._data = CoverageData(str(data))
        self._data.read()
        self._files = {}
        for name in self._data.measured_files():
            if "samestep" in Path(name).parts:
                parts = Path(name).parts
                place = len(parts) - 1 - parts[::-1].index("samestep")
                self._files["/".join(parts[place:])] = name
        self._lines: dict[str, dict[int, list[str]]] = {}

    def by(self, mutant: Mutant) -> list[str]:
        """The names of tests."""
        if mutant.file not in self._lines:
            name = self._files.get(mutant.file)
            self._lines[mutant.file] = self._data.contexts_by_lineno(name) if name else {}
        contexts = self._lines[mutant.file].get(mutant.line, [])
        return sorted({name.partition("|")[0] for name in contexts if name})


# --- runs ----------------------------------------------------------------------------------------


class Battery:
    """Runs mutants in place of the tests that pytest has collected."""

    def __init__(
        self,
        mutants: list[Mutant],
        reached: Reached,
        seconds: dict[str, float],
        lanes: int,
        patience: float,
    ) -> None:
        self._mutants, self._reached, self._seconds = mutants, reached, seconds
        self._lanes, self._patience = lanes, patience
        self._passes: dict[str, bool] = {}
        self.verdicts: list[Verdict] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Several at a time, each in a process of its own."""
        prepare()
        items = {item.nodeid: item for item in session.items}
        waiting = list(self._mutants)
        running: dict[int, tuple[Mutant, list[str], int, float]] = {}
        while waiting or running:
            while waiting and len(running) < self._lanes:
                mutant = waiting.pop(0)
                names = [name for name in self._reached.by(mutant) if name in items]
                names.sort(key=lambda name: (self._seconds.get(name, 1.0), name))
                if not names:
                    self._note(Verdict(mutant, "not run", "", 0, 0, 0.0))
                    continue
                process, told = self._start(mutant, [items[name] for name in names])
                running[told] = mutant, names, process, time.monotonic()
            ready, _, _ = select.select(list(running), [], [], 1.0)
            now = time.monotonic()
            for told, (mutant, names, process, start) in list(running.items()):
                late = now - start > self._patience
                if told not in ready and not late:
                    continue
                text = b"" if told not in ready else _all_of(told)
                os.close(told)
                for end in (os.killpg, os.kill):
                    with suppress(ProcessLookupError):
                        end(process, signal.SIGKILL)
                os.waitpid(process, 0)
                del running[told]
                of_child = json.loads(text) if text else {}
                by, tried = of_child.get("by", ""), of_child.get("tried", 0)
                outcome = "timeout" if late else of_child.get("outcome", "died")
                if outcome == "caught" and not self._passes_alone(items[by]):
                    outcome = "unclear"
                self._note(Verdict(mutant, outcome, by, tried, len(names), round(now - start, 1)))
        return True

    def _start(self, mutant: Mutant | None, items: list[pytest.Item]) -> tuple[int, int]:
        told, write = os.pipe()
        parent = os.getpid()
        process = os.fork()
        if process:
            os.close(write)
            return process, told
        try:
            os.close(told)
            end_with(parent)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            found = {"outcome": "survived", "by": "", "tried": 0}
            if mutant is not None and not apply(mutant):
                found["outcome"] = "nothing changed"
            else:
                found |= _first_failure(items)
            os.write(write, json.dumps(found).encode())
        finally:
            os._exit(0)

    def _passes_alone(self, item: pytest.Item) -> bool:
        """Whether a test passes without any mutant, here."""
        if item.nodeid not in self._passes:
            process, told = self._start(None, [item])
            ready, _, _ = select.select([told], [], [], self._patience)
            text = _all_of(told) if ready else b""
            os.close(told)
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            self._passes[item.nodeid] = bool(text) and json.loads(text)["outcome"] == "survived"
        return self._passes[item.nodeid]

    def _note(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        m = verdict.mutant
        sys.__stdout__.write(
            f"{verdict.outcome:9} {verdict.seconds:6.1f} s {verdict.tried:4}/{verdict.covering:<4}"
            f" {m.file}:{m.line} {m.what}  {verdict.by}\n"
        )
        sys.__stdout__.flush()


def _first_failure(items: list[pytest.Item]) -> dict[str, object]:
    for place, item in enumerate(items):
        following = items[place + 1] if place + 1 < len(items) else None
        for report in runtestprotocol(item, nextitem=following, log=False):
            if report.failed:
                return {"outcome": "caught", "by": item.nodeid, "tried": place + 1}
    return {"tried": len(items)}


def _all_of(pipe: int) -> bytes:
    text = b""
    while part := os.read(pipe, 1 << 16):
        text += part
    return text


# --- the command ---------------------------------------------------------------------------------


def sample(count: int, seed: int, packages: Iterable[str]) -> list[Mutant]:
    """So many mutants of some packages, each file by the number that it has."""
    found = []
    for package in packages:
        for path in sorted((ROOT / "samestep" / package).rglob("*.py")):
            found += mutants_of(path)
    return sorted(random.Random(seed).sample(found, min(count, len(found))), key=asdict_key)


def asdict_key(mutant: Mutant) -> tuple[str, int]:
    return mutant.file, mutant.number


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--patience", type=float, default=limit(120.0), help="seconds for a mutant")
    parser.add_argument("--seconds", type=Path, help="JSON: seconds of tests, the quick ones first")
    parser.add_argument("--again", type=Path, help="mutants of an earlier --out, not a new sample")
    parser.add_argument("--only", nargs="*", help="outcomes of --again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("tests", nargs="*", default=["tests"])
    options = parser.parse_args(words)
    if options.again:
        before = json.loads(options.again.read_text())
        kept = [v for v in before if not options.only or v["outcome"] in options.only]
        mutants = [Mutant(**verdict["mutant"]) for verdict in kept]
    else:
        mutants = sample(options.count, options.seed, options.packages)
    seconds = json.loads(options.seconds.read_text()) if options.seconds else {}
    battery = Battery(mutants, Reached(options.data), seconds, options.lanes, options.patience)
    pytest.main(
        [*options.tests, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:cov", "-s",
         "--continue-on-collection-errors"],
        plugins=[battery],
    )  # fmt: skip
    counts: dict[str, int] = defaultdict(int)
    for verdict in battery.verdicts:
        counts[verdict.outcome] += 1
    sys.__stdout__.write(f"{dict(counts)}\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(v) for v in battery.verdicts], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
