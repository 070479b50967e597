"""Receipts of `samestep stress` as runs leave them, made up."""

import random
from copy import deepcopy

STARTED = "2026-03-14T09:26:53Z"
LAYOUTS = {
    "one_process": "no other rank: gradients averaged by hand",
    "none": "everything on every rank",
    "zero1": "state and update sharded",
    "zero2": "gradients freed once reduced",
    "zero1_overlap": "zero1, reduced inside backward",
    "zero2_overlap": "zero2, reduced inside backward",
}
FURTHER_LAYOUTS = {
    name: f"the story of {name}"
    for name in (
        "flat_zero1", "flat_zero2_overlap", "flat_gather_overlap", "fsdp2_gather",
        "fsdp2_parallel", "hsdp", "tp_fsdp2", "ep_fsdp2",
    )
}  # fmt: skip
TINY = ("adam", "mu_a_0", "mu_a_1", "mu_b_0", "mu_b_1")
LAYER = ("norm_1", "qkv", "out", "norm_2", "up", "down", "recycle")
GPT = (
    "embedding.weight",
    "position.weight",
    *(f"layers.{layer}.{part}.weight" for layer in range(3) for part in LAYER),
    "head.weight",
    "second_head.weight",
)
SCENARIOS = {
    "dist_adamw_muon": ("open", TINY, "four patterns of present and missing gradients in turn"),
    "dist_adamw_muon_random": ("open", TINY, "the same patterns, each parameter in its own phase"),
    "megatron_conditional": ("recorded", GPT, "a GPT with skipped layers, toggled per rank"),
    "megatron_conditional_live": ("closed", GPT, "the same, with each layout's own gradients"),
    "fixed_capacity": ("open", ("router", "stack", "expert_0", "expert_1"), "zeros count"),
    "conditional_compute": ("open", ("router", "stack", "expert_0"), "no gradient, no change"),
    "empty_expert": ("closed", ("router", "expert_0", "expert_1", "expert_2"), "no tokens"),
    **{
        name: ("open", TINY, f"the story of {name}")
        for name in (
            "frozen_and_added", "uneven_accumulation", "uneven_accumulation_sharded", "not_finite",
            "overflow_scaler", "allocator_churn", "schedules", "clipped", "normuon_cautious",
            "fused_mha", "fused_gqa", "fused_mqa", "resumed", "different_start",
        )
    },
}  # fmt: skip
MUTANTS = {
    "skips_missing": ("a rank without a gradient skips the reduction", "hang"),
    "zeros_for_none": ("a parameter nobody has a gradient for moves by its momentum", "reference"),
    "stale_chunk": ("segments are not computed anew when a group is added", "plan"),
    "local_norm": ("every rank clips by the norm of its own gradients", "replicas"),
    "sum_for_mean": ("gradients are added, not averaged", "reference"),
    "early_reuse": ("a buffer is reused before its collective has ended", "layouts"),
}


def clean():
    """Two scenarios in three layouts, nothing found."""
    return receipt(["dist_adamw_muon", "megatron_conditional"], ["one_process", "none", "zero2"])


def large():
    """Everything there is, on four ranks, with mutants."""
    made = receipt(list(SCENARIOS), list(LAYOUTS), world=4)
    made["mutants"] = mutants()
    made["asked"]["mutants"] = True
    return made


def dense():
    """So many layouts that a page has room for little of each; one does not apply."""
    made = receipt(["dist_adamw_muon", "uneven_accumulation_sharded"], [*LAYOUTS, *FURTHER_LAYOUTS])
    for case in made["cases"]:
        if case["layout"] == "hsdp":
            nothing = {"status": "does_not_apply", "reason": "it needs four ranks"}
            case |= {**nothing, "samples": [], "steps_taken": 0, "collectives": {}}
    return made


def fast():
    """The fast reduction: layouts differ a little."""
    scenarios = ["dist_adamw_muon_random", "megatron_conditional_live"]
    return receipt(scenarios, list(LAYOUTS), world=4, reduction="fast")


def with_mutants(escaped=()):
    """A clean run, and mutants of which some may have escaped."""
    made = clean()
    made["mutants"] = mutants(escaped)
    made["asked"]["mutants"] = True
    if escaped:
        made["verdict"] = "failed"
    return made


