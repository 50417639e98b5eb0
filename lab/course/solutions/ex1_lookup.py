"""A solution of exercise 1. ../ex1_lookup.py has the shapes."""

import torch


def mean(v):
    total = torch.zeros_like(v[0])
    for row in v:
        total = total + row
    return total / len(v)


def scores(q, k):
    return q @ k.T / q.shape[-1] ** 0.5


def softmax(s):
    weights = (s - s.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def lookup(q, k, v):
    return softmax(scores(q, k)) @ v
