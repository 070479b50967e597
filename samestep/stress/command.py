"""`samestep stress`: cases on ranks, a table, a receipt and a report."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rich.console import Console

from samestep.command.output import check_folder, write_files
from samestep.command.request import BadRequestError
from samestep.command.signals import Stopped, stopped_once
from samestep.launch import TorchrunRank, torchrun_rank
from samestep.stress.campaign import Campaign, Case, CaseResult
from samestep.stress.compare import changes_table, compare, read_receipt
from samestep.stress.display import (
    Display,
    findings_lines,
    known_table,
    mutants_table,
    results_table,
)
from samestep.stress.lanes import Lanes
from samestep.stress.layouts import LAYOUTS
from samestep.stress.mutants import MUTANTS
from samestep.stress.mutation import MutantResult, MutantRunner
from samestep.stress.options import Options
from samestep.stress.ranks import ForkedRanks, Ranks
from samestep.stress.receipt import machine, receipt
from samestep.stress.report import render
from samestep.stress.scenarios import SCENARIOS
from samestep.stress.schema import check_receipt
from samestep.stress.torchrun_ranks import TorchrunRanks

# --other-steps is for all other scenarios, and for other layouts of these.
LONG_SCENARIOS = ("dist_adamw_muon", "dist_adamw_muon_random")
LONG_LAYOUTS = ("none", "zero1", "zero2")
MUTANT_WATCHDOG = 2.0


def run(options: Options) -> int:
    """Do what the options ask; give the exit status."""
    console = Console(highlight=False)
    if options.compare is not None:
        return _compare(console, *options.compare)
    if options.list:
        console.print(known_table())
        return 0
    options.check()
    torchrun = torchrun_rank()
    session = Session(options, torchrun, console)
    return session.run()


class Session:
    """One run of the command, from its cases to its files."""

    def __init__(self, options: Options, torchrun: TorchrunRank | None, console: Console) -> None:
        self.options = options
        self.console = console
        self.torchrun = torchrun
        self.speaks = torchrun is None or torchrun.rank == 0
        self.world = options.ranks(torchrun)
        self.backend, self.fallback_reason = options.chosen_backend(torchrun)
        self.make_model = options.make_model()
        self.results: list[CaseResult] = []
        self.mutants: list[MutantResult] = []
        self.presence: dict[str, dict[str, list[int]]] = {}
        self.started = datetime.now(UTC)
        if self.speaks:
            check_folder(options.out)

    def run(self) -> int:
        """Run everything; whatever happens, what was found is written."""
        with stopped_once():
            start = time.monotonic()
            stopped: int | None = None
            try:
                if self.options.mutants:
                    self._run_mutants()
                else:
                    self._run_cases()
            except Stopped as signal:
                stopped = signal.status
            if not self.speaks:
                return stopped or 0
            verdict = self._write(time.monotonic() - start, interrupted=stopped is not None)
        if stopped is not None:
            return stopped
        return 0 if verdict == "clean" else 1

    def _write(self, seconds: float, *, interrupted: bool) -> str:
        """Write the files and show the tables; give the verdict."""
        content = receipt(
            asked=self._asked(),
            ran=self._ran(seconds),
            results=self.results,
            mutants=self.mutants,
            presence=self.presence,
            interrupted=interrupted,
        )
        check_receipt(content)
        files = {
            "receipt.json": json.dumps(content, indent=1, allow_nan=False).encode() + b"\n",
            "report.html": render(content).encode(),
        }
        write_files(self.options.out, files)  # first: the terminal may be gone
        self._show(content["verdict"])
        self.console.print(f"Wrote {' and '.join(files)} to {self.options.out}.", soft_wrap=True)
        return str(content["verdict"])

    def cases(self) -> list[Case]:
        """Scenario by scenario, since layouts of one share its reference."""
        options = self.options
        names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
        if self.make_model is not None:
            names = [name for name in names if SCENARIOS[name].takes_any_model]
        layouts = list(LAYOUTS) if options.layout == "all" else [options.layout]
        found = []
        for name in names:
            for layout in layouts:
                steps = options.steps
                is_long = name in LONG_SCENARIOS and layout in LONG_LAYOUTS
                if options.other_steps is not None and not is_long:
                    steps = options.other_steps
                every = min(options.sample_every, steps)
                shared = options.reduction, options.seed
                # The last sample of short layouts is one of the long ones, too.
                meet = () if options.other_steps is None else (options.other_steps,)
                found.append(Case(name, layout, self.world, steps, every, *shared, meet))
        # The longest layout of a scenario first: the others are compared with it.
        found.sort(key=lambda case: (names.index(case.scenario), -case.steps))
        return found

    def _run_cases(self) -> None:
        cases = self.cases()
        what = f"{len(cases)} cases on {self.world} {self.backend} ranks, {self.options.reduction}"
        display = Display(self.console, len(cases), what)

        def on_result(result: CaseResult) -> None:
            self.results.append(result)
            if self.speaks:
                display.done()
                for line in findings_lines([result]):
                    display.say(line)

        scenarios = [list(alike) for _, alike in groupby(cases, key=lambda case: case.scenario)]
        with display.shown() if self.speaks else nullcontext():
            try:
                if self.torchrun is not None or self.options.lanes == 1:
                    self._run_in_order(scenarios, on_result, display)
                else:
                    self._run_in_lanes(scenarios, on_result, display)
            finally:
                self.results.sort(key=lambda result: cases.index(result.case))

    def _run_in_lanes(
        self,
        scenarios: Sequence[Sequence[Case]],
        on_result: Callable[[CaseResult], None],
        display: Display,
    ) -> None:
        """Several scenarios side by side."""
        lanes = Lanes(self.options.lanes, self._campaign)
        self.presence = lanes.presence
        try:
            lanes.run(scenarios, on_result, display.step)
        finally:
            self.results += lanes.interrupted

    def _run_in_order(
        self,
        scenarios: Sequence[Sequence[Case]],
        on_result: Callable[[CaseResult], None],
        display: Display,
    ) -> None:
        """One scenario after the other; ranks of torchrun cannot be started again."""
        campaign = self._campaign()
        self.presence = campaign.presence
        for alike in scenarios:
            try:
                campaign.run_all(alike, on_result, display.step)
            except KeyboardInterrupt:
                if campaign.interrupted is not None:
                    self.results.append(campaign.interrupted)
                raise
            if self.torchrun is not None and _broken(self.results[-1]):
                if self.speaks:
                    display.say("Ranks of torchrun cannot be started again: stopping here.")
                break

    def _campaign(self) -> Campaign:
        ranks: Ranks = ForkedRanks(self.world, self.options.watchdog)
        if self.torchrun is not None:
            ranks = TorchrunRanks(self.torchrun, self.options.watchdog, self.backend)
        return Campaign(ranks, self.make_model)

    def _run_mutants(self) -> None:
        if self.torchrun is not None:
            raise BadRequestError("--mutants start their own ranks: run it without torchrun")
        display = Display(self.console, len(MUTANTS), f"{len(MUTANTS)} known bugs")
        watchdog = min(self.options.watchdog, MUTANT_WATCHDOG)
        runner = MutantRunner(watchdog, self.options.seed)
        with display.shown():
            for mutant in MUTANTS.values():
                display.begin(mutant.name)
                self.mutants.append(runner.run(mutant))
                display.done()

    def _show(self, verdict: str) -> None:
        if self.results:
            self.console.print(results_table(self.results))
        if self.mutants:
            self.console.print(mutants_table(self.mutants))
        self.console.print(_sentence(verdict, self.results, self.mutants))

    def _asked(self) -> dict[str, Any]:
        keys = (
            "scenario", "layout", "world_size", "backend", "steps", "other_steps", "sample_every",
            "reduction", "seed", "model", "watchdog", "mutants",
        )  # fmt: skip
        return {**{k: getattr(self.options, k) for k in keys}, "out": str(self.options.out)}

    def _ran(self, seconds: float) -> dict[str, Any]:
        return {
            "requested_backend": self.options.backend,
            "actual_backend": self.backend,
            "runtime_mode": "forked" if self.torchrun is None else "torchrun",
            "fallback_reason": self.fallback_reason,
            "world_size": self.world,
            "device": "cuda" if self.backend == "nccl" else "cpu",
            **machine(),
            "command": ["samestep", *sys.argv[1:]],
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": seconds,
        }


def _broken(result: CaseResult) -> bool:
    """Whether a rank did not come to its end."""
    return any(ending.error is not None for ending in result.endings.values())


def _sentence(verdict: str, results: Sequence[CaseResult], mutants: Sequence[MutantResult]) -> str:
    if verdict == "interrupted":
        return "[yellow]Stopped before the end; nothing had failed so far.[/]"
    if mutants:
        escaped = [result.mutant.name for result in mutants if not result.caught]
        if escaped:
            count = f"{len(escaped)} of {len(mutants)}"
            return f"[bold red]{count} known bugs escape:[/] {', '.join(escaped)}"
        return f"[green]All {len(mutants)} known bugs are caught, each by the check it should.[/]"
    results = [result for result in results if result.status != "does_not_apply"]
    if not results:
        return "[yellow]Nothing was run: no scenario applies to the layout.[/]"
    failed = sum(result.status == "failed" for result in results)
    if failed:
        return f"[bold red]{failed} of {len(results)} cases failed.[/]"
    near = sum(result.status == "within_tolerance" for result in results)
    flag = f", {near} of them not exactly zero" if near else ": every difference is exactly 0"
    return f"[green]All {len(results)} cases are clean{flag}.[/]"


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
