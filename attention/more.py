"""More attentions, in the form of those in model.py: f(q, k, v, *, window=None, scale=None, bias=None) -> y, causal.

model.py adds MORE to its table ATTENTION. An attention that works well beside another one can live here.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from attention.scores import scores, visible

SOFTCAP = 50.0  # Gemma 2's


def softcap_attention(q, k, v, *, window=None, scale=None, bias=None, dropout=0.0, causal=True, seen=None):
    """y = softmax(c tanh(s / c)) v: no score is larger than c = SOFTCAP (Gemma 2, Riviere et al. 2024, section 2)."""
    s, seen = scores(q, k, scale, bias), visible(q, k, window, causal, seen)
    weights = (SOFTCAP * torch.tanh(s / SOFTCAP)).masked_fill(~seen, -math.inf).softmax(-1)
    return F.dropout(weights, dropout).to(v.dtype) @ v


MORE: dict[str, Callable] = {"softcap": softcap_attention}
