"""A run that is saved, ended, and goes on: what scenarios of resuming do between steps."""

from pathlib import Path

import torch
import torch.distributed as dist

import samestep
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.comm.messages import gather_everywhere
from samestep.stress.layouts import LAYOUTS, Layout
from samestep.stress.scenario import Scenario
from samestep.stress.sharded_training import new_training
from samestep.stress.training import Training

BEGUN = "begun"  # the checkpoint of `begin_alone`


def begin_alone(
    scenario: Scenario, steps: int, folder: Path, device: torch.device | None = None
) -> None:
    """Take the first steps in this process, with the gradients of all ranks, and save them."""
    training = new_training(scenario, LAYOUTS["one_process"], 0, device=device)
    for step in range(steps):
        training.step(step)
    samestep.save(folder / BEGUN, training.model, training.optimizer)


class Relay:
    """The trainings of one rank, one after the other."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        rank: int,
        reduction: str,
        device: torch.device | None,
        folder: Path | None,
    ) -> None:
        self._scenario, self._layout, self._rank = scenario, layout, rank
        self._reduction, self._device, self._folder = reduction, device, folder

    def begin(self, step: int) -> Training:
        """A new run, or one that goes on where one process has left it before that step."""
        training = self._new(self._layout)
        if step:
            _load(self._path(BEGUN), training)
        return training

    def before(self, step: int, training: Training, recorder: FlightRecorder) -> Training:
        """The training that takes a step: the same as before, or one that has loaded its state."""
        place = self._scenario.goes_on(step)
        if place is None or self._layout.one_process:
            return training
        recorder.stop()  # reading and writing is no part of the run
        path = self._path(f"{self._layout.name}_{step}")
        samestep.save(path, training.model, training.optimizer)
        new = self._new(self._layout if place == "here" else self._another_layout())
        _load(path, new)
        recorder.start()
        return new

    def _new(self, layout: Layout) -> Training:
        options = {"reduction": self._reduction, "device": self._device}
        return new_training(self._scenario, layout, self._rank, **options)

    def _path(self, name: str) -> Path:
        """In the first rank's folder: ranks of torchrun have each their own."""
        assert self._folder is not None
        path, group = self._folder / name, dist.group.WORLD
        return path if group is None else gather_everywhere(path, group)[0]

    def _another_layout(self) -> Layout:
        """Half the registry away: plain parameters become DTensors, and the other way round."""
        world = self._scenario.world
        names = [
            name
            for name, layout in LAYOUTS.items()
            if not layout.one_process and not layout.reason_against(type(self._scenario), world)
        ]
        return LAYOUTS[names[(names.index(self._layout.name) + len(names) // 2) % len(names)]]


def _load(path: Path, training: Training) -> None:
    """Into a model of other weights, so that nothing is right by itself."""
    with torch.no_grad():
        for param in training.model.parameters():
            param.add_(1.0)
    samestep.load(path, training.model, training.optimizer)
