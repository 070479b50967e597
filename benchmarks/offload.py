"""State in the host's memory: a step with and without it, and those of torchao and DeepSpeed.

`step`: every way has a training of its own: a backward pass that gives each parameter a gradient,
then the step. A plain copy of pinned memory, both ways at once, tells how fast the link is, and
with that how long the bytes of a step take at least. Memory is what torch says, beside what
`samestep plan` says. On a CPU it shows only that it runs.

`train`: a GPT in bfloat16 with main parameters, Muon and AdamW, first with state on the device,
where it may not fit, then with state on the host.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import samestep
from benchmarks import gpt_config, heading, run_script, write_json
from samestep.lab.bench.gpu.measure import give_back_memory, settle
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import plan_on_grid
from samestep.lab.estimate.memory import RankMemory, rank_memory
from samestep.models.gpt import GPT
from samestep.models.parameter_sets import SETS
from samestep.tooling.request import Flag
from samestep.train.corpus import Order, load_corpus, windows

TINY = "tiny"


@dataclass(frozen=True)
class Options:
    """What to measure."""

    mode: Annotated[Literal["step", "train"], Flag(positional=True)] = "step"
    parameters: Annotated[str, f"{TINY}, {', '.join(SETS)}"] = TINY
    rule: Literal["both", "adamw", "muon"] = "both"
    width: Annotated[int, "of train"] = 64
    layers: Annotated[int, "of train"] = 2
    steps: Annotated[int, "of train"] = 3
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rounds: int = 5
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    out: Path = Path("out/bench/offload")


class Measured(NamedTuple):
    """Of one way to keep state, in seconds and bytes."""

    name: str
    step: float  # median of backward and step, less that of backward alone
    moved: int  # to the device, and as much back; or what torchao sends
    least: float  # seconds of these bytes on the link
    memory: int  # of the device at most, in a step
    planned: int | None

    @property
    def ratio(self) -> float | None:
        """Of the step and what the link allows; None: nothing is moved."""
        return self.step / self.least if self.least else None


def shapes_of(options: Options) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of matrices, and of the rest."""
    if options.parameters == TINY:
        return [(64, 64), (256, 64), (64, 256)] * 2, [(512, 64), (64,)]
    found = SETS[options.parameters]
    return list(found.matrices), list(found.others)


def model_of(options: Options, device: str) -> nn.Module:
    matrices, others = shapes_of(options)
    dtype: torch.dtype = getattr(torch, options.dtype)
    generator = torch.Generator(device="cpu" if device == "meta" else device).manual_seed(0)
    model = nn.Module()
    for number, shape in enumerate([*matrices, *others]):
        value = torch.empty(shape, dtype=dtype, device=device)
        if device != "meta":
            value.normal_(std=0.02, generator=generator)
        model.register_parameter(f"p{number}", nn.Parameter(value))
    return model


def ours(
    options: Options, rule: str, offload: str | None, model: nn.Module, *, narrow: bool = False
) -> samestep.MuonAdamW:
    """`narrow`: without main parameters, and all state in the parameters' dtype."""
    matrices, _ = shapes_of(options)
    params = list(model.named_parameters())
    first, rest = params[: len(matrices)], params[len(matrices) :]
    groups = [
        {"params": [name for name, _ in first], "rule": rule},
        {"params": [name for name, _ in rest], "rule": "adamw"},
    ]
    masters = options.dtype != "float32" and not narrow
    dtypes = dict.fromkeys(("exp_avg", "exp_avg_sq"), getattr(torch, options.dtype))
    return samestep.MuonAdamW(
        model,
        lr=1e-3,
        groups=groups,
        master_weights=masters,
        offload=offload,
        state_dtypes=dtypes if narrow else None,
    )


def planned(options: Options, optimizer: samestep.MuonAdamW) -> RankMemory:
    """What the plan says of an optimizer of parameters without memory."""
    return rank_memory(plan_on_grid(optimizer, one_axis(1), device=torch.device(options.device)), 0)


def seconds(options: Options, run: Callable[[], object]) -> float:
    device = torch.device(options.device)
    settle(device)
    begin = time.perf_counter()
    run()
    settle(device)
    return time.perf_counter() - begin


