"""Every peer's class and how it is said here; and how far the two are apart after 20 steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

import samestep
from samestep import presets
from tests.peers.checkouts import importable, torchs_muon

STEPS = 20
ZERO_AT, MISSING_AT = (6, 7), (0, 9, 15)
LR, DECAY = 0.02, 0.1
LIMITS = {torch.float64: 1e-14, torch.float32: 2e-6}
Keys = dict[str, Any]


class Steps(Protocol):
    """Their optimizer."""

    def step(self) -> Any: ...


Params = list[nn.Parameter]
SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (24, 10), "wide": (10, 24), "square": (16, 16), "3-D": (3, 8, 12), "fused": (24, 10),
    "convolution": (12, 2, 3, 3), "tall kernel": (6, 2, 4, 2), "vector": (7,), "matrix": (5, 6),
}  # fmt: skip
MATRICES = ("tall", "wide", "square")
ELEMENTS = ("vector", "matrix")
FUSED_ROWS = (16, 4, 4)
GROUPED = "interleaved:4+1+1x4"  # rows of a query, key and value, of each of four groups


@dataclass(frozen=True)
class Entry:
    """One class of theirs, or one way to use it."""

    peer: str
    what: str  # their class or function, and its options
    theirs: Callable[[Params], Steps]
    ours: Keys
    said: str  # the same here, for the table
    shapes: Sequence[str] = MATRICES
    own: dict[str, Keys] = field(default_factory=dict)  # more keys of ours, by shape
    missing: Literal["left alone", "taken for zeros", "not possible"] = "left alone"
    size: float = 1.0  # of gradients
    loaded: str = "class"  # "functions": their class needs CUDA or ranks
    limits: dict[torch.dtype, float] = field(default_factory=lambda: LIMITS)
    note: str = ""  # what is other, and why

    def __str__(self) -> str:
        return f"{self.peer}: {self.what}"


def error(entry: Entry, shape: str, dtype: torch.dtype) -> float:
    """The largest difference in 20 steps, against the largest value."""
    torch.manual_seed(0)
    start = torch.randn(SHAPES[shape], dtype=torch.float64)
    here, there = (nn.Parameter(start.to(dtype, copy=True)) for _ in range(2))
    group = {**entry.ours, **entry.own.get(shape, {}), "lr": LR, "weight_decay": DECAY}
    if group["rule"] != "adamw":
        group["compute_dtype"] = dtype
    ours = samestep.MuonAdamW([{**group, "params": [here]}])
    largest = 0.0
    with importable(dtype):
        theirs = entry.theirs([there])
        for step in range(STEPS):
            grad: Tensor | None = torch.randn(start.shape, dtype=torch.float64).to(dtype)
            grad = grad * entry.size * 3.0 ** -(step % 3)
            if step in ZERO_AT:
                grad = torch.zeros_like(grad)
            absent = step in MISSING_AT and entry.missing != "not possible"
            zeros = entry.missing == "taken for zeros"
            here.grad = (torch.zeros_like(grad) if zeros else None) if absent else grad.clone()
            there.grad = None if absent else grad.clone()
            ours.step()
            theirs.step()
            apart = (here.detach() - there.detach()).double().abs().max()
            largest = max(largest, float(apart / there.detach().double().abs().max()))
    if not torch.isfinite(there).all() or torch.equal(there.detach().double(), start):
        raise AssertionError(f"{entry}: theirs did not move, or is not finite")
    return largest


# --- theirs ----------------------------------------------------------------------------------


def _torch_muon(params: Params) -> Steps:
    made: Steps = torchs_muon(params[0].dtype).Muon(params, lr=LR, weight_decay=DECAY)
    return made


def _torch_adamw(params: Params) -> Steps:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, foreach=False)


def _with_aux_adam(module: str, **options: Any) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        group = {"params": params, "lr": LR, "weight_decay": DECAY, **options}
        found: Steps = import_module(module).SingleDeviceMuonWithAuxAdam([group])
        return found

    return made


def _moonlight(muon: bool) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        kinds = {"muon_params": params} if muon else {"muon_params": [], "adamw_params": params}
        found: Steps = import_module("toy_train").Muon(lr=LR, wd=DECAY, **kinds)
        return _WithoutGrad(found)

    return made


class _WithoutGrad:
    """Moonlight's step writes into parameters with .data, and multiplies gradients outside."""

    def __init__(self, opt: Steps) -> None:
        self._opt = opt

    def step(self) -> None:
        with torch.no_grad():
            self._opt.step()


def _nanochat(**options: Any) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        group = {"params": params, "lr": LR, "weight_decay": DECAY, **options}
        found: Steps = import_module("nanochat.optim").MuonAdamW([group])
        return found

    return made


