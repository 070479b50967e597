"""A small model that packages of others and ours train on the same data."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HIDDEN = 11, 5, 9
SEQUENCES = 8  # of all ranks together
BEFORE, AFTER = 5, 20  # steps until it was saved, and of the run that went on


class Net(nn.Module):
    """Sizes that no number of ranks divides, biases, a norm and an embedding."""

    def __init__(self, seed=0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)

    def forward(self, tokens):
        """The loss of guessing each next token."""
        x = self.embed(tokens)
        x = self.head(self.norm(x + self.down(torch.tanh(self.up(x)))))
        return functional.cross_entropy(x[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(step, rank=0, world=1):
    """What a rank has of a step: together the same, on any number of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, 6), generator=generator)
    return tokens[rank::world]


def adamw_groups(model):
    """Two groups, as everybody has them: with weight decay and without."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]


ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def muon_groups(model):
    """Hidden matrices, and all others."""
    matrices = [model.up.weight, model.down.weight]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return matrices, others