def link_rate(options: Options) -> float:
    """Bytes per second of a copy of pinned memory, each way while the other goes on."""
    size = 1 << (29 if options.device == "cuda" else 20)
    on_gpu = options.device == "cuda"
    here = [torch.empty(size, dtype=torch.uint8, device=options.device) for _ in range(2)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    make: Any = torch.cuda.Stream
    streams = [make() for _ in range(2)] if on_gpu else []

    def both_ways() -> None:
        pairs = [(here[0], host[0]), (host[1], here[1])]
        for number, (into, source) in enumerate(pairs):
            if streams:
                with torch.cuda.stream(streams[number]):
                    into.copy_(source, non_blocking=True)
            else:
                into.copy_(source)

    seconds(options, both_ways)
    return size / min(seconds(options, both_ways) for _ in range(5))


def backward(params: Sequence[Tensor], number: int) -> None:
    """Every parameter gets a gradient of its own, as hooks on parameters see it."""
    for place, param in enumerate(params):
        torch.autograd.backward(loss_of(param, place, number))


def loss_of(param: Tensor, place: int, number: int) -> Tensor:
    return (param * (1e-3 * (1 + number + 0.01 * place))).sum()


def timed(
    options: Options,
    params: Sequence[Tensor],
    step: Callable[[], object] | None,
    backward: Callable[[Sequence[Tensor], int], None] = backward,
) -> tuple[float, int]:
    """Median of backward and step, and the most memory of the device in a step."""
    times = []
    for number in range(options.rounds + 2):

        def once(number: int = number) -> None:
            backward(params, number)
            if step is not None:
                step()

        times.append(seconds(options, once))
        for param in params:
            param.grad = None
    memory = 0
    if step is not None and options.device == "cuda":
        backward(params, -1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        memory = torch.cuda.max_memory_allocated()
        for param in params:
            param.grad = None
    return statistics.median(times[2:]), memory


def measured(options: Options, rule: str, rate: float, alone: float) -> Iterator[Measured]:
    """Each way by itself: what one keeps is no other's."""
    ways: list[tuple[str | None, bool]] = [(None, False), ("state", False)]
    if rule == "adamw" and options.dtype != "float32":
        ways.append(("state", True))  # what torchao's keeps
    for offload, narrow in ways:
        gc.collect()
        model = model_of(options, options.device)
        optimizer = ours(options, rule, offload, model, narrow=narrow)
        iteration, memory = timed(options, list(model.parameters()), optimizer.step)
        state = [t for own in optimizer.state.values() for t in own.values()]
        moved = sum(t.nbytes for t in state) if offload else 0
        plan = planned(
            options, ours(options, rule, offload, model_of(options, "meta"), narrow=narrow)
        )
        name = f"samestep {rule}, {'state on the host' if offload else 'on the device'}"
        name += f", {options.dtype} without master weights" if narrow else ""
        yield Measured(name, iteration - alone, moved, moved / rate, memory, plan.peak)
        del model, optimizer, state


def peer(name: str) -> Any:
    """What another library calls so, with the memory of those before it given back; or None."""
    gc.collect()
    try:
        return resolve_name(name)
    except ImportError as error:
        print(f"{name} is not there: {error}")
        return None


def torchao(options: Options, rate: float, alone: float) -> Iterator[Measured]:
    """Its AdamW on the CPU: gradients go there in backward, parameters come back."""
    make = peer("torchao.optim:CPUOffloadOptimizer")
    if make is None:
        return
    model = model_of(options, "cuda")
    params = list(model.parameters())
    optimizer = make(params, torch.optim.AdamW, lr=1e-3, fused=True)
    iteration, memory = timed(options, params, optimizer.step)
    moved = sum(param.nbytes for param in params)
    name = "torchao CPUOffloadOptimizer, AdamW without master weights"
    yield Measured(name, iteration - alone, moved, moved / rate, memory, None)


def deepspeed(options: Options, rate: float, alone: float) -> Iterator[Measured]:
    """ZeRO-Offload, stage 2 on one rank: AdamW on the CPU, with main parameters there."""
    initialize = peer("deepspeed:initialize")
    if initialize is None:
        return
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29517}.items():
        os.environ.setdefault(key, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

    class Model(nn.Module):
        """Its loss has a gradient for every parameter, as `backward` gives them."""

        def __init__(self) -> None:
            super().__init__()
            self.held = model_of(options, "cuda")

        def forward(self, number: int) -> Tensor:
            losses = [loss_of(p, place, number) for place, p in enumerate(self.held.parameters())]
            return torch.stack(losses).sum()

    model = Model()
    params = list(model.parameters())
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    engine = initialize(model=model, model_parameters=params, config=settings)[0]

    def run(params: Sequence[Tensor], number: int) -> None:
        engine.backward(engine(number))

    iteration, memory = timed(options, params, engine.step, run)
    moved = sum(param.nbytes for param in params)
    name = "DeepSpeed ZeRO-Offload, AdamW on the host"
    yield Measured(name, iteration - alone, moved, moved / rate, memory, None)


def line(found: Measured) -> str:
    ratio = "-" if found.ratio is None else f"{found.ratio:.2f}"
    plan = "-" if found.planned is None else f"{found.planned / 1e9:.3f}"
    return (
        f"{found.name:58} {1e3 * found.step:10.2f} {found.moved / 1e9:9.3f} "
        f"{1e3 * found.least:9.2f} {ratio:>6} {found.memory / 1e9:9.3f} {plan:>9}"
    )


def run_steps(options: Options) -> dict[str, Any]:
    rate = link_rate(options)
    print(f"link: {rate / 1e9:.1f} GB/s each way at once, {options.device}, {options.dtype}")
    head = ("step ms", "GB/way", "least ms", "ratio", "GB there", "GB plan")
    print(f"{'':58} {head[0]:>10} {head[1]:>9} {head[2]:>9} {head[3]:>6} {head[4]:>9} {head[5]:>9}")
    model = model_of(options, options.device)
    alone, _ = timed(options, list(model.parameters()), None)
    del model
    rules = ("adamw", "muon") if options.rule == "both" else (options.rule,)
    ways = [measured(options, rule, rate, alone) for rule in rules]
    if "adamw" in rules and options.device == "cuda":
        # Last: DeepSpeed's engine keeps its model.
        ways += [torchao(options, rate, alone), deepspeed(options, rate, alone)]
    found = []
    for each in chain.from_iterable(ways):
        print(line(each))
        found.append({**each._asdict(), "ratio": each.ratio})
    return {"link": rate, "found": found}


def run_training(options: Options) -> dict[str, Any]:
    """Both ways, from the same weights and batches."""
    found = {}
    for offload in (None, "state"):
        where = "host" if offload else "device"
        with torch.device("meta"):
            meta = gpt_in(options, "meta")
        plan = planned(options, muon_adamw(meta, offload))
        billions = sum(p.numel() for p in meta.parameters()) / 1e9
        print(
            f"state on the {where}: {billions:.2f} billion parameters, planned "
            f"{plan.peak / 1e9:.1f} GB on the device, {plan.on_host / 1e9:.1f} on the host"
        )
        try:
            found[where] = {**trained(options, offload), "planned": plan.peak}
        except torch.OutOfMemoryError as error:
            print(f"  does not fit: {str(error).split('.')[0]}")
            found[where] = {"fits": False, "planned": plan.peak}
        gc.collect()
        give_back_memory(torch.device(options.device))
    return {"found": found}


def gpt_in(options: Options, device: str) -> GPT:
    torch.manual_seed(0)
    usual, dtype = torch.get_default_dtype(), getattr(torch, options.dtype)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return GPT(gpt_config(options.width, options.layers, context=512))
    finally:
        torch.set_default_dtype(usual)


def muon_adamw(model: nn.Module, offload: str | None) -> samestep.MuonAdamW:
    return samestep.MuonAdamW(model, lr=1e-3, master_weights=True, offload=offload)


def trained(options: Options, offload: str | None) -> dict[str, Any]:
    """Losses, seconds of each step, and the most memory of the device inside step()."""
    device, corpus = options.device, load_corpus()
    model = gpt_in(options, device)
    optimizer = muon_adamw(model, offload)
    order, losses, times, memory = Order(len(corpus.train), 512, 0), [], [], 0
    for number in range(options.steps):
        inputs, targets = windows(corpus.train, order.starts(torch.arange(4) + 4 * number), 512)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model.loss(inputs.contiguous().to(device), targets.contiguous().to(device))
        torch.autograd.backward(loss)
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times.append(seconds(options, optimizer.step))
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        took = f"step() {times[-1]:.2f} s, {memory / 1e9:.2f} GB"
        print(f"  step {number}: loss {losses[-1]:.4f}, {took}")
    return {"fits": True, "losses": losses, "seconds": times, "memory": memory}


def main(options: Options) -> None:
    content = run_steps(options) if options.mode == "step" else run_training(options)
    found = {**heading("offload", options, device=torch.device(options.device)), **content}
    write_json(options.out, "offload.json", found)


if __name__ == "__main__":
    run_script(main, Options)
