"""Write files with dion itself, on one CPU rank, without torch.compile.

    PYTHONPATH=.:DION TORCHDYNAMO_DISABLE=1 python -m tests.checkpoint.foreign.make_dion FOLDER

`step5.pt` is of torch.save, `dcp` the same through torch.distributed.checkpoint; both with the
parameters of the run that went on. dion rounds the direction to bfloat16, which turns that of a
matrix of low rank into noise: here it stays in 32 bits, as state is the question.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.checkpoint.foreign.net import AFTER, BEFORE, Net, muon_groups, tokens_of


def write(folder):
    import dion.muon
    import dion.normuon
    from dion import Muon, NorMuon

    rounded = dion.muon.muon_update_pre_orthogonalize

    def unrounded(G, M, momentum, nesterov):
        rounded(G=G, M=M, momentum=momentum, nesterov=nesterov)  # updates M
        return [m * momentum + g if nesterov else m.clone() for m, g in zip(M, G, strict=True)]

    dion.muon.muon_update_pre_orthogonalize = unrounded
    dion.normuon.muon_update_pre_orthogonalize = unrounded

    def exact(matrix, epsilon):
        """Its default in 32 bits: Polar Express, with its factor of the norm."""
        from samestep.rules.orthogonalize import orthogonalize

        return orthogonalize(
            matrix.float(),
            method="polar-express",
            norm_factor=1.02,
            eps=float(epsilon),
            eps_form="add",
        )

    for name, kind in (("muon", Muon), ("normuon", NorMuon)):
        model = Net()
        matrices, others = muon_groups(model)
        groups = [
            {"params": matrices, "adjust_lr": "rms_norm", "nesterov": True},
            {"params": others, "algorithm": "adamw", "betas": (0.9, 0.95), "weight_decay": 0.0},
        ]
        optimizer = kind(groups, lr=0.01, weight_decay=0.1, newton_schulz_func=exact)
        train(model, optimizer, range(BEFORE))
        (folder / name).mkdir(parents=True)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, folder / name / "step5.pt")
        of_model, of_optimizer = get_state_dict(model, optimizer)
        content = {"model": of_model, "optimizer": of_optimizer}
        dcp.save(content, checkpoint_id=folder / name / "dcp", no_dist=True)
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        torch.save(model.state_dict(), folder / name / "expected.pt")


def train(model, optimizer, steps):
    for step in steps:
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