def failed():
    """A rank that drifts, a hang with all its dumps, and one that ended with an error."""
    made = receipt(list(SCENARIOS)[:4], list(LAYOUTS), world=3)
    made["verdict"] = "failed"
    drifted = case_of(made, "dist_adamw_muon_random", "zero2_overlap")
    drifted |= {"status": "failed", "findings": [], "flights": dumps(3)}
    drifted["findings"] = [
        finding("replicas", 300, "ranks differ by 1.86e-09"),
        finding("reference", 800, "mu_a is 0.00071 away from the reference, limit 0.0003"),
        finding("state", 900, "state is inf away from the reference's, limit 0.0003"),
    ]
    for number, sample in enumerate(drifted["samples"]):
        if number >= 2:
            apart = 1.86e-9 * 6 ** (number - 2)
            sample["max_mu_a_abs_diff"] = sample["max_abs_param_diff"] = apart
            sample["layouts"]["mu_a"] = 0.7 * apart
            sample["reference"]["mu_a"] = max(sample["reference"]["mu_a"], 2 * apart)
        if number >= 8:
            sample["max_abs_state_diff"] = "infinite"
            sample["reference"]["state"] = "infinite"
    hung = case_of(made, "megatron_conditional", "zero1_overlap")
    hung |= {"status": "failed", "steps_taken": 47, "samples": [], "flights": dumps(3, stuck=True)}
    hung["findings"] = [
        finding(
            "hang",
            47,
            "rank 1: reduce bucket 3 of 0 was waited for 20 s. Rank 0 is in reduce bucket 3 of 0, "
            "rank 2 is in presence of 0: it has not launched the same operations",
        )
    ]
    hung["positions"] = {
        "0": "reduce bucket 3 of 0",
        "1": "reduce bucket 3 of 0",
        "2": "presence of 0",
    }
    broken = case_of(made, "megatron_conditional", "zero2_overlap")
    broken |= {"status": "failed", "steps_taken": 0, "samples": [], "collectives": {}}
    broken |= {"collectives_per_step": 0.0, "bytes_per_step": 0.0, "flights": {"0": {}}}
    broken["findings"] = [finding("error", 0, "rank 0: KeyError: 'qkv' (placement_of, line 88)")]
    return made


def interrupted():
    """Ctrl-C before anything had ended."""
    made = receipt([], [])
    made["verdict"] = "interrupted"
    made["ran"]["seconds"] = 0.4
    return made


EXAMPLES = {
    "clean": clean,
    "large": large,
    "dense": dense,
    "fast": fast,
    "mutants": with_mutants,
    "escaped": lambda: with_mutants(escaped=("local_norm",)),
    "failed": failed,
    "interrupted": interrupted,
}


def case_of(made, scenario, layout):
    """The case of a receipt."""
    return next(c for c in made["cases"] if (c["scenario"], c["layout"]) == (scenario, layout))


