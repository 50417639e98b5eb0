"""Attentions whose heads, or whose keys, share scores.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.mixing \
        --attention=talking_heads

mta              scores of a key mixed with those of its neighbours (multi-token attention)
talking_heads    scores and weights of each head mixed with those of the others
iha              queries, keys and values of each head from those of all (interleaved heads)

Importing this file adds them to model.ATTENTION. At first no head is mixed with another one: each
matrix is the identity plus a trained change, which begins as 0 and which weight decay keeps small.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.scores import learned, scores
from errors import UserError
from lab.ideas.scores import Long, sums_from_here
from model import ATTENTION, CausalSelfAttention
from parts import RoPE, Scheme

zero = learned(0.0)  # at first no score is mixed with another


def mta_attention(s, seen, v, drop, a=zero, b=zero, c=learned(1.0), d=zero, e=zero):
    """y = softmax(s') v, s'_j = a s_j-2 + b s_j-1 + c s_j + d s_j+1 + e s_j+2 over seen keys.

    Multi-token attention (arXiv 2504.00927, equation 5) over keys alone: the tokens of its name are
    neighbouring keys. The paper's kernels are 11 keys wide, and 6 queries high, in every fourth
    layer; there are some after the softmax, heads are mixed too, and norms follow.
    """
    n = s.shape[-1]
    s = F.pad(s.where(seen, 0.0), (2, 2))
    s = sum(w * s[..., i : i + n] for i, w in enumerate((a, b, c, d, e)))
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


class Change(nn.Module):
    """x (..., n, T, D) -> (..., m, T, D): sums over heads.

    It begins as x itself; with m = P n each head P times; with n = P m the mean of each P heads.
    """

    def __init__(self, n: int, m: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, m))

    def matrix(self) -> Tensor:
        n, m = self.weight.shape
        start = torch.eye(min(n, m), device=self.weight.device)
        start = start.repeat_interleave(max(1, n // m), 0).repeat_interleave(max(1, m // n), 1)
        return start / max(1, n // m) + self.weight

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return (x.movedim(-3, -1) @ self.matrix().to(x.dtype)).movedim(-1, -3)


NO_CHANGE = nn.Identity()


def talking_heads_scores(s, seen, v, drop, before=NO_CHANGE, after=NO_CHANGE):
    """y = after(softmax(before(s))) v: both mix heads."""
    weights = before(s).where(seen, -math.inf).softmax(-1)
    return drop(after(weights)) @ v


class Talk(Scheme):
    """Gives the attention `before` and `after` by name."""

    def __init__(self, H):
        super().__init__()
        self.before = Change(H, H)
        self.after = Change(H, H)

    def forward(self, q, k, heads, past):
        return q, k, {"before": self.before, "after": self.after}


class TalkingHeads(Long):
    """Talking-heads attention (Shazeer et al. 2020, arXiv 2003.02436): see talking_heads_scores."""

    attention = talking_heads_scores

    def __init__(self, c, layer):
        if c.decay != "none":
            raise UserError(f"talking_heads takes no decay={c.decay!r}")
        super().__init__(c, layer)
        self.decay = Talk(c.n_head)  # a Scheme that gives arguments, as a decay does


PSEUDO = 2  # pseudo-heads of a head


def pseudo(x):
    """(..., T, P D) -> (..., T, P, D)."""
    return x.unflatten(-1, (PSEUDO, -1))


def iha_scores(s, seen, v, drop, q, k):
    """Softmax over T P tokens, P of each token; a vector does not see the token's later ones."""
    q, k, v = (pseudo(x).flatten(-3, -2) for x in (q, k, v))  # (B, H, T P, D)
    own = seen & (sums_from_here(seen) == 1)  # the token itself
    order = torch.ones(PSEUDO, PSEUDO, dtype=torch.bool, device=s.device).triu(1)
    seen = torch.kron(seen, torch.ones_like(order)) & ~torch.kron(own, order)
    y = drop(scores(q, k).where(seen, -math.inf).softmax(-1)) @ v
    return y.unflatten(-2, (-1, PSEUDO)).flatten(-2)  # (B, H, Tq, P D)


class RoPEOfEach(RoPE):
    """RoPE that turns the P vectors of a token alike."""

    def forward(self, q, k, heads, past):
        q, k = (pseudo(x).transpose(-3, -2) for x in (q, k))  # (B, H, P, T, D)
        q, k, _ = super().forward(q, k, heads, past)
        return *(x.transpose(-3, -2).flatten(-2) for x in (q, k)), {}


class IHA(CausalSelfAttention):
    """Interleaved head attention (arXiv 2602.21371, algorithm 1, definition 3).

    Each head has P queries, keys and values, which are sums over all heads'; its P outputs, with
    those of all heads, are summed. Chosen: P = 2; the P vectors of a token have one position, and
    with norms of q and k one norm; a vector sees the earlier ones of its own token.
    """

    attention = iha_scores
    has_scores = False  # q k is not all
    has_maps = False

    def __init__(self, c, layer):
        for name, value in {"qkv": "linear", "decay": "none", "temperature": 1.0}.items():
            if getattr(c, name) != value:
                raise UserError(f"iha takes no {name}={getattr(c, name)!r}")
        if c.scheme not in (None, RoPE):
            raise UserError(f"iha takes no position={c.position!r}: use rope")
        wide = copy.copy(c)
        wide.head_dim *= PSEUDO
        super().__init__(wide, layer)
        if self.position is not None:
            self.position = RoPEOfEach(c)
        self.c_attn = Pseudo(c)
        self.c_proj = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=c.bias)
        self.collapse = Change(c.n_head * PSEUDO, c.n_head)

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)  # (B, H, T, P D)
        return self.collapse(pseudo(y).transpose(2, 3).flatten(1, 2))  # of (B, H P, T, D)


class Pseudo(nn.Module):
    """q, k and v of all pseudo-heads, (B, T, (H + 2 G) P D)."""

    def __init__(self, c):
        super().__init__()
        self.sizes = c.n_head, c.n_kv_head, c.n_kv_head
        self.qkv = nn.Linear(c.n_embd, sum(self.sizes) * c.head_dim, bias=c.bias)
        self.mix = nn.ModuleList(Change(n, n * PSEUDO) for n in self.sizes)

    def forward(self, x, context):
        heads = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)
        parts = [mix(part) for mix, part in zip(self.mix, heads.split(self.sizes, 1), strict=True)]
        return torch.cat(parts, dim=1).transpose(1, 2).flatten(2)  # of (B, n P, T, D)


ATTENTION |= {"mta": mta_attention, "talking_heads": TalkingHeads, "iha": IHA}
