"""Whether there is all the time in the world: `make soak` runs long what `make test` runs short."""

import os

SOAK = bool(os.environ.get("SAMESTEP_SOAK"))
