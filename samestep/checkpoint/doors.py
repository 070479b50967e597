"""Storage writers and readers of samestep for `torch.distributed.checkpoint.save` and `load`.

    dcp.save(state_dict, storage_writer=Writer("runs/a/step_1000"))
    dcp.load(state_dict, storage_reader=reader("runs/a/step_1000"))

What goes by these doors has the form of `fully_reshardable`: it appears whole or not at all, has
checksums, and loads on any number of ranks. `samestep.save` and `load` do by hand what torch's
functions cannot: they know options of groups and state that is kept in fewer bits, agree on errors
by name of the rank, save in the background without a plan where nothing but values has changed, and
name ranks that have died.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from samestep.checkpoint import folder
from samestep.checkpoint.formats import open_checkpoint
from samestep.checkpoint.saving import facts_of
from samestep.checkpoint.storage import CheckpointError, RawWriter, StoredCheckpoint


class Writer(RawWriter):
    """Writes a checkpoint of tensors that dcp.save has planned.

    Args:
        path: A folder that does not exist yet, on a disk that all ranks share.
        extra: What JSON can have.
        keep: Remove all but so many of the newest checkpoints beside it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, extra: Any = None, keep: int | None = None
    ) -> None:
        super().__init__(Path(path), 0, {})
        self._path, self._extra, self._keep = Path(path), extra, keep
        self._unfinished: folder.Unfinished | None = None
        self._give_up = finalize(self, lambda: None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse objects that are no tensors, because these checkpoints have no pickle."""
        objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if objects:
            raise CheckpointError(
                f"{objects[0]!r} is no tensor, and this format stores only tensors: "
                "pass values that JSON can store as extra="
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the partial folder, and tell every rank its path.

        torch tells a writer nothing of a save that fails on another rank: the folder goes with
        the writer, unless it is finished.
        """
        self._unfinished = folder.Unfinished(self._path)
        self._give_up = finalize(self, self._unfinished.abandon)
        where = self._unfinished.folder.name
        return [replace(plan, storage_data=(where, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards into the folder that the plan names."""
        name, self.rank = plan.storage_data
        self.folder = self._path.with_name(name)
        try:
            return super().write_data(plan, planner)
        except BaseException:
            self._give_up()
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and rename the folder to its final name."""
        assert self._unfinished is not None
        self.facts = facts_of("fully_reshardable", len(results), [], self._extra)
        try:
            super().finish(metadata, results)
            self._unfinished.commit(self._keep)
        except BaseException:
            self._give_up()
            raise
        self._give_up.detach()


def reader(path: str | os.PathLike[str]) -> StoredCheckpoint:
    """Open a checkpoint of any format, or the newest in a folder, for dcp.load."""
    return open_checkpoint(folder.find(Path(path)))
