"""The command `samestep train`."""

from samestep.tooling.output import check_folder
from samestep.train.journal import LOG, PICTURE, Journal, display
from samestep.train.options import Options, parse
from samestep.train.trainer import Trainer
from samestep.train.world import World, joined

__all__ = ["Options", "parse", "run"]


def run(options: Options) -> int:
    check_folder(options.out)
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
            shown.say(f"stopped in step {trainer.step + 1}; the same command goes on")
            return 130
        files = [LOG, "checkpoints"] + [PICTURE] * journal.draw()
        shown.say(f"{options.out} has {', '.join(files)}")
    return 0
