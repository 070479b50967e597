"""`samestep stress`: cases on ranks, a table, a receipt and a report."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rich import box
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from samestep.comm.nccl import library_version
from samestep.lab.common.provenance import code_digest, machine
from samestep.lab.stress.campaign import (
    Campaign,
    CaseResult,
    Lanes,
    MutantResult,
    MutantRunner,
    OnResult,
    Stopped,
    stopped_once,
)
from samestep.lab.stress.compare import changes_table, compare, read_receipt
from samestep.lab.stress.faults import FAULTS, FaultResult, run_faults
from samestep.lab.stress.faults import LAYOUTS as FAULT_LAYOUTS
from samestep.lab.stress.faults import cases as fault_cases
from samestep.lab.stress.faults import receipt_of as faults_receipt
from samestep.lab.stress.foreign import FOREIGN, ForeignResult, run_case, try_factory
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUT_SETS, LAYOUTS
from samestep.lab.stress.mutants import MUTANTS, STREAM_MUTANTS, XLA_MUTANTS
from samestep.lab.stress.options import Options, own_model
from samestep.lab.stress.progress import Entry, Progress, go_on, key
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks, Ranks, TorchrunRanks, XlaDevices
from samestep.lab.stress.receipt import case_entry, check_receipt, receipt
from samestep.lab.stress.report import render
from samestep.lab.stress.report.numbers import (
    between_replicas,
    distances,
    to_first_layout,
    to_reference,
    worst,
)
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from samestep.launch import TorchrunRank, torchrun_rank
from samestep.launch.forked import nccl_devices
from samestep.tooling.output import check_folder, json_file, write_files
from samestep.tooling.request import BadRequestError, number_of_ranks

# --- what it shows: progress while it runs, tables at its end ------------------------------------

MARKS = {"failed": "[bold red]FAILED[/]", "interrupted": "[dim]stopped[/]"}
LINE_EVERY = 10.0  # seconds between lines in a log


class Display(bars.Progress):
    """Two lines of progress: how many cases are done, and the step of the present one.

    Where the output is no terminal but a log, a line of it now and then.
    """

    def __init__(self, console: Console, total: int, what: str) -> None:
        columns = (
            bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
        )  # fmt: skip
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
        """Show the name of work that has no steps to count."""
        self.update(self._one, description=text, completed=0, total=None)
        self._log(text)

    def done(self, count: int = 1) -> None:
        self.advance(self._all, count)

    def _log(self, text: str) -> None:
        """Write a line of progress to a file, every ten seconds."""
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
        found = list(distances(row, to_reference))
        adam = [each.distance for each in found if each.family == "adam"]
        muon = [each.distance for each in found if each.family in ("mu_a", "mu_b")]
        away = [f"{max(each):.1e}" if each else "" for each in (adam, muon)]
        table.add_row(scenario, steps, _summary(row), *away, seconds)
    return table


def _summary(cases: Sequence[Entry]) -> str:
    """Summarize the layouts of a scenario: the number of exact ones, and the others by name."""
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
    """Reasons why cases do not apply, one line for each with its layouts and scenarios."""
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
    for name, scenario in EVERY_SCENARIO.items():
        table.add_row("scenario", name, scenario.story)
    for name, layout in EVERY_LAYOUT.items():
        table.add_row("layout", name, layout.story)
    for name, mutant in {**MUTANTS, **STREAM_MUTANTS, **XLA_MUTANTS}.items():
        table.add_row("mutant", name, mutant.story)
    for name, foreign in FOREIGN.items():
        table.add_row("with --optimizer", name, foreign.story)
    return table


# --- the command ----------------------------------------------------------------------------------

# --other-steps is for all other scenarios, and for other layouts of these.
LONG_SCENARIOS = ("dist_adamw_muon", "dist_adamw_muon_random")
LONG_LAYOUTS = ("none", "zero1", "zero2", *LAYOUT_SETS["xla"])
MUTANT_WATCHDOG = 2.0


def run(options: Options) -> int:
    console = Console(highlight=False)
    if options.compare is not None:
        return _compare(console, *options.compare)
    if options.list:
        console.print(known_table())
        return 0
    if options.mutant is not None:
        options = replace(options, mutants=True)
    options.check()
    if options.faults:
        return _faults(console, options)
    if options.optimizer is not None:
        return _foreign(console, options)
    options = options.quickened()
    return Session(options, torchrun_rank(), console).run()


class Session:
    """One run of the command, from its cases to its files."""

    def __init__(self, options: Options, torchrun: TorchrunRank | None, console: Console) -> None:
        self.options = options
        self.console = console
        self.torchrun = torchrun
        self.speaks = torchrun is None or torchrun.rank == 0
        self.world = number_of_ranks(options.world_size, torchrun, least=1)
        self.backend, self.fallback_reason = options.chosen_backend(torchrun)
        self.device = options.chosen_device(self.backend)
        self.delays = options.chosen_delays(self.device)
        self.make_model = options.make_model()
        self._code = code_digest(self.make_model)
        self.mutants: list[MutantResult] = []
        self.interrupted: list[CaseResult] = []  # what was known of cases at Ctrl-C
        self.progress = Progress(options.out, self._asked(), self._ran(), on_disk=torchrun is None)
        if self.speaks:
            check_folder(options.out)

    def run(self) -> int:
        """Run all cases, and write the results in any event."""
        if self.options.goes_on:
            self._take_over()
        if self.progress.finished:
            content = self._content(interrupted=False)
            self._show(content["verdict"], content["cases"])
            self.console.print("Nothing was left to run.")
            return 0 if content["verdict"] == "clean" else 1
        self.progress.begin()
        with stopped_once(), closing(self.progress):
            start = time.monotonic()
            stopped: int | None = None
            try:
                if self.options.mutants:
                    self._run_mutants()
                else:
                    self._run_cases(lambda: time.monotonic() - start)
            except Stopped as signal:
                stopped = signal.status
            if not self.speaks:
                return stopped or 0
            self.progress.stop(time.monotonic() - start)
            verdict = self._write(interrupted=stopped is not None)
            if stopped is None:
                self.progress.remove()
        if stopped is not None:
            return stopped
        return 0 if verdict == "clean" else 1

    def _take_over(self) -> None:
        """Take over the cases that an earlier, unfinished run has completed."""
        if self.torchrun is not None:
            raise BadRequestError("--continue starts its own ranks: run it without torchrun")
        self.progress = go_on(self.progress, self.console.print)
        if self.progress.entries:
            try:
                check_receipt(self._content(interrupted=True))
            except ValueError as error:
                raise BadRequestError(
                    f"--continue: the unfinished run in {self.options.out} is damaged: {error}"
                ) from error

    def _content(self, *, interrupted: bool) -> dict[str, Any]:
        progress = self.progress
        ended = progress.entries | {
            key(result.case): case_entry(result)
            for result in self.interrupted
            if key(result.case) not in progress.entries  # else it ran again
        }
        cases = [ended[name] for name in map(key, self.cases()) if name in ended]
        ran = {
            **self._ran(),
            "command": progress.stretches[-1]["command"],
            "started": progress.stretches[0]["started"],
            "seconds": float(sum(stretch["seconds"] for stretch in progress.stretches)),
            "stretches": progress.stretches,
        }
        presence = progress.presence
        return receipt(self._asked(), ran, cases, self.mutants, presence, interrupted=interrupted)

    def _write(self, *, interrupted: bool) -> str:
        content = self._content(interrupted=interrupted)
        check_receipt(content)
        files = {
            "receipt.json": json.dumps(content, indent=1, allow_nan=False).encode() + b"\n",
            "report.html": render(content).encode(),
        }
        write_files(self.options.out, files)  # first: the terminal may be gone
        self._show(content["verdict"], content["cases"])
        self.console.print(f"Wrote {' and '.join(files)} to {self.options.out}.", soft_wrap=True)
        return str(content["verdict"])

    def cases(self) -> list[Case]:
        """Yield cases scenario by scenario, because the layouts of one share its reference."""
        options = self.options
        names = options.scenarios()
        found = []
        for name in names:
            usual = EVERY_SCENARIO[name].layouts or tuple(LAYOUTS)
            if self.device == "xla":
                usual = LAYOUT_SETS["xla_hybrid" if EVERY_SCENARIO[name].has_plan else "xla"]
            sets = {"all": usual, **LAYOUT_SETS}
            for layout in sets.get(options.layout, (options.layout,)):
                is_long = name in LONG_SCENARIOS and layout in LONG_LAYOUTS
                steps = options.steps if is_long else options.other_steps or options.steps
                every = min(options.sample_every, steps)
                shared = options.reduction, options.seed
                # The last sample of short layouts is one of the long ones, too.
                meet = () if options.other_steps is None else (options.other_steps,)
                found.append(Case(name, layout, self.world, steps, every, *shared, meet))
        # The longest layout of a scenario first: the others are compared with it.
        found.sort(key=lambda case: (names.index(case.scenario), -case.steps))
        return found

    def _run_cases(self, seconds: Callable[[], float]) -> None:
        cases = self.cases()
        in_all = f"{len(cases)} cases on {self.world} {self.backend} ranks"
        display = Display(self.console, len(cases), f"{in_all}, {self.options.reduction}")
        if self.progress.entries:
            display.done(len(self.progress.entries))
            self.progress.open()  # another run may have it

        def on_result(result: CaseResult) -> None:
            if not result.ended:
                self.interrupted.append(result)
                return
            new = key(result.case) not in self.progress.entries
            self.progress.add(case_entry(result), result.presence, seconds())
            if self.speaks:
                display.done(new)
                for line in findings_lines(result):
                    display.console.print(line)

        by_scenario = groupby(cases, key=lambda case: case.scenario)
        left = [self.progress.left(list(alike)) for _, alike in by_scenario]
        scenarios = [alike for alike in left if alike]
        with display if self.speaks else nullcontext():
            if self.torchrun is not None or self.options.lanes == 1:
                self._run_in_order(scenarios, on_result, display)
            else:
                Lanes(self.options.lanes, self._campaign).run(scenarios, on_result, display.step)

    def _run_in_order(
        self, scenarios: Sequence[Sequence[Case]], on_result: OnResult, display: Display
    ) -> None:
        """One scenario after the other; ranks of torchrun cannot be started again."""
        campaign = self._campaign()
        for alike in scenarios:
            campaign.run_all(alike, on_result, display.step)
            if campaign.ranks.broken:
                if self.speaks:
                    told = "Ranks of torchrun cannot be started again: stopping here."
                    display.console.print(told)
                break

    def _campaign(self) -> Campaign:
        ranks: Ranks = ForkedRanks(self.world, self.options.watchdog, self.device, self.backend)
        if self.device == "xla":
            ranks = XlaDevices(self.world, self.options.watchdog)
        if self.torchrun is not None:
            ranks = TorchrunRanks(self.torchrun, self.options.watchdog, self.backend, self.device)
        return Campaign(ranks, self.make_model, self.delays)

    def _run_mutants(self) -> None:
        if self.torchrun is not None:
            raise BadRequestError("--mutants start their own ranks: run it without torchrun")
        mutants = self.options.known_bugs()
        display = Display(self.console, len(mutants), f"{len(mutants)} known bugs")
        watchdog = min(self.options.watchdog, MUTANT_WATCHDOG)
        runner = MutantRunner(watchdog, self.options.seed)
        with display:
            for mutant in mutants:
                display.begin(mutant.name)
                self.mutants.append(runner.run(mutant))
                display.done()

    def _show(self, verdict: str, cases: Sequence[Entry]) -> None:
        if cases:
            self.console.print(results_table(cases))
            for line in left_out(cases):
                self.console.print(line)
        if self.mutants:
            self.console.print(mutants_table(self.mutants))
        self.console.print(closing_sentence(verdict, cases, self.mutants))
        if verdict == "interrupted" and self.torchrun is not None:
            why = "Torchrun ends all ranks when one has failed; its report says which was first."
            self.console.print(f"[yellow]{why}[/]")

    def _asked(self) -> dict[str, Any]:
        keys = (
            "scenario", "layout", "world_size", "backend", "device", "steps", "other_steps",
            "sample_every", "reduction", "seed", "model", "delays", "watchdog", "mutants",
        )  # fmt: skip
        return {**{k: getattr(self.options, k) for k in keys}, "out": str(self.options.out)}

    def _ran(self) -> dict[str, Any]:
        mode = "forked" if self.torchrun is None else "torchrun"
        here = self.world if self.torchrun is None else self.torchrun.local_world_size
        return {
            "requested_backend": self.options.backend,
            "actual_backend": self.backend,
            "runtime_mode": "spmd" if self.device == "xla" else mode,
            "fallback_reason": self.fallback_reason,
            "world_size": self.world,
            "device": self.device,
            **_of_nccl(self.backend, here),
            **machine(),
            "code": self._code,
        }


def _of_nccl(backend: str, ranks: int) -> dict[str, Any]:
    """The version of NCCL, and whether each of the machine's ranks had its own GPU."""
    found = library_version() if backend == "nccl" else None
    if found is None:
        return {}
    return {"nccl": ".".join(map(str, found)), "shared_gpus": ranks > nccl_devices()}


