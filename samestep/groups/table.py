"""The table that shows which rule each parameter follows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from samestep.groups.param_groups import members
from samestep.groups.table_state import kept_of, state_lines
from samestep.layout.blocks import Block
from samestep.rules import RULES
from samestep.rules.muon import lr_factor

OPTIONAL = ("state", "averaged by", "updated by", "reason")  # shown where they say something


def table(
    groups: Sequence[Mapping[str, Any]],
    blocks: Mapping[Tensor, list[Block] | None],
    reasons: Mapping[str, str],
    ranks: Callable[[Tensor], tuple[str, str]] | None = None,
    *,
    master_weights: bool = False,
    offload: str | None = None,
) -> str:
    """Every parameter with its rule, blocks, learning rate and decay, and the totals, as text.

    How state is kept and where, too, where `state_dtypes` or `offload` says anything of it.

    `reasons`: why parameters that were routed have their rule, by name.
    `ranks`: who averages a parameter's gradients, and who updates it, where there are others.
    """
    rows: list[dict[str, str]] = []  # by title
    totals: dict[str, list[int]] = {}
    for group, name, param in members(groups):
        total = totals.setdefault(group["rule"], [0, 0, 0])
        own = blocks[param]
        of_ranks = ("", "") if ranks is None else ranks(param)
        kept = ""
        if group.get("state_dtypes") is not None:
            kept = kept_of(param, group, own, master_weights=master_weights).text
        rows.append(_row(name, param, group, own, kept, of_ranks, reasons.get(name, "")))
        total[0] += 1
        total[1] += param.numel()
        total[2] += sum(len(block.matrices) for block in own or [])
    titles = [
        title for title in rows[0] if title not in OPTIONAL or any(row[title] for row in rows)
    ]
    shown = [titles, *([row[title] for title in titles] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    everything = sum(elements for _, elements, _ in totals.values())
    for rule, (count, elements, block_count) in sorted(totals.items()):
        share = 100 * elements / max(1, everything)
        note = f" in {_count(block_count, 'block')}" if RULES[rule].kind == "matrix" else ""
        lines.append(
            f"{rule}: {_count(count, 'parameter')}, {elements:,} elements ({share:.1f}%){note}"
        )
    lines += state_lines(groups, blocks, master_weights=master_weights, offload=offload)
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _row(
    name: str,
    param: Tensor,
    group: Mapping[str, Any],
    blocks: list[Block] | None,
    kept: str,
    ranks: tuple[str, str],
    reason: str,
) -> dict[str, str]:
    """One line of the table; equal blocks are counted, unequal ones listed."""
    kinds = Counter(matrix for block in blocks or [] for matrix in block.matrices)
    cut = ", ".join(
        f"{rows} x {cols}" if count == 1 else f"{count} of {rows} x {cols}"
        for (rows, cols), count in kinds.items()
    )
    factors = [
        f"{lr_factor(*kind, group['adjust_lr'], group['update_scale']):.4g}"
        for kind in kinds
        if "adjust_lr" in group
    ]
    return {
        "parameter": name,
        "shape": " x ".join(str(size) for size in param.shape) or "scalar",
        "rule": group["rule"],
        "role": str(group.get("role", "")),
        "blocks": cut or "-",
        "lr": f"{float(group['lr']):.4g}" if "lr" in group else "-",
        "lr factor": ", ".join(dict.fromkeys(factors)) or "1",
        "decay": f"{float(group['weight_decay']):.4g}" if "weight_decay" in group else "-",
        "state": kept,
        "averaged by": ranks[0],
        "updated by": ranks[1],
        "reason": reason,
    }
