"""A solution of exercise 3. ../ex3_window.py has the shapes."""

import math

import torch
from torch.nn import functional as F


def window_attention(q, k, v, w):
    T, D = q.shape
    near_k = F.pad(k, (0, 0, w, 0)).unfold(0, w + 1, 1)  # (T, D, w + 1)
    near_v = F.pad(v, (0, 0, w, 0)).unfold(0, w + 1, 1)
    s = (q[:, None] @ near_k)[:, 0] / D**0.5  # (T, w + 1): the last one is the query's own key
    j = torch.arange(T)[:, None] - w + torch.arange(w + 1)  # each key's index, below 0 for zeros
    a = s.where(j >= 0, -math.inf).softmax(-1)
    return (near_v @ a[..., None])[..., 0]
