"""The tables of choices: norms, where a block has them, queries and keys, a convolution, what follows attention, MLPs.

NORM, WHERE, QK_NORM, AFTER and ACTIVATION are tables. A new choice is one function or class, and one line in its table.
(positions.py has the positions; rules.py says which choices go together.) `c` is a model.GPTConfig with its defaults
filled in (GPTConfig.resolved). Shapes: B batch, H heads, T time, D head width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

from attention.cache import Cache
from attention.documents import Documents
from attention.scores import at_least_float32

# -----------------------------------------------------------------------------
# Norms


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, equation 4) in float32 or wider, also under autocast."""

    def forward(self, x):
        weight = at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), self.normalized_shape, weight, self.eps).to(x.dtype)


# f(c, width) -> the module
NORM: dict[str, Callable] = {
    "layernorm": lambda c, width: nn.LayerNorm(width, eps=c.norm_eps, bias=c.bias),  # Ba et al. 2016
    "rmsnorm": lambda c, width: RMSNorm(width, eps=c.norm_eps),
}

# Where a block has norms: (before a sublayer, after it, after its output is added to the residual stream).
WHERE: dict[str, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # x + f(norm(x)): GPT-2, Llama
    "post": (False, False, True),  # norm(x + f(x)): Vaswani et al. 2017, GPT-1
    "sandwich": (True, True, False),  # x + norm(f(norm(x))): Gemma 2
    "olmo2": (False, True, False),  # x + norm(f(x)): OLMo 2
}

# -----------------------------------------------------------------------------
# What happens to queries and keys before their product


class L2Norm(nn.Module):
    """x / ||x||_2 or, if a scale is given, g sqrt(D) x / ||x||_2 with a learned g that starts at this scale."""

    def __init__(self, scale: float | None = None):
        super().__init__()
        self.scale = None if scale is None else nn.Parameter(torch.tensor([scale]))  # FSDP2 cannot shard a scalar

    def forward(self, x):
        x = F.normalize(at_least_float32(x), dim=-1)
        return x if self.scale is None else self.scale * x.shape[-1] ** 0.5 * x


# f(c, D) -> (the module for a layer's queries, the module for its keys)
QK_NORM: dict[str, Callable] = {
    "none": lambda c, D: (nn.Identity(), nn.Identity()),
    "layernorm": lambda c, D: (NORM["layernorm"](c, D), NORM["layernorm"](c, D)),  # LASER, section 4
    "rmsnorm": lambda c, D: (NORM["rmsnorm"](c, D), NORM["rmsnorm"](c, D)),
    # s = g q k: sqrt(D) cancels the factor 1 / sqrt(D). g starts at log2(T^2 - T) (Henry et al. 2020, section 3.1)
    "l2": lambda c, D: (L2Norm(math.log2(max(2, c.block_size**2 - c.block_size))), L2Norm()),
}

# -----------------------------------------------------------------------------
# A convolution over time


class ShortConv(nn.Module):
    """x_t + sum_o w_o x_(t - o), o = 0 to width - 1: a causal convolution over time of each channel alone.

    It begins as the identity. x (B, T, C); w (C, width). context: as in model.CausalSelfAttention.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def forward(self, x, context=None):
        n, T = self.weight.shape[1] - 1, x.shape[1]
        before = context.before(self, x, n) if isinstance(context, Cache) else x.new_zeros(len(x), n, x.shape[-1])
        padded = torch.cat((before, x), dim=1)
        y = x
        for o, w in enumerate(self.weight.to(x.dtype).unbind(1)):
            earlier = padded[:, n - o : n - o + T]
            if isinstance(context, Documents):  # not those of another document
                earlier = earlier * (context.pos >= o)[..., None]
            y = torch.addcmul(y, earlier, w)
        return y


# -----------------------------------------------------------------------------
# After attention


class Gate(nn.Module):
    """y sigmoid(x W) (Qiu et al., arXiv 2505.06708): a gate for each channel, or one for each head."""

    def __init__(self, c, per_head: bool):
        super().__init__()
        heads = c.n_head // 2 if c.differential else c.n_head
        self.c_gate = nn.Linear(c.n_embd, heads if per_head else c.n_head * c.head_dim, bias=False)

    def forward(self, y, x, v):
        return y * self.c_gate(x).sigmoid().unflatten(-1, (y.shape[1], -1)).transpose(1, 2)


class Exclusive(nn.Module):
    """XSA: y - (y . v^) v^, v^ = v / ||v||, takes the token's own value out of y (arXiv 2603.09078)."""

    def forward(self, y, x, v):
        v = F.normalize(at_least_float32(v), dim=-1).repeat_interleave(y.shape[1] // v.shape[1], dim=1)
        return (y - (y * v).sum(-1, keepdim=True) * v).to(y.dtype)


# f(c) -> the module of a layer, or None. It is called with y (B, H, T, D), the layer's input x (B, T, C) and the
# tokens' own values v (B, G, T, D). If it has n_map = 2, it returns half of the heads.
AFTER: dict[str, Callable] = {
    "none": lambda c: None,
    "gate": partial(Gate, per_head=False),
    "gate_head": partial(Gate, per_head=True),
    "xsa": lambda c: Exclusive(),
}

# -----------------------------------------------------------------------------
# Activations of the MLP

gelu_tanh = partial(F.gelu, approximate="tanh")
# (f, gated): the MLP is W2 f(W1 x) or, gated, W2 (f(W1 x) * (W3 x)) (Shazeer 2020)
ACTIVATION: dict[str, tuple[Callable, bool]] = {
    "gelu": (gelu_tanh, False),  # GPT-2's own
    "gelu_exact": (F.gelu, False),  # nanoGPT's
    "relu": (F.relu, False),  # Vaswani et al. 2017
    "relu2": (lambda x: F.relu(x).square(), False),  # Primer (So et al. 2021)
    "swish": (F.silu, False),  # SiLU
    "elu": (F.elu, False),
    "selu": (F.selu, False),
    "sigmoid": (F.sigmoid, False),
    "softplus": (F.softplus, False),
    "glu": (F.sigmoid, True),
    "reglu": (F.relu, True),
    "geglu": (gelu_tanh, True),  # T5 1.1, Gemma
    "swiglu": (F.silu, True),  # PaLM, Llama
    "liglu": (lambda x: x, True),  # called bilinear by Shazeer
}