def _faults(console: Console, options: Options) -> int:
    """Run the faults in every layout they apply to; prints a table and writes faults.json."""
    if torchrun_rank() is not None:
        raise BadRequestError("--faults start their own ranks: run it without torchrun")
    check_folder(options.out)
    world = number_of_ranks(options.world_size, None, least=2)
    backend, _ = options.chosen_backend(None)
    layouts = tuple(FAULT_LAYOUTS) if options.layout == "all" else tuple(options.layout.split(","))
    asked = fault_cases(tuple(FAULTS), layouts, world, backend, options.watchdog)
    results: list[FaultResult] = []
    table = Table("layout", "fault", "", Column("s", justify="right"), "what another rank said")

    def on_result(result: FaultResult) -> None:
        results.append(result)
        slowest = max((each.seconds or 0.0 for each in result.reports), default=0.0)
        mark = "[green]named[/]" if result.passed else "[bold red]FAILED[/]"
        worst_first = sorted(result.reports, key=lambda each: each.named)
        said = worst_first[0].message[:200] if worst_first else ""
        table.add_row(result.layout, result.fault, mark, f"{slowest:.1f}", escape(said))
        display.done()

    with Display(console, len(asked), f"{len(asked)} faults on {backend} ranks") as display:
        start = time.monotonic()
        run_faults(asked, options.lanes, on_result)
    ran = {
        "actual_backend": backend,
        "world_size": world,
        "seconds": time.monotonic() - start,
        **_of_nccl(backend, world),
        **machine(),
        "code": code_digest(),
    }
    write_files(options.out, {"faults.json": faults_receipt(results, ran)})
    console.print(table)
    failed = sum(not each.passed for each in results)
    good = f"[green]All {len(results)} faults were named by every other rank, and all ended.[/]"
    console.print(f"[bold red]{failed} of {len(results)} faults failed.[/]" if failed else good)
    console.print(f"Wrote faults.json to {options.out}.", soft_wrap=True)
    return 1 if failed else 0


