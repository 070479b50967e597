"""Reports on a client's trainings: lines as they go, tables, bars, JSON and a picture."""

import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

from samestep.lab.bench.client.training import (
    LAST,
    MEASURED,
    VALIDATION_BATCHES,
    Batches,
    Client,
    ClientOptions,
    Race,
    Training,
    as_times,
    median_of,
)
from samestep.lab.bench.gpu.options import Contestant
from samestep.lab.bench.gpu.report import Screen, Verdict, begin, leave, number
from samestep.tooling.output import png_file

SETTINGS = ("layers", "steps", "seeds", "batch", "sequence", "warmup")  # in the receipt
LOSSES = ("", "final loss of each seed", "mean", "held-out text", "not finite")
TIMES = (
    "", "optimizer ms", "min..max", "host ms", "iteration ms", "optimizer of rival's",
    "iteration of rival's",
)  # fmt: skip


Seeds = dict[int, list[Training]]


def run_client(
    client: Client,
    contestants: Sequence[Contestant],
    options: ClientOptions,
    fastest: float | None = None,
) -> int:
    """Train all contestants and report; return 1 if one of samestep's ended early, else 0.

    `fastest` is the bar for our optimizer's time as a multiple of its rival's; None: no bar.
    """
    corpus = options.corpus()
    screen = Screen(progress_to=sys.stderr)
    device, _, content = begin(f"samestep client {client.name}", options, screen)
    taking_part = [each for each in contestants if each.name in options.variants]
    content |= settings(client, options, len(corpus.train), corpus.sha256)
    seeds: Seeds = {}

    def keep(picture: bytes | None = None) -> list[str]:
        """Write the receipt so far, which a run that ends early leaves; return file names."""
        return leave(options.out, client.name, content | as_json(seeds, fastest), picture)

    for seed in options.seeds:
        batches = Batches(corpus, options, device, seed)
        race = Race(client, taking_part, options, device, batches, seed)
        seeds[seed] = race.trainings

        def report(done: int, seed: int = seed, race: Race = race) -> None:
            screen.progress(f"seed {seed}, step {done}: {_losses(race.trainings)}")
            keep()

        race.run(report)
        screen.say(f"seed {seed}: {'; '.join(map(outcome, race.trainings))}")
        keep()
    show(seeds, fastest, screen)
    screen.wrote(keep(draw(client.name, seeds)), options.out)
    every = chain.from_iterable(seeds.values())
    return int(any(each.contestant.ours and not each.running for each in every))


def settings(client: Client, options: ClientOptions, size: int, sha256: str) -> dict[str, Any]:
    return {
        "client": client.name,
        "model": client.described,
        "training": {
            **{name: getattr(options, name) for name in SETTINGS},
            "steps_of_final_loss": min(LAST, options.steps),
            "validation_sequences": VALIDATION_BATCHES * options.batch,
        },
        "text": {
            "file": None if options.data is None else str(options.data),
            "bytes": size,
            "sha256": sha256,
        },
    }


def spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def of_contestants(seeds: Seeds) -> list[list[Training]]:
    """Return a list for each contestant, with its trainings from all seeds."""
    return [list(each) for each in zip(*seeds.values(), strict=True)]


def final_losses(trainings: Sequence[Training]) -> list[float]:
    """Return the final losses of the trainings that came to their end."""
    return [each.final_loss for each in trainings if each.final_loss is not None]


def verdicts(seeds: Seeds, fastest: float | None) -> list[Verdict]:
    """Judge samestep's optimizers against their rivals by broken trainings, loss and time."""
    everybody = of_contestants(seeds)
    found = []
    for trainings in everybody:
        contestant = trainings[0].contestant
        if not contestant.ours:
            continue
        lost = sum(not each.running for each in trainings)
        found.append(Verdict(f"{contestant.name}: trainings that broke", float(lost), 0.0))
        rival = _rival(contestant, everybody)
        if rival is None:
            continue
        name = contestant.rival
        pairs = [
            ours.final_loss - theirs.final_loss
            for ours, theirs in zip(trainings, rival, strict=True)
            if ours.final_loss is not None and theirs.final_loss is not None
        ]
        noise = spread(final_losses(rival))
        if noise is not None and len(pairs) == len(seeds):
            what = f"{contestant.name}: mean final loss above {name}'s; bar: how its seeds differ"
            found.append(Verdict(what, statistics.mean(pairs), noise))
        if fastest is not None:
            ratio = _ratio(trainings, rival, "optimizer_ms")
            what = f"{contestant.name}: time of the optimizer, of {name}'s"
            found.append(Verdict(what, ratio, fastest))
    return found


def _rival(
    contestant: Contestant, everybody: Sequence[list[Training]]
) -> Sequence[Training] | None:
    """Return the trainings of a contestant's rival, or None if that takes no part."""
    return next((each for each in everybody if each[0].contestant.name == contestant.rival), None)


def _ratio(ours: Sequence[Training], rival: Sequence[Training] | None, which: str) -> float | None:
    times, others = median_of(ours, which), median_of(rival or (), which)
    return None if times is None or others is None else times.median / others.median


def as_json(seeds: Seeds, fastest: float | None) -> dict[str, Any]:
    return {
        "contestants": [_summary(trainings) for trainings in of_contestants(seeds)],
        "bars": [each._asdict() | {"met": each.met} for each in verdicts(seeds, fastest)],
        "seeds": [
            {"seed": seed, "trainings": [each.as_json() for each in trainings]}
            for seed, trainings in seeds.items()
        ],
    }


