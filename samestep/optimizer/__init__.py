"""The optimizers: MuonAdamW, Muon and AdamW."""

from samestep.optimizer.muon_adamw import AdamW, Muon, MuonAdamW

__all__ = ["AdamW", "Muon", "MuonAdamW"]
