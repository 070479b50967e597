"""Small runs of the trainer on forked ranks."""

import json
import signal
from collections.abc import Container, Sequence
from pathlib import Path

# Some only so that forked ranks need not import them again.
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
import torch.distributed as dist

import samestep.checkpoint  # noqa: F401
from samestep import cli
from samestep.train import journal, trainer
from tests.ranks import run_forked

STEPS = 10
# Seven sequences are divided unevenly by 2 and 3 ranks, and one at a time leaves empty parts.
TINY = {
    "--width": 16, "--layers": 2, "--heads": 2, "--kv-heads": 1, "--context": 12,
    "--batch-size": 7, "--micro-batch": 2, "--steps": STEPS, "--warmup": 2, "--momentum-warmup": 8,
    "--log-every": 3, "--eval-every": 5, "--eval-sequences": 5, "--save-every": 4,
    "--device": "cpu", "--lr": 0.03,
}  # fmt: skip
EXPERTS = {"--experts": 3, "--active-experts": 2, "--dropout": 0.1}


def text_file(folder: Path) -> Path:
    """A little text to train on."""
    path = folder / "text"
    path.write_bytes(Path(trainer.__file__).read_bytes()[:6000])
    return path


def words(out: Path, data: Path, **changes: object) -> list[str]:
    """The command line of a tiny run; batch_size=3 stands for --batch-size 3."""
    named = {"--" + key.replace("_", "-"): value for key, value in changes.items()}
    options = {**TINY, "--out": out, "--data": data, **named}
    return [str(word) for pair in options.items() for word in pair]


def train(
    ranks: int,
    arguments: list[str],
    *,
    stop_in: int | None = None,
    signals: Sequence[int] = (signal.SIGINT, signal.SIGINT),
    ranks_stopped: Container[int] = range(8),
    draws: bool = False,
) -> list[int]:
    """Train on forked ranks; return their exit statuses.

    In step `stop_in` the signals come, on those of the ranks that are stopped. Drawing the losses
    takes longer than the rest: only who looks at the picture has it drawn.
    """
    own = [signals if rank in ranks_stopped else () for rank in range(ranks)]
    return run_forked(ranks, _rank, arguments, stop_in, own, draws)


def _rank(
    rank: int,
    arguments: list[str],
    stop_in: int | None,
    signals: Sequence[Sequence[int]],
    draws: bool,
) -> int:
    if not draws:
        journal.picture = lambda rows: b""
    if dist.get_world_size() == 1:
        dist.destroy_process_group()  # as without torchrun
    optimizer_step = trainer.Trainer._balance_experts

    def step(self):
        for number in signals[rank] if self.step + 1 == stop_in else ():
            signal.raise_signal(number)
        optimizer_step(self)

    trainer.Trainer._balance_experts = step  # in this process, which ends soon
    return cli.main(["train", *arguments])


def run_all(rank: int, commands: list[list[str]]) -> list[int]:
    """On a rank: one run after the other."""
    torch.set_num_threads(1)
    journal.picture = lambda rows: b""
    return [trainer.run(trainer.parse(each, "train")) for each in commands]


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path, key: str = "loss") -> dict[int, float]:
    """What the log has of every step; a step that is in it twice is an error."""
    found = [(row["step"], row[key]) for row in rows(out) if key in row]
    assert len(dict(found)) == len(found)
    return dict(found)
