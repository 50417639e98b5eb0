"""The tables of choices: NORM, WHERE, QK_NORM, AFTER and ACTIVATION; and the short convolution.

A new choice is one function or class, and one line in its table. positions.py has the positions;
rules.py says which choices go together. `c` is a model.GPTConfig with its defaults filled in
(GPTConfig.resolved). Shapes: B batch, H heads, T time, D head width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

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
    "layernorm": lambda c, width: nn.LayerNorm(
        width, eps=c.norm_eps, bias=c.bias
    ),  # Ba et al. 2016
    "rmsnorm": lambda c, width: RMSNorm(width, eps=c.norm_eps),
}

# Where a block has norms: (before a sublayer, after it, after its output is added to x)
WHERE: dict[str, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # x + f(norm(x)): GPT-2, Llama
    "post": (False, False, True),  # norm(x + f(x)): Vaswani et al. 2017, GPT-1
    "sandwich": (True, True, False),  # x + norm(f(norm(x))): Gemma 2
    "olmo2": (False, True, False),  # x + norm(f(x)): OLMo 2
}

# -----------------------------------------------------------------------------
# What happens to queries and keys before their product


class L2Norm(nn.Module):
    """x / ||x||_2; with a scale g sqrt(D) x / ||x||_2, a learned g that starts at the scale."""

    def __init__(self, scale: float | None = None):
        super().__init__()
        # Of one dimension: FSDP2 cannot shard a scalar
        self.scale = None if scale is None else nn.Parameter(torch.tensor([scale]))

    def forward(self, x):
        x = F.normalize(at_least_float32(x), dim=-1)
        if self.scale is None:
            return x
        return self.scale * x.shape[-1] ** 0.5 * x


def l2_norms(c, D: int) -> tuple[nn.Module, nn.Module]:
    """s = g q k: the factor sqrt(D) of L2Norm cancels the scale 1 / sqrt(D).

    g starts at log2(T^2 - T) (Henry et al. 2020, section 3.1).
    """
    pairs = max(2, c.block_size**2 - c.block_size)
    return L2Norm(math.log2(pairs)), L2Norm()


def two_of(name: str) -> Callable:
    return lambda c, D: (NORM[name](c, D), NORM[name](c, D))


# f(c, D) -> (the module for a layer's queries, the module for its keys)
QK_NORM: dict[str, Callable] = {
    "none": lambda c, D: (nn.Identity(), nn.Identity()),
    "layernorm": two_of("layernorm"),  # LASER, section 4
    "rmsnorm": two_of("rmsnorm"),
    "l2": l2_norms,
}

# -----------------------------------------------------------------------------
# A convolution over time


class ShortConv(nn.Module):
    """x_t + sum_o w_o x_(t - o), o = 0 to width - 1: a causal convolution of each channel alone.

    It begins as the identity. x (B, T, C); w (C, width). context: as in model.CausalSelfAttention.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def forward(self, x, context=None):
        B, T, C = x.shape
        n = self.weight.shape[1] - 1
        # A Cache has a state, which keeps the last n inputs for the next call
        state = getattr(context, "state", {})
        before = state.get(self, x.new_zeros(B, n, C))
        padded = torch.cat((before, x), dim=1)  # (B, n + T, C)
        # A view would keep the memory of all of x
        state[self] = padded[:, T:].clone()

        y = x
        for offset, w in enumerate(self.weight.to(x.dtype).unbind(1)):
            earlier = padded[:, n - offset : n - offset + T]
            if isinstance(context, Documents):  # no token of another document
                earlier = earlier * (context.pos >= offset)[..., None]
            y = torch.addcmul(y, earlier, w)
        return y


# -----------------------------------------------------------------------------
# After attention


class Gate(nn.Module):
    """y sigmoid(x W) (Qiu et al., arXiv 2505.06708): a gate for each channel, or for each head."""

    def __init__(self, c, per_head: bool):
        super().__init__()
        heads = c.n_head // 2 if c.differential else c.n_head
        self.c_gate = nn.Linear(c.n_embd, heads if per_head else c.n_head * c.head_dim, bias=False)

    def forward(self, y, x, v):
        gate = self.c_gate(x).sigmoid()  # (B, T, H D), or (B, T, H) per head
        gate = gate.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)  # (B, H, T, D or 1)
        return y * gate


class Exclusive(nn.Module):
    """XSA: y - (y . v^) v^, v^ = v / ||v||, takes out the token's own value (arXiv 2603.09078)."""

    def forward(self, y, x, v):
        v = F.normalize(at_least_float32(v), dim=-1)
        v = v.repeat_interleave(y.shape[1] // v.shape[1], dim=1)  # (B, H, T, D)
        return (y - (y * v).sum(-1, keepdim=True) * v).to(y.dtype)


# f(c) -> the module of a layer, or None. It is called with y (B, H, T, D), the layer's input x (B,
# T, C) and the tokens' own values v (B, G, T, D). With n_map = 2 it returns half of the heads.
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