def foreign_table(results: Sequence[ForeignResult]) -> Table:
    """The table of --optimizer: one row per case; a dash marks a check that was not made."""
    columns = ("scenario", "ranks", "", "replicas", "alone", "untouched", "state dict")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    answers = {None: "[dim]-[/]", True: "[green]yes[/]", False: "[bold red]NO[/]"}
    for each in results:
        mark = "[green]held[/]" if each.status == "held" else f"[bold red]{each.status}[/]"
        alone = "[dim]-[/]" if each.alone is None else f"{each.alone:.1e}"
        asked = (answers[value] for value in (each.untouched, each.state_dict))
        row = (each.scenario, str(each.world), mark, answers[each.replicas], alone, *asked)
        table.add_row(*row)
    return table


def _foreign(console: Console, options: Options) -> int:
    """Run the optimizer of --optimizer through its cases; prints a table, writes foreign.json."""
    check_folder(options.out)
    assert options.optimizer is not None
    factory = options.foreign_factory()
    make_model = None if options.model == "tiny" else own_model(options.model, options.seed)
    limits: dict[str, Any] = {"make_model": make_model, "watchdog": options.watchdog}
    try_factory(factory, options.optimizer, **limits)
    cases = options.foreign_cases()
    results: list[ForeignResult] = []
    with Display(console, len(cases), f"{len(cases)} cases of {options.optimizer}") as display:
        for case in cases:
            display.begin(f"{case.scenario} · {case.world} ranks")
            results.append(run_case(case, factory, **limits, tolerance=options.tolerance))
            display.done()
    ran = [each for each in results if each.status != "does_not_apply"]
    bad = [each for each in ran if each.status != "held"]
    content = {
        "kind": "samestep foreign",
        "asked": {
            key: getattr(options, key)
            for key in ("optimizer", "grads", "model", "seed", "watchdog", "tolerance")
        },
        "ran": {**machine(), "code": code_digest()},
        "cases": [asdict(each) for each in results],
        "verdict": "failed" if bad else "held",
    }
    write_files(options.out, {"foreign.json": json_file(content)})
    console.print(foreign_table(ran))
    for each in bad:
        where = f"[red]{each.scenario} · {each.world} ranks[/]"
        console.print(f"{where} {each.status}: {escape(each.message)}", soft_wrap=True)
    for reason in dict.fromkeys(e.message for e in results if e.status == "does_not_apply"):
        names = dict.fromkeys(each.scenario for each in results if each.message == reason)
        console.print(f"[dim]does not apply: {', '.join(names)}: {reason}[/]")
    good = f"[green]All {len(ran)} cases held.[/]"
    console.print(f"[bold red]{len(bad)} of {len(ran)} cases did not hold.[/]" if bad else good)
    console.print(f"Wrote foreign.json to {options.out}.", soft_wrap=True)
    return 1 if bad else 0


def _compare(console: Console, first: Any, second: Any) -> int:
    try:
        changes = compare(read_receipt(first), read_receipt(second))
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    if not changes:
        console.print("Nothing changed.")
        return 0
    console.print(changes_table(changes))
    return 1 if any(change.severity == "worse" for change in changes) else 0
