"""What a rank tells of itself at a sampled step, and at its end."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.stress.training import Training

Values = dict[str, Tensor]
State = dict[str, dict[str, Tensor]]
SCALER = "GradScaler"  # its scale is state, too


@dataclass(frozen=True)
class Sample:
    """Parameters and state after `step` steps, and the collectives so far."""

    step: int
    params: Values
    state: State
    collectives: int = 0
    digest: str = ""  # of the collectives, in order


@dataclass(frozen=True)
class Ending:
    """How a rank's run has ended. `error` is None if it went to its end."""

    step: int  # taken
    error: str | None = None
    kind: str | None = None  # of the error: the check that failed, or "error"
    positions: dict[int, str] = field(default_factory=dict)  # rank -> the collective it was in
    flights: dict[str, Any] = field(default_factory=dict)  # the recorder's last operations
    totals: dict[str, Any] = field(default_factory=dict)  # per kind of collective
    fingerprint: str = ""
    schedule: tuple[str, ...] = ()


def take_sample(step: int, training: Training, recorder: FlightRecorder) -> Sample:
    """Collective: parameters and their state may be spread over ranks."""
    recorder.stop()  # sampling is no part of the run
    params = training.parameters()
    state = {
        name: {key: value.cpu() for key, value in entries.items()}
        for name, entries in training.state().items()
    }
    if training.scale is not None:
        state[SCALER] = {"scale": torch.tensor(training.scale, dtype=torch.float64)}
    log = training.log(recorder)
    recorder.start()
    return Sample(step, params, state, *log)
