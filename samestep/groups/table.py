"""Builds the text of `opt.table()`, and of the formats of state for `explain()`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from samestep.groups.param_groups import members
from samestep.layout.blocks import Block
from samestep.rules import RULES
from samestep.rules.muon import lr_factor
from samestep.rules.state import MASTERS, chosen_format, format_word, stored_tensors
from samestep.rules.stored import EIGHT_BITS, REMAINDER, SCALE_SUFFIX, STOCHASTIC
from samestep.tooling.warn import some

OPTIONAL = ("state", "averaged by", "updated by", "reason")  # shown where they say something
# What the words of a table mean, for whoever has not read docs/saving_memory.md.
MEANINGS = {
    EIGHT_BITS: '"8bit/64" has a code of 8 bits for each element, and a 32-bit scale for each 64 '
    "neighbours of a row",
    STOCHASTIC: f'"{STOCHASTIC}" is bfloat16, rounded up or down at random, right in the mean',
    REMAINDER: f'"master {REMAINDER}" is the 16 bits by which a 32-bit copy differs from its '
    "bfloat16 parameter",
}


def table(
    groups: Sequence[Mapping[str, Any]],
    blocks: Mapping[Tensor, list[Block] | None],
    reasons: Mapping[str, str],
    ranks: Callable[[Tensor], tuple[str, str]] | None = None,
    *,
    master_weights: bool = False,
    offload: str | None = None,
) -> str:
    """The text of `opt.table()`: rule, blocks, rate and decay of every parameter, and totals.

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
    """One row; equal blocks are counted, unequal ones listed."""
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


class Kept(NamedTuple):
    """Formats of a parameter's state by key.

    wide: 8 bits were asked for some of it, which stays as wide as it is computed.
    """

    moments: dict[str, str]
    masters: list[str]
    wide: bool

    @property
    def text(self) -> str:
        """A single word if all moments have the same format."""
        words = [*dict.fromkeys(self.moments.values())]
        if len(words) > 1:
            words = [f"{key} {word}" for key, word in self.moments.items()]
        return ", ".join([*words, *(f"master {word}" for word in self.masters)])


def kept_of(
    param: Tensor, group: Mapping[str, Any], blocks: list[Block] | None, *, master_weights: bool
) -> Kept:
    stored = stored_tensors(RULES[group["rule"]], param, blocks, group, master_weights)
    words = {key: format_word(key, stored) for key, how in stored.items() if how.per == 1}
    masters = [words.pop(key) for key in MASTERS if key in words]
    wide = any(
        str(chosen_format(key, group)).startswith(EIGHT_BITS) and key + SCALE_SUFFIX not in stored
        for key in words
    )
    return Kept(words, masters, wide)


def state_lines(
    groups: Sequence[Mapping[str, Any]],
    blocks: Mapping[Tensor, list[Block] | None],
    *,
    master_weights: bool,
    offload: str | None,
) -> list[str]:
    """Lines on the place and format of state; [] for the defaults."""
    named = [
        (name, kept_of(param, group, blocks.get(param), master_weights=master_weights))
        for group, name, param in members(groups)
        if group.get("state_dtypes") is not None
    ]
    lines = []
    if offload is not None:
        lines.append(
            f'state: in the host\'s memory between steps (offload="{offload}"), and on the device '
            "a window at a time"
        )
    wide = [name for name, kept in named if kept.wide]
    if wide:
        lines.append(
            f"state: {len(wide)} of {len(named)} parameters stay in 32 bits or more where 8 were "
            "asked for, as vectors do, and matrices whose last dim is no multiple of 32: "
            + some(wide)
        )
    found = _words(kept for _, kept in named)
    return lines + [f"state: {text}" for word, text in MEANINGS.items() if word in found]


def _words(all_kept: Iterable[Kept]) -> set[str]:
    """Formats that occur, without block sizes."""
    return {
        word.partition("/")[0]
        for kept in all_kept
        for word in (*kept.moments.values(), *kept.masters)
    }
