"""Waits that are missing where collectives and copies run on streams of their own: on GPUs alone.

Gloo's host waits for a collective to its end, so none of these shows there. Each is run beside the
delay that makes it show, and its case without the bug has the same delay.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep.comm import collectives, presence
from samestep.comm.collectives import Chained, Pending
from samestep.comm.diagnosis.flight import Flight
from samestep.lab.stress.delays import Delays, Where
from samestep.lab.stress.mutants.mutant import RANDOM, STREAM_MUTANTS, Mutant, mutant, patched
from samestep.parallel.experts import _Trip
from samestep.shards.replicated.reduction import BucketReductions
from samestep.update.offload import CudaStreams


def _late(where: Where, often: float = 0.5, most_ms: float = 8.0) -> Delays:
    """Delays of one kind alone."""
    return Delays((where,), often=often, most_ms=most_ms)


PLACE: dict[str, Any] = {"device": "cuda", "steps": 6}
LATE_COLLECTIVES: dict[str, Any] = {**PLACE, "delays": _late("collectives")}
LATE_COPIES: dict[str, Any] = {**PLACE, "delays": _late("copies")}
LATE_COMPUTE: dict[str, Any] = {**PLACE, "delays": _late("compute")}

# --- the result of a collective is used before it is there ----------------------------------------

# By the name of the operation, which is all that tells them apart: `Flight.wait` waits for all. On
# one level the sums of a bucket are not among them: presence, which is launched after them in the
# same group and waited for before they are read, is there only when they are.
NOT_WAITED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "presence_not_waited": (r"presence$", "who has a gradient", {"expected": "state"}),
    "norm_not_waited": (r"gradient norm$", "the norm of all gradients", {"scenario": "clipped"}),
    "small_sums_not_waited": (
        r"sums of bucket",
        "the sums of small parameters, which travel on to all ranks",
        {"scenario": "conditional_compute"},
    ),
    "gather_not_waited": (r"gather of bucket", "parameters that others have updated", {}),
    "gather_in_forward_not_waited": (
        r"gather of bucket",
        "parameters that are gathered while the next forward runs",
        {"layout": "flat_gather_overlap"},
    ),
    "first_level_not_waited": (
        r"reduction of bucket.*, in hosts$",
        "the sums inside of a host, which are the addends across hosts",
        {"layout": "hosts_zero2_two_levels", "world": 4},
    ),
    "second_level_not_waited": (
        r"reduction of bucket.*, across hosts$",
        "the sums across hosts",
        {"layout": "hosts_zero2_two_levels", "world": 4},
    ),
    "gather_across_hosts_not_waited": (
        r"gather of bucket.*, across hosts$",
        "what comes from other hosts and is sent on inside",
        {"layout": "hosts_zero2_two_levels", "world": 4},
    ),
    "gather_in_hosts_not_waited": (
        r"gather of bucket.*, in hosts$",
        "what other ranks of the host have gathered",
        {"layout": "hosts_flat_gather_overlap", "world": 4},
    ),
    "sums_in_mesh_not_waited": (
        r"sum of gradients$",
        "the sums over a mesh whose ranks have summands",
        {"layout": "tp_dp_zero2", "scenario": "clipped", "world": 4},
    ),
    "norm_of_stages_not_waited": (
        r"norm of stages$",
        "the norms of all stages of a pipeline",
        {"layout": "hybrid_pp_ep", "scenario": "hybrid_gpt", "world": 4},
    ),
    "collection_not_waited": (
        r"collection of chunk",
        "the parts of a block at its owner",
        {"layout": "fsdp2_parallel"},
    ),
    "return_not_waited": (
        r"return of chunk",
        "the updated parts of a block",
        {"layout": "fsdp2_parallel"},
    ),
    "fsdp_sums_not_waited": (
        r"reduction of (the outermost )?FSDP module",
        "the sums inside of FSDP2's reduce-scatter",
        {"layout": "fsdp2_parallel"},
    ),
}  # fmt: skip


def _not_waited(pattern: str) -> Callable[..., None]:
    wanted = re.compile(pattern)

    def wait(original: Callable[[Flight], None], self: Flight) -> None:
        if wanted.search(self._name) is None:
            original(self)
        elif self.operation is not None:
            self.operation.waited = True

    return wait


for _name, (_pattern, _what, _place) in NOT_WAITED.items():
    _usual: dict[str, Any] = {"expected": "reference", "scenario": RANDOM, "layout": "zero2"}
    STREAM_MUTANTS[_name] = Mutant(
        _name,
        f"{_what}: read without waiting for the collective",
        patch=patched([(Flight, "wait", _not_waited(_pattern))]),
        **{**_usual, **LATE_COLLECTIVES, **_place},
    )


@mutant("reference", "hybrid_gpt", layout="hybrid_ep", replaces=(_Trip, "wait"), **LATE_COLLECTIVES)
def rows_of_experts_not_waited(original: Any, self: _Trip) -> Tensor:
    """the rows that experts get from other ranks are read without waiting for the all-to-all"""
    assert self._flight is not None
    (_, into, _), self._flight = self._flight, None
    return into


@mutant(
    "plan", RANDOM, replaces=(presence, "has_passed"), device="cuda", steps=6, sample_every=6,
    delays=_late("compute", often=1.0, most_ms=40.0),
)  # fmt: skip
def votes_read_before_copied(original: Any, event: Any) -> bool:
    """the host reads what ranks said of a step before the device has copied it there"""
    return True


# --- a buffer is freed, or used for something else, while it is on its way ------------------------


@mutant("reference", RANDOM, layout="zero1", **LATE_COLLECTIVES)
def buffer_reused_on_a_stream() -> list[Any]:
    """a buffer is packed anew for the next bucket while the last one is sent from it"""
    kept: list[Tensor] = []

    def packed(original: Any, self: BucketReductions, number: int, *args: Any) -> Tensor:
        buffer: Tensor = original(self, number, *args)
        if not kept:
            kept.append(buffer.new_empty(1 << 16))
        view = kept[0][: buffer.numel()]
        view.copy_(buffer)
        return view

    return [(BucketReductions, "_packed", packed)]


@mutant(
    "reference", "allocator_churn", reduction="fast", replaces=(collectives, "_reduced"),
    **LATE_COLLECTIVES,
)  # fmt: skip
def freed_before_it_is_sent(original: Any, transfer: Any, buffer: Tensor, group: Any) -> Any:
    """the memory of gradients is given back at launch, while they are sent from it"""
    pending = original(transfer, buffer, group)
    buffer.untyped_storage().resize_(0)
    # What comes next in this stream gets the memory, as the next bucket would.
    torch.full((buffer.numel(),), float("nan"), dtype=buffer.dtype, device=buffer.device)
    return pending


@mutant(
    "reference", "allocator_churn", layout="hosts_zero2_two_levels", world=4,
    replaces=(Chained, "__init__"), **LATE_COLLECTIVES,
)  # fmt: skip
def first_level_freed_before_the_second(original: Any, self: Pending[Any], *args: Any) -> None:
    """what is sent inside of a host is freed as soon as the side stream has waited for it"""
    original(self, *args)
    self._buffers = None


# --- state on the host, which travels on two streams ----------------------------------------------


@mutant("reference", RANDOM, layout="zero2_offload", replaces=(CudaStreams, "wait"), **LATE_COPIES)
def state_used_before_it_came(original: Any, self: CudaStreams, event: Any) -> None:
    """a window of state is used before its copy from the host has arrived"""


@mutant("state", RANDOM, layout="zero2_offload", replaces=(CudaStreams, "finish"), **LATE_COPIES)
def state_read_before_it_is_back(original: Any, self: CudaStreams) -> None:
    """the host reads state, and the next step fetches it, before it was copied back"""


@mutant(
    "reference", RANDOM, layout="zero2_offload", replaces=(CudaStreams, "take_back"), **LATE_COMPUTE
)
def state_taken_back_too_early(original: Any, self: CudaStreams, copies: Any) -> Any:
    """state is copied to the host while it is still being computed"""
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # as a larger step would take
    return self._copied(self._out, copies)


@mutant(
    "reference", "fused_qkv_mha", layout="zero2_offload", replaces=(CudaStreams, "bring"),
    **LATE_COPIES,
)  # fmt: skip
def window_overwritten(original: Any, self: CudaStreams, copies: Any, after: Any) -> Any:
    """a window is brought into a buffer whose last window is not back yet"""
    return self._copied(self._into, copies)
