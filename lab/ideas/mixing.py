"""Attentions whose heads, or whose keys, share scores.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.mixing \
        --attention=talking_heads

mta              scores of a key mixed with those of its neighbours (multi-token attention)
talking_heads    scores and weights of each head mixed with those of the others
iha              queries, keys and values of each head from those of all (interleaved heads)

Importing this file adds them to model.ATTENTION. (NAME_scores is what the heads of a layer NAME
compute, and no attention by itself.)
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from attention.scores import learned
from errors import UserError
from lab.ideas.scores import sums_from_here
from model import ATTENTION, CausalSelfAttention
from parts import RoPE, Scheme


def mta_attention(
    s,
    seen,
    v,
    drop,
    a=learned(0.0),
    b=learned(0.0),
    c=learned(1.0),
    d=learned(0.0),
    e=learned(0.0),
):
    """y = softmax(s') v, s'_j = a s_j-2 + b s_j-1 + c s_j + d s_j+1 + e s_j+2 over seen keys.

    Multi-token attention (2504.00927, equation 5) over keys alone, with a kernel of 5. The paper's
    is 11 wide, over 6 queries too, and after the softmax as well; then comes a norm of each head.
    """
    n = s.shape[-1]
    s = F.pad(s.where(seen, 0.0), (2, 2))
    s = sum(w * s[..., i : i + n] for i, w in enumerate((a, b, c, d, e)))
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


def talking_heads_scores(s, seen, v, drop, before=None, after=None):
    """y = after softmax(before s) v: both (H, H) matrices mix heads; None: no mixing."""
    if before is not None:
        s = (s.movedim(1, -1) @ before).movedim(-1, 1)
    weights = s.where(seen, -math.inf).softmax(-1)
    if after is not None:
        weights = (weights.movedim(1, -1) @ after).movedim(-1, 1)
    return drop(weights) @ v


class Matrices(Scheme):
    """The two matrices, which begin as the identity; attention gets them by name."""

    def __init__(self, H):
        super().__init__()
        self.before = nn.Parameter(torch.eye(H))
        self.after = nn.Parameter(torch.eye(H))

    def forward(self, q, k, heads, past):
        return q, k, {"before": self.before, "after": self.after}


class TalkingHeads(CausalSelfAttention):
    """Talking-heads attention (Shazeer et al. 2020, arXiv 2003.02436): see talking_heads_scores."""

    attention = "talking_heads_scores"

    def __init__(self, c, layer):
        if "S" in c.heads or c.decay != "none":
            raise UserError("the heads of talking_heads are mixed: no short ones, and no decay")
        super().__init__(c, layer)
        self.decay = Matrices(c.n_head)  # a place for arguments of the attention


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
    s = q @ k.mT * q.shape[-1] ** -0.5
    y = drop(s.where(seen, -math.inf).softmax(-1)) @ v
    return y.unflatten(-2, (-1, PSEUDO)).flatten(-2)  # (B, H, Tq, P D)


class RoPEOfEach(RoPE):
    """RoPE that turns the P vectors of a token alike."""

    def __init__(self, c):
        super().__init__(c, width=c.head_dim // PSEUDO)

    def forward(self, q, k, heads, past):
        q, k = (pseudo(x).transpose(-3, -2) for x in (q, k))  # (B, H, P, T, D)
        q, k, _ = super().forward(q, k, heads, past)
        return *(x.transpose(-3, -2).flatten(-2) for x in (q, k)), {}


class IHA(CausalSelfAttention):
    """Interleaved head attention (2602.21371, algorithm 1, definition 3).

    Each head has P queries, keys and values, which are sums over all heads' with weights alpha; its
    P outputs, with those of all heads, are summed with weights R. It begins as ordinary heads.
    Chosen: P = 2; the P vectors of a token have one position, rope or none.
    """

    attention = "iha_scores"

    def __init__(self, c, layer):
        if c.position not in ("rope", "none", "learned"):
            raise UserError(f"iha takes no position={c.position!r}: use rope")
        wide = copy.copy(c)
        wide.head_dim *= PSEUDO
        super().__init__(wide, layer)
        if self.position is not None:
            self.position = RoPEOfEach(wide)
        self.c_attn = Pseudo(c)
        self.c_proj = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=c.bias)
        self.R = nn.Parameter(torch.eye(c.n_head).repeat_interleave(PSEUDO, 0) / PSEUDO)  # (H P, H)

    def attend(self, q, k, v, x, context):
        y = super().attend(q, k, v, x, context)  # (B, H, T, P D)
        y = pseudo(y).transpose(2, 3).flatten(1, 2)  # (B, H P, T, D)
        return (y.movedim(1, -1) @ self.R.to(y.dtype)).movedim(-1, 1)


class Pseudo(nn.Module):
    """q, k and v of all pseudo-heads, (B, T, (H + 2 G) P D)."""

    def __init__(self, c):
        super().__init__()
        self.sizes = H, G, G = c.n_head, c.n_kv_head, c.n_kv_head
        self.qkv = nn.Linear(c.n_embd, (H + 2 * G) * c.head_dim, bias=c.bias)
        eyes = (torch.eye(n).repeat_interleave(PSEUDO, 1) for n in self.sizes)  # (n, n P)
        self.alphas = nn.ParameterList(eyes)

    def forward(self, x, context):
        qkv = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).split(self.sizes, dim=2)
        parts = [(x.mT @ alpha).mT for x, alpha in zip(qkv, self.alphas, strict=True)]
        return torch.cat(parts, dim=2).flatten(2)  # of (B, T, n P, D)


ATTENTION |= {
    "mta": mta_attention,
    "talking_heads_scores": talking_heads_scores,
    "talking_heads": TalkingHeads,
    "iha_scores": iha_scores,
    "iha": IHA,
}
