"""Two "hosts" on one machine: the hybrid lane on both, and what happens when one is cut off.

Each host is a network namespace with a name of its own, joined by virtual links, and runs
torchrun with half of the ranks. The same run on one host must give the same bits. Then the
link is cut in the middle of a run: every rank has to end, with an error, within the timeout.

    python -m benchmarks.two_hosts --out receipts/two_hosts

Needs Linux and root (`ip netns`, `unshare`).
"""

import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import run_script, write_json
from benchmarks.namespaces import cards, cut_the_link, end, require_hosts, torchrun
from samestep.comm.groups import registry
from samestep.comm.integrity.checksum import checksums
from samestep.lab.stress.scenarios.hybrid import HybridGPT
from samestep.mesh import build
from samestep.models.gpt import GPTConfig, mean_loss
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.tooling.output import check_folder, write_files

Told = dict[str, Any]
ASKED = "SAMESTEP_TWO_HOSTS"  # what ranks are to do, for their environment


@dataclass(frozen=True)
class Options:
    """What to run."""

    layers: Annotated[int, "16 is the lane in full; it takes long on two cores"] = 4
    steps: int = 5
    ranks_per_host: Annotated[
        int, "a multiple of 4: tensor and expert parallel stay inside a host"
    ] = 4
    timeout: Annotated[float, "seconds that a collective may take"] = 20.0
    cut_after: Annotated[int, "steps that all ranks have taken when the link is cut"] = 1
    grace: Annotated[
        float, "seconds beyond the timeout in which every rank has to end, and torchrun with it"
    ] = 20.0
    limit: Annotated[float, "seconds for a whole run"] = 900.0
    out: Path = Path("out/two_hosts")


class Ended(NamedTuple):
    """What came of a run."""

    statuses: list[int]  # of the torchruns
    told: dict[int, Told]  # by rank, in their order
    output: list[str]
    seconds: float
    cut: float = math.inf  # when the link was, if so


def run(options: Options, hosts: int, *, cut: bool = False) -> Ended:
    """Train with one torchrun per host; with one host it has all ranks."""
    since, ranks = time.time(), 2 * options.ranks_per_host // hosts
    with cards(2), tempfile.TemporaryDirectory(prefix="two_hosts_") as folder:
        marks = Path(folder)
        asked = json.dumps([options.layers, options.steps, options.timeout, folder])
        words = ["-m", "benchmarks.two_hosts"]
        logs = [marks / f"host{number}.log" for number in range(hosts)]
        agents = [
            torchrun(words, number, hosts, ranks, log, **{ASKED: asked})
            for number, log in enumerate(logs)
        ]
        when, deadline = math.inf, since + options.limit
        try:
            if cut:
                _wait_for_step(options, marks, agents, deadline)
                cut_the_link()
                when = time.time()
                deadline = when + options.timeout + options.grace
            output = _outputs(agents, logs, deadline)
        finally:
            end(agents)
    lines = (line.partition("TOLD ")[2] for text in output for line in text.splitlines())
    all_told = [json.loads(line) for line in lines if line]
    told = {each["rank"]: each for each in all_told if "rank" in each}
    statuses = [agent.returncode for agent in agents]
    return Ended(statuses, dict(sorted(told.items())), output, time.time() - since, when)


def _wait_for_step(
    options: Options, marks: Path, agents: Sequence[subprocess.Popen[bytes]], deadline: float
) -> None:
    wanted = [
        marks / f"rank{rank}_step{options.cut_after - 1}"
        for rank in range(2 * options.ranks_per_host)
    ]
    while not all(mark.exists() for mark in wanted):
        if time.time() > deadline or any(agent.poll() is not None for agent in agents):
            raise RuntimeError(f"the ranks did not take {options.cut_after} steps")
        time.sleep(0.1)


def _outputs(
    agents: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float
) -> list[str]:
    """What they wrote until their end, or until the deadline."""
    found = []
    for agent, log in zip(agents, logs, strict=True):
        ending = ""
        try:
            agent.wait(max(0.1, deadline - time.time()))
        except subprocess.TimeoutExpired:
            ending = "\nKILLED at the deadline\n"
        found.append(log.read_text(errors="replace") + ending)
    return found


def same_run(one: Ended, two: Ended, ranks: int) -> list[str]:
    """Why a run on two hosts is not that on one; empty if it is."""
    problems = []
    for name, run_ in (("one host", one), ("two hosts", two)):
        if any(run_.statuses) or len(run_.told) != ranks:
            problems.append(f"{name}: {len(run_.told)} of {ranks} ranks told, {run_.statuses}")
    for rank, there in two.told.items():
        here = one.told.get(rank, {})
        for key in ("losses", "checksum", "groups"):
            if here.get(key) != there.get(key):
                problems.append(f"rank {rank}: {key} differ")
    if len({told["host"] for told in two.told.values()}) != 2:
        problems.append("the two hosts have one name")
    return problems


