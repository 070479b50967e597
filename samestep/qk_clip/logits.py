"""The largest attention logit of each head: of queries and keys, or of a module as it runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from samestep.kernels.choice import missing
from samestep.layout.boxes import local_of

AT_ONCE = 1 << 24  # logits that are in memory at the same time

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
    """The largest scale * q k of each query head, (H,), over pairs that may attend; -inf: none.

    query: (..., H, T, D), key: (..., G, S, D), where H is a multiple of G; masks are those of
    `scaled_dot_product_attention`, `score_mod` and `mask_mod` those of flex attention. Only q k
    counts: weights cannot scale what a mask or `score_mod` adds. Where these give -inf (or the
    least number of the mask's dtype), a pair does not attend. In fp32 or wider, `at_once` logits
    at a time; on a GPU, of 16-bit queries and keys without functions, by a kernel that writes none.
    """
    query, key = local_of(query.detach()), local_of(key.detach())
    (heads, length, size), (kv_heads, places) = query.shape[-3:], key.shape[-3:-1]
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = size**-0.5 if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], places)
    batch = query.shape[:-3]
    if score_mod is None and mask_mod is None and scale > 0 and missing(query.device) is None:
        from samestep.kernels.logits import fits, largest_of_heads

        if fits(query, key):
            return largest_of_heads(
                query.reshape(-1, heads, length, size),
                key.expand(*batch, -1, -1, -1).reshape(-1, kv_heads, places, size),
                scale,
                is_causal=is_causal,
                mask=None if mask is None else mask.reshape(-1, heads, length, places),
            )
    keys = key.to(wide).expand(*batch, -1, -1, -1).reshape(-1, kv_heads, places, size)
    # Query heads that share a key head lie in its rows: no key is copied.
    queries = query.reshape(-1, kv_heads, heads // kv_heads, length, size)
    largest = torch.full((heads,), -torch.inf, dtype=wide, device=query.device)
    step = max(1, at_once // max(1, len(queries) * heads * places))
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = min(stop, places) if is_causal else places
        rows = queries[:, :, :, start:stop].to(wide) * scale
        with torch.autocast(query.device.type, enabled=False):
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


def _indices(logits: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence, head, place of the query and of the key, each broadcast to the logits."""
    batch, heads, rows, seen = (torch.arange(n, device=logits.device) for n in logits.shape)
    return batch.view(-1, 1, 1, 1), heads.view(-1, 1, 1), (rows + start).view(-1, 1), seen


def _attends(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


class AttentionCalls(TorchFunctionMode):
    """While it is on, tells the largest logits of every `scaled_dot_product_attention`."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run what was called, after a look at it."""
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
    """What `scaled_dot_product_attention` of the same arguments has for its largest logits."""
    if query.is_nested or type(attn_mask) not in (type(None), Tensor):
        what = "nested tensors" if query.is_nested else f"a mask of {type(attn_mask).__name__}"
        raise TypeError(
            f"the logits of an attention with {what} cannot be looked at: use watch=False and tell "
            "them by clip.observe(layer, logits)"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # What attention multiplies: autocast rounds its arguments only after this.
        query, key = (own.to(torch.get_autocast_dtype(kind)) for own in (query, key))
    return largest_logits(query, key, scale=scale, is_causal=is_causal, attn_mask=attn_mask)


class _Hook:
    """A hook of a module. A copy of the model has none: its logits are not the original's."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: object) -> None:
    """The copied or loaded model belongs to no QK-clip."""


def watched(module: nn.Module, tell: Callable[[Tensor], None]) -> Callable[[], None]:
    """Tell the largest logits of a module's attention whenever it runs in training.

    Gives a function that ends it. Hooks alone: no function of torch is replaced. A compiled module
    is not looked at, since dynamo fails on some methods of tensors while a mode is on.
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
