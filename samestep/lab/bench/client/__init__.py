"""Models of other projects, trained with their own optimizers and with samestep's."""
