"""What the functions of promises say of results, errors and warnings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import torch

from tests.promises.trial import Run


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same bits by name."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    for name, value in wanted.items():
        own = found[name]
        if not torch.equal(own, value):
            far = (own.double() - value.double()).abs().max().item()
            raise AssertionError(f"{name} is not that of one process: {far:.2g} away")


def same_state(found: dict, wanted: dict) -> None:
    for name, own in wanted.items():
        same(found[name], own)


def refused(action: Callable[[], object], *texts: str) -> str:
    """The error of an action, which has these texts."""
    try:
        action()
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        kind, said = type(error).__name__, " ".join(str(error).split())
    else:
        raise AssertionError(f"nothing was raised; promised was {texts}")
    missing = [text for text in texts if not re.search(text, said)]
    assert not missing, f"the error has no {missing}: {kind}: {said}"
    return said


def heard(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [" ".join(str(warning.message).split()) for warning in caught]


def warned(action: Callable[[], object], *texts: str) -> None:
    """An action warns with these texts, once."""
    said = heard(action)
    fitting = [told for told in said if all(re.search(text, told) for text in texts)]
    assert len(fitting) == len(said) == 1, f"promised was one warning with {texts}, heard: {said}"


def unchanged(run: Run, action: Callable[[], object]) -> None:
    """Weights and state are those of before, bit for bit."""
    weights, state = run.weights(), run.state()
    action()
    same(run.weights(), weights)
    same_state(run.state(), state)
