"""Tests of what users see, and tests of what is inside: `tests/inside/` has the latter.

A test outside of it goes through public names: optimizers, checkpoints, commands, messages. It
holds a rebuilding of the core and is not changed by one. A test in `tests/inside/` is of a class
or a planner, and goes with it. What else needs a name from inside is listed here, with that name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import samestep

TESTS = Path(__file__).parent
# Rooms whose names are inside; every other one is a command, a library of its own, or a formula.
INSIDE = {
    "comm", "groups", "kernels", "lab.estimate", "layout", "optimizer", "plan", "shards", "update",
}  # fmt: skip
# What users catch, or read in docs/api.md.
PUBLIC = {
    "samestep.comm.diagnosis.flight.CollectiveError",
    "samestep.comm.integrity.agreement.RanksDisagreeError",
    "samestep.comm.presence.RankProblemError",
    "samestep.groups.distribution.Distribution",
    "samestep.groups.step_options.StepOptions",
    "samestep.shards.replicated.reduced_gradient.GradientIsReducedError",
}
HARNESS = {  # shared by tests: when the core changes, so may these
    "conftest.py": {"comm.groups.registry"},
    "checkpoint/training.py": {"layout.boxes.local_of"},
    "ranks.py": {"shards.dtensor."},
}
EXCEPTIONS = {
    "acceptance/test_flat.py": {
        "layout.blocks.Block",
        "plan.flat.plan_flat",
        "plan.links.LEAST_ELEMENTS",
        "plan.sharding.ParamSpec",
    },
    "bench/test_crossover.py": {
        "comm.groups.RankGroup",
        "comm.groups.rank_group",
        "groups.crossover.Measurement",
        "groups.crossover.crossover_of",
        "groups.crossover.read_crossover",
    },
    "bench/test_gpu_bench.py": {
        "kernels.choice",
    },
    "checkpoint/test_earlier_versions.py": {"layout.boxes.whole_box"},
    "checkpoint/test_foreign.py": {"layout.boxes.held_range"},
    "checkpoint/test_pages.py": {
        "optimizer.muon_adamw.MuonAdamW",
        "optimizer.muon_adamw.MuonAdamWOptions",
    },
    "mesh/test_build.py": {"comm.groups.registry"},
    "nccl/test_checkpoints.py": {"comm.nccl.sharing_problem"},
    "nccl/test_host.py": {"comm.nccl.sharing_problem"},
    "nccl/test_products.py": {"comm.nccl.sharing_problem"},
    "nccl/test_restart.py": {"comm.nccl.sharing_problem"},
    "nccl/test_shared_gpu.py": {"comm.nccl.sharing_problem"},
    "options_page.py": {"groups.group_keys.ALIASES"},  # generates a page from the code
    "parallel/test_fused.py": {"shards.dtensor.gradients.combine_gradients"},
    "parallel/test_fused_checkpoints.py": {"layout.fused_rows.parts_apart"},
    "parallel/test_own_model.py": {"shards.dtensor.gradients.combine_gradients"},
    "parallel/test_pipeline.py": {"shards.replicated.reduction.BucketReductions"},
    "parallel/test_pipeline_checkpoints.py": {"comm.diagnosis.roll_call.ANSWER_S"},
    "parallel/test_spmd.py": {"comm.meshes.own_box", "layout.boxes.Box"},
    "planning/test_command.py": {"lab.estimate.configs"},
    "rules/emulation_case.py": {
        "kernels.orthogonalize.orthogonalize_blocks",
        "kernels.symmetric",
        "kernels.symmetric.Tiling",
    },
    "rules/test_adamw.py": {"groups.param_groups.refuse_unsupported"},
    "rules/test_options_of_peers.py": {"update.plain.GroupMath", "update.triton.can_run"},
    "stress/test_cases.py": {"optimizer.rule_optimizer.RuleOptimizer"},
    "stress/test_check.py": {"comm.integrity.differences"},
    "stress/test_check_cuda.py": {"comm.integrity.checksum.checksum"},
    "stress/test_streams.py": {
        "comm.diagnosis.flight.Flight",
        "comm.diagnosis.flight._roll_call",
        "comm.diagnosis.recorder.FlightRecorder",
    },
    "stress/test_mutants.py": {
        "shards.replicated.reduction",
        "shards.replicated.reduction.BucketReductions",
    },
    "test_assumptions.py": {"optimizer.assumptions.REGISTER"},
    "test_consolidated.py": {"optimizer.saved_state"},
    "test_copies.py": {"shards.planner"},
    "test_every_mesh.py": {"comm.meshes.held", "comm.meshes.mesh_group"},
    "test_failures.py": {
        "comm.collectives.total",
        "comm.diagnosis.flight",
        "comm.diagnosis.roll_call.ANSWER_S",
        "comm.groups.registry",
    },
    "test_flat_gather.py": {"shards.replicated.awaited.ARRIVAL"},
    "test_group_keys.py": {"groups.group_keys.OF_THE_OPTIMIZER", "groups.group_keys.PEERS"},
    "test_hyperparameters.py": {"comm.presence.presence_elements"},
    "test_keywords.py": {
        "groups.group_keys.OF_EVERY_GROUP",
        "groups.group_keys.WAYS_OF_TORCH",
        "groups.group_keys.options_of_rule",
    },
    "test_master_weights.py": {"layout.boxes.local_of"},
    "test_mistakes.py": {"groups.mistakes"},
    "test_offload.py": {"plan.windows"},
    "test_overlap.py": {"shards.replicated.reduced_gradient.ReducedGradient"},
    "test_qk_clip.py": {"layout.fused_rows.rows_in"},
    "test_sharded_more.py": {"comm.exchange"},
    "test_shared_memory.py": {"layout.memory.overlap"},
    "test_splits.py": {"layout.blocks.blocks_of"},
    "test_step.py": {
        "optimizer.recorded_step.RecordedStep",
        "optimizer.recorded_step.StepShape",
        "optimizer.recorded_step._refuse",
    },
    "test_two_optimizers.py": {"shards.replicated.reduced_gradient.ReducedGradient"},
}


ROOMS = "|".join(sorted({room.rpartition(".")[2] for room in INSIDE}))
MAY_NAME = re.compile(rf"samestep(\.lab)?\.({ROOMS})\b|from samestep(\.lab)? import")


def names_from_inside(file: Path) -> set[str]:
    """What a file imports or patches of a room that is inside, each as the path of a name."""
    found = set()
    text = file.read_text()
    if not MAY_NAME.search(text):  # looking takes a tenth of parsing
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # of `monkeypatch.setattr`
    paths = {name for name in found if name.replace(".", "").replace("_", "").isalnum()}
    return {name for name in paths if name.startswith("samestep.") and _room(name) in INSIDE}


def _room(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[1:3]) if parts[1] == "lab" else parts[1]


def files() -> list[Path]:
    """All Python files below tests/ that are not inside, but for this one."""
    everything = TESTS.rglob("*.py")
    return [file for file in everything if "inside" not in file.parts and file != Path(__file__)]


def test_every_room_is_either_inside_or_not():
    top = Path(samestep.__file__).parent
    rooms = {path.stem for path in top.iterdir()}
    rooms |= {f"lab.{path.stem}" for path in (top / "lab").iterdir()}
    assert rooms >= INSIDE


def test_tests_of_what_users_see_go_through_public_names():
    """What is listed and not used is an error as well: the list only gets shorter."""
    found = defaultdict(set)
    for file in files():
        for name in names_from_inside(file) - PUBLIC:
            found[str(file.relative_to(TESTS))].add(name.removeprefix("samestep."))
    listed = {**HARNESS, **EXCEPTIONS}
    assert {name: found[name] - listed.get(name, set()) for name in sorted(found)} == {
        name: set() for name in sorted(found)
    }, "move these tests to tests/inside/, or go through a public name"
    assert {name: listed[name] - found[name] for name in listed if listed[name] - found[name]} == {}


def test_names_are_found(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(
        "from samestep.plan import windows\nimport samestep.update.plain\nimport samestep.rules\n"
        "TEXT = 'samestep.comm.groups.registry'\nOTHER = 'samestep.comm is a room'\n"
    )
    assert names_from_inside(file) == {
        "samestep.plan.windows", "samestep.update.plain", "samestep.comm.groups.registry",
    }  # fmt: skip
