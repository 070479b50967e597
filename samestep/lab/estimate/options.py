"""Options of `samestep plan`, and the axes of `--mesh dp=8,tp=2,...`.

Axes are given by name, and checked against each other and against the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from samestep.groups.state_flags import OffloadWord, StateWord
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.decoder import SHAPES
from samestep.lab.estimate.hardware import PRESETS
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
    """Tell whether a model fits on a cluster, and simulate how long a step takes and what is sent.

        samestep plan llama-7b --mesh dp=8
        samestep plan config.json --mesh dp=64,tp=8 --batch 4 --sequence 4096
        samestep plan mypackage.models:make --out out/plan
        samestep plan --calibrate --world-size 8 --out out    # measure this machine

    Exit status: 0, planned, whether or not it fits; 2, refused, and the error says why.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "mesh": "the cluster",
        "sharding": "the optimizer",
        "tokens": "the work of an iteration",
        "reserve": "the result",
        "calibrate": "measuring this machine instead",
    }

    model: Annotated[
        str,
        Flag(
            f"a preset ({', '.join(SHAPES)}), a Hugging Face config.json, or PACKAGE:FACTORY, a "
            "function that returns the model",
            metavar="MODEL",
            positional=True,
        ),
    ] = ""

    mesh: Annotated[
        str,
        Flag(
            "sizes of the mesh axes: dp (data), tp (tensor), pp (pipeline), ep (expert), replicate "
            "(copies, in HSDP)",
            metavar="AXIS=SIZE,...",
        ),
    ] = "dp=8"
    ranks: Annotated[
        int | None, "total number of ranks, to check --mesh against; dp is what the others leave"
    ] = None
    hardware: Annotated[
        str,
        Flag(
            f"a preset ({', '.join(PRESETS)}), or the file that --calibrate wrote",
            metavar="NAME|FILE",
        ),
    ] = "h200x8"

    sharding: Annotated[
        Literal["none", "zero1", "zero2", "zero3"],
        "zero1: ranks share optimizer state; zero2: gradients too; zero3: parameters too (FSDP2)",
    ] = "zero2"
    buffers: Annotated[
        Literal["per_parameter", "flat"],
        "one buffer per parameter, or flat buffers of many parameters, as in Megatron-LM",
    ] = "per_parameter"
    offload: Annotated[
        OffloadWord, "state: optimizer state stays in the host's memory between steps"
    ] = "none"
    rule: Annotated[
        Literal["muon", "adamw"], "the rule for hidden matrices; all others are AdamW's"
    ] = "muon"
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        "dtype of parameters and gradients; bfloat16 parameters have fp32 main parameters",
    ] = "bfloat16"
    state: Annotated[StateWord, "how the optimizer state of each parameter is stored"] = "float32"
    remainders: Annotated[
        bool,
        "store main parameters as the 16 bits that bfloat16 lacks: 2 bytes less per element",
    ] = False
    overlap: Annotated[
        bool,
        "reduce gradients during backward, and gather flat buffers during the next forward",
    ] = True
    bucket_size: Annotated[
        int | None,
        Flag("elements per bucket of a collective", default="chosen by ranks and links"),
    ] = None

    tokens: Annotated[
        int,
        "tokens of one rank per iteration: whole iterations are planned, with activations; "
        "0: the optimizer step alone",
    ] = 0
    batch: Annotated[int, "sequences of one rank per iteration, in place of --tokens"] = 0
    sequence: Annotated[int, "tokens per sequence; needed with --batch"] = 0
    micro_batches: Annotated[
        int, "micro-batches of one rank per iteration; 0: as many as pipeline stages"
    ] = 0
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activations recomputed in backward: none; selective: all but matrix products and "
        "attention; full: whole blocks",
    ] = "none"
    sequence_parallel: Annotated[
        bool, "ranks of the tp axis also share the sequence between matrix products"
    ] = False
    stages_per_rank: Annotated[
        int, "pipeline stages on each rank: 1 is 1F1B, more are interleaved"
    ] = 1

    reserve: Annotated[
        float | None,
        Flag(
            "share of the device's memory that must stay free for it to fit",
            default="0.1 if activations are counted, else 0.3",
        ),
    ] = None
    scaling: Annotated[
        bool,
        "also plan 8, 16, ... 4096 ranks, where dp grows and other axes stay; --out adds a picture",
    ] = False
    out: Annotated[
        Path | None,
        "folder for plan.json, plan.html and the timeline; with --calibrate for hardware.json",
    ] = None

    calibrate: Annotated[
        bool, "measure collectives and kernels here, and write a file for --hardware"
    ] = False
    world_size: Annotated[int, "ranks that --calibrate starts"] = 2


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
        raise BadRequestError("--stages-per-rank needs a pipeline: add pp=... to --mesh")
    if options.stages_per_rank > 1 and options.sharding == "zero3":
        raise BadRequestError(
            "--stages-per-rank can be planned with --sharding none, zero1 and zero2, not with zero3"
        )
    tokens = options.tokens
    if options.batch:
        if not options.sequence:
            raise BadRequestError("--batch needs --sequence, the tokens of each sequence")
        if tokens not in (0, options.batch * options.sequence):
            raise BadRequestError(
                f"--batch {options.batch} of --sequence {options.sequence} are "
                f"{options.batch * options.sequence} tokens, not --tokens {tokens}: "
                "leave --batch or --tokens out"
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
            + f": use a multiple of {unit}"
        )
    if options.stages_per_rank == 1 and parts < degrees.pp:
        raise BadRequestError(
            f"--micro-batches {parts} are fewer than pp={degrees.pp}: give at least as many"
        )
    if options.stages_per_rank > 1 and parts % degrees.pp:
        raise BadRequestError(
            f"--micro-batches {parts} are no multiple of pp={degrees.pp}, which "
            "--stages-per-rank above 1 requires"
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