def clear_end(options: Options, ended: Ended, when: float) -> list[str]:
    """Why the end of a run that was cut was not clear; empty if it was."""
    ranks = 2 * options.ranks_per_host
    silent = sorted(set(range(ranks)) - ended.told.keys())
    problems = [f"rank {rank} did not tell how it ended" for rank in silent]
    for rank, told in sorted(ended.told.items()):
        if "error" not in told:
            problems.append(f"rank {rank} did not fail")
        elif told["ended"] - when > options.timeout + options.grace:
            problems.append(f"rank {rank} ended after {told['ended'] - when:.1f} s")
    if any("KILLED" in text for text in ended.output):
        problems.append("torchrun did not end by itself")
    return problems


def main(options: Options) -> int:
    """Run both; 0 if all is as it should be, 1 if not, 2 if hosts cannot be made."""
    require_hosts()
    check_folder(options.out)
    ranks = 2 * options.ranks_per_host
    one = run(options, 1)
    print(f"one host: {one.seconds:.0f} s, {len(one.told)} of {ranks} ranks", flush=True)
    two = run(options, 2)
    print(f"two hosts: {two.seconds:.0f} s, {len(two.told)} of {ranks} ranks", flush=True)
    problems = same_run(one, two, ranks)
    same_bits = not problems
    cut = run(options, 2, cut=True)
    problems += clear_end(options, cut, cut.cut)
    ends = {rank: round(told["ended"] - cut.cut, 2) for rank, told in cut.told.items()}
    first = two.told.get(0, {})
    for rank, told in cut.told.items():
        print(f"rank {rank} on {told['host']}: {ends[rank]} s after the cut: {told.get('error')}")
    print(
        "\n".join(problems) or "the same bits on one and two hosts; a clear end when one is cut off"
    )
    receipt = {
        "asked": {**asdict(options), "out": str(options.out)},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "hosts": first.get("hosts"),
        "losses": first.get("losses"),
        "same_bits_as_on_one_host": same_bits,
        "copies_compared": {rank: told.get("copies") for rank, told in two.told.items()},
        "trace": [told.get("trace") for told in two.told.values()],
        "groups_of_rank_0": first.get("groups"),
        "seconds": {"one host": round(one.seconds, 1), "two hosts": round(two.seconds, 1)},
        "cut": {
            "ended_after_s": ends,
            "errors": {rank: told.get("error") for rank, told in cut.told.items()},
            "torchrun_statuses": cut.statuses,
        },
        "problems": problems,
    }
    write_json(options.out, "receipt.json", receipt, indent=1)
    if problems:
        logs: Mapping[str, list[str]] = {"one": one.output, "two": two.output, "cut": cut.output}
        texts = {f"{k}_{n}.log": t.encode() for k, v in logs.items() for n, t in enumerate(v)}
        write_files(options.out, texts)
    return 1 if problems else 0


# One rank of it


def lane(layers: int) -> HybridGPT:
    """Width 128, heads of 32, 2 KV heads, 128 tokens, 8 experts of 64, a sequence per rank."""

    class Lane(HybridGPT):
        config = GPTConfig(
            context=128, width=128, layers=layers, heads=4, kv_heads=2, experts=8, expert_size=64
        )
        sequences = 1

    return Lane(0, dist.get_world_size())


def train(layers: int, steps: int, told: Told, marks: Path | None) -> None:
    """Fill `told` as it goes; a file in `marks` says that a step was taken."""
    scenario = lane(layers)
    mesh = build(tp=2, sequence_parallel=True, ep=2)  # FSDP2 has the rest
    model = scenario.model_to_cut()
    stack = Stack(model, scenario.plans()[0], mesh, loss=mean_loss, ordered=True)
    optimizer = stack.optimizer(reduction="ordered", **scenario.options())
    told["hosts"] = list(mesh.hosts)
    told["trace"] = stack.trace(tell=lambda line: None)["ranks"][mesh.rank]
    told["groups"] = [str(creation) for creation in registry.creations if creation.mine]
    share = mesh.degrees.world // mesh.degrees.batch_ranks
    mine = range(share * stack.batch_place, share * (stack.batch_place + 1))
    for step in range(steps):
        tokens = torch.cat([scenario.tokens(step, rank) for rank in mine])
        loss = stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(loss.item())
        if marks is not None:
            (marks / f"rank{mesh.rank}_step{step}").touch()
    told["copies"] = check_replicas(model)
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    told["checksum"] = checksums(held).tolist()


def rank_main(asked: str) -> NoReturn:
    """Train as torchrun says; the last line of output is JSON, also if that fails."""
    layers, steps, timeout, marks = json.loads(asked)
    torch.set_num_threads(1)
    told: Told = {"host": socket.gethostname(), "losses": []}
    status = 0
    last = time.time()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        told["rank"] = dist.get_rank()
        train(layers, steps, told, Path(marks))
    except Exception as error:
        status = 1
        told["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
    told["ended"] = time.time()
    told["seconds"] = told["ended"] - last
    print(f"\nTOLD {json.dumps(told)}", flush=True)
    # Groups of a host that is cut off cannot be taken down in an orderly way.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    if ASKED in os.environ:
        rank_main(os.environ[ASKED])
    run_script(main, Options)
