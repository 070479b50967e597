"""Measurements of this repository: what its documentation says of speed and memory."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.lab.bench.gpu.report import describe
from samestep.lab.bench.step_contestants import with_gradients
from samestep.lab.common.provenance import versions
from samestep.models.gpt import GPTConfig
from samestep.models.parameter_sets import gpt
from samestep.tooling.output import json_file, write_files
from samestep.tooling.request import BadRequestError, parse_flags

HEAD_WIDTH = 64
Parameters = list[nn.Parameter]


def gpt_config(width: int, layers: int, **more: Any) -> GPTConfig:
    """With heads of 64 channels, as many for keys and values as for queries."""
    heads = max(1, width // HEAD_WIDTH)
    return GPTConfig(width=width, layers=layers, heads=heads, kv_heads=heads, **more)


def gpt_parameters(width: int, layers: int, vocabulary: int) -> tuple[Parameters, Parameters]:
    """(matrices, all other parameters) of a GPT on a CPU, with random values and gradients."""
    matrices, tables = gpt(width, layers, vocabulary)
    norms = ((width,),) * (2 * layers + 1)
    cpu = torch.device("cpu")
    return with_gradients(matrices, cpu), with_gradients((*norms, *tables), cpu)


def timed(call: Callable[[], object]) -> float:
    """Seconds from a barrier to the end of a call on this rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def batch(shape: Any, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of an iteration, (sequences, tokens); of every rank its own."""
    generator = torch.Generator().manual_seed(dist.get_world_size() * number + dist.get_rank())
    size = (2, shape.sequences, shape.tokens)
    tokens, targets = torch.randint(shape.vocabulary, size, generator=generator)
    return tokens, targets


def slowest(seconds: float) -> float:
    """Of all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def heading(
    script: str,
    options: Any,
    load_before: float | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """How a receipt begins: what was asked, of what, and where; with the load, what else matters.

    load_before: that of the machine when the benchmark began.
    """
    asked = asdict(options).items()
    found: dict[str, Any] = {
        "command": f"python -m benchmarks.{script}",
        "options": {key: str(v) if isinstance(v, Path) else v for key, v in asked},
        "versions": versions(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    if device is not None:
        found["device"] = describe(device)
    if load_before is not None:
        found["load"] = [load_before, os.getloadavg()[0]]
    return found


def run_script(main: Callable[[Any], int | None], options: type) -> NoReturn:
    """Run a script as its flags ask; what cannot be done is told in one line."""
    script = main.__globals__  # its name is __main__ for Python
    prog = f"python -m {script['__spec__'].name}"
    try:
        sys.exit(main(parse_flags(options, sys.argv[1:], prog, script["__doc__"])))
    except BadRequestError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def write_json(folder: Path, name: str, content: Mapping[str, object], indent: int = 2) -> None:
    write_files(folder, {name: json_file(content, indent)})
    print(f"written to {folder / name}")
