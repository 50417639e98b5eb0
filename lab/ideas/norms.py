"""Queries and keys of length 1, with a learned scale (Henry et al. 2020, section 3.1).

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.norms --qk_norm=l2

Importing this file adds it to parts.QK_NORM.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from attention.scores import at_least_float32
from parts import QK_NORM


class L2Norm(nn.Module):
    """x / ||x||_2; with a scale g sqrt(D) x / ||x||_2, a learned g that starts at the scale."""

    def __init__(self, scale: float | None = None):
        super().__init__()
        # of one dimension: FSDP2 cannot shard a scalar
        self.scale = None if scale is None else nn.Parameter(torch.tensor([scale]))

    def forward(self, x):
        x = F.normalize(at_least_float32(x), dim=-1)
        if self.scale is None:
            return x
        return self.scale * x.shape[-1] ** 0.5 * x


def l2_norms(c, D: int) -> tuple[nn.Module, nn.Module]:
    """s = g q k: the factor sqrt(D) of L2Norm cancels the scale 1 / sqrt(D).

    g starts at log2(T^2 - T).
    """
    pairs = max(2, c.block_size**2 - c.block_size)
    return L2Norm(math.log2(pairs)), L2Norm()


QK_NORM["l2"] = l2_norms
