"""A solution of exercise 7. ../ex7_positions.py has the shapes."""

import torch


def angles(T, width):
    """(T, width / 2)."""
    m = torch.arange(width // 2, dtype=torch.float64)
    return torch.arange(T, dtype=torch.float64)[:, None] / 10000 ** (2 * m / width)


def sinusoids(T, C):
    t = angles(T, C)
    return torch.stack((t.sin(), t.cos()), dim=-1).flatten(1)


def rope(x):
    t = angles(*x.shape)
    a, b = x[:, ::2], x[:, 1::2]
    turned = (a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos())
    return torch.stack(turned, dim=-1).flatten(1)


def scores_by_position(q, k, T):
    return rope(q.expand(T, -1)) @ rope(k.expand(T, -1)).T


def with_alibi(q, k, slope):
    i = slope * torch.arange(len(q), dtype=q.dtype)[:, None]
    one = torch.ones_like(i)
    return torch.cat((q, -i, one), dim=1), torch.cat((k, one, i), dim=1)
