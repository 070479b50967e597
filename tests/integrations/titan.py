"""torchtitan's own trainer on CPU ranks, which it is not made for; the path is TORCHTITAN_PATH.

What is put in the place of what a CPU lacks: statistics of a device's memory, and causal attention
in torch for FlexAttention, whose backward needs a GPU. Model, FSDP2, pipeline, loss, clipping,
schedules, checkpoints and the training loop are torchtitan's.

It is written for a later torch than 2.13: its backend "spmd_types" wants another FSDP2, so this is
"partial_dtensor"; and its pipelines hand micro-batches to torch's schedules, so `_step` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention

import samestep
from tests.ranks import free_port, run_forked

PATH = os.environ.get("TORCHTITAN_PATH")


class _CpuModule(ModuleType):
    """`torch.cpu` with the statistics that torchtitan asks of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=2**30, name="cpu")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out, None


def version() -> str:
    """The commit of the checkout."""
    told = subprocess.run(
        ["git", "-C", str(PATH), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True
    )
    return told.stdout.strip() or "a checkout without commits"


if PATH is None:
    pytest.skip("TORCHTITAN_PATH= a checkout of torchtitan", allow_module_level=True)
sys.path.insert(0, PATH)
try:
    with pytest.MonkeyPatch.context() as patch:
        # It asks once, when it is imported.
        patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
        patch.setattr(torch._utils, "_get_device_module", lambda kind: _CpuModule("cpu"))
        import torchtitan.tools.utils
    from torchtitan import trainer as of_titan
    from torchtitan.components.data.loader import BaseDataLoader
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
except ImportError as error:
    pytest.skip(f"torchtitan of TORCHTITAN_PATH: {error}", allow_module_level=True)

assert torchtitan.tools.utils.device_type == "cpu"
attention.FlexAttention._compiled_flex_attn = staticmethod(_causal)
attention._compiled_create_block_mask = attention.create_block_mask  # compiling takes longer
of_titan.dist_utils.set_pg_timeouts = lambda **_: None  # NCCL's
of_titan.time = SimpleNamespace(sleep=lambda _: None, perf_counter=of_titan.time.perf_counter)

ROW = 16  # tokens of one microbatch
# An eps above the rounding of gradients, which AdamW else makes whole steps of where they are zero.
ROUND = {"lr": 1e-2, "eps": 1e-5}


class Tokens(BaseDataLoader):
    """Random tokens: batch n of all is the same whoever reads it, and ranks take turns."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.seen, self.rank, self.ranks = 0, dp_rank, dp_world_size

    def __iter__(self) -> Any:
        while True:
            generator = torch.Generator().manual_seed(self.seen + self.rank)
            tokens = torch.randint(0, 2048, (ROW + 1,), generator=generator)
            self.seen += self.ranks
            yield {"input": tokens[:-1], "positions": torch.arange(ROW)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def trainer(folder: Any, options: Any = None, *, rows: int = 2, **changes: Any) -> Any:
    """torchtitan's trainer of its debug model: 6 steps of `rows` rows each, saved after 3."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.optimizer = samestep.torchtitan.optimizers(**{**ROUND, **(options or {})})
    config.training.num_tokens_per_microbatch_per_dp_rank = ROW
    config.training.num_tokens_per_train_step = rows * ROW
    config.training.max_context_length = ROW
    config.training.steps = 6
    config.debug.seed = 0
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.dataloader = Tokens.Config()
    config.checkpoint.enable = True
    config.checkpoint.interval = 3
    config.validator.enable = False
    config.dump_folder = str(folder)
    config.hf_assets_path = f"{PATH}/tests/assets/tokenizer"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    for name, value in changes.items():
        section, _, key = name.partition("__")
        setattr(getattr(config, section), key, value)
    made = config.build()
    for module in (module for part in made.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):  # gloo has no sums with a factor
            module.set_force_sum_reduction_for_comms(True)
    if made.parallel_dims.pp_enabled:
        made.pp_schedule.step = partial(_step, made.pp_schedule)
    return made


def _step(schedule: Any, *, return_outputs: bool, **microbatches: Any) -> None:
    """`step` of torch's schedules for inputs that are cut already."""
    for stage in schedule._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(**microbatches, return_outputs=return_outputs)


def trained(folder: Any, *arguments: Any, **changes: Any) -> Any:
    made = trainer(folder, *arguments, **changes)
    made.train()
    made.close()
    return made


def run_trainers(world: int, job: Callable[[int], Any]) -> list[Any]:
    """`job(rank)` on ranks that torchtitan joins itself, from the environment of torchrun."""
    port = free_port()

    def on_rank(rank: int) -> Any:
        dist.destroy_process_group()
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"samestep\.|tests\.")
        return job(rank)

    return run_forked(world, on_rank)