def receipt(scenarios, layouts, *, world=2, steps=1000, every=100, reduction="ordered"):
    """A receipt without findings."""
    cases = [
        case(scenario, layout, layouts[0], world, steps, every, reduction)
        for scenario in scenarios
        for layout in layouts
    ]
    return {
        "kind": "samestep stress",
        "format": 1,
        "verdict": "clean",
        "asked": {
            "scenario": "all",
            "layout": "all",
            "world_size": world,
            "backend": None,
            "steps": steps,
            "other_steps": None,
            "sample_every": every,
            "reduction": reduction,
            "seed": 0,
            "model": "tiny",
            "watchdog": 20.0,
            "mutants": False,
            "out": "out/stress",
        },
        "ran": {
            "requested_backend": None,
            "actual_backend": "gloo",
            "runtime_mode": "forked",
            "fallback_reason": "no CUDA device was found",
            "world_size": world,
            "device": "cpu",
            "versions": {"samestep": "0.4.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
            "machine": "Linux-6.1.0-x86_64-with-glibc2.36",
            "cpus": 2,
            "environment": {"OMP_NUM_THREADS": "1", "ONEDNN_JIT_PROFILE": "0"},
            "command": ["samestep", "stress", "--world-size", str(world), "--steps", str(steps)],
            "started": STARTED,
            "seconds": 4.5 * len(cases) + 2.25,
        },
        "thresholds": {"adam": 2e-5, "mu_a": 3e-4, "mu_b": 3e-4, "state": 3e-4},
        "scenarios": {name: scenario_entry(name, world) for name in scenarios},
        "layouts": {name: {"story": (LAYOUTS | FURTHER_LAYOUTS)[name]} for name in layouts},
        "cases": cases,
        "mutants": [],
    }


def scenario_entry(name, world):
    """Its story, and the presence of its parameters over 64 steps."""
    loop, params, story = SCENARIOS[name]
    rows = [presence_row(name, place, world) for place in range(len(params))]
    presence = {"params": list(params), "ranks_with_gradient": rows}
    return {"story": story, "loop": loop, "presence": presence}


def presence_row(name, place, world):
    """The four patterns in turn, or layers that skip."""
    if name.startswith("megatron"):
        layer = (place - 2) // 7 if 2 <= place < 23 else -1
        if layer < 0:
            return [world - (step % 6 == 5) for step in range(64)]
        return [
            sum((step // 2 + layer + rank) % 3 != 0 for rank in range(world)) for step in range(64)
        ]
    odd = world // 2
    phase = 0 if name == "dist_adamw_muon" else place
    row = [(world - odd, odd, world, 0)[(step + phase) % 4] for step in range(64)]
    return [0] * 7 + row[7:] if name == "frozen_and_added" and place > 2 else row


def case(scenario, layout, first, world, steps, every, reduction):
    """One without findings."""
    alone = layout == "one_process"
    exact = reduction == "ordered" or layout == first
    numbers = random.Random(scenario if exact else scenario + layout)
    closed = SCENARIOS[scenario][0] == "closed"
    calls = {"one_process": 0, "none": 6}.get(layout, 14)
    samples = []
    for step in range(every, steps + 1, every):
        away = {
            key: size * step**0.4 * numbers.uniform(0.8, 1.3)
            for key, size in (("adam", 2e-8), ("mu_a", 3e-7), ("mu_b", 2.2e-7), ("state", 6e-8))
        }
        apart = {key: 0.0 if exact else value / 5 for key, value in away.items()}
        comparable = not closed or step <= 100
        zero = None if alone else 0.0
        samples.append(
            {
                "step": step,
                "max_adam_abs_diff": zero,
                "max_mu_a_abs_diff": zero,
                "max_mu_b_abs_diff": zero,
                "max_abs_param_diff": 0.0,
                "max_abs_state_diff": 0.0,
                "reference": away if comparable else None,
                "layouts": None
                if layout == first or not (comparable or reduction == "ordered")
                else apart,
                "collectives": calls * step,
                "same_collectives": True,
            }
        )
    kinds = {"one_process": (), "none": ("all_reduce",)}.get(
        layout, ("all_to_all", "all_gather", "all_reduce")
    )
    collectives = {
        kind: {
            "calls": calls * steps // len(kinds),
            "elements": 1_204_000 // (place + 1),
            "sent": 4_816_000 // (place + 1),
            "waited": 0.8 / (place + 1),
            "in_flight": 2.1 / (place + 1),
        }
        for place, kind in enumerate(kinds)
    }
    return {
        "scenario": scenario,
        "layout": layout,
        "world_size": world,
        "seed": 0,
        "steps": steps,
        "steps_taken": steps,
        "sample_every": every,
        "reduction": reduction,
        "status": "exact" if exact else "within_tolerance",
        "findings": [],
        "samples": samples,
        "fingerprint": f"{random.Random(scenario + layout).getrandbits(64):016x}",
        "schedule": [] if alone else ["Agree 0", "Reduce 0.0", "Average 0.0", "Update 0.0"],
        "collectives": collectives,
        "collectives_per_step": float(calls),
        "bytes_per_step": sum(entry["sent"] for entry in collectives.values()) / steps,
        "seconds": 4.5,
        "positions": {},
        "flights": {},
    }


def finding(check, step, message):
    """One finding."""
    return {"check": check, "step": step, "message": message}


def dumps(world, stuck=False):
    """What the flight recorders of all ranks dumped; `stuck`: the last rank goes its own way."""
    return {str(rank): dump(rank, world, stuck) for rank in range(world)}


def dump(rank, world, stuck):
    """The last operations of a rank."""
    names = [f"{what} {n} of 0" for n in range(4) for what in ("reduce bucket", "gather bucket")]
    last = 700 - (stuck and rank == world - 1)
    records = []
    for number in range(last - 12, last):
        name = names[number % len(names)]
        if stuck and number >= 697:
            name = "presence of 0" if rank == world - 1 else "reduce bucket 3 of 0"
        waiting = stuck and number == last - 1
        records.append(
            {
                "number": number,
                "name": name,
                "kind": "all_reduce" if "presence" in name else "all_to_all",
                "ranks": list(range(world)),
                "elements": 1536 + number % 7,
                "dtype": "int32" if "presence" in name else "float32",
                "sent": 4096,
                "waited": 0.0 if waiting else 0.0004,
                "failed": waiting and rank != world - 1,
                "launched_ago": 20.1 + (last - number) * 0.002,
                "finished_ago": None if waiting else 20.1 + (last - number) * 0.001,
            }
        )
    return {
        "rank": rank,
        "count": last,
        "digest": "5d41402abc4b2a76b9719d911017c592",
        "in_flight": [deepcopy(records[-1])] if stuck else [],
        "records": records,
        "totals": {
            "all_to_all": {
                "calls": last,
                "elements": 1_000_000,
                "sent": 4_000_000,
                "waited": 20.8,
                "in_flight": 22.0,
            }
        },
    }


def mutants(escaped=()):
    """One per kind of damage."""
    return [
        {
            "name": name,
            "story": story,
            "scenario": "dist_adamw_muon_random",
            "layout": "zero2",
            "world_size": 2,
            "expected": check,
            "caught": name not in escaped,
            "by": [] if name in escaped else list(dict.fromkeys([check, "reference"])),
            "step": None if name in escaped else 10 + 7 * place,
            "message": "" if name in escaped else f"{check} found it",
            "unpatched": "exact",
            "seconds": 1.5,
        }
        for place, (name, (story, check)) in enumerate(MUTANTS.items())
    ]
