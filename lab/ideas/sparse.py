"""Attentions that choose keys: blocks of them, or those that earlier tokens have left.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.sparse \
        --attention=moba --position=rope

moba         the blocks whose mean key is nearest (MoBA)
nsa          means of blocks, the best blocks and the last keys, gated (NSA)
selective    keys that later tokens do not need get lower scores

Importing this file adds them to model.ATTENTION. Their heads are long: moba and nsa count keys from
the first one, selective sums over all earlier queries. They are written to be read: they take all
scores, and save no time.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cache import Cache
from attention.scores import of_token, plain_form
from errors import UserError
from lab.ideas.scores import Long
from model import ATTENTION

BLOCK = 16  # keys
BEST = 3  # blocks of keys that a query reads


def means(x: Tensor) -> Tensor:
    """The means of x (..., T) over each BLOCK of keys, (..., n), zeros after the last one."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).mean(-1)


def of_keys(x: Tensor, T: int) -> Tensor:
    """What is true of blocks (..., n), for each of their T keys."""
    return x.repeat_interleave(BLOCK, dim=-1)[..., :T]


def best(worth: Tensor, n: int) -> Tensor:
    """True for the n largest of each row of worth (..., blocks), but never for -inf."""
    index = worth.topk(min(n, worth.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, index, True)
    return chosen & (worth > -math.inf)


def moba_scores(s, seen, v, drop):
    """y = softmax(s) v over the query's own block and two more.

    Of the blocks before its own those with the largest q k, k the mean of their keys: that is the
    mean of their scores.
    """
    own = (seen.sum(-1, keepdim=True) - 1) // BLOCK
    block = torch.arange(-(-s.shape[-1] // BLOCK), device=s.device)
    worth = means(s).where(block < own, -math.inf).masked_fill(block == own, math.inf)
    read = of_keys(best(worth, BEST), s.shape[-1])
    return drop(s.where(seen & read, -math.inf).softmax(-1)) @ v


class MoBA(Long):
    """Mixture of block attention (arXiv 2502.13189, equations 2 to 6): see moba_scores."""

    attention = moba_scores


def nsa_scores(s, seen, v, drop, g=of_token(0.0, width=3)):
    """y = sum of sigmoid(g_c) y_c of three branches.

    y_1 reads the means of whole blocks, y_2 the first block, the last two and the best by the
    weights of y_1, y_3 the last 2 BLOCK keys.
    """
    place = seen.sum(-1, keepdim=True) - 1
    block = torch.arange(-(-s.shape[-1] // BLOCK), device=s.device)
    whole = block < (place + 1) // BLOCK
    weights = means(s).where(whole, -1e30).softmax(-1) * whole  # 0 where no block is whole
    y = [drop(weights) @ means(v.mT).mT]

    own = place // BLOCK
    always = (block == 0) | (own - block == 1) | (own == block)
    worth = weights.masked_fill(block > own, -math.inf).masked_fill(always, math.inf)
    key = torch.arange(s.shape[-1], device=s.device)
    for read in (of_keys(best(worth, 1 + BEST), len(key)), place - key < 2 * BLOCK):
        y.append(drop(s.where(seen & read, -math.inf).softmax(-1)) @ v)
    gates = g[..., -s.shape[-2] :, :].sigmoid()  # of the query's token
    return sum(gate * x for gate, x in zip(gates.split(1, dim=-1), y, strict=True))


class NSA(Long):
    """Native sparse attention (arXiv 2502.11089, equations 5 to 12): see nsa_scores.

    Chosen: phi (equation 7) is the mean, blocks do not overlap, the branches share keys and values,
    each head chooses its blocks, and heads of a group have the same gates. The paper's phi is an
    MLP, its branches have keys of their own, and the heads of a group choose together.
    """

    attention = nsa_scores


def selective_scores(s, seen, v, drop):
    """y = softmax(s - F) v, F_ij the sum of relu(S_kj) over queries k, j < k < i.

    S are the first head's scores; the first key is never masked.
    """
    S = s[:, :1].where(seen.tril(-1), 0.0).relu()
    S = torch.cat((torch.zeros_like(S[..., :1]), S[..., 1:]), dim=-1)
    return drop((s - S.cumsum(-2) + S).where(seen, -math.inf).softmax(-1)) @ v


class Selective(Long):
    """Selective attention (arXiv 2410.02703): a token that was read need not be read again.

    See selective_scores, which runs on all tokens at once. So a cache keeps the inputs of the
    layer, and each new token computes all before it again.
    """

    attention = selective_scores

    def __init__(self, c, layer):
        if c.qkv in ("value_residual", "cla"):
            raise UserError(
                f"selective attention computes a layer again: it takes no qkv={c.qkv!r}"
            )
        super().__init__(c, layer)
        for heads in self.heads:
            heads.run = plain_form(heads.definition)

    def forward(self, x, context=None):
        if isinstance(context, Cache):
            before = context.state.get(self, x[:, :0])
            context.state[self] = torch.cat((before, x), dim=1)
            return super().forward(context.state[self])[:, -x.shape[1] :]
        return super().forward(x, context)


ATTENTION |= {"moba": MoBA, "nsa": NSA, "selective": Selective}
