"""The floor for bits: digests of parameters and state, of one version of the code and of another.

    make bits OUT=out/bits/before    # every scenario in every layout on 1 to 4 ranks, 100 steps
    make bits OUT=out/bits/after     # the same with changed code
    make bits-compare A=out/bits/before B=out/bits/after

`make bits` runs `samestep stress` and keeps its receipts, so it goes on where it was stopped.
`compare` looks at the digests alone and ends with 1 if any of them differs, naming the first step
at which it does. Digests of two machines, or of two versions of torch, may differ by rounding.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

COPIES = "dist_adamw_muon,normuon_cautious,expert_stacks,conditional_compute"


class Part(NamedTuple):
    """One run of `samestep stress`: its receipt is in the folder of that name."""

    name: str
    ranks: int
    scenario: str = "all"
    layout: str = "all"
    reduction: str = "ordered"


PARTS = (
    *(Part(f"ranks_{ranks}", ranks) for ranks in (1, 2, 3, 4)),
    Part("copies_4", 4, COPIES, "copies"),
    Part("hybrid_4", 4, "hybrid_conditional"),
    Part("offload_3", 3, "dist_adamw_muon,small_state_8bit,resume", "offload"),
    # With two addends there is one order, so fast sums have bits to compare as well.
    Part("fast_2", 2, "dist_adamw_muon,conditional_compute", reduction="fast"),
)


def make(folder: Path, steps: int, lanes: int, names: list[str]) -> int:
    """Run the parts that are asked for; 1 if any of them found a difference between ranks."""
    status = 0
    for part in PARTS:
        if names and part.name not in names:
            continue
        command = [
            sys.executable, "-m", "samestep", "stress", "--continue",
            "--world-size", str(part.ranks), "--scenario", part.scenario, "--layout", part.layout,
            "--reduction", part.reduction, "--steps", str(steps),
            "--sample-every", str(max(1, steps // 4)), "--lanes", str(lanes), "--watchdog", "120",
            "--out", str(folder / part.name),
        ]  # fmt: skip
        status = max(status, subprocess.run(command, check=False).returncode)
    return status


def digests(folder: Path) -> dict[str, dict[int, str]]:
    """By part, scenario and layout: the digest after each sampled step."""
    found = {}
    for path in sorted(folder.glob("*/receipt.json")):
        for case in json.loads(path.read_bytes())["cases"]:
            if case["status"] != "does_not_apply":
                name = f"{path.parent.name} · {case['scenario']} · {case['layout']}"
                found[name] = {sample["step"]: sample["bits"] for sample in case["samples"]}
    return found


def differences(
    before: Mapping[str, Mapping[int, str]], after: Mapping[str, Mapping[int, str]]
) -> Iterator[str]:
    """A line for each case that only one side has, or whose digests differ."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only {'after' if name in after else 'before'}"
            continue
        steps = sorted(before[name].keys() | after[name].keys())
        different = [step for step in steps if before[name].get(step) != after[name].get(step)]
        if different or not steps:
            yield f"{name}: " + (f"differs at step {different[0]}" if steps else "has no samples")


def compare(first: Path, second: Path) -> int:
    """Print how two folders differ; 0 only if both have cases and all digests are equal."""
    before, after = digests(first), digests(second)
    found = list(differences(before, after))
    found.append(f"{len(before.keys() & after.keys())} cases compared, {len(found)} differ")
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if len(found) > 1 or not before else 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bits", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="run all cases and keep their digests")
    making.add_argument("folder", type=Path)
    making.add_argument("--steps", type=int, default=100)
    making.add_argument("--lanes", type=int, default=2)
    making.add_argument("--part", action="append", default=[], choices=[p.name for p in PARTS])
    comparing = commands.add_parser("compare", help="compare the digests of two folders")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    asked: Any = parser.parse_args(words)
    if asked.command == "make":
        return make(asked.folder, asked.steps, asked.lanes, asked.part)
    return compare(asked.first, asked.second)


if __name__ == "__main__":
    sys.exit(main())
