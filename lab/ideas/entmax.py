"""Entmax with alpha = 1.5: low scores get no weight at all (Peters et al. 2019, 1905.05702).

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.entmax \
        --attention=entmax15

Importing this file adds it to model.ATTENTION.
"""

import math

import torch

from model import ATTENTION


class Entmax15(torch.autograd.Function):
    """p = max(0, s / 2 - tau)^2 over the last dimension, with tau such that p sums to 1."""

    @staticmethod
    def forward(ctx, s):
        s = (s - s.amax(-1, keepdim=True)) / 2

        # tau begins too small, and Newton's steps never make it too large
        tau = -torch.ones_like(s[..., :1])
        halvings = math.log2(s.shape[-1]) / 2  # of tau, where all scores are equal
        for _ in range(5 + math.ceil(halvings)):
            x = (s - tau).clamp(min=0)
            tau += (x.square().sum(-1, keepdim=True) - 1) / (2 * x.sum(-1, keepdim=True))

        root = (s - tau).clamp(min=0)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dp):
        (root,) = ctx.saved_tensors
        mean = (root * dp).sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
        return root * (dp - mean)


def entmax15_attention(s, seen, v, drop):
    """y = entmax15(s) v."""
    return drop(Entmax15.apply(s.where(seen, -math.inf))) @ v


ATTENTION["entmax15"] = entmax15_attention
