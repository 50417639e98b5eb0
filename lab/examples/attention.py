"""Attention that is not causal: every token sees the whole text, or another text.

CausalSelfAttention passes its queries, keys and values to its `context`, if it has one. A Bidirectional is such a
context: it calls the definition of the attention with a mask of its own. This costs T^2, also for short heads and beta.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import LASER_RANGE
from attention.forms import unchanged
from attention.heads import HeadGroup
from attention.scores import distances, plain_form
from errors import UserError
from model import ATTENTION, CausalSelfAttention, laser_attention
from positions import ALiBi, RoPE


class Bidirectional:
    """Makes the attention layers that get it as their `context` see the tokens on both sides, and no padding.

    seen (B, T): False where a key is padding; None: there is none. A short head sees the keys with |i - j| <= window
    (LS-attention, equation 4). other (B, N, C): the text that a CrossAttention looks at; then seen (B, N) is about it.
    found: a list to which each group of heads of each CrossAttention appends its weights; None: they are not computed.
    Raises UserError for a position or a decay that has no meaning for later tokens.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, seen: Tensor | None = None, other: Tensor | None = None, found: list | None = None):
        self.seen, self.other, self.found = seen, other, found

    def attend(self, core: Callable, group: HeadGroup, q, k, v, *, window: int | None, **settings) -> Tensor:
        """y (B, H, T, Dv) of a group of heads. core, its causal form, is not used."""
        known = (RoPE, ALiBi) if group.fades else RoPE  # a decay that multiplies weights goes to both sides
        message = "counts how far a key lies behind a query, so it cannot see later tokens: use"
        for name in (type(x).__name__ for x in group.schemes if not isinstance(x, known)):
            raise UserError(f"{name} {message} --position=learned, sinusoidal, rope or none")
        k, v = group.share(k, v)
        near = distances(q.shape[-2], k.shape[-2], q.device).abs() <= (math.inf if window is None else window)  # (T, T)
        seen = near if self.seen is None else near & self.seen[:, None, None, :]
        seen = torch.where(seen.any(-1, keepdim=True), seen, near)  # where all is padding: any finite output
        if self.found is not None:
            self.found.append(weights_of(group.name, q, k, seen, settings["scale"]))
        fast = group.name == "laser" and unchanged("laser", group.definition)
        return plain_form(laser_by_exp if fast else group.definition)(q, k, v, seen=seen, **settings)


def laser_by_exp(s: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """LASER with exp around softmax, as in its paper: without the definition's T x T x Dv numbers. For usual values."""
    if (v.amax(-2) - v.amin(-2)).max() > LASER_RANGE:
        return laser_attention(s, seen, v)
    shift = v.detach().amax(-2, keepdim=True)
    return (s.where(seen, -math.inf).softmax(-1) @ (v - shift).exp()).log() + shift


class CrossAttention(CausalSelfAttention):
    """Attention with queries from x, and with keys and values from another text, context.other (B, N, C).

    It is self-attention of both texts in a row, in which every token sees the other text alone.
    """

    def forward(self, x: Tensor, context: Bidirectional) -> Tensor:
        seen = F.pad(context.seen, (0, x.shape[1]), value=False)
        both = torch.cat((context.other, x), dim=1)
        return super().forward(both, Bidirectional(seen, found=context.found))[:, -x.shape[1] :]


def weights_of(name: str, q: Tensor, k: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """The weights (B, H, Tq, T) of ATTENTION[name]: what it makes of one-hot values, and LASER of their logarithms."""
    one_hot = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device).expand(*k.shape[:-1], -1)
    attend = plain_form(ATTENTION[name])
    if name == "laser":  # y = log(W exp(v))
        return attend(q, k, one_hot.log(), seen=seen, scale=scale).exp()
    return attend(q, k, one_hot, seen=seen, scale=scale)
