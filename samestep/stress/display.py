"""What `samestep stress` shows: progress while it runs, tables at its end."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from samestep.stress.campaign import Case, CaseResult, MutantResult
from samestep.stress.layouts import LAYOUTS, LAYOUTS_ON_REQUEST
from samestep.stress.mutants import MUTANTS, XLA_MUTANTS
from samestep.stress.report.numbers import (
    between_replicas,
    distances,
    to_first_layout,
    to_reference,
    worst,
)
from samestep.stress.scenarios import SCENARIOS, SCENARIOS_ON_REQUEST

Entry = Mapping[str, Any]  # a case as the receipt has it
MARKS = {"failed": "[bold red]FAILED[/]", "interrupted": "[dim]stopped[/]"}
LINE_EVERY = 10.0  # seconds between lines in a log


class Display(Progress):
    """Two lines while cases run: how many are done, and how far the present one is.

    Where the output is no terminal but a log, a line of it now and then.
    """

    def __init__(self, console: Console, total: int, what: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=console, transient=True, refresh_per_second=4)
        self._all = self.add_task(what, total=total)
        self._one = self.add_task("")
        self._what, self._begun, self._told = what, 0.0, 0.0

    def start(self) -> None:
        super().start()
        self._begun = self._told = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(f"{self._what} ...", soft_wrap=True)

    def step(self, case: Case, step: int, worst: float) -> None:
        text = f"{case.scenario} · {case.layout} · largest difference {worst:.3g}"
        self.update(self._one, description=text, completed=step, total=case.steps)
        self._log(f"{case.scenario} · {case.layout} · step {step}")

    def begin(self, text: str) -> None:
        """Something without steps."""
        self.update(self._one, description=text, completed=0, total=None)
        self._log(text)

    def done(self, count: int = 1) -> None:
        self.advance(self._all, count)

    def _log(self, text: str) -> None:
        """A line, if it is time for one; also of ranks that show nothing: they never start."""
        now = time.monotonic()
        if self.console.is_terminal or not self._begun or now - self._told < LINE_EVERY:
            return
        self._told = now
        whole = self.tasks[0]
        done = f"{whole.completed:.0f} of {whole.total:.0f} after {now - self._begun:.0f} s"
        self.console.print(f"{done} · {escape(text)}", soft_wrap=True)


def results_table(cases: Sequence[Entry]) -> Table:
    """Per scenario: the differences that should be 0, and the distance to the reference.

    Has room on 80 columns; what does not apply stands below it (`left_out`).
    """
    table = Table(
        Column("scenario", no_wrap=True),
        Column("steps", justify="right"),
        Column("between ranks\nand layouts", min_width=15),
        Column("reference\nadam", justify="right"),
        Column("\nmuon", justify="right"),
        Column("s", justify="right"),
        title="largest differences, over all samples",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    by_scenario: dict[str, list[Entry]] = {}
    for case in cases:
        by_scenario.setdefault(case["scenario"], []).append(case)
    for scenario, row in by_scenario.items():
        steps = str(max(case["steps"] for case in row))
        seconds = f"{sum(case['seconds'] for case in row):.0f}"
        table.add_row(scenario, steps, _summary(row), *_from_reference(row), seconds)
    return table


def _summary(cases: Sequence[Entry]) -> str:
    """How many layouts are exact; the others by name."""
    exact = sum(case["status"] == "exact" for case in cases)
    parts = [f"[green]0 in {exact} layout{'s' * (exact != 1)}[/]"] if exact else []
    for case in cases:
        if case["status"] == "within_tolerance":
            found = (worst([case], pick) for pick in (between_replicas, to_first_layout))
            largest = max(each.distance for each in found if each is not None)
            parts.append(f"[yellow]{case['layout']} {largest:.1e}[/]")
        elif case["status"] in MARKS:
            parts.append(f"{case['layout']} {MARKS[case['status']]}")
    return ", ".join(parts) or "[dim]does not apply[/]"


def left_out(cases: Sequence[Entry]) -> list[str]:
    """Why cases do not apply: a line for each reason, with the layouts and scenarios it is for."""
    scenarios = list(dict.fromkeys(case["scenario"] for case in cases))
    reasons: dict[str, list[Entry]] = {}
    for case in cases:
        if case["status"] == "does_not_apply":
            reasons.setdefault(case["reason"], []).append(case)
    lines = []
    for reason, alike in reasons.items():
        layouts = ", ".join(dict.fromkeys(case["layout"] for case in alike))
        of = list(dict.fromkeys(case["scenario"] for case in alike))
        where = "" if len(of) == len(scenarios) > 1 else f" in {', '.join(of)}"
        lines.append(f"[dim]does not apply to {layouts}{where}: {reason}[/]")
    return lines


def _from_reference(cases: Sequence[Entry]) -> tuple[str, str]:
    found = list(distances(cases, to_reference))
    adam = [each.distance for each in found if each.family == "adam"]
    muon = [each.distance for each in found if each.family in ("mu_a", "mu_b")]
    return f"{max(adam):.1e}" if adam else "", f"{max(muon):.1e}" if muon else ""


def findings_lines(result: CaseResult) -> Iterator[str]:
    """Every failed check in words, and where each rank was when it hung."""
    for finding in result.findings:
        where = f"{result.case.scenario} · {result.case.layout} · step {finding.step}"
        yield f"[red]{where}[/] {finding.check}: {escape(finding.message)}"
    for rank, operation in result.positions.items():
        yield f"    rank {rank} was in: {escape(operation)}"


def mutants_table(results: Sequence[MutantResult]) -> Table:
    columns = ("bug", "expected", "caught by", Column("step", justify="right"))
    title = "known bugs, and whether they are caught"
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD)
    for result in results:
        step = "" if result.first is None else str(result.first.step)
        story = f"{result.mutant.name}\n[dim]{result.mutant.story}[/]"
        table.add_row(story, result.mutant.expected, _caught(result), step)
    return table


def _caught(result: MutantResult) -> str:
    if result.caught:
        others = [check for check in result.checks if check != result.mutant.expected]
        also = f" [dim](also {', '.join(others)})[/]" if others else ""
        return f"[green]{result.mutant.expected}[/]{also}"
    if result.unpatched not in ("exact", "within_tolerance"):
        return "[bold red]fails without it[/]"
    if result.checks:
        return f"[bold red]only by accident: {', '.join(result.checks)}[/]"
    return "[bold red]NOT CAUGHT[/]"


def closing_sentence(verdict: str, cases: Sequence[Entry], mutants: Sequence[MutantResult]) -> str:
    if verdict == "interrupted":
        return "[yellow]Stopped before the end; nothing had failed so far.[/]"
    if mutants:
        escaped = [result.mutant.name for result in mutants if not result.caught]
        if escaped:
            count = f"{len(escaped)} of {len(mutants)}"
            return f"[bold red]{count} known bugs escape:[/] {', '.join(escaped)}"
        return f"[green]All {len(mutants)} known bugs are caught, each by the check it should.[/]"
    cases = [case for case in cases if case["status"] != "does_not_apply"]
    if not cases:
        return "[yellow]Nothing was run: no scenario applies to the layout.[/]"
    failed = sum(case["status"] == "failed" for case in cases)
    if failed:
        return f"[bold red]{failed} of {len(cases)} cases failed.[/]"
    near = sum(case["status"] == "within_tolerance" for case in cases)
    flag = f", {near} of them not exactly zero" if near else ": every difference is exactly 0"
    return f"[green]All {len(cases)} cases are clean{flag}.[/]"


def known_table() -> Table:
    table = Table("", "name", "story")
    for name, scenario in {**SCENARIOS, **SCENARIOS_ON_REQUEST}.items():
        table.add_row("scenario", name, scenario.story)
    for name, layout in {**LAYOUTS, **LAYOUTS_ON_REQUEST}.items():
        table.add_row("layout", name, layout.story)
    for name, mutant in {**MUTANTS, **XLA_MUTANTS}.items():
        table.add_row("mutant", name, mutant.story)
    return table
