"""The model of the examples; `samestep train` trains it too, so it lives there."""

from samestep.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
