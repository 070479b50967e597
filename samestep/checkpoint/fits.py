"""Whether a checkpoint is that of the model and the optimizer that are here."""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from samestep.checkpoint.errors import CheckpointError
from samestep.rules.state import MASTER

Stored = Mapping[str, TensorStorageMetadata]


def surplus(wanted: Mapping[str, Tensor], stored: Stored) -> list[str]:
    """What the checkpoint has of a model, or of an optimizer, that is not wanted here."""
    parts = {name.split(".", 1)[0] for name in wanted}
    here = {name for name in stored if name.split(".", 1)[0] in parts}
    return sorted(name for name in here - wanted.keys() if not _is_master(name))


def names_that_fit(
    wanted: Mapping[str, Tensor],
    stored: Stored,
    partial: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> list[str]:
    """The names that can be loaded; raises if the checkpoint is that of another model.

    Master copies are optional on both sides: without a stored one the parameter is taken. What is
    `elsewhere` other ranks load.
    """
    missing = sorted(name for name in wanted.keys() - stored.keys() if not _is_master(name))
    if missing and not partial:
        raise CheckpointError(_sentence("the checkpoint lacks", missing))
    more = [name for name in surplus(wanted, stored) if name not in elsewhere]
    if more and not partial:
        raise CheckpointError(_sentence("the checkpoint has more than is here", more))
    common = [name for name in wanted if name in stored]
    if not common:
        raise CheckpointError("the checkpoint has nothing that is here: is it of another model?")
    for name in common:
        if stored[name].size != wanted[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].size)} in the checkpoint and "
                f"{tuple(wanted[name].shape)} here: load it into the model that it was saved from"
            )
    return common


def _is_master(name: str) -> bool:
    return name.endswith(f".{MASTER}")


def _sentence(what: str, names: list[str]) -> str:
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what}: {some}. Pass partial=True to load only what both have"
