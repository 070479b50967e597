"""What the table and `explain()` say of state: how that of each parameter is kept, and where."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from samestep.groups.param_groups import members
from samestep.layout.blocks import Block
from samestep.rules import RULES
from samestep.rules.state import MASTERS, chosen_format, format_word, stored_tensors
from samestep.rules.stored import EIGHT_BITS, REMAINDER, SCALE_SUFFIX, STOCHASTIC
from samestep.tooling.warn import some

# What the words of a table mean, for whoever has not read docs/small_state.md.
MEANINGS = {
    EIGHT_BITS: '"8bit/64" has a code of 8 bits for each element, and a 32-bit scale for each 64 '
    "neighbours of a row",
    STOCHASTIC: f'"{STOCHASTIC}" is bfloat16, rounded up or down at random, right in the mean',
    REMAINDER: f'"master {REMAINDER}" is the 16 bits by which a 32-bit copy differs from its '
    "bfloat16 parameter",
}


class Kept(NamedTuple):
    """How the state of a parameter is kept, in the words of `state_dtypes`, by key.

    wide: 8 bits were asked for some of it, which stays as wide as it is computed.
    """

    moments: dict[str, str]
    masters: list[str]
    wide: bool

    @property
    def text(self) -> str:
        """One word if all moments are kept alike."""
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
    """Of all parameters: where state stays, what stays wide, and what words mean; [] as usual."""
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
    """Formats that occur, without the sizes of blocks."""
    return {
        word.partition("/")[0]
        for kept in all_kept
        for word in (*kept.moments.values(), *kept.masters)
    }
