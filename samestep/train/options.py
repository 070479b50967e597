"""Options of `samestep train`, read with what Python brings."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from samestep.groups.state_flags import OffloadWord, StateWord
from samestep.models.gpt import GPTConfig
from samestep.parallel.grouped import Products
from samestep.tooling.request import BadRequestError, Flag, parse_flags, spelled

Layout = Literal["none", "zero1", "zero2", "flat_zero1", "flat", "fsdp2", "hsdp"]
ROUTED = 8  # experts of --moe
WARMUP, MOMENTUM_WARMUP = 30, 100  # steps at most, unless they are asked for


class LayoutKeywords(NamedTuple):
    """A layout: the keywords of the optimizer.

    kind: in `placements.registry`, of parameters that no axis beside data cuts.
    """

    kind: str
    keywords: dict[str, Any]


_OVERLAP = {"overlap_grad_reduce": True}
_FLAT = {"buffers": "flat", "overlap_param_gather": True}
LAYOUTS: dict[Layout, LayoutKeywords] = {
    "none": LayoutKeywords("replicated", {"sharding": "none"}),
    "zero1": LayoutKeywords("replicated", {"sharding": "zero1", **_OVERLAP}),
    "zero2": LayoutKeywords("replicated", {"sharding": "zero2", **_OVERLAP}),
    "flat_zero1": LayoutKeywords("replicated", {"sharding": "zero1", **_OVERLAP, **_FLAT}),
    "flat": LayoutKeywords("replicated", {"sharding": "zero2", **_OVERLAP, **_FLAT}),
    "fsdp2": LayoutKeywords("dtensor", {}),
    "hsdp": LayoutKeywords("dtensor", {}),
}


@dataclass(frozen=True)
class Options:
    """Train a small byte-level GPT in any layout, alone or under torchrun.

        samestep train --steps 30    # a first run, on a CPU
        torchrun --nproc-per-node 4 -m samestep train --layout fsdp2
        torchrun --nproc-per-node 8 -m samestep train --tp 2 --pp 2 --batch-size 32

    A run that finds checkpoints in --out goes on from the newest, in any layout and on any number
    of ranks.

    Exit status: 0, trained; 1, a rank failed; 2, refused, and the error says why.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "out": "the run",
        "layout": "layout over ranks",
        "state": "memory and precision",
        "context": "the model",
        "batch_size": "the schedule",
        "log_every": "reports and checkpoints",
    }

    out: Annotated[Path, "folder for log.jsonl, loss.png and checkpoints/"] = Path("out/gpt")
    resume: Annotated[
        str,
        Flag(
            "auto: resume from the newest checkpoint in --out, if there is one; never: refuse if "
            "there is one; or the path of a checkpoint",
            metavar="auto|never|PATH",
        ),
    ] = "auto"
    data: Annotated[
        Path | None,
        Flag("file to train on, read as bytes", default="Python's standard library"),
    ] = None
    seed: Annotated[int, "seed of the initial weights, the order of the data and dropout"] = 0
    steps: Annotated[int, "optimizer steps of the whole run, and the length of its schedules"] = 300

    layout: Annotated[
        Literal["auto", "none", "zero1", "zero2", "flat_zero1", "flat", "fsdp2", "hsdp"],
        "how ranks share parameters, gradients and state; auto: fsdp2 beside --tp, --ep, --pp, "
        "--replicate or --fsdp, else zero2",
    ] = "auto"
    shards: Annotated[int, "with --layout hsdp: ranks that share one copy of the model"] = 2
    tp: Annotated[int, "tensor parallel: ranks that share each matrix"] = 1
    sp: Annotated[
        bool, "sequence parallel: ranks of --tp also share the sequence between matrix products"
    ] = False
    ep: Annotated[int, "expert parallel: ranks that share the experts of a layer"] = 1
    pp: Annotated[int, "pipeline parallel: number of stages"] = 1
    fsdp: Annotated[bool, "shard parameters over all other ranks, as --layout fsdp2 does"] = False
    replicate: Annotated[int, "copies of the sharded model"] = 1
    ep_carries_data: Annotated[
        bool, "ranks of --ep see different tokens; without it they see the same"
    ] = True
    expert_tensor_parallel: Annotated[
        int, "ranks that share the matrices of one expert; 0: as many as --tp"
    ] = 0
    schedule: Annotated[
        Literal["1f1b", "interleaved"],
        "with --pp: the pipeline's schedule; interleaved has two stages on each rank",
    ] = "1f1b"
    reduction: Annotated[
        Literal["ordered", "fast"],
        "how gradients are summed; ordered: in rank order, the same bits every time; fast: by the "
        "backend's own collective",
    ] = "ordered"
    bucket_size: Annotated[
        int | None,
        Flag("elements per bucket of a collective", default="chosen by ranks and links"),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], "auto: a GPU if there is one, else the CPU"
    ] = "auto"

    state: Annotated[StateWord, "how optimizer state is stored"] = "float32"
    offload: Annotated[
        OffloadWord, "state: optimizer state stays in the host's memory between steps"
    ] = "none"
    dtype: Annotated[
        Literal["fp32", "bf16"], "dtype of matrix products in forward and backward"
    ] = "fp32"
    parameters: Annotated[
        Literal["fp32", "bf16"], "dtype of the parameters; bf16 has fp32 main parameters beside"
    ] = "fp32"
    compile: Annotated[bool, "compile blocks with torch.compile, where the layout allows it"] = (
        False
    )
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activations recomputed in backward; selective: all but matrix products and attention; "
        "full: whole blocks",
    ] = "none"

    context: Annotated[int, "bytes per sequence"] = 64
    width: Annotated[int, "channels of the residual stream"] = 128
    layers: Annotated[int, "transformer layers"] = 4
    heads: Annotated[int, "query heads"] = 4
    kv_heads: Annotated[int, "key and value heads"] = 2
    moe: Annotated[
        bool, f"mixture of experts in place of one MLP per layer: {ROUTED}, or --experts"
    ] = False
    experts: Annotated[int, "experts per layer; 0: one MLP for all tokens"] = 0
    active_experts: Annotated[int, "experts that each token is sent to"] = 2
    expert_size: Annotated[
        int, "channels of an expert; 0: the active experts together are as wide as one MLP"
    ] = 0
    capacity: Annotated[
        float,
        "most tokens of an expert, as a multiple of an even share; 0: no limit, none is dropped",
    ] = 0.0
    shared_experts: Annotated[int, "experts that every token passes beside those it is sent to"] = 0
    null_experts: Annotated[
        int, "experts that a token may be sent to and that compute nothing and add nothing"
    ] = 0
    balance_loss: Annotated[float, "coefficient of the loss against uneven use of experts"] = 0.0
    z_loss: Annotated[float, "coefficient of the loss against large logits of the router"] = 0.0
    expert_products: Annotated[
        Products,
        "matrix products of experts; grouped: one kernel for all; loop: one for each; auto: the "
        "faster one by shape",
    ] = "auto"
    lora: Annotated[
        bool, "train only LoRA factors of the attention matrices (and of the MLP's)"
    ] = False
    lora_rank: Annotated[int, "with --lora: rank of the factors"] = 8
    lora_rule: Annotated[Literal["adamw", "muon"], "with --lora: rule that updates the factors"] = (
        "adamw"
    )
    dropout: Annotated[float, "probability of dropout at the end of each residual branch"] = 0.0

    batch_size: Annotated[int, "sequences per step, of all ranks together"] = 16
    micro_batch: Annotated[
        int | None,
        Flag(
            "most sequences per forward pass of a rank; gradients of several passes are added",
            default="all of the rank's",
        ),
    ] = None
    lr: Annotated[float, "peak learning rate"] = 0.02
    warmup: Annotated[
        int | None,
        Flag(
            "steps in which the learning rate rises to its peak",
            default=f"a tenth of --steps, at most {WARMUP}",
        ),
    ] = None
    final_lr: Annotated[
        float, "learning rate at the end of the cosine decay, as a share of the peak"
    ] = 0.05
    weight_decay: Annotated[float, "weight decay of Muon and AdamW"] = 0.1
    momentum: Annotated[float, "Muon's momentum after its warm-up"] = 0.95
    first_momentum: Annotated[float, "Muon's momentum in the first step"] = 0.85
    momentum_warmup: Annotated[
        int | None,
        Flag(
            "steps in which Muon's momentum rises from the first to the final value",
            default=f"a third of --steps, at most {MOMENTUM_WARMUP}",
        ),
    ] = None
    max_grad_norm: Annotated[float, "gradients are clipped to this norm of all together"] = 1.0

    log_every: Annotated[int, "steps between lines of progress"] = 10
    eval_every: Annotated[int, "steps between measurements of the validation loss"] = 50
    eval_sequences: Annotated[
        int, "sequences per measurement of the validation loss, of all ranks together"
    ] = 64
    save_every: Annotated[int, "steps between checkpoints"] = 100
    keep: Annotated[int, "number of newest checkpoints that are kept"] = 2

    def check(self) -> None:
        """Refuse values that cannot run, before anything is made."""
        least_one = (
            "steps", "shards", "tp", "ep", "pp", "replicate", "context", "batch_size", "log_every",
            "eval_every", "eval_sequences", "save_every", "keep", "lora_rank",
        )  # fmt: skip
        for name in least_one:
            self._need(name, getattr(self, name) >= 1, "at least 1")
        self._need("experts", self.experts >= 0, "at least 0")
        for name in ("warmup", "momentum_warmup"):
            given = getattr(self, name)
            self._need(name, given is None or given >= 0, "at least 0")
        for name in ("micro_batch", "bucket_size"):
            given = getattr(self, name)
            self._need(name, given is None or given >= 1, "at least 1")
        self._need("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        for name in ("lr", "max_grad_norm"):
            self._need(name, 0 < getattr(self, name) < math.inf, "above 0")
        self._need("final_lr", 0 <= self.final_lr <= 1, "from 0 to 1")
        self._need("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0")
        for name in ("momentum", "first_momentum"):
            self._need(name, 0 <= getattr(self, name) < 1, "from 0 to below 1")
        self._check_axes()
        try:
            _ = self.model
        except ValueError as error:
            raise BadRequestError(f"the model cannot be built: {_by_flags(error)}") from None

    def _check_axes(self) -> None:
        """Refuse axes that make no sense together, whatever ranks there are."""
        by_fsdp = self.fsdp or self.lora or self.replicate > 1
        if by_fsdp and LAYOUTS[self.placed].kind != "dtensor":
            raise BadRequestError(
                f"--layout {self.layout} keeps a copy on every data rank, and "
                "--replicate, --fsdp and --lora need FSDP2: leave --layout out, or "
                "these options"
            )
        if self.layout == "hsdp" and self.replicate > 1:
            raise BadRequestError(
                "--layout hsdp sets the number of copies by --shards: leave --replicate out"
            )
        if self.compile and not self.meshed:
            raise BadRequestError(
                "--compile works only with --tp, --ep, --pp, --replicate or --fsdp: "
                "add one of them, or leave --compile out"
            )
        if self.compile and self.recompute == "selective":
            raise BadRequestError(
                "--recompute selective chooses single operations, which compiled "
                "blocks do not have: use --recompute full, or leave --compile out"
            )
        if self.sp and self.tp == 1:
            raise BadRequestError(
                "--sp divides the sequence among the ranks of --tp, which is 1: give --tp, "
                "or leave --sp out"
            )
        about = ["capacity", "expert_size", "shared_experts", "null_experts"]
        about += ["balance_loss", "z_loss"]
        asked = ["--ep"] * (self.ep > 1) + [spelled(name) for name in about if getattr(self, name)]
        if asked and not self.routed:
            raise BadRequestError(
                f"{', '.join(asked)}: needs experts, and the model has none: add --moe or --experts"
            )
        if self.pp > 1 and self.dropout:
            raise BadRequestError(
                "--dropout cannot be combined with --pp, whose micro-batches would "
                "draw different masks: leave one of them out"
            )
        self._need(
            "expert_tensor_parallel", self.expert_tensor_parallel in (0, 1, self.tp), "0, 1 or --tp"
        )

    @property
    def meshed(self) -> bool:
        """Whether an axis beside data was asked for."""
        degrees = (self.tp, self.ep, self.pp, self.replicate)
        return self.sp or self.fsdp or self.lora or any(degree > 1 for degree in degrees)

    @property
    def placed(self) -> Layout:
        """The layout, with auto resolved."""
        if self.layout == "auto":
            return "fsdp2" if self.meshed else "zero2"
        return self.layout

    @property
    def routed(self) -> int:
        """The number of experts of a layer; 0: it has an MLP."""
        return self.experts or (ROUTED if self.moe else 0)

    def _need(self, name: str, fine: bool, what: str) -> None:
        if not fine:
            raise BadRequestError(f"{spelled(name)} must be {what}, got {getattr(self, name)}")

    @property
    def model(self) -> GPTConfig:
        same = {key.name for key in fields(GPTConfig)} & vars(self).keys()
        shape = {key: getattr(self, key) for key in same}
        return GPTConfig(**{**shape, "experts": self.routed})

    @property
    def of_the_model(self) -> dict[str, Any]:
        """The fields that decide which parameters there are."""
        names = (
            "width", "layers", "heads", "kv_heads", "moe", "experts", "expert_size",
            "active_experts", "shared_experts", "null_experts", "lora", "lora_rank",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def lr_share(self, step: int) -> float:
        """The share of the peak learning rate in a step, counted from 0: a rise, then a cosine."""
        rise = min(WARMUP, self.steps // 10) if self.warmup is None else self.warmup
        if step < rise:
            return (step + 1) / rise
        progress = min(1.0, (step - rise) / max(1, self.steps - rise))
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

    def momentum_at(self, step: int) -> float:
        """Muon's momentum in a step, counted from 0: low while gradients still turn."""
        rise = self.momentum_warmup
        if rise is None:
            rise = min(MOMENTUM_WARMUP, self.steps // 3)
        share = min(1.0, step / rise) if rise else 1.0
        return (1 - share) * self.first_momentum + share * self.momentum


def _by_flags(error: ValueError) -> str:
    """The model's errors about its fields, which it calls by name before a value or a limit."""
    names = "|".join(key.name for key in fields(GPTConfig))
    return re.sub(
        rf"(?<![\w-])({names})(?= must| is | =|, got)", lambda m: spelled(m[1]), str(error)
    )


def parse(words: Sequence[str], prog: str) -> Options:
    options = parse_flags(Options, words, prog)
    options.check()
    return options
