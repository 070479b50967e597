"""Reads checkpoints of DeepSpeed: ZeRO 1, 2 and 3, and universal ones.

*_model_states.pt    the model (empty in ZeRO 3), and names and shapes of each group's parameters
*_optim_states.pt    of each rank its range of every group: main parameters and state, flat

In ZeRO 1 and 2 a group is one flat vector that is cut into ranges, one per rank; which parameters a
range has, and where, it says itself (`param_slice_mappings`). In ZeRO 3 every parameter is cut into
as many equal ranges, the last one padded. Universal checkpoints have a folder per parameter.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.claims import inside
from samestep.checkpoint.folder import pointed
from samestep.checkpoint.foreign import safe
from samestep.checkpoint.foreign.dialects import Meaning, meaning
from samestep.checkpoint.logical import state_key
from samestep.checkpoint.sources import Collected, Source, SourceOptions, model_name, step_tensor
from samestep.checkpoint.storage import CheckpointError
from samestep.layout.fused_rows import without_wrappers
from samestep.rules.state import MASTER

# What DeepSpeed has in its files beside tensors and plain values; made as shells.
SHELLS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
LATEST = "latest"
OPTIM, MODEL = "*_optim_states.pt", "*_model_states.pt"
FP32 = "fp32"
KEPT = ("global_steps", "global_samples", "skipped_steps", "ds_version")
READ = ("module", "optimizer", "param_shapes", "buffer_names", "ds_config", "shared_params")
SAID = ("frozen_param_shapes", "frozen_param_fragments", "dp_world_size", "mp_world_size")
State = Mapping[str, Any]


def folder_of(path: Path) -> Path | None:
    """The checkpoint in a folder: itself, or the one that `latest` names; None if neither."""
    latest = path / LATEST
    if latest.is_file():
        path = pointed(path, LATEST)
    found = any(path.glob(OPTIM)) or any(path.glob("zero/*/fp32.pt"))
    return path if found else None


def read(path: Path, given: SourceOptions) -> Source:
    """Read a checkpoint, or only its model; tensor parallel ones must be universal."""
    folder = folder_of(path)
    if folder is None:
        raise CheckpointError(
            f"{path} is no checkpoint of DeepSpeed: it has no {OPTIM}, no zero/*/fp32.pt and no "
            f"{LATEST} that names a folder with these"
        )
    models = _by_rank(folder, MODEL)
    if not models:
        raise CheckpointError(
            f"{folder} has no {MODEL}, which has the names of the parameters: copy it "
            "from the folder of the run"
        )
    facts = safe.load_dict(models[0], SHELLS)
    universal = any(folder.glob("zero/*/fp32.pt"))
    degrees = facts.get("checkpoint_parallel_dimensions") or {}
    parallel = [key for key in ("tp_degree", "pp_degree") if degrees.get(key, 1) > 1]
    if parallel and not universal:
        raise CheckpointError(
            f"{folder} was saved with {parallel[0]} above 1: turn it into a universal "
            "checkpoint with DeepSpeed's ds_to_universal, and convert that"
        )
    into, ranks = _Into(given.only), 1
    if universal:
        _add_universal(folder, facts, into, whole=not parallel)
    else:
        files = _by_rank(folder, OPTIM)
        states = [safe.load_dict(file, SHELLS)["optimizer_state_dict"] for file in files]
        stage = states[0].get("zero_stage", 0)
        if isinstance(stage, safe.Shell):  # a member of an enum, made with its value
            stage = next(iter(stage.arguments), None)
        counts = states[0].get("partition_count", len(files))
        ranks = max(counts) if isinstance(counts, list) else counts
        if ranks != len(files):
            raise CheckpointError(
                f"{folder} has {len(files)} {OPTIM} files instead of {ranks}: copy the "
                "files of all ranks"
            )
        if stage not in (1, 2, 3):
            raise CheckpointError(
                f"{files[0]} has ZeRO stage {stage}, and only 1 to 3 are supported"
            )
        _add_ranges(files, states, facts["param_shapes"], into, stage=stage)
    _add_model(models, facts, into.collected, whole=not parallel)
    extra = {key: facts[key] for key in KEPT if isinstance(facts.get(key), int | str)}
    done = (*KEPT, *READ, *SAID, "checkpoint_parallel_dimensions")
    left = [key for key, value in facts.items() if key not in done and value not in (None, {}, [])]
    return into.collected.source(world_size=ranks, extra={"deepspeed": extra}, left_out=left)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Sort files by rank as a number."""
    return sorted(
        folder.glob(pattern), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)]
    )


