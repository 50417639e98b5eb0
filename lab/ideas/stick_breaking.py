"""Stick-breaking attention in blocks: memory O(n), and time as far back as a model looks.

Each block of queries starts at its own keys and goes back, a block of keys at a time, with the
logarithm of what is left of each query's stick. It stops where nothing is left that the precision
could show. In decoding the cache is read in the same way. The definition is
ideas.stick_breaking_attention.
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
    """The fast code of the definition's long heads (attention/forms.py)."""
    general = general_form(definition)

    @uncompiled  # how many blocks there are depends on the numbers
    def attend(q, k, v, *, scale=None, dropout=0.0):
        Tq = q.shape[-2]
        T = k.shape[-2]
        is_short = Tq > 1 and T <= 2 * BLOCK  # the definition is faster
        if dropout or is_short:
            return general(q, k, v, scale=scale, dropout=dropout)
        with torch.autocast(q.device.type, enabled=False):
            form = one_query if Tq == 1 < T else Blocks.apply
            q = at_least_float32(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
            y = form(q, at_least_float32(k), at_least_float32(v))
        return y.to(v.dtype)

    return attend


def nothing(x: Tensor) -> float:
    """The logarithm of a part of a stick that x's precision does not show."""
    return math.log(torch.finfo(x.dtype).eps) - 3


def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y (B, H, 1, Dv) of the last token's query (B, H, 1, D), scaled."""
    y = v.new_zeros(*q.shape[:-1], v.shape[-1])
    left = torch.zeros_like(q[..., :1])  # the logarithm of what is left of each stick
    end = k.shape[-2] - 1

    while end > 0 and left.max() > nothing(q):
        start = max(0, end - BLOCK)
        s = q @ k[..., start:end, :].mT
        from_here = F.logsigmoid(-s).flip(-1).cumsum(-1).flip(-1)
        y = y + (s + from_here + left).exp() @ v[..., start:end, :]
        left = left + from_here[..., :1]
        end = start
    return y


def walk(
    q: Tensor, k: Tensor, heads: int, pad: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Goes back from each block of queries; yields (query blocks, key blocks, scores, weights).

    q (heads * nq, r, D), scaled: the last nq blocks of each head; k (heads * nk, BLOCK, D). The
    first `pad` keys of each head do not exist. Scores and weights (n, r, BLOCK) of the n blocks of
    queries that have something left; a block of keys for each.
    """
    nq = len(q) // heads
    nk = len(k) // heads
    r = q.shape[1]
    later = q.new_ones(BLOCK, BLOCK).tril(-1)  # x @ later: for each key the sum over keys after it
    left = q.new_zeros(q.shape[:2])  # the logarithm of what is left of each stick

    rows = torch.arange(len(q), device=q.device)  # blocks of queries
    first = rows // nq * nk  # the first block of keys of the same head
    cols = first + rows % nq + nk - nq  # blocks of keys: at first the queries' own
    is_own = True
    while len(rows):
        # scores of the keys that exist, before the query's own
        s = q[rows] @ k[cols].mT
        if is_own:
            s = s.masked_fill_(later[-r:] == 0, -math.inf)
            is_own = False
        if pad:
            begins = cols == first[rows]
            s[begins, :, :pad] = -math.inf

        not_taken = F.logsigmoid(-s)
        weights = (s + not_taken + not_taken @ later + left[rows, :, None]).exp_()
        yield rows, cols, s, weights

        # one block of keys further back, where something is left
        left[rows] += not_taken.sum(-1)
        goes_on = (cols > first[rows]) & (left[rows].amax(-1) > nothing(q))
        rows = rows[goes_on]
        cols = cols[goes_on] - 1


class Blocks(torch.autograd.Function):
    """y (B, H, Tq, Dv) of q (B, H, Tq, D), scaled, k (B, H, T, D) and v (B, H, T, Dv)."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.heads = q.shape[0] * q.shape[1]
        ctx.pad = -k.shape[-2] % BLOCK
        ctx.block = min(BLOCK, q.shape[-2])  # queries in a block

        of_q = cut(q, ctx.block)
        of_v = cut(v)
        y = of_v.new_zeros(*of_q.shape[:2], v.shape[-1])
        for rows, cols, _, weights in walk(of_q, cut(k), ctx.heads, ctx.pad):
            y[rows] += weights @ of_v[cols]
        y = joined(y, q)
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        """With h_ij = a_ij (dy_i v_j): ds_il = h_il - sigmoid(s_il) sum_j<=l h_ij."""
        q, k, v, y = ctx.saved_tensors
        of_q = cut(q, ctx.block)
        of_dy = cut(dy, ctx.block)
        of_k = cut(k)
        of_v = cut(v)
        dq = torch.zeros_like(of_q)
        dk = torch.zeros_like(of_k)
        dv = torch.zeros_like(of_v)
        later = of_q.new_ones(BLOCK, BLOCK).tril(-1)

        to_come = (of_dy * cut(y, ctx.block)).sum(-1)  # the sum of h over the keys still to come
        for rows, cols, s, weights in walk(of_q, of_k, ctx.heads, ctx.pad):
            h = weights * (of_dy[rows] @ of_v[cols].mT)
            ds = h - s.sigmoid() * (to_come[rows, :, None] - h @ later)
            to_come[rows] -= h.sum(-1)
            dq[rows] += ds @ of_k[cols]
            dk[cols] += ds.mT @ of_q[rows]
            dv[cols] += weights.mT @ of_dy[rows]
        return joined(dq, q), joined(dk, k), joined(dv, v)


def cut(x: Tensor, size: int = BLOCK) -> Tensor:
    """x (B, H, T, D) in blocks of `size` tokens, (B H n, size, D); zeros before the first token."""
    return F.pad(x, (0, 0, -x.shape[-2] % size, 0)).reshape(-1, size, x.shape[-1])


def joined(blocks: Tensor, like: Tensor) -> Tensor:
    """The tokens of blocks that `cut` made of a tensor with the same B, H and T as `like`."""
    return blocks.reshape(*like.shape[:2], -1, blocks.shape[-1])[..., -like.shape[-2] :, :]
