"""Layouts and options in which promises are tried."""

from __future__ import annotations

# What MuonAdamW gets, and on how many ranks; two data ranks in each.
LAYOUTS: dict[str, tuple[int, dict[str, str]]] = {
    "none": (2, {"sharding": "none"}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "flat zero1": (2, {"buffers": "flat", "sharding": "zero1"}),
    "flat zero2": (2, {"buffers": "flat", "sharding": "zero2"}),
    "FSDP2": (2, {}),
    "TP": (4, {}),
    "stages": (4, {}),
}
WHOLE = ("none", "zero1", "zero2")
FLAT = ("flat zero1", "flat zero2")
PLAIN = (*WHOLE, *FLAT)
SHARED = ("zero1", "zero2", *FLAT)  # ranks share the state
# Reduced gradients leave no memory behind, or sums in it.
GIVES_BACK = ("zero2", *FLAT, "TP", "stages")

NORM = 0.75  # to which gradients are clipped, always
OPTIONS: dict[str, dict[str, object]] = {
    "": {},
    "overlap_grad_reduce": {"overlap_grad_reduce": True},
    "overlap_param_gather": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "no_sync": {"overlap_grad_reduce": True},
    "synchronize": {"overlap_grad_reduce": True},
    "max_grad_norm": {"max_grad_norm": NORM},
    "clip_grad_norm_": {},
    "clip_grad_norm_, overlap": {"overlap_grad_reduce": True},
    "GradScaler": {},
    "GradScaler, overlap": {"overlap_grad_reduce": True},
    "master_weights": {"master_weights": True},
    "8 bits": {"state_dtypes": "8bit"},
    "offload": {"offload": "state"},
    "cuda_graph": {"cuda_graph": True},
}
ACCUMULATED = ("no_sync", "synchronize")
OVERLAPS = ("", "overlap_grad_reduce", "overlap_param_gather")
EVERY = tuple(OPTIONS)
BY_FSDP = "FSDP2 averages gradients inside backward itself"
ONE_PROCESS = ("max_grad_norm", "master_weights", "state_dtypes")  # what it has of them


def never(layout: str, option: str) -> str | None:
    """Why an option is not there in a layout, whatever is promised."""
    options = OPTIONS[option]
    if option == "cuda_graph":
        return "graphs need a GPU: `tests/test_cuda.py`, `make test-gpu`"
    if layout == "FSDP2":
        if options.get("overlap_grad_reduce"):
            return "FSDP2 itself reduces inside backward, and keeps sums of its own"
    elif "overlap_param_gather" in options and layout in WHOLE:
        return '`overlap_param_gather` needs `buffers="flat"`, and is refused'
    return None
