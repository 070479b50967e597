"""Trainers of others, each against the real package: `make test-integrations`."""

import sys

# It makes folders when it is imported, as trainers do if it is there; nothing here reports to it.
sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
