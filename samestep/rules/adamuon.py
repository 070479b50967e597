"""AdaMuon: Muon with a second moment of every element (Si, Zhang and Shen, arXiv 2507.11005).

momentum -> [sign] -> orthogonalize -> second moment -> [renormalize]
         -> scale -> (cautious) weight decay -> update
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from samestep.rules import checks
from samestep.rules.muon import MuonRule, orthogonalized, renormalize
from samestep.rules.rule import Direction, Options, Shape, Tensors, in_dtype, number

# Of Muon's: what has no place between orthogonalization and the second moment of elements.
NOT_HERE = ("equilibrate", "variance_axis", "variance_eps_form")


class AdaMuonRule(MuonRule):
    """The matrix rule `"adamuon"`: all of Muon's options but those of `NOT_HERE`.

    u <- orthogonalized sign(momentum);   v <- beta2 v + (1 - beta2) u^2
    u <- u / (sqrt(v) + eps);             u <- u sqrt(min(rows, cols)) / ||u||

    With the scale of `match_rms_adamw` an update has the RMS 0.2, as in the paper. Without `sign`
    and `renormalize` it is the "adamuon" of Emerging-Optimizers and Megatron.

    The second moment belongs to whole blocks, as the norm does: where DTensors are divided, every
    rank that holds a part of a block keeps all of its second moment.

    Options of a group, where they are not Muon's:
        sign: orthogonalize the signs of the momentum.
        variance_beta2: decay rate of the second moment of the direction.
        variance_eps: added to the root of the second moment.
        renormalize: scale the result to the Frobenius norm sqrt(min(rows, cols)).
    """

    name = "adamuon"
    defaults: ClassVar[Options] = {
        **{key: value for key, value in MuonRule.defaults.items() if key not in NOT_HERE},
        "orthogonalize": "newton-schulz",
        "momentum_form": "sum",
        "nesterov": False,
        "sign": True,
        "variance_beta2": 0.95,
        "variance_eps": 1e-8,
        "renormalize": True,
    }

    taken: ClassVar = {**MuonRule.taken, "sign": checks.boolean}

    def check(self, options: Options) -> None:
        if options["variance_beta2"] is None:
            raise ValueError(
                "variance_beta2 is None, and rule 'adamuon' needs a second moment: "
                "give a number in [0, 1), or use rule 'muon'"
            )
        super().check({**{key: MuonRule.defaults[key] for key in NOT_HERE}, **options})

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Return the shapes of momentum (the block's) and second moment (1-D, per element)."""
        return {"momentum_buffer": shape, "second_moment": (math.prod(shape),)}

    def largest_norm(self, shape: Shape, options: Options) -> float:
        """Return the norm of a renormalized block; without `renormalize` there is no bound."""
        rows, cols = shape[0], math.prod(shape[1:])
        return 1.01 * math.sqrt(min(rows, cols)) if options["renormalize"] else math.inf

    def transform_stack(
        self, prepared: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Orthogonalize blocks (B, rows, cols), apply the second moment, and set their norm."""
        direction = orthogonalized(prepared.sign() if options["sign"] else prepared, options)
        beta2 = number(scalars["variance_beta2"], direction)
        square = direction.square()
        second_moment = torch.lerp(
            state["second_moment"].view(square.shape), square, in_dtype(1 - beta2, square)
        )
        direction = direction / second_moment.sqrt().add_(options["variance_eps"])
        if options["renormalize"]:
            direction = renormalize(direction)
        return Direction(direction, {"second_moment": second_moment.flatten(start_dim=1)})
