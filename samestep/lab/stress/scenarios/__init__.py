"""Every scenario, by name."""

from collections import ChainMap

from samestep.lab.stress.scenario import Scenario
from samestep.lab.stress.scenarios import hybrid, patterns, recipes, small_state

SCENARIOS: dict[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (
        patterns.FourPatterns,
        patterns.FourPatternsRandom,
        patterns.MegatronConditional,
        patterns.MegatronConditionalLive,
        patterns.FixedCapacity,
        patterns.ConditionalCompute,
        patterns.EmptyExpert,
        recipes.FrozenAndAdded,
        patterns.UnevenAccumulation,
        patterns.UnevenAccumulationSharded,
        recipes.NotFinite,
        recipes.Overflow,
        patterns.AllocatorChurn,
        recipes.Schedules,
        recipes.Clipped,
        recipes.NorMuon,
        recipes.FusedMHA,
        recipes.FusedGQA,
        recipes.FusedMQA,
        recipes.Resumed,
        recipes.ResumedMidrun,
        patterns.DifferentStart,
    )
}

# Run when they are named: `all` is what fits into a few minutes.
SCENARIOS_ON_REQUEST: dict[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (
        patterns.ExpertStacks,
        recipes.FusedInGroups,
        recipes.SchedulesToZero,
        recipes.OptionsOfPeers,
        recipes.ClippedByRule,
        small_state.EightBits,
        small_state.RandomBFloat16,
        small_state.Remainders,
        hybrid.HybridGPT,
        hybrid.HybridConditional,
        hybrid.HybridLoRA,
        hybrid.FSDPOnHalves,
        hybrid.TwoOptimizersInOneBackward,
        hybrid.FusedQKVCut,
    )
}
EVERY_SCENARIO = ChainMap(SCENARIOS_ON_REQUEST, SCENARIOS)
