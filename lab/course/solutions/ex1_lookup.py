"""A solution of exercise 1."""

import torch
from torch import Tensor


def mean(v: Tensor) -> Tensor:
    total = torch.zeros_like(v[0])
    for row in v:
        total = total + row
    return total / len(v)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.T / q.shape[-1] ** 0.5


def softmax(s: Tensor) -> Tensor:
    weights = (s - s.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def lookup(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(scores(q, k)) @ v
