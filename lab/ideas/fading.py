"""Attentions whose keys fade: each channel of a key by itself, or in steps that double.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.fading \
        --attention=wall --position=none

wall          softmax with a forget gate for each channel of a key (Wall attention)
log_linear    linear attention with a weight for each of log n stretches of the past

Importing this file adds them to model.ATTENTION.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from attention.scores import at_least_float32, of_token
from errors import UserError
from lab.ideas.scores import Long
from model import ATTENTION, CausalSelfAttention
from parts import RMSNorm


def wall_scores(s, seen, v, drop, q, k):
    """y = softmax(s) v, s_ij = 1 / sqrt(D) sum_n q_in k_jn e^(p_in - r_jn).

    q is (q, p) and k is (k, r), of D numbers each: p and r are running sums of log gates.
    """
    (q, p), (k, r) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
    fade = (p[..., :, None, :] - r[..., None, :, :]).clamp(max=0).exp()  # (B, H, Tq, T, D)
    s = (q[..., :, None, :] * fade * k[..., None, :, :]).sum(-1) * q.shape[-1] ** -0.5
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


class Wall(CausalSelfAttention):
    """Wall attention (Tilde Research 2026): forgetting attention with a gate for each channel.

    Its gates are sigmoid(W x + 8); it knows no positions. Chosen: query heads that share a key
    share its gates. Slow, for short texts: T^2 D numbers for each head.
    """

    attention = wall_scores
    has_scores = False  # q k is not all

    def __init__(self, c, layer):
        if c.scheme is not None or c.decay != "none":
            raise UserError("wall needs no positions: add --position=none, and no decay")
        super().__init__(c, layer)
        self.c_gate = nn.Linear(c.n_embd, c.n_kv_head * c.head_dim)
        self.temperature = c.temperature

    def attend(self, q, k, v, x, context):
        log_gate = F.logsigmoid(at_least_float32(self.c_gate(x)) + 8.0)
        sums = log_gate.unflatten(-1, k.shape[1::2]).transpose(1, 2).cumsum(2)  # (B, G, T, D)
        sums = sums + context.state.get(self, 0.0)
        context.state[self] = sums[:, :, -1:].clone()
        of_q = sums.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        q, k = torch.cat((q / self.temperature, of_q), dim=-1), torch.cat((k, sums), dim=-1)
        y = super().attend(q, k, at_least_float32(v), x, context)  # sums are not rounded
        return y.to(v.dtype)


def log_linear_scores(s, seen, v, drop, fade, r=of_token(0.0, width=16)):
    """y_i = sum of lambda_i^(l) s_ij v_j, l = bit length of (i XOR j).

    Stretches of 1, 1, 2, 4, ... tokens have a weight each, lambda = 2 sigmoid(r) of the query.
    """
    i = seen.sum(-1, keepdim=True) - 1
    j = torch.arange(s.shape[-1], device=s.device)
    length = torch.frexp((i ^ j).to(s.dtype)).exponent  # 0 for 0, 1 for 1, 2 for 2 and 3
    weights = 2 * r[..., -s.shape[-2] :, :].sigmoid()
    weights = weights.gather(-1, length.long().expand(s.shape))
    return drop(fade(weights * s).where(seen, 0.0)) @ v


class LogLinear(Long):
    """Log-linear attention (arXiv 2506.04761, equation 4), then a norm of each head.

    See log_linear_scores. Chosen: lambda, which begins as 1, and no decay gates.
    """

    attention = log_linear_scores

    def __init__(self, c, layer):
        if c.block_size > 2**15:
            raise UserError(f"log_linear has 16 stretches: block_size={c.block_size} is above 2^15")
        super().__init__(c, layer)
        self.ln_head = RMSNorm(c.head_dim, eps=1e-5)

    def attend(self, q, k, v, x, context):
        return self.ln_head(super().attend(q, k, v, x, context))


ATTENTION |= {"wall": Wall, "log_linear": LogLinear}