def _summary(trainings: Sequence[Training]) -> dict[str, Any]:
    contestant, final = trainings[0].contestant, final_losses(trainings)
    return {
        "name": contestant.name,
        "what": contestant.what,
        "ours": contestant.ours,
        "rival": contestant.rival or None,
        "final_losses": [each.final_loss for each in trainings],
        "mean": statistics.mean(final) if final else None,
        "standard_deviation": spread(final),
        "validation_losses": [each.validation_loss for each in trainings],
        "finite": all(each.not_finite is None for each in trainings),
        **{which: as_times(trainings, which) for which in MEASURED},
    }


# The screen


def _losses(trainings: Sequence[Training]) -> str:
    return ", ".join(
        f"{each.contestant.name} "
        + (f"{each.losses[-1]:.4f}" if each.running and each.losses else "out")
        for each in trainings
    )


def outcome(training: Training) -> str:
    name, lost = training.contestant.name, training.not_finite
    if training.failed is not None:
        return f"{name} is out: {training.failed}"
    if lost is not None:
        more = f" and {len(lost.parameters) - 1} more" if len(lost.parameters) > 1 else ""
        what = f"{lost.parameters[0]}{more}" if lost.parameters else "the loss"
        return f"{name} is NOT FINITE at step {lost.step}: {what}"
    optimizer, host = (median_of([training], which) for which in MEASURED[:2])
    times = ""
    if optimizer is not None and host is not None:
        times = f", optimizer {optimizer.median:.2f} ms (host {host.median:.2f})"
    return f"{name} final loss {number(training.final_loss, 4)}{times}"


def show(seeds: Seeds, fastest: float | None, screen: Screen) -> None:
    everybody = of_contestants(seeds)
    longest = max(len(each.losses) for each in chain.from_iterable(everybody))
    steps = sorted({round(part * longest / 10) for part in range(1, 11)} - {0})
    curves = []
    for each in everybody:
        at = [[own.losses[step - 1] for own in each if len(own.losses) >= step] for step in steps]
        means = [statistics.mean(losses) if len(losses) == len(each) else None for losses in at]
        curves.append([each[0].contestant.name, *(number(mean, 3) for mean in means)])
    screen.table("Training loss, mean over seeds", ["after step", *map(str, steps)], curves)
    screen.table("Final loss", LOSSES, [_loss_row(each) for each in everybody])
    rows = [_time_row(each, _rival(each[0].contestant, everybody)) for each in everybody]
    screen.table("Time by the wall clock", TIMES, rows)
    for seed, trainings in seeds.items():
        for training in trainings:
            if not training.running:
                screen.say(f"seed {seed}: {outcome(training)}")
    for verdict in verdicts(seeds, fastest):
        screen.say(verdict.line())


def _loss_row(trainings: Sequence[Training]) -> list[str]:
    final = final_losses(trainings)
    held_out = [each.validation_loss for each in trainings if each.validation_loss is not None]
    noise = spread(final)
    mean = number(statistics.mean(final), 4) if final else "-"
    return [
        trainings[0].contestant.name,
        " ".join(number(each.final_loss, 4) for each in trainings),
        mean if noise is None else f"{mean} ± {noise:.4f}",
        number(statistics.mean(held_out), 4) if held_out else "-",
        str(sum(each.not_finite is not None for each in trainings)),
    ]


def _time_row(trainings: Sequence[Training], rival: Sequence[Training] | None) -> list[str]:
    times = [median_of(trainings, which) for which in MEASURED]
    optimizer, host, iteration = (number(None if t is None else t.median) for t in times)
    low_to_high = "-" if times[0] is None else f"{times[0].low:.2f}..{times[0].high:.2f}"
    ratios = [_ratio(trainings, rival, which) for which in ("optimizer_ms", "iteration_ms")]
    shown = ["-" if ratio is None else f"x {ratio:.2f}" for ratio in ratios]
    return [trainings[0].contestant.name, optimizer, low_to_high, host, iteration, *shown]


# The picture


def draw(name: str, seeds: Seeds) -> bytes | None:
    """Draw loss curves, and times as bars; return a PNG, or None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    everybody = of_contestants(seeds)
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    figure.suptitle(f"{name}: the same model, batches and seeds", fontweight="bold")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, trainings in enumerate(everybody):
        color = f"C{place}"
        for training in trainings:
            label = training.contestant.name if training is trainings[0] else None
            steps = range(1, len(training.losses) + 1)
            style = "dashed" if training.contestant.ours else "solid"  # or one would hide the other
            curves.plot(
                steps, training.losses, linestyle=style, color=color, label=label, linewidth=0.9
            )
            if training.not_finite is not None:
                curves.axvline(training.not_finite.step + 1, color=color, linestyle="dotted")
    curves.set_xlabel("step")
    curves.set_ylabel("training loss (each seed)")
    curves.legend()
    names = [trainings[0].contestant.name for trainings in everybody]
    for shift, which, color in ((-0.2, "optimizer_ms", "#1f5fa8"), (0.2, "host_ms", "#c2571a")):
        times = [median_of(trainings, which) for trainings in everybody]
        values = [0.0 if found is None else found.median for found in times]
        label = {"optimizer_ms": "optimizer", "host_ms": "of which host"}[which]
        places = [place + shift for place in range(len(names))]
        drawn = bars.barh(places, values, height=0.38, color=color, label=label)
        bars.bar_label(drawn, fmt=" {:.3g}", fontsize=8)
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set_xlabel("ms by the wall clock (median)")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return png_file(figure)
