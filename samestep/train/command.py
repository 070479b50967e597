"""The command `samestep train`."""

import os
import sys

from samestep.command.output import check_folder
from samestep.launch import torchrun_rank
from samestep.train.journal import LOG, PICTURE, Journal, display
from samestep.train.options import Options, parse
from samestep.train.trainer import Trainer
from samestep.train.world import World, joined

__all__ = ["Options", "parse", "run"]

SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def run(options: Options) -> int:
    """Train; return the exit status."""
    check_folder(options.out)
    _warn_of_restarts()
    with joined(options.device) as world:
        return _train(options, world)


def _train(options: Options, world: World) -> int:
    speaks = world.rank == 0
    journal = Journal(options.out, active=speaks)
    with display(speaks) as shown:
        trainer = Trainer(options, world, journal, shown)
        try:
            trainer.run()
        except KeyboardInterrupt:
            shown.say(f"stopped after step {trainer.step}; the same command goes on from there")
            return 130
        files = [LOG, "checkpoints"] + [PICTURE] * journal.draw()
        shown.say(f"{options.out} has {', '.join(files)}")
    return 0


def _warn_of_restarts() -> None:
    """Gloo cannot use the store of an attempt that has failed, which torchrun keeps by default."""
    place = torchrun_rank()
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if place is None or place.rank or restarts == "0" or os.environ.get(SEPARATE_STORE) == "1":
        return
    sys.stderr.write(
        f"warning: restarts need {SEPARATE_STORE}=1 in torchrun's environment, or ranks of the "
        "second attempt wait for those of the first\n"
    )
