"""Attention that is not causal: every token sees the whole text.

A layer hands its queries, keys and values to its context (attention/cache.py). A Bidirectional is
such a context: it calls the attention's definition with another mask. This costs T^2, also for
short heads and beta. An Encoder is a GPT whose positions know later tokens too; it is called with a
Bidirectional.

Shapes: B batch, H heads, T time, D width of queries and keys, Dv width of values, C n_embd.
"""

import math
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cache import Context
from attention.fast import LASER_RANGE, center
from attention.forms import Heads, unchanged
from attention.scores import caller, distances, scores
from errors import UserError
from model import GPT, GPTConfig, laser_attention, softmax_attention
from parts import DECAY, POSITION, ALiBi, RoPE, Scheme

# -----------------------------------------------------------------------------
# a definition with any mask


def attend(definition, q, k, v, seen, *, scale=None, **settings) -> Tensor:
    """y (B, H, Tq, Dv) of an attention, for q (B, H, Tq, D), k (B, H, T, D) and v (B, H, T, Dv).

    seen: broadcasts to (B, H, Tq, T); True where a query sees a key. The others: see plain_form of
    attention/scores.py.
    """
    if unchanged("laser", definition):
        definition = laser_by_exp
    y = caller(definition)(scores(q, k, scale), seen, q, k, v, **settings)
    return y.to(v.dtype)


def laser_by_exp(s: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """LASER by expm1 and log1p, as in attention/fast.py: without T x T x Dv numbers.

    Where the values of a channel differ so much that expm1 would overflow, the definition runs.
    """
    c = center(v.detach())
    if (v.detach() - c).max() > LASER_RANGE:
        return laser_attention(s, seen, v)
    weights = s.where(seen, -math.inf).softmax(-1)
    return c + torch.log1p(weights @ torch.expm1(v - c))


def weights_of(definition, q, k, seen, **settings) -> Tensor:
    """The weights W (B, H, Tq, T) of an attention with y = W v; LASER's are those of softmax.

    One-hot values become the weights: W I = W. The arguments are those of `attend`.
    """
    if unchanged("laser", definition):
        definition = softmax_attention
    one_hot = torch.eye(k.shape[-2]).to(k).expand(*k.shape[:-1], -1)
    return attend(definition, q, k, one_hot, seen, **settings)


# -----------------------------------------------------------------------------
# in a GPT's layers


class Bidirectional(Context):
    """The context of layers that see the tokens on both sides, and no padding.

    seen (B, N): which of the first N keys are no padding; later keys are not seen. None: all keys
    are seen. A short head sees the keys with |i - j| <= window (LS-attention, equation 4).
    weights: a list, to which the heads of each layer append their weights. None: these are not
    computed.
    """

    def __init__(self, seen=None, weights=None):
        super().__init__()
        self.seen = seen
        self.weights = weights

    def attend(self, heads: Heads, q, k, v, *, window=None, **settings) -> Tensor:
        """y (B, H, T, D) of some heads, by their definition: heads.run would be causal."""
        k, v = heads.expand(k), heads.expand(v)
        seen = self.visible(q.shape[-2], window, q.device)
        if self.weights is not None:
            self.weights.append(weights_of(heads.definition, q, k, seen, **settings))
        return attend(heads.definition, q, k, v, seen, **settings)

    def visible(self, T: int, window: int | None, device: torch.device) -> Tensor:
        """Which of T keys each of T queries sees: (T, T), or (B, 1, T, T) with padding.

        A query that would see nothing but padding sees it: its output is finite, and is not used.
        """
        near = distances(T, T, device).abs() <= (math.inf if window is None else window)
        if self.seen is None:
            return near
        no_padding = F.pad(self.seen, (0, T - self.seen.shape[1]))  # (B, T)
        seen = near & no_padding[:, None, None, :]
        return torch.where(seen.any(-1, keepdim=True), seen, near)


class BothALiBi(ALiBi):
    """ALiBi on both sides: weights are multiplied by exp(-slope |i - j|).

    In an attention that has no `fade`, slope |i - j| is subtracted from the scores.
    """

    def forward(self, q, k, heads, past):
        return q, k, {"decay": self.slopes[heads.numbers][:, None, None]}


class Encoder(GPT):
    """A GPT whose positions know later tokens too. Its context must be a Bidirectional.

    Raises UserError for a position inside attention that knows earlier tokens alone.
    """

    def __init__(self, config: GPTConfig):
        both_sides = mock.patch.dict(POSITION, alibi=(None, BothALiBi))
        with both_sides, mock.patch.dict(DECAY, alibi=BothALiBi):
            super().__init__(config)

        for module in self.modules():
            if isinstance(module, Scheme) and not isinstance(module, RoPE | BothALiBi):
                raise UserError(
                    f"{type(module).__name__} counts how far a key lies behind a query, "
                    "so it cannot be used in an encoder"
                )
