"""Attention that is not causal: every token sees the whole text, or another text.

CausalSelfAttention passes its queries, keys and values to its `context`, if it has one. A Bidirectional is such a
context: it calls the definition of the attention with a mask of its own. This costs T^2, also for short heads and beta.
An Encoder is a GPT whose positions know later tokens too; it is called with a Bidirectional.
"""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import LASER_RANGE
from attention.forms import unchanged
from attention.heads import HeadGroup
from attention.scores import distances, plain_form, with_one_hot
from errors import UserError
from model import GPT, CausalSelfAttention, GPTConfig, laser_attention
from positions import DECAY, POSITION, T5, ALiBi, Relative, RoPE
from scripts.maps import weights_at_once


class BothALiBi(ALiBi):
    """ALiBi on both sides: weights are multiplied by exp(-slope |i - j|), or -slope |i - j| is added to the scores."""

    def forward(self, q, k, group, past):
        slopes = self.slopes if self.log_slopes is None else self.log_slopes.exp()
        return q, k, {"decay": slopes[group.q][:, None, None]}


class BothRelative(Relative):
    """Shaw et al.'s positions on both sides: a vector of keys and one of values for each clip(j - i, -k, k), which are
    2k + 1 distances, k = max_distance (Shaw et al. 2018, equations 3 to 5)."""

    def __init__(self, c):
        super().__init__(replace(c, max_distance=2 * c.max_distance))  # one vector more than max_distance

    def forward(self, q, k, group, past):
        bias = self.scale * (q @ self.k.to(q.dtype).mT)  # (B, H, T, 2k + 1)
        at = clipped(q.shape[-2], len(self.k), q.device)
        return q, k, {"bias": bias.gather(-1, at.expand(*bias.shape[:2], -1, -1)), "far": self.v}


def clipped(T: int, n: int, device: torch.device) -> Tensor:
    """clip(j - i, -k, k) + k of query i and key j, (T, T), for n = 2k + 1 distances."""
    return (n // 2 - distances(T, T, device)).clamp(0, n - 1)


class BothT5(T5):
    """T5's positions on both sides: 16 of the 32 buckets are for earlier keys, 16 for later ones (Raffel et al. 2019,
    section 2.1, and their encoder's code)."""

    def __init__(self, c):
        super().__init__(c)
        offset = torch.arange(1 - c.block_size, c.block_size)  # j - i
        self.register_buffer("bucket", bucket_of_both(offset, c.max_distance), persistent=False)

    def forward(self, q, k, group, past):
        by_offset = self.table(self.bucket).T[group.q]  # (H, 2 block_size - 1)
        at = len(self.bucket) // 2 - distances(q.shape[-2], q.shape[-2], q.device)
        return q, k, {"bias": by_offset[None, :, at]}


def bucket_of_both(offset: Tensor, max_distance: int) -> Tensor:
    """The bucket of each j - i. Each distance below 8 has its own; 8 more widen by a factor up to max_distance."""
    distance, exact = offset.abs(), T5.buckets // 4
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * exact
    bucket = torch.where(distance < exact, distance, (exact + far.long()).clamp(max=2 * exact - 1))
    return bucket + 2 * exact * (offset > 0)


class Encoder(GPT):
    """A GPT whose positions know later tokens too. Its attention needs a Bidirectional as its context."""

    def __init__(self, config: GPTConfig):
        both = {"alibi": (None, BothALiBi), "relative": (None, BothRelative), "t5": (None, BothT5)}
        decay = {"alibi": BothALiBi, "learned": partial(BothALiBi, learned=True)}
        with mock.patch.dict(POSITION, both), mock.patch.dict(DECAY, decay):  # while the GPT is made
            super().__init__(config)


class Bidirectional:
    """Makes the attention layers that get it as their `context` see the tokens on both sides, and no padding.

    seen (B, T): False where a key is padding; None: there is none. A short head sees the keys with |i - j| <= window
    (LS-attention, equation 4). other (B, N, C): the text that a CrossAttention looks at; then seen (B, N) is about it.
    found: a list to which each group of heads of each CrossAttention appends its weights; None: they are not computed.
    Raises UserError for a position inside attention that is not one of an Encoder's.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, seen: Tensor | None = None, other: Tensor | None = None, found: list | None = None):
        self.seen, self.other, self.found = seen, other, found

    def attend(self, group: HeadGroup, q, k, v, *, window: int | None, **settings) -> Tensor:
        """y (B, H, T, Dv) of a group of heads. group.core, its causal form, is not used."""
        known = (RoPE, BothALiBi, BothRelative, BothT5)
        for name in (type(scheme).__name__ for scheme in group.schemes if not isinstance(scheme, known)):
            raise UserError(f"{name} counts how far a key lies behind a query, so it cannot be used in an encoder")
        far = settings.pop("far", None)
        k, v = group.share(k, v)
        near = distances(q.shape[-2], k.shape[-2], q.device).abs() <= (math.inf if window is None else window)  # (T, T)
        seen = near if self.seen is None else near & self.seen[:, None, None, :]
        seen = torch.where(seen.any(-1, keepdim=True), seen, near)  # where all is padding: any finite output
        if self.found is not None:
            self.found.append(weights_at_once(group.name, q, k, seen=seen, scale=settings["scale"]))
        fast = group.name == "laser" and unchanged("laser", group.definition)
        values = v if far is None else with_one_hot(v)
        y = plain_form(laser_by_exp if fast else group.definition)(q, k, values, seen=seen, **settings)
        if far is not None:  # BothRelative's values, by distance: what attention makes of one-hot values is its weights
            y, weights = y.split((v.shape[-1], k.shape[-2]), dim=-1)
            at = clipped(q.shape[-2], len(far), q.device).expand_as(weights)
            y = y + weights.new_zeros(*weights.shape[:-1], len(far)).scatter_add(-1, at, weights) @ far.to(y.dtype)
        return y.to(v.dtype)


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
