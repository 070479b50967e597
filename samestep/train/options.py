"""Options of `samestep train`, read with what Python brings."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from samestep.groups.state_flags import OffloadWord, StateWord
from samestep.models.gpt import GPTConfig
from samestep.parallel.grouped import Products
from samestep.tooling.request import BadRequestError, parse_flags, spelled

Layout = Literal["none", "zero1", "zero2", "flat_zero1", "flat", "fsdp2", "hsdp"]
ROUTED = 8  # experts of --moe


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
    """Train a small byte-level GPT, alone or under torchrun, in any layout."""

    out: Annotated[Path, "folder for log.jsonl, loss.png and checkpoints/"] = Path("out/gpt")
    resume: Annotated[
        str, "auto: from the newest checkpoint in --out, if any; never; or a path"
    ] = "auto"
    data: Annotated[Path | None, "file to train on; if not given, Python's standard library"] = None
    seed: Annotated[int, "decides the initial weights, the order of the data and dropout"] = 0
    steps: Annotated[int, "where the run ends, and its schedules"] = 300

    layout: Annotated[
        Literal["auto", "none", "zero1", "zero2", "flat_zero1", "flat", "fsdp2", "hsdp"],
        "where parameters, gradients and state live; auto: zero2, or fsdp2 with the axes below, "
        "beside which every layout goes",
    ] = "auto"
    shards: Annotated[int, "ranks that share one copy of the model, in hsdp"] = 2
    tp: Annotated[int, "tensor parallel: ranks that share a matrix"] = 1
    sp: Annotated[bool, "sequence parallel: they share the sequence between matrices"] = False
    ep: Annotated[int, "expert parallel: ranks that share the experts"] = 1
    pp: Annotated[int, "pipeline stages"] = 1
    fsdp: Annotated[bool, "shard over all other ranks, as --layout fsdp2"] = False
    replicate: Annotated[int, "copies of the sharded model"] = 1
    ep_carries_data: Annotated[bool, "ranks of --ep see different tokens"] = True
    expert_tensor_parallel: Annotated[int, "ranks that share an expert's matrix; 0: --tp"] = 0
    schedule: Annotated[
        Literal["1f1b", "interleaved"], "of the pipeline; interleaved: two stages on each rank"
    ] = "1f1b"
    compile: Annotated[bool, "compile blocks, where no gate is closed"] = False
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "what blocks compute again in backward; selective: not matrix products and attention",
    ] = "none"
    state: Annotated[StateWord, "how moments and momenta are kept: in 32 bits, or fewer"] = (
        "float32"
    )
    offload: Annotated[OffloadWord, "state: moments and momenta stay in the host's memory"] = "none"
    reduction: Annotated[
        Literal["ordered", "fast"],
        "ordered: the same bits every time; fast: whatever the backend does",
    ] = "ordered"
    dtype: Annotated[Literal["fp32", "bf16"], "of the matrix products; weights stay fp32"] = "fp32"
    parameters: Annotated[
        Literal["fp32", "bf16"], "dtype of parameters; bf16: with main parameters in fp32 beside"
    ] = "fp32"
    bucket_size: Annotated[
        int | None, "elements that travel together; if not given, by ranks and links"
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: a GPU if there is one"] = "auto"

    context: Annotated[int, "bytes per sequence"] = 64
    width: Annotated[int, "channels of the model"] = 128
    layers: Annotated[int, "transformer layers"] = 4
    heads: Annotated[int, "query heads"] = 4
    kv_heads: Annotated[int, "key and value heads"] = 2
    moe: Annotated[bool, f"experts in place of one MLP: {ROUTED}, if --experts does not say"] = (
        False
    )
    experts: Annotated[int, "MLPs per layer to choose from; 0: one for all tokens"] = 0
    active_experts: Annotated[int, "of these, how many a token uses"] = 2
    expert_size: Annotated[int, "channels in an expert; 0: per token as many as one MLP has"] = 0
    capacity: Annotated[
        float, "room of an expert, in even shares of the tokens; 0: for all that come"
    ] = 0.0
    shared_experts: Annotated[int, "experts that every token passes, beside those it chooses"] = 0
    null_experts: Annotated[int, "experts to choose from that add nothing and cost nothing"] = 0
    balance_loss: Annotated[float, "coefficient of a loss of uneven use of experts"] = 0.0
    z_loss: Annotated[float, "coefficient of a loss of large logits of routers"] = 0.0
    expert_products: Annotated[
        Products, "one kernel for all experts, or one for each; auto: whichever pays"
    ] = "auto"
    lora: Annotated[bool, "train low-rank factors of attention (and MLP) matrices alone"] = False
    lora_rank: Annotated[int, "of these factors"] = 8
    lora_rule: Annotated[Literal["adamw", "muon"], "what updates them"] = "adamw"
    dropout: Annotated[float, "share of each branch that is dropped in training"] = 0.0

    batch_size: Annotated[int, "sequences per step, of all ranks together"] = 16
    micro_batch: Annotated[
        int | None, "at most so many at a time on a rank; the rest is added up"
    ] = None
    lr: Annotated[float, "peak learning rate"] = 0.02
    warmup: Annotated[int, "steps in which the learning rate rises to its peak"] = 30
    final_lr: Annotated[float, "share of the peak that a cosine falls to at the end"] = 0.05
    weight_decay: Annotated[float, "of Muon and AdamW"] = 0.1
    momentum: Annotated[float, "Muon's, after its warm-up"] = 0.95
    first_momentum: Annotated[float, "Muon's, in the first step"] = 0.85
    momentum_warmup: Annotated[int, "steps between the two"] = 100
    max_grad_norm: Annotated[float, "gradients are scaled down to this joint norm"] = 1.0

    log_every: Annotated[int, "steps between lines of progress"] = 10
    eval_every: Annotated[int, "steps between validations"] = 50
    eval_sequences: Annotated[int, "sequences of each, of all ranks together"] = 64
    save_every: Annotated[int, "steps between checkpoints"] = 100
    keep: Annotated[int, "newest checkpoints that are kept"] = 2

    def check(self) -> None:
        """Refuse values that cannot run, before anything is made."""
        least_one = (
            "steps", "shards", "tp", "ep", "pp", "replicate", "context", "batch_size", "log_every",
            "eval_every", "eval_sequences", "save_every", "keep", "lora_rank",
        )  # fmt: skip
        for name in least_one:
            self._need(name, getattr(self, name) >= 1, "at least 1")
        for name in ("experts", "warmup", "momentum_warmup"):
            self._need(name, getattr(self, name) >= 0, "at least 0")
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
                f"--layout {self.layout} leaves every data rank a copy, and --replicate, --fsdp "
                "and --lora are about FSDP2: leave --layout out, or these"
            )
        if self.layout == "hsdp" and self.replicate > 1:
            raise BadRequestError(
                "--layout hsdp has --shards, and --replicate says the same: drop one"
            )
        if self.compile and not self.meshed:
            raise BadRequestError(
                "--compile is about blocks that an axis cuts: add --tp, --ep, --pp, --replicate or "
                "--fsdp, or leave it out"
            )
        if self.compile and self.recompute == "selective":
            raise BadRequestError(
                "--recompute selective looks at single operations, and --compile leaves none: take "
                "--recompute full, or drop one"
            )
        if self.sp and self.tp == 1:
            raise BadRequestError("--sp divides the sequence among the ranks of --tp, which is 1")
        about = ["capacity", "expert_size", "shared_experts", "null_experts"]
        about += ["balance_loss", "z_loss"]
        asked = ["--ep"] * (self.ep > 1) + [spelled(name) for name in about if getattr(self, name)]
        if asked and not self.routed:
            raise BadRequestError(
                f"{', '.join(asked)}: about experts, and there are none: add --moe"
            )
        if self.pp > 1 and self.dropout:
            raise BadRequestError(
                "--dropout draws once per batch, and --pp cuts it into micro-batches: drop one"
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
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

    def momentum_at(self, step: int) -> float:
        """Muon's momentum in a step, counted from 0: low while gradients still turn."""
        share = min(1.0, step / self.momentum_warmup) if self.momentum_warmup else 1.0
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