def _add_model(models: Sequence[Path], facts: State, collected: Collected, *, whole: bool) -> None:
    """Add parameters and buffers of the model; in ZeRO 3 from the main parameters.

    So they are with tensor parallel, where files have parts (`whole` is False). Main parameters
    stay beside as master weights where the model's are of 16 bits.
    """
    for raw, tensor in facts["module"].items():
        name = without_wrappers(raw)
        own, main = model_name(name), state_key(name, MASTER)
        if not isinstance(tensor, Tensor):
            continue
        if main not in collected or (tensor.numel() and whole):
            if raw not in (facts.get("frozen_param_shapes") or {}) or tensor.numel():
                collected.add(own, tensor, f"{models[0].name}: {raw}")
        else:
            collected.add_same(own, main)
        if main in collected and tensor.dtype.itemsize >= 4:
            collected.drop(main)
    for rank, file in enumerate(models):  # frozen ones in ZeRO 3
        of_rank = safe.load_dict(file, SHELLS) if rank else facts
        for raw, shape in (of_rank.get("frozen_param_shapes") or {}).items():
            own, part = model_name(without_wrappers(raw)), of_rank["frozen_param_fragments"][raw]
            share = -(-prod(shape) // len(models))
            if own not in collected or rank:
                left = max(0, min(share, prod(shape) - rank * share))
                origin = f"{file.name}: {raw}"
                flat = part.reshape(-1)[:left]
                collected.add_range(own, torch.Size(shape), rank * share, flat, origin)
    for raw, same in (facts.get("shared_params") or {}).items():
        own, other = model_name(without_wrappers(raw)), model_name(without_wrappers(same))
        if other in collected and own not in collected:
            collected.add_same(own, other)


class _Into:
    """The places of a parameter's ranges and its state, collected over all ranks."""

    def __init__(self, only: str | None) -> None:
        self.collected, self._only = Collected(), only
        self._meanings: dict[str, Meaning] = {}

    def options(self, place: int, name: str, keys: Sequence[str], group: State) -> Meaning:
        if self._only == "model":
            return Meaning("", {}, {}, "")
        if name not in self._meanings:
            found = meaning(name, keys, group)
            self._meanings[name] = found
            self.collected.add_options(place, name, found.options)
        return self._meanings[name]


def _add_ranges(
    files: Sequence[Path], states: Sequence[State], shapes: Sequence[State], into: _Into, stage: int
) -> None:
    """Add the ranges of every parameter that each rank has saved."""
    base, fp32 = "base_optimizer_state", "single_partition_of_fp32_groups"
    if stage == 3:
        base, fp32 = "optimizer_state_dict", "fp32_flat_groups"
    done: dict[str, int] = defaultdict(int)  # elements of a parameter that ranks so far have
    for rank, (file, own) in enumerate(zip(files, states, strict=True)):
        entries, groups = _entries(own[base], own)
        if stage == 3 and len(entries) != len(shapes):
            raise CheckpointError(
                f"{file} has state of {len(entries)} groups, and {MODEL} has the shapes "
                f"of {len(shapes)}: give files of one checkpoint"
            )
        group_of = {number: group for group in groups for number in group["params"]}
        for number, (entry, main) in enumerate(zip(entries, own[fp32], strict=True)):
            if stage == 3:
                group = group_of.get(number, groups[min(number, len(groups) - 1)])
                where = _equal_ranges(shapes[number], rank, len(files))
            else:
                group = groups[number]
                where = _told_ranges(file, own, number)
            origin = f"{file.name}: group {number}"
            for raw, (start, numel) in where.items():
                name, shape = without_wrappers(raw), torch.Size(shapes[number][raw])
                found = into.options(number, name, list(entry), group)
                flats = {
                    theirs: entry[theirs] for theirs, ours in found.keys.items() if ours != "step"
                }
                for theirs, values in {**flats, FP32: main.detach()}.items():
                    part = values.reshape(-1)[start : start + numel]
                    if part.numel() != numel:
                        raise CheckpointError(
                            f"{origin} has {values.numel()} elements of {theirs}, and "
                            f"{name!r} ends at {start + numel}: the file is truncated "
                            "or belongs to another checkpoint"
                        )
                    key = state_key(name, found.keys.get(theirs, MASTER))
                    into.collected.add_range(key, shape, done[name], part, f"{origin} {theirs}")
                if found.rule == "adamw":
                    count = entry.get("step", group.get("step"))
                    into.collected.add_step(name, count, f"{origin} step")
                done[name] += numel


def _equal_ranges(shapes: State, rank: int, ranks: int) -> dict[str, tuple[int, int]]:
    """Start and length of each parameter in a rank's flat group of ZeRO 3."""
    found, start = {}, 0
    for name, sizes in shapes.items():
        share = -(-prod(sizes) // ranks)
        found[name] = start, max(0, min(share, prod(sizes) - rank * share))
        start += share
    return found


def _told_ranges(file: Path, own: State, number: int) -> dict[str, tuple[int, int]]:
    """Start and length of each parameter in ZeRO 1 and 2, from param_slice_mappings."""
    places = own.get("param_slice_mappings")
    if places is None:
        raise CheckpointError(
            f"{file} lacks param_slice_mappings, the places of the parameters, because "
            "an old DeepSpeed wrote it: load and save it with a newer one"
        )
    found = ((name, fragment.fields) for name, fragment in places[number].items())
    return {name: (fields["start"], fields["numel"]) for name, fields in found}


def _entries(base: Any, own: State) -> tuple[list[State], list[dict[str, Any]]]:
    """State and options of each group; elastic checkpoints have a list without options."""
    if isinstance(base, Mapping):
        return [base["state"][number] for number in sorted(base["state"])], base["param_groups"]
    step = own.get("base_optimizer_state_step")
    return list(base), [{"step": step, "params": [n]} for n in range(len(base))]


def _add_universal(folder: Path, facts: State, into: _Into, *, whole: bool) -> None:
    """Add zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt and the options of a universal checkpoint.

    Shapes are those of the model's files, if these are of whole parameters.
    """
    place_of = {name: place for place, own in enumerate(facts["param_shapes"]) for name in own}
    options = _universal_options(folder)
    for raw, place in place_of.items():
        own, name = inside(folder, f"zero/{raw}"), without_wrappers(raw)
        files = {file.stem: file for file in sorted(own.glob("*.pt"))}
        if FP32 not in files:
            raise CheckpointError(
                f"{own} has no {FP32}.pt: the checkpoint is incomplete, copy all of it"
            )
        group = options[place] if place < len(options) else {}
        found = into.options(place, name, [key for key in files if key != FP32], group)
        shape = torch.Size(facts["param_shapes"][place][raw])
        for theirs, ours in {**found.keys, FP32: MASTER}.items():
            value = safe.load(files[theirs], SHELLS)
            value = value["param"] if isinstance(value, Mapping) else value
            origin = f"zero/{raw}/{theirs}.pt"
            if ours == "step":
                value = step_tensor(value)
            elif whole and value.numel() != prod(shape):
                raise CheckpointError(
                    f"{files[theirs]} has shape {tuple(value.shape)}, and {name!r} has "
                    f"{tuple(shape)}: give files of one checkpoint"
                )
            elif whole:
                value = value.reshape(shape)
            into.collected.add(state_key(name, ours), value, origin)
        if found.rule == "adamw" and "step" not in found.keys:
            origin = "zero/optimizer_state.pt: step"
            into.collected.add_step(name, group.get("step"), origin)


def _universal_options(folder: Path) -> list[dict[str, Any]]:
    """Options of the groups, with the step count where it is saved there."""
    path = folder / "zero" / "optimizer_state.pt"
    if not path.is_file():
        return []
    content = safe.load_dict(path, SHELLS)
    base = content.get("optimizer_state_dict", content)
    counts = {
        number: {"step": entry["step"]}
        for number, entry in base.get("state", {}).items()
        if "step" in entry
    }
    return [
        {**group, **counts.get(number, {})}
        for number, group in enumerate(base.get("param_groups", ()))
    ]
