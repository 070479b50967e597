"""Options of `samestep plan`, and the axes of `--mesh dp=8,tp=2,...`.

Axes are given by name, and checked against each other and against the ranks.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from samestep.groups.state_flags import OffloadWord, StateWord
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.model import Model, layers_of
from samestep.mesh.contract import ModelSizes, terms
from samestep.mesh.degrees import Degrees, DegreesError
from samestep.tooling.request import BadRequestError, Flag

NAMES = {
    "dp": "dp", "data": "dp", "tp": "tp", "model": "tp", "pp": "pp", "pipe": "pp",
    "ep": "ep", "expert": "ep", "replicate": "replicate",
}  # fmt: skip
HOST = 8  # ranks


@dataclass(frozen=True)
class Options:
    """Memory, traffic and time of an optimizer step, for any model on any cluster."""

    model: Annotated[
        str,
        Flag(
            "a preset, a Hugging Face config.json, or PACKAGE:FACTORY",
            metavar="MODEL",
            positional=True,
        ),
    ] = ""
    mesh: Annotated[str, "axes and sizes: dp=8,tp=2,pp=4,ep=8,replicate=2"] = "dp=8"
    ranks: Annotated[int | None, "how many there are; the axes must make up that number"] = None
    sharding: Annotated[
        Literal["none", "zero1", "zero2", "zero3"],
        "zero3 is FSDP2; the others hold whole parameters",
    ] = "zero2"
    buffers: Annotated[Literal["per_parameter", "flat"], "how gradients and parameters lie"] = (
        "per_parameter"
    )
    offload: Annotated[
        OffloadWord,
        "what stays in the host's memory between steps: state comes to the device in windows",
    ] = "none"
    hardware: Annotated[str, "a preset, or a file that --calibrate wrote"] = "h200x8"
    rule: Annotated[Literal["muon", "adamw"], "for matrices; the rest is AdamW's"] = "muon"
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        "of parameters and gradients; 16-bit parameters have 32-bit main copies",
    ] = "bfloat16"
    state: Annotated[StateWord, "how moments and momentum are kept"] = "float32"
    remainders: Annotated[
        bool, "of main copies keep only the 16 bits that bfloat16 parameters lack"
    ] = False
    overlap: Annotated[
        bool, "reduce inside backward, and with flat buffers gather inside the next forward"
    ] = True
    tokens: Annotated[
        int,
        "of one rank per iteration: count activations and what layers send, simulate iterations",
    ] = 0
    batch: Annotated[int, "the same in sequences, of --sequence tokens each"] = 0
    sequence: Annotated[int, "tokens of a sequence"] = 0
    micro_batches: Annotated[
        int, "parts of a rank's batch that run one after the other; 0: as many as pipeline stages"
    ] = 0
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "what backward computes again: nothing, all but products and attention, whole blocks",
    ] = "none"
    sequence_parallel: Annotated[bool, "ranks of tp share the sequence between matrices"] = False
    stages_per_rank: Annotated[int, "of a pipeline: 1 is 1F1B, more are interleaved"] = 1
    bucket_size: Annotated[
        int | None, "elements that travel together; chosen by ranks and links if left out"
    ] = None
    reserve: Annotated[
        float | None,
        "share of the device's memory to stay free: 0.3 for activations, 0.1 if they are counted",
    ] = None
    scaling: Annotated[
        bool,
        "plan 8, 16, ... 4096 ranks too: dp grows, other axes stay; with --out there is a picture",
    ] = False
    calibrate: Annotated[
        bool, "measure collectives and kernels on this machine and write the hardware file instead"
    ] = False
    world_size: Annotated[int, "ranks that --calibrate starts"] = 2
    out: Annotated[
        Path | None,
        "folder for plan.json, plan.html and the timeline; with --calibrate for hardware.json",
    ] = None


def read_mesh(text: str, ranks: int | None, *, sequence_parallel: bool = False) -> Degrees:
    """Raises BadRequestError, in one line with the numbers, for axes that do not fit."""
    sizes: dict[str, int] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = item.partition("=")
        if name not in NAMES or not equals:
            known = ", ".join(NAMES)
            raise BadRequestError(f"--mesh: {item!r} is not AXIS=SIZE; the axes are {known}")
        if not value.isdigit() or int(value) < 1:
            raise BadRequestError(f"--mesh: {name} must be a whole number above 0, got {value!r}")
        if NAMES[name] in sizes:
            raise BadRequestError(f"--mesh: {NAMES[name]} is given twice")
        sizes[NAMES[name]] = int(value)
    others = prod(size for name, size in sizes.items() if name != "dp")
    world = others * sizes.get("dp", 1)
    if ranks is not None and "dp" not in sizes and ranks % others == 0:
        world = ranks  # what is left is data parallel
    if ranks is not None and world != ranks:
        raise BadRequestError(f"--mesh: {_question(sizes, world, ranks)}")
    try:
        return Degrees(
            world, sizes.get("pp", 1), sizes.get("replicate", 1), sizes.get("ep", 1),
            sizes.get("tp", 1), sequence_parallel,
        )  # fmt: skip
    except DegreesError as error:
        raise BadRequestError(f"--mesh: {error}") from error


def _question(sizes: dict[str, int], world: int, ranks: int) -> str:
    """The reason why axes do not make up the ranks, and what would."""
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    parts = [f"{product} = {world:,} ranks, and there are {ranks:,}"]
    others = world // sizes.get("dp", 1)
    if sizes.get("ep", 1) > 1:
        without = world // sizes["ep"]
        parts.append(f"if ep is part of dp x tp (as in Megatron) they are {without:,}")
        inside = others // sizes["ep"]
        if ranks % inside == 0:
            parts.append(f"then dp {ranks // inside} makes {ranks:,}")
    if ranks % others == 0:
        parts.append(f"dp {ranks // others} would fit")
    else:
        parts.append(f"no dp does: {ranks:,} / {others:,} = {ranks / others:g}")
    return "; ".join(parts)


def read_batch(options: Options, degrees: Degrees) -> Batch | None:
    """The batch of a rank per iteration, None for no tokens; raises BadRequestError."""
    for name in ("tokens", "batch", "sequence", "micro_batches"):
        if getattr(options, name) < 0:
            flag = name.replace("_", "-")
            raise BadRequestError(f"--{flag} must be 0 or more, got {getattr(options, name)}")
    if options.stages_per_rank < 1:
        raise BadRequestError(f"--stages-per-rank must be 1 or more, got {options.stages_per_rank}")
    if options.stages_per_rank > 1 and degrees.pp == 1:
        raise BadRequestError("--stages-per-rank is of a pipeline: give --mesh pp=...")
    if options.stages_per_rank > 1 and options.sharding == "zero3":
        raise BadRequestError(
            "--stages-per-rank is planned with none, zero1 and zero2: FSDP2 gathers every stage of "
            "a rank at times of its own, which zero3 here does not follow"
        )
    tokens = options.tokens
    if options.batch:
        if not options.sequence:
            raise BadRequestError("--batch counts sequences: give --sequence, their length, too")
        if tokens not in (0, options.batch * options.sequence):
            raise BadRequestError(
                f"--batch {options.batch} of --sequence {options.sequence} are "
                f"{options.batch * options.sequence} tokens, not --tokens {tokens}: leave one out"
            )
        tokens = options.batch * options.sequence
    parts = options.micro_batches or degrees.pp
    if not tokens:
        return None
    unit = parts * (options.sequence or 1)
    if tokens % unit:
        raise BadRequestError(
            f"{tokens} tokens do not divide into {parts} micro-batches"
            + (f" of sequences of {options.sequence}" if options.sequence else "")
            + f": take a multiple of {unit}"
        )
    if options.stages_per_rank == 1 and parts < degrees.pp:
        raise BadRequestError(
            f"--micro-batches {parts} do not fill pp={degrees.pp}: take at least as many"
        )
    if options.stages_per_rank > 1 and parts % degrees.pp:
        raise BadRequestError(
            f"--micro-batches {parts} are no multiple of pp={degrees.pp}, which interleaved stages "
            "need"
        )
    return Batch(tokens // parts, parts, options.recompute, options.stages_per_rank)


def questions(model: Model, degrees: Degrees, sequence: int = 0) -> list[str]:
    """Doubts about what can be planned: lines of the contract, and hosts."""
    found = [str(term) for term in terms(_sizes(model, sequence), degrees) if not term.holds]
    if degrees.ep > 1 and model.shape is not None and not model.shape.experts:
        found.append(f"ep={degrees.ep}, and the model has no experts: they are data parallel")
    if degrees.tp > HOST:
        found.append(f"tp={degrees.tp} spans hosts of {HOST} ranks")
    return found


def not_counted(
    model: Model, degrees: Degrees, sharding: str, batch: Batch | None = None
) -> list[str]:
    """Parts of a step that a plan of these axes does not tell of."""
    found = []
    cut = [f"{name}={getattr(degrees, name)}" for name in ("tp", "ep", "pp")]
    cut = [text for text in cut if not text.endswith("=1")]
    if batch is None or model.shape is None:
        unknown = "--tokens counts them" if batch is None else "the model's shape is not known"
        found.append(f"activations, in memory: {unknown}")
        if cut:
            found.append(
                f"what layers and stages send each other under {', '.join(cut)}, in bytes and "
                f"time: {unknown}"
            )
    if sharding == "zero3" and batch is None:
        found.append(
            "FSDP2's gathers and reductions, in time: the step is the optimizer's alone; --tokens "
            "simulates whole iterations"
        )
    return found


def _sizes(model: Model, sequence: int) -> ModelSizes:
    layers, shape = layers_of(model.module), model.shape
    known = ModelSizes(layers=0 if layers is None else len(layers[1]), sequence=sequence)
    if shape is None:
        return known
    return replace(
        known,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        mlp_width=shape.hidden,
        experts=shape.experts,
        expert_width=shape.expert_hidden,
    )
