"""Attention that is not causal: every token sees the whole text, or another text.

CausalSelfAttention passes its queries, keys and values to its `context`, if it has one. A
Bidirectional is such a context: it calls the attention's definition with another mask. This costs
T^2, also for short heads and beta. An Encoder is a GPT whose positions know later tokens too; it is
called with a Bidirectional.
"""

import math
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import LASER_RANGE
from attention.forms import unchanged
from attention.heads import HeadGroup
from attention.scores import distances, plain_form
from errors import UserError
from lab.ideas.positions import T5, Relative
from lab.look.maps import weights_at_once
from model import GPT, CausalSelfAttention, GPTConfig, laser_attention
from positions import DECAY, POSITION, ALiBi, RoPE


class BothALiBi(ALiBi):
    """ALiBi on both sides: weights are multiplied by exp(-slope |i - j|).

    In an attention that has no `fade`, -slope |i - j| is added to the scores.
    """

    def forward(self, q, k, group, past):
        slopes = self.slopes if self.log_slopes is None else self.log_slopes.exp()
        return q, k, {"decay": slopes[group.q][:, None, None]}


class LearnedBothALiBi(BothALiBi):
    """ALiBi on both sides with slopes that begin at ALiBi's and are trained."""

    learned = True


class BothRelative(Relative):
    """Shaw et al.'s positions on both sides (Shaw et al. 2018, equations 3 to 5).

    A vector for keys and one for values belong to each clip(j - i, -k, k). These are 2k + 1
    distances, k = max_distance.
    """

    def __init__(self, c):
        # Relative makes one vector more than max_distance.
        super().__init__(replace(c, max_distance=2 * c.max_distance))

    def place(self, Tq, T, device):
        return place_in(self.k, T).clamp(0, len(self.k) - 1)


def place_in(table: Tensor, T: int) -> Tensor:
    """j - i + k of query i and key j, (T, T): their offset's place in a table of -k to k."""
    return len(table) // 2 - distances(T, T, table.device)


class BothT5(T5):
    """T5's positions on both sides (Raffel et al. 2019, section 2.1, and their encoder's code).

    16 of the 32 buckets are for earlier keys, 16 for later ones.
    """

    def __init__(self, c):
        super().__init__(c)
        offset = torch.arange(1 - c.block_size, c.block_size)  # j - i
        self.register_buffer("bucket", bucket_of_both(offset, c.max_distance), persistent=False)

    def forward(self, q, k, group, past):
        by_offset = self.table(self.bucket).T[group.q]  # (H, 2 block_size - 1)
        return q, k, {"bias": by_offset[None, :, place_in(self.bucket, q.shape[-2])]}


def bucket_of_both(offset: Tensor, max_distance: int) -> Tensor:
    """The bucket of each offset j - i.

    On each side, every distance below 8 has its own bucket; 8 more buckets, each wider than the one
    before by the same factor, reach to max_distance.
    """
    distance = offset.abs()
    exact = T5.buckets // 4
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * exact
    far = (exact + far.long()).clamp(max=2 * exact - 1)
    return torch.where(distance < exact, distance, far) + 2 * exact * (offset > 0)


class Encoder(GPT):
    """A GPT whose positions know later tokens too. Its context must be a Bidirectional."""

    def __init__(self, config: GPTConfig):
        both = {"alibi": (None, BothALiBi), "relative": (None, BothRelative), "t5": (None, BothT5)}
        decay = {"alibi": BothALiBi, "learned": LearnedBothALiBi}
        with mock.patch.dict(POSITION, both), mock.patch.dict(DECAY, decay):
            super().__init__(config)


class Bidirectional:
    """The `context` of attention layers that see the tokens on both sides, and no padding.

    seen (B, T): False where a key is padding; None: there is no padding. A short head sees the keys
    with |i - j| <= window (LS-attention, equation 4).
    other (B, N, C): the text that a CrossAttention looks at; seen (B, N) then belongs to this text.
    weights: a list; each group of heads appends its attention weights. None: they are not computed.
    """

    length = 0  # tokens before x, as in a Cache; here always 0

    def __init__(self, seen=None, other=None, weights=None):
        self.seen = seen
        self.other = other
        self.weights = weights

    def attend(self, group: HeadGroup, q, k, v, *, window=None, **settings):
        """y (B, H, T, Dv) of a group of heads, by its definition. group.form is not used.

        Raises UserError for a position inside attention that an Encoder does not have.
        """
        for scheme in group.schemes:
            if not isinstance(scheme, (RoPE, BothALiBi, BothRelative, BothT5)):
                raise UserError(
                    f"{type(scheme).__name__} counts how far a key lies behind a query, "
                    "so it cannot be used in an encoder"
                )
        k, v = group.share(k, v)
        seen = self.visible(q.shape[-2], window, q.device)
        if self.weights is not None:
            weights = weights_at_once(group.name, q, k, seen=seen, scale=settings["scale"])
            self.weights.append(weights)
        definition = group.definition
        if group.name == "laser" and unchanged("laser", definition):
            definition = laser_by_exp
        return plain_form(definition)(q, k, v, seen=seen, **settings)

    def visible(self, T: int, window: int | None, device: torch.device):
        """Which of T keys each of T queries sees: (T, T), or (B, 1, T, T) with padding.

        A query that would see nothing but padding sees it: its output is finite, and is not used.
        """
        near = distances(T, T, device).abs() <= (math.inf if window is None else window)
        if self.seen is None:
            return near
        seen = near & self.seen[:, None, None, :]
        return torch.where(seen.any(-1, keepdim=True), seen, near)


def laser_by_exp(s: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """LASER with exp around softmax, as in its paper: without the definition's T x T x Dv numbers.

    Where the values differ so much that exp could underflow, the definition runs.
    """
    if (v.amax(-2) - v.amin(-2)).max() > LASER_RANGE:
        return laser_attention(s, seen, v)
    shift = v.detach().amax(-2, keepdim=True)
    return (s.where(seen, -math.inf).softmax(-1) @ (v - shift).exp()).log() + shift


class CrossAttention(CausalSelfAttention):
    """Attention with queries from x, keys and values from another text, context.other (B, N, C).

    It is self-attention of both texts in a row, in which every token sees the other text alone.
    """

    def forward(self, x, context: Bidirectional):
        T = x.shape[1]
        both = torch.cat((context.other, x), dim=1)
        seen = F.pad(context.seen, (0, T), value=False)
        y = super().forward(both, Bidirectional(seen, weights=context.weights))
        return y[:, -T:]
