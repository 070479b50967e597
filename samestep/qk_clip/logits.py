"""The largest attention logit of each head, from queries and keys or from a running module."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from samestep.kernels.choice import missing
from samestep.layout.boxes import local_of, mesh_of

AT_ONCE = 1 << 24  # logits that are in memory at the same time
# What a mask adds to hide a pair, or less: e to the power of it is nothing. Some add -1e4, others
# the least number of some dtype; what adds a bias by distance hides those that are this far.
HIDDEN = -5000.0
TELL = "use watch=False and tell them by clip.observe(layer, logits)"

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    at_once: int = AT_ONCE,
) -> Tensor:
    """Return each query head's largest scale * q k, (H,), over pairs that attend; -inf: none.

    query: (..., H, T, D), key: (..., G, S, D), where H is a multiple of G; masks are those of
    `scaled_dot_product_attention`, `score_mod` and `mask_mod` those of flex attention. Only q k
    counts: weights cannot scale what a mask or `score_mod` adds. A pair does not attend where a
    mask adds `HIDDEN` or less, or `score_mod` gives -inf. In fp32 or wider, `at_once` logits at a
    time; on a GPU, of 16-bit queries and keys without functions, by a kernel that writes none.
    """
    query, key = _heads_whole("queries", query), _heads_whole("keys", key)
    (heads, length, size), (kv_heads, places) = query.shape[-3:], key.shape[-3:-1]
    if heads % kv_heads or key.shape[-1] != size:
        raise ValueError(
            "queries (..., H, T, D) and keys (..., G, S, D) must have H a multiple of G and the "
            f"same D, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    if min(query.numel(), key.numel()) == 0:
        return torch.full((heads,), -torch.inf, dtype=wide, device=query.device)
    scale = size**-0.5 if scale is None else scale
    masked = () if attn_mask is None else attn_mask.shape[:-3]
    shapes = query.shape[:-3], key.shape[:-3], masked
    batch = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    query, key = (own.expand(*batch, -1, -1, -1) for own in (query, key))
    mask = None if attn_mask is None else attn_mask.expand(*batch, heads, length, places)
    is_plain = type(query) is Tensor and score_mod is None and mask_mod is None
    if is_plain and scale > 0 and missing(query.device) is None:
        from samestep.kernels.logits import fits, largest_of_heads

        if fits(query, key):
            return largest_of_heads(
                query.reshape(-1, heads, length, size),
                key.reshape(-1, kv_heads, places, size),
                scale,
                is_causal=is_causal,
                mask=None if mask is None else mask.reshape(-1, heads, length, places),
                hidden=HIDDEN,
            )
    keys = key.to(wide).reshape(-1, kv_heads, places, size)
    # Query heads that share a key head lie in its rows: no key is copied.
    queries = query.reshape(-1, kv_heads, heads // kv_heads, length, size)
    largest = torch.full((heads,), -torch.inf, dtype=wide, device=query.device)
    step = max(1, at_once // max(1, len(queries) * heads * places))
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = min(stop, places) if is_causal else places
        rows = queries[:, :, :, start:stop].to(wide) * scale
        with _without_autocast(query.device.type):
            logits = rows.flatten(2, 3) @ keys[:, :, :seen].mT  # (B, G, H / G * rows, seen)
        logits = logits.view(-1, heads, stop - start, seen)
        at = _indices(logits, start)
        if is_causal:
            logits = logits.masked_fill(at[2] < at[3], -torch.inf)
        if mask is not None:
            logits = logits.masked_fill(
                ~_attends(mask[..., start:stop, :seen].reshape(logits.shape)), -torch.inf
            )
        if mask_mod is not None:
            logits = logits.masked_fill(~mask_mod(*at), -torch.inf)
        if score_mod is not None:
            logits = logits.masked_fill(score_mod(logits, *at).isneginf(), -torch.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest


def _heads_whole(what: str, tensor: Tensor) -> Tensor:
    """Return this rank's shard of queries or keys; raise if its positions are sharded."""
    if tensor.ndim < 3:
        raise ValueError(f"{what} must be (..., heads, places, D), got {tuple(tensor.shape)}")
    kept = tensor.ndim - 2
    for placement in () if mesh_of(tensor) is None else tensor.placements:  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or (dim is not None and dim % tensor.ndim >= kept):
            raise TypeError(
                f"{what} are a DTensor placed as {placement}, so that no rank has the "
                f"logits of all positions: {TELL}"
            )
    return local_of(tensor.detach())


def _indices(logits: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indices of sequence, head, query and key, which broadcast to the logits."""
    batch, heads, rows, seen = (torch.arange(n, device=logits.device) for n in logits.shape)
    return batch.view(-1, 1, 1, 1), heads.view(-1, 1, 1), (rows + start).view(-1, 1), seen


def _attends(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDDEN


class AttentionCalls(TorchFunctionMode):
    """A mode that reports the largest logits of every `scaled_dot_product_attention`."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; report the logits first if the function is attention."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self._tell(_of_call(*args, **kwargs))
        return func(*args, **kwargs)


def _of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the largest logits of `scaled_dot_product_attention` with these arguments."""
    if query.is_nested or type(attn_mask) not in (type(None), Tensor):
        what = "nested tensors" if query.is_nested else f"a mask of {type(attn_mask).__name__}"
        raise TypeError(
            f"the logits of an attention with {what} cannot be measured from outside: {TELL}"
        )
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # What attention multiplies: autocast rounds its arguments only after this.
        query, key, attn_mask = (_under_autocast(own, kind) for own in (query, key, attn_mask))
    return largest_logits(query, key, scale=scale, is_causal=is_causal, attn_mask=attn_mask)


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    known = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if known else nullcontext()


def _under_autocast(tensor: Any, kind: str) -> Any:
    """Cast an argument as autocast does for attention."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Hook:
    """A hook of a module, which does nothing in a copy of the model."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: object) -> None:
    """Do nothing: a copied or loaded model belongs to no QK-clip."""


def watched(module: nn.Module, tell: Callable[[Tensor], None]) -> Callable[[], None]:
    """Report the largest logits of a module's attention whenever it runs in training.

    Return a function that removes the hooks; no function of torch is replaced. A compiled module
    is not watched, since dynamo fails on some methods of tensors while a mode is on.
    """
    calls = AttentionCalls(tell)
    entered: list[bool] = []

    def begin(module: nn.Module, args: Any) -> None:
        entered.append(module.training and not torch.compiler.is_compiling())
        if entered[-1]:
            calls.__enter__()  # type: ignore[no-untyped-call]

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if entered and entered.pop():  # also called where a hook before `begin` has failed
            calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    handles = [
        module.register_forward_pre_hook(_Hook(begin)),
        module.register_forward_hook(_Hook(end), always_call=True),
    ]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop
