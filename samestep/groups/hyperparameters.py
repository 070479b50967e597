"""Hyperparameters of a step, as a digest that ranks compare and as text.

Ranks that hold copies or shards of the same parameters must have the same ones, or their replicas
part: a digest travels with presence, and text is made of them when digests differ.
"""

import operator
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm.presence import CALL
from samestep.groups.param_groups import LAYOUT_KEYS, Group, is_constant
from samestep.rules import RULES

PRECISION = "torch.get_float32_matmul_precision()"
SCALE = "1 / scale of the GradScaler"
_DIGEST = 8  # bytes
_PLAIN = {float, int}


class Numbers(NamedTuple):
    """Scalar options by name: floats on the host, and 0-D tensors on a device."""

    here: dict[str, float]
    on_device: dict[str, Tensor]

    @classmethod
    def of(cls, scalars: Mapping[str, float | Tensor]) -> "Numbers":
        """Read a rule's scalar options from a group."""
        if _PLAIN.issuperset(map(type, scalars.values())):
            return cls(dict(scalars), {})  # type: ignore[arg-type]
        on_device = {
            key: value.detach().reshape(())
            for key, value in scalars.items()
            if isinstance(value, Tensor) and value.device.type != "cpu"
        }
        here = {key: float(value) for key, value in scalars.items() if key not in on_device}
        return cls(here, on_device)

    def packed(self) -> bytes:
        """Exact bits of the host scalars, and the names of device scalars."""
        numbers = struct.pack(f"{len(self.here)}d", *self.here.values())
        return numbers + " ".join(self.on_device).encode() if self.on_device else numbers


class Constants(NamedTuple):
    """Options that are no numbers, in the order of their keys."""

    values: tuple[Any, ...]
    text: tuple[str, ...]
    digest: bytes
    is_fixed: bool  # nobody can change a value where it is

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> "Constants":
        """Read the constant options of a group."""
        text = tuple(repr(_normal(value)) for value in values)
        digest = blake2b(repr(text).encode(), digest_size=_DIGEST).digest()
        return cls(values, text, digest, is_constant(values))

    def are_still(self, values: tuple[Any, ...]) -> bool:
        """Whether none of the options was set since they were read."""
        return (
            self.is_fixed
            and len(values) == len(self.values)
            and all(map(operator.is_, values, self.values))
        )


class GroupNumbers(NamedTuple):
    """Hyperparameters of one group at the time they were read."""

    number: int  # of the group
    keys: tuple[str, ...]
    constants: Constants
    numbers: Numbers
    packed: bytes


class Hyperparameters(NamedTuple):
    """Hyperparameters of several groups and of the step itself.

    digest: of all that the host knows.
    on_device: the numbers that it does not know, 0-D.
    """

    digest: int
    on_device: tuple[Tensor, ...]
    groups: tuple[GroupNumbers, ...]
    precision: str
    scale: Numbers
    call: str = "step()"

    def of_call(self, call: str) -> "Hyperparameters":
        """These hyperparameters for another call that all ranks make."""
        digest = blake2b(call.encode(), digest_size=_DIGEST).digest()
        other = int.from_bytes(digest, "little", signed=True)
        return self._replace(digest=self.digest ^ other, call=call)

    def lines(self, on_device: Sequence[float] | None = None) -> list[str]:
        """One line "option of group = value" each; waits for tensors on a device.

        on_device: what these were in the step in question, if they may have changed since.
        """
        if on_device is None:
            on_device = [float(tensor) for tensor in self.on_device]
        found = [f"{CALL} = {self.call}", f"{PRECISION} = {self.precision}"]
        known = iter(on_device)
        for group in self.groups:
            of_group = f" of param_groups[{group.number}]"
            texts = zip(group.keys, group.constants.text, strict=True)
            found += [f"{key}{of_group} = {text}" for key, text in texts]
            found += _number_lines(group.numbers, of_group, known)
        return found + _number_lines(self.scale, "", known)


def _number_lines(numbers: Numbers, of_group: str, known: Any) -> list[str]:
    here = [f"{key}{of_group} = {float(value)!r}" for key, value in numbers.here.items()]
    there = [
        f"{key}{of_group} = {next(known)!r} (a tensor on {tensor.device.type})"
        for key, tensor in numbers.on_device.items()
    ]
    return here + there


class HyperparameterReader:
    """Reads hyperparameters of groups, and reuses those that were not set since."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, ...]] = {}  # of constants, by rule
        self._constants: dict[int, Constants] = {}
        self._groups: dict[int, GroupNumbers] = {}
        self._last: dict[tuple[int, ...], Hyperparameters] = {}

    def set_since(self, index: int) -> None:
        """Whether an option of a group was set, or may have changed in place."""
        self._groups.pop(index, None)
        self._last.clear()

    def read(
        self, groups: Sequence[Group], indices: tuple[int, ...], inverse_scale: Tensor | None
    ) -> Hyperparameters:
        """Read the groups at `indices`; `inverse_scale`: of a GradScaler, if one is in use."""
        precision = torch.get_float32_matmul_precision()
        last = self._last.get(indices)
        if last is not None and inverse_scale is None and last.precision == precision:
            return last
        scale = Numbers.of({} if inverse_scale is None else {SCALE: inverse_scale})
        found = tuple(self._of_group(index, groups[index]) for index in indices)
        digest = blake2b(b"".join([group.packed for group in found]), digest_size=_DIGEST)
        digest.update(precision.encode() + scale.packed())
        numbers = [*(group.numbers for group in found), scale]
        on_device = tuple(t for own in numbers for t in own.on_device.values())
        number = int.from_bytes(digest.digest(), "little", signed=True)
        read = Hyperparameters(number, on_device, found, precision, scale)
        if inverse_scale is None:
            self._last[indices] = read
        return read

    def _of_group(self, index: int, group: Group) -> GroupNumbers:
        known = self._groups.get(index)
        if known is None:
            rule = RULES[group["rule"]]
            keys = self._keys.get(rule.name)
            if keys is None:
                changing = rule.schedulable | LAYOUT_KEYS
                keys = ("rule", "maximize", *(key for key in rule.defaults if key not in changing))
                self._keys[rule.name] = keys
            values = tuple([group[key] for key in keys])
            constants = self._constants.get(index)
            if constants is None or not constants.are_still(values):
                constants = self._constants[index] = Constants.of(values)
            numbers = Numbers.of(rule.scalars(group))
            packed = constants.digest + numbers.packed()
            known = GroupNumbers(index, keys, constants, numbers, packed)
            self._groups[index] = known
        return known


def _normal(value: Any) -> Any:
    """Lists as tuples, because config files have one and code the other."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return f"a tensor of {tuple(value.shape)} on {value.device.type}"
    return tuple(map(_normal, value)) if isinstance(value, list | tuple) else value
