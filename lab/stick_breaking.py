"""Stick-breaking attention in blocks: memory O(n), and time that follows how far back a model looks.

Each block of queries starts at its own keys and goes back, a block of keys at a time, with the logarithm of what is
left of each query's stick. It stops where nothing is left that the precision could show. In decoding the cache is read
in the same way. The definition is ideas.stick_breaking_attention.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import general_form
from attention.scores import at_least_float32, uncompiled

BLOCK = 64  # tokens


def stick_breaking(definition: Callable) -> Callable:
    """The fast form of the definition (attention/forms.py): for long heads without bias, decay and dropout."""
    general = general_form(definition)

    @uncompiled  # how many blocks there are depends on the numbers
    def attend(q, k, v, *, window=None, scale=None, bias=None, decay=None, dropout=0.0, far=None):
        few = 1 < q.shape[-2] and k.shape[-2] <= 2 * BLOCK  # for which the definition is faster
        if few or window is not None or bias is not None or decay is not None or far is not None or dropout:
            return general(q, k, v, window=window, scale=scale, bias=bias, decay=decay, dropout=dropout, far=far)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        with torch.autocast(q.device.type, enabled=False):
            form = one_query if q.shape[-2] == 1 < k.shape[-2] else Blocks.apply
            return form(at_least_float32(q) * scale, at_least_float32(k), at_least_float32(v)).to(v.dtype)

    return attend


def nothing(x: Tensor) -> float:
    """The logarithm of a part of a stick that x's precision does not show."""
    return math.log(torch.finfo(x.dtype).eps) - 3


def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y (B, H, 1, Dv) of the last token's query (B, H, 1, D), scaled."""
    left, y = torch.zeros_like(q[..., :1]), v.new_zeros(*q.shape[:-1], v.shape[-1])
    end = k.shape[-2] - 1
    while end > 0 and left.max() > nothing(q):
        start = max(0, end - BLOCK)
        s = q @ k[..., start:end, :].mT
        from_here = F.logsigmoid(-s).flip(-1).cumsum(-1).flip(-1)
        y = y + (s + from_here + left).exp() @ v[..., start:end, :]
        left, end = left + from_here[..., :1], start
    return y


def walk(q: Tensor, k: Tensor, heads: int, pad: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Goes back from each block of queries; yields (blocks of queries, their blocks of keys, scores, weights) at once.

    q (heads * nq, r, D), scaled: the last nq blocks of each head; k (heads * nk, BLOCK, D). The first `pad` keys of
    each head do not exist. Scores and weights (n, r, BLOCK) of the n blocks of queries that have something left.
    """
    nq, nk, r = len(q) // heads, len(k) // heads, q.shape[1]
    earlier = q.new_ones(BLOCK, BLOCK).tril(-1)  # x @ earlier: for each key the sum of x over the keys after it
    left = q.new_zeros(q.shape[:2])
    rows = torch.arange(len(q), device=q.device)
    first = rows // nq * nk  # the first block of keys of the same head
    at, own = first + rows % nq + nk - nq, True
    while len(rows):
        s = q[rows] @ k[at].mT
        if own:
            s, own = s.masked_fill_(earlier[-r:] == 0, -math.inf), False
        if pad and (begins := at == first[rows]).any():
            s[begins, :, :pad] = -math.inf
        not_taken = F.logsigmoid(-s)
        yield rows, at, s, (s + not_taken + not_taken @ earlier + left[rows, :, None]).exp_()
        left[rows] += not_taken.sum(-1)
        goes_on = (at > first[rows]) & (left[rows].amax(-1) > nothing(q))
        rows, at = rows[goes_on], at[goes_on] - 1


class Blocks(torch.autograd.Function):
    """y (B, H, Tq, Dv) of q (B, H, Tq, D), scaled, k (B, H, T, D) and v (B, H, T, Dv)."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.sizes = q.shape[0] * q.shape[1], -k.shape[-2] % BLOCK
        ctx.few = min(BLOCK, q.shape[-2])  # queries in a block
        of_q, of_k, of_v = cut(q, ctx.few), cut(k), cut(v)
        y = of_v.new_zeros(*of_q.shape[:2], v.shape[-1])
        for rows, at, _, weights in walk(of_q, of_k, *ctx.sizes):
            y[rows] += weights @ of_v[at]
        y = joined(y, q)
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        """With h_ij = a_ij (dy_i v_j): ds_il = h_il - sigmoid(s_il) times the sum of h_ij over j <= l."""
        q, k, v, y = ctx.saved_tensors
        of_q, of_dy, of_k, of_v = cut(q, ctx.few), cut(dy, ctx.few), cut(k), cut(v)
        dq, dk, dv = torch.zeros_like(of_q), torch.zeros_like(of_k), torch.zeros_like(of_v)
        earlier = of_q.new_ones(BLOCK, BLOCK).tril(-1)
        before = (of_dy * cut(y, ctx.few)).sum(-1)  # the sum of h over the keys that are still to come
        for rows, at, s, weights in walk(of_q, of_k, *ctx.sizes):
            h = weights * (of_dy[rows] @ of_v[at].mT)
            ds = h - s.sigmoid() * (before[rows, :, None] - h @ earlier)
            before[rows] -= h.sum(-1)
            dq[rows] += ds @ of_k[at]
            dk[at] += ds.mT @ of_q[rows]
            dv[at] += weights.mT @ of_dy[rows]
        return joined(dq, q), joined(dk, k), joined(dv, v)


def cut(x: Tensor, size: int = BLOCK) -> Tensor:
    """x (B, H, T, D) in blocks of `size` tokens, (B H n, size, D), with zeros before the first token."""
    return F.pad(x, (0, 0, -x.shape[-2] % size, 0)).reshape(-1, size, x.shape[-1])


def joined(blocks: Tensor, like: Tensor) -> Tensor:
    """The tokens of blocks that `cut` made of a tensor with the same B, H and T as `like`."""
    return blocks.reshape(*like.shape[:2], -1, blocks.shape[-1])[..., -like.shape[-2] :, :]
