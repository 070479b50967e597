"""Recipes: the weights of known architectures that are fused, stacked or gates.

    samestep.MuonAdamW(model)                      found from `model.config.model_type`
    samestep.MuonAdamW(model, recipe="mixtral")    asked for, with the numbers of `model.config`
    samestep.MuonAdamW(model, recipe=None)         names and shapes alone
    samestep.recipes.overrides(model)              the same as `overrides=`, for named parameters

A recipe says only what names and shapes do not: the rest is routed as in any model. What a user
overrides wins.
"""

from samestep.recipes.architectures import RECIPES, Line
from samestep.recipes.matching import known_of, overrides

__all__ = ["RECIPES", "Line", "known_of", "overrides"]
