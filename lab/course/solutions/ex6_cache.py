"""A solution of exercise 6."""

import torch
from torch import Tensor


def softmax_step(q: Tensor, k: Tensor, v: Tensor, cache: tuple | None) -> tuple[Tensor, tuple]:
    keys, values = k[None], v[None]
    if cache is not None:
        keys = torch.cat((cache[0], keys))
        values = torch.cat((cache[1], values))
    a = (keys @ q / len(q) ** 0.5).softmax(0)
    return a @ values, (keys, values)


def window_step(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple | None, w: int
) -> tuple[Tensor, tuple]:
    y, (keys, values) = softmax_step(q, k, v, cache)
    first = max(0, len(keys) - w)
    return y, (keys[first:].clone(), values[first:].clone())  # a slice would keep the whole memory


def sum_step(q: Tensor, k: Tensor, v: Tensor, cache: tuple | None) -> tuple[Tensor, tuple]:
    S = torch.outer(k, v)
    if cache is not None:
        S = cache[0] + S
    return q @ S, (S,)


def cache_numbers(n: int, D: int, w: int) -> tuple[int, int, int]:
    return 2 * n * D, 2 * w * D, D * D
