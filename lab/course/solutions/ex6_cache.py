"""A solution of exercise 6. ../ex6_cache.py has the shapes."""

import torch


def softmax_step(q, k, v, cache):
    keys, values = k[None], v[None]
    if cache is not None:
        keys = torch.cat((cache[0], keys))
        values = torch.cat((cache[1], values))
    a = (keys @ q / len(q) ** 0.5).softmax(0)
    return a @ values, (keys, values)


def window_step(q, k, v, cache, w):
    y, (keys, values) = softmax_step(q, k, v, cache)
    first = max(0, len(keys) - w)
    return y, (keys[first:].clone(), values[first:].clone())  # a slice would keep the whole memory


def sum_step(q, k, v, cache):
    S = torch.outer(k, v)
    if cache is not None:
        S = cache[0] + S
    return q @ S, (S,)


def cache_numbers(n, D, w):
    return 2 * n * D, 2 * w * D, D * D