def _dion(kind: str, group: Keys | None = None, **options: Any) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        module = {"Muon": "muon", "NorMuon": "normuon", "MuonReference": "muon_reference"}[kind]
        cls = getattr(import_module(f"dion.{module}"), kind.removesuffix("Reference"))
        given = [{"params": params, **(group or {})}]
        found: Steps = cls(given, lr=LR, weight_decay=DECAY, **options)
        return found

    return made


class _Functional:
    """A loop around functions that get a state of zeros."""

    def __init__(self, params: Params, update: Callable[[Tensor, Tensor, Keys], None]) -> None:
        self.params, self.update = params, update
        self.states: list[Keys] = [{"step": 0} for _ in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, state in zip(self.params, self.states, strict=True):
            if param.grad is not None:
                state["step"] += 1
                self.update(param, param.grad, state)


def _dion_adamw(cautious: bool) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        function = import_module("dion.scalar_opts").adamw_update

        def update(param: Tensor, grad: Tensor, state: Keys) -> None:
            for key in "MV":
                state.setdefault(key, torch.zeros_like(param))
            lr, beta1, beta2, decay = (torch.tensor(x) for x in (LR, 0.9, 0.95, DECAY))
            function(
                param, grad, state["M"], state["V"], lr, beta1, beta2, decay, state["step"], 1e-8,
                cautious,
            )  # fmt: skip

        return _Functional(params, update)

    return made


def _emerging(cls: str = "Muon", **options: Any) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        module = import_module("emerging_optimizers.orthogonalized_optimizers")
        own = {"lr": LR, "momentum": 0.95, "weight_decay": DECAY, "fp32_matmul_prec": "highest"}
        found: Steps = getattr(module, cls)(params, **{**own, **options})
        return found

    return made


def _emerging_adam(decay: str) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        scalar = import_module("emerging_optimizers.scalar_optimizers")
        functions = import_module("emerging_optimizers.scalar_optimizers.update_functions")
        defaults = {
            "lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": DECAY,
            "correct_bias": True, "nesterov": False,
        }  # fmt: skip
        found: Steps = scalar.TwoMomentsOptimizer(
            params,
            defaults,
            update_fn=functions.calculate_adam_update,
            update_kwarg_names=("betas", "eps", "correct_bias", "nesterov"),
            weight_decay_method=decay,
        )
        return found

    return made


def _megatron(cls: str = "TensorParallelMuon", **options: Any) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        module = import_module("megatron.core.optimizer.emerging_optimizers")
        own = {
            "lr": LR, "weight_decay": DECAY, "nesterov": False, "fp32_matmul_prec": "highest",
            "is_qkv_fn": lambda param: True,
        }  # fmt: skip
        found: Steps = getattr(module, cls)(params, **{**own, **options})
        return found

    return made


def _torchtitan(adjust_lr_fn: str | None) -> Callable[[Params], Steps]:
    def made(params: Params) -> Steps:
        module = import_module("torchtitan.distributed.flex_shard.dist_muon")

        def update(param: Tensor, grad: Tensor, state: Keys) -> None:
            momentum = state.setdefault("momentum", torch.zeros_like(param))
            ready, direction = torch.empty_like(param), torch.empty_like(param)
            module._prepare_muon_input(grad, momentum, momentum=0.95, nesterov=True, out=ready)
            module._compute_muon_direction(
                ready, ns_coefficients=(3.4445, -4.7750, 2.0315), ns_steps=5, eps=1e-7,
                out=direction,
            )  # fmt: skip
            module._apply_muon_update(
                param, direction, lr=LR, weight_decay=DECAY, adjust_lr_fn=adjust_lr_fn,
                compute_matrix_shape=param.shape,
            )  # fmt: skip

        return _Functional(params, update)

    return made


# --- all of them -----------------------------------------------------------------------------

NORMUON = {"variance_beta2": 0.95, "variance_eps": 1e-8}
ADAMUON = {
    **{k: v for k, v in presets.emerging_optimizers().items() if k != "rule"},
    "rule": "adamuon", "sign": False, "renormalize": False, "variance_beta2": 0.95,
}  # fmt: skip
STACKS = (*MATRICES, "3-D")
KELLER_KERNELS = {
    "convolution": {**presets.keller(kernel=(3, 3))},
    "tall kernel": {**presets.keller(kernel=(4, 2))},
}
SPLIT = {"fused": {"split_sizes": FUSED_ROWS}}
KELLER = {"use_muon": True}, {"use_muon": False}
SCALES = {"spectral": "sqrt_max", "shape_scaling": "original", "unit_rms_norm": "unit_rms_norm"}
TABLES = {
    "simple": {"orthogonalize": "newton-schulz"}, "quintic": {"orthogonalize": "quintic"},
    "cans": {"orthogonalize": "cans"}, "deepseekv4": {"orthogonalize": "deepseek-v4"},
    "aol": {"orthogonalize": "aol"}, "cubic5": {"orthogonalize": "cubic"},
    "polar_express": {
        "orthogonalize": "polar-express", "norm_factor": 1.0,
        "ns_coefficients": [
            (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985),
        ],
    },
}  # fmt: skip
STEPS_OF = {"deepseekv4": 10, "aol": 4}
TWICE = (
    "with these two checkouts its scale is applied twice, in its own orthogonalization and in "
    "Emerging-Optimizers' step; `update_scale` says so here"
)
CANS_NOTE = (
    "this table multiplies rounding most: in float32 ours is 6e-6 from float64 here, theirs 4e-6"
)
DECAYS = ("decoupled", "independent", "l2")


def _entries() -> list[Entry]:
    emerging, adam = presets.emerging_optimizers(), presets.emerging_optimizers("adamw")
    return [
        Entry("torch", "torch.optim.Muon", _torch_muon, presets.torch(), "`presets.torch()`"),
        Entry(
            "torch", "torch.optim.AdamW", _torch_adamw, presets.torch("adamw"),
            '`presets.torch("adamw")`', ELEMENTS,
        ),
        Entry(
            "Keller Jordan", "SingleDeviceMuonWithAuxAdam, Muon",
            _with_aux_adam("muon", **KELLER[0]), presets.keller(), "`presets.keller()`", STACKS,
            missing="taken for zeros",
        ),
        Entry(
            "Keller Jordan", "SingleDeviceMuonWithAuxAdam, Muon on convolutions",
            _with_aux_adam("muon", **KELLER[0]), presets.keller(),
            "`presets.keller(kernel=(h, w))`", tuple(KELLER_KERNELS), KELLER_KERNELS,
            missing="taken for zeros",
        ),
        Entry(
            "Keller Jordan", "SingleDeviceMuonWithAuxAdam, Adam",
            _with_aux_adam("muon", **KELLER[1]), presets.keller("adamw"),
            '`presets.keller("adamw")`', ELEMENTS, missing="taken for zeros",
        ),
        Entry("Moonlight", "Muon", _moonlight(True), presets.moonlight(), "`presets.moonlight()`"),
        *(
            Entry(
                "Moonlight", f"Muon's AdamW, gradients of {size:g}", _moonlight(False),
                presets.moonlight("adamw"), '`presets.moonlight("adamw")`', ELEMENTS, size=size,
            )
            for size in (1.0, 1e-6)
        ),
        Entry(
            "nanochat", "MuonAdamW, muon",
            _nanochat(kind="muon", momentum=0.95, ns_steps=5, beta2=0.9), presets.nanochat(),
            "`presets.nanochat()`", MATRICES, missing="not possible",
        ),
        Entry(
            "nanochat", "MuonAdamW, adamw", _nanochat(kind="adamw", betas=(0.8, 0.95), eps=1e-10),
            presets.nanochat("adamw"), '`presets.nanochat("adamw")`', ELEMENTS,
            missing="not possible",
        ),
        Entry(
            "dion", "Muon", _dion("Muon"), presets.dion(), "`presets.dion()`", STACKS,
        ),
        Entry(
            "dion", "Muon, cautious_wd, nesterov, rms_norm",
            _dion("Muon", cautious_wd=True, nesterov=True, adjust_lr="rms_norm"),
            {
                **presets.dion(), "cautious": True, "nesterov": True,
                "adjust_lr": "match_rms_adamw",
            },
            "`cautious`, `nesterov`, `match_rms_adamw`", STACKS,
        ),
        Entry(
            "dion", "Muon, use_polar_express=False", _dion("Muon", use_polar_express=False),
            {**presets.dion(), "orthogonalize": "quintic", "norm_factor": 1.0},
            '`orthogonalize="quintic"`, `norm_factor=1`', STACKS,
        ),
        Entry(
            "dion", "Muon, split_sizes", _dion("Muon", {"split_sizes": FUSED_ROWS}),
            presets.dion(), "`split_sizes`", ("fused",), SPLIT,
        ),
        Entry(
            "dion", "NorMuon", _dion("NorMuon"), presets.dion_normuon(),
            "`presets.dion_normuon()`", STACKS,
        ),
        Entry(
            "dion", "NorMuon, split_sizes", _dion("NorMuon", {"split_sizes": FUSED_ROWS}),
            presets.dion_normuon(), "`split_sizes`", ("fused",), SPLIT,
            limits={**LIMITS, torch.float64: 1e-9},
            note="dion multiplies blocks with their scale first, and adds 1e-8 to those roots",
        ),
        Entry(
            "dion", "MuonReference, adamw",
            _dion("MuonReference", {"algorithm": "adamw"}, betas=(0.9, 0.95)),
            {**presets.dion("adamw"), "eps_hat": True}, "`eps_hat=True`", ELEMENTS,
        ),
        *(
            Entry(
                "dion", f"adamw_update, cautious_wd={cautious}", _dion_adamw(cautious),
                {**presets.dion("adamw"), "cautious": cautious},
                '`presets.dion("adamw")`' + (", `cautious`" if cautious else ""), ELEMENTS,
                loaded="functions",
            )
            for cautious in (False, True)
        ),
        *(
            Entry(
                "Emerging-Optimizers", f"Muon, {theirs}, extra_scale_factor=0.3",
                _emerging(scale_mode=theirs, extra_scale_factor=0.3, nesterov=True),
                {**emerging, "adjust_lr": ours, "update_scale": 0.3, "nesterov": True},
                f'`adjust_lr="{ours}"`, `update_scale`',
            )
            for theirs, ours in SCALES.items()
        ),
        *(
            Entry(
                "Emerging-Optimizers", f"Muon, {table}",
                _emerging(coefficient_type=table, num_ns_steps=STEPS_OF.get(table, 5)),
                {**emerging, **ours},
                f'`orthogonalize="{ours["orthogonalize"]}"`'
                + (", `ns_coefficients`" if "ns_coefficients" in ours else ""),
                limits={**LIMITS, torch.float32: 4e-6} if table == "cans" else LIMITS,
                note=CANS_NOTE if table == "cans" else "",
            )
            for table, ours in TABLES.items()
        ),
        Entry(
            "Emerging-Optimizers", "Muon, independent decay",
            _emerging(weight_decay_method="independent"), {**emerging, "decay_form": "independent"},
            '`decay_form="independent"`',
        ),
        Entry(
            "Emerging-Optimizers", "AdaptiveMuon, normuon",
            _emerging("AdaptiveMuon", moment2_method="normuon"), {**emerging, **NORMUON},
            "`variance_beta2`, `variance_eps`",
        ),
        Entry(
            "Emerging-Optimizers", "AdaptiveMuon, adamuon",
            _emerging("AdaptiveMuon", moment2_method="adamuon"), ADAMUON,
            '`"rule": "adamuon"`, `sign=False`, `renormalize=False`',
        ),
        *(
            Entry(
                "Emerging-Optimizers", f"TwoMomentsOptimizer with Adam, {decay}",
                _emerging_adam(decay), {**adam, "decay_form": decay}, f'`decay_form="{decay}"`',
                ELEMENTS,
            )
            for decay in DECAYS
        ),
        Entry("Megatron-LM", "TensorParallelMuon", _megatron(), presets.megatron(),
              "`presets.megatron()`"),
        Entry(
            "Megatron-LM", "TensorParallelMuon, split_qkv of four groups",
            _megatron(split_qkv=True, qkv_split_shapes=[4, 1, 1]), presets.megatron(),
            f'`split_sizes="{GROUPED}"`', ("fused",), {"fused": {"split_sizes": GROUPED}},
        ),
        Entry(
            "Megatron-LM", "TensorParallelAdaptiveMuon, normuon",
            _megatron("TensorParallelAdaptiveMuon", moment2_method="normuon"),
            {**presets.megatron(), **NORMUON}, "`variance_beta2`, `variance_eps`, `update_scale`",
            own={shape: {"update_scale": max(SHAPES[shape]) ** 0.5} for shape in MATRICES},
            note=TWICE,
        ),
        *(
            Entry(
                "torchtitan", f"DistMuon, {fn}", _torchtitan(fn),
                {**presets.torchtitan(), "adjust_lr": ours},
                "`presets.torchtitan()`" + (f', `adjust_lr="{ours}"`' if fn else ""), STACKS,
                loaded="functions",
            )
            for fn, ours in (
                (None, "original"), ("match_rms_adamw", "match_rms_adamw"),
                ("spectral_unclamped", "unit_rms_norm"),
            )
        ),
        *(
            Entry(
                "DeepSpeed", f"SingleDeviceMuonWithAuxAdam, Muon, {method}",
                _with_aux_adam("deepspeed.runtime.zero.muon.original_muon", use_muon=True,
                               ns_method=method),
                presets.deepspeed(), "`presets.deepspeed()`", STACKS, missing="taken for zeros",
            )
            for method in ("gram", "standard")
        ),
        Entry(
            "DeepSpeed", "SingleDeviceMuonWithAuxAdam, Adam",
            _with_aux_adam("deepspeed.runtime.zero.muon.original_muon", use_muon=False),
            presets.deepspeed("adamw"), '`presets.deepspeed("adamw")`', ELEMENTS,
            missing="taken for zeros",
        ),
    ]  # fmt: skip


ENTRIES = _entries()
