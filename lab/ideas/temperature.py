"""A temperature of each dimension of the queries (LASER, Duvvuri and Dhillon, section 4).

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.temperature \
        --qk_norm=per_dim

Importing this file adds it to parts.QK_NORM.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from parts import QK_NORM


class PerDim(nn.Module):
    """q softplus(p), before positions turn q. p (D,) begins where this is q itself."""

    def __init__(self, D: int):
        super().__init__()
        self.p = nn.Parameter(torch.full((D,), math.log(math.e - 1)))

    def forward(self, q):
        return q * F.softplus(self.p)


QK_NORM["per_dim"] = lambda c, D: (PerDim(D), nn.Identity())
