"""Code of others that communicates: when it fails, who is missing."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from samestep.comm.diagnosis.flight import CollectiveError, attempt
from samestep.comm.groups import RankGroup

T = TypeVar("T")


class _OwnError(Exception):
    """Carries an error that has nothing to do with other ranks past those who look for them."""


def explained(name: str, group: RankGroup, call: Callable[[], T]) -> T:
    """What `call` gives; a CollectiveError that names who is missing if other ranks are the reason.

    FSDP2, DTensors and pipelines launch collectives of their own, whose errors are the backend's.
    An error of the model comes through as it is.
    """

    def act() -> T:
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, CollectiveError) or not is_of_communication(error):
                raise _OwnError(error) from error
            raise

    try:
        return attempt(name, group, act)
    except _OwnError as error:
        raise error.args[0] from None


def is_of_communication(error: RuntimeError) -> bool:
    """Whether another rank is the reason. Gloo raises plain errors, known by their text."""
    return isinstance(error, dist.DistError | CollectiveError) or "gloo" in str(error).lower()
