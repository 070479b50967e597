"""Trainings that begin with a mistake, which has to be refused on every rank.

Then they go on as one does it right, and have to end like all others. If nobody refuses the
mistake, they go on with it, and a check of the harness has to find what comes of it.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import samestep
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.comm.presence import RankProblemError
from samestep.optimizer.step import RuleOptimizer
from samestep.stress.models import named_params
from samestep.stress.sharded_training import GroupLogs, TwinTraining
from samestep.stress.training import Training, backward, mean_over_ranks, rank_gradients


class TensorParallelAlone(TwinTraining):
    """Tensor parallel on pairs of ranks that have data of their own, and no FSDP2 over the pairs.

    Each pair has the gradients of its own data. Done right, FSDP2 averages over the pairs.
    """

    _alone = True

    def _new_model(self) -> nn.Module:
        if self._alone:
            self._logs = GroupLogs()  # pairs begin in groups of their own
        return super()._new_model()

    def log(self, recorder: FlightRecorder) -> tuple[int, str]:
        """The same on all ranks if in every group all members have launched the same."""
        return self._logs.compared(recorder)

    def _over_data(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._pair = mesh["inner"].mesh.flatten().tolist()
        if not self._alone:
            super()._over_data(model, mesh)

    def _new_optimizer(self) -> RuleOptimizer:
        try:
            return super()._new_optimizer()
        except ValueError as error:
            if not self._alone or "nobody is known to average" not in str(error):
                raise
        self._alone = False
        self.model = self._new_model()
        return super()._new_optimizer()

    def _means(self, number: int) -> dict[Tensor, Tensor]:
        if not self._alone:
            return super()._means(number)
        ranks = [rank_gradients(self.scenario, self._twin, number, rank) for rank in self._pair]
        return mean_over_ranks(self._twin, ranks)


class TwoOptimizers(Training):
    """Two optimizers on one model, which both reduce inside its backward, tried on a copy of it.

    Done right, one optimizer has all parameters.
    """

    STEPS = 8  # ranks lack gradients of all kinds meanwhile

    def _new_optimizer(self) -> RuleOptimizer:
        copy = self._new_model()
        params = list(named_params(copy).values())
        options = {key: self._distribution[key] for key in ("sharding", "overlap_grad_reduce")}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="replicas differ")
            both = [
                samestep.AdamW(own, bucket_size=200, crossover=1, **options)
                for own in (params[::2], params[1::2])
            ]
        for step in range(self.STEPS):
            loss = self.scenario.loss(copy, step, self.rank, 0)
            if loss is not None:
                backward(loss)
            if any(_refuses(optimizer) for optimizer in both):
                break
            copy.zero_grad(set_to_none=True)
        return super()._new_optimizer()


def _refuses(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.step()
    except RankProblemError:
        return True
    except RuntimeError as error:
        if "two optimizers reduce gradients" not in str(error):
            raise
        return True
    return False
