"""The tables of choices: norms, positions, decays, activations.

QK_NORM, NORM, WHERE, POSITION, DECAY and ACTIVATION are tables: a new choice is one function or class here, and one
line in its table. (rules.py says which choices go together.) `c` is a model.GPTConfig with its defaults filled in
(GPTConfig.resolved). Shapes: B batch, H heads, T time, D head width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

from attention.cache import Cache
from attention.documents import Documents
from attention.scores import ByDistance, at_least_float32

# -----------------------------------------------------------------------------
# Norms


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, equation 4) in float32 or wider, also under autocast; an optional bias."""

    def __init__(self, width: int, bias: bool, eps: float):
        super().__init__(width, eps=eps)
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        y = F.rms_norm(at_least_float32(x), self.normalized_shape, at_least_float32(self.weight), self.eps).to(x.dtype)
        return y if self.bias is None else y + self.bias


NORM: dict[str, Callable] = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}  # LayerNorm: Ba et al. 2016


def new_norm(c, norm: str, width: int) -> nn.Module:
    """A norm of this name with the configuration's bias and epsilon."""
    return NORM[norm](width, bias=norm_has_bias(c, norm), eps=c.norm_eps)


def norm_has_bias(c, norm: str) -> bool:
    """Whether a norm has a bias: norm_bias or, if that is None, `bias` for a LayerNorm and False for an RMSNorm."""
    return (c.bias and norm == "layernorm") if c.norm_bias is None else c.norm_bias


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
    """x / ||x||_2, times a learned scale that starts at `scale`, if given."""

    def __init__(self, scale: float | None = None):
        super().__init__()
        self.scale = None if scale is None else nn.Parameter(torch.tensor([scale]))  # FSDP2 cannot shard a scalar

    def forward(self, x):
        x = F.normalize(at_least_float32(x), dim=-1)
        return x if self.scale is None else self.scale * x


# f(c, D) -> (the module for a layer's queries, the module for its keys)
QK_NORM: dict[str, Callable] = {
    "none": lambda c, D: (nn.Identity(), nn.Identity()),
    "layernorm": lambda c, D: (new_norm(c, "layernorm", D), new_norm(c, "layernorm", D)),  # LASER, section 4
    "rmsnorm": lambda c, D: (new_norm(c, "rmsnorm", D), new_norm(c, "rmsnorm", D)),
    # s = g q k: D**0.5 cancels the factor 1 / sqrt(D). g starts at log2(T^2 - T) (Henry et al. 2020, section 3.1)
    "l2": lambda c, D: (L2Norm(D**0.5 * math.log2(max(2, c.block_size**2 - c.block_size))), L2Norm()),
}

# -----------------------------------------------------------------------------
# Positions


class Sinusoids(nn.Module):
    """p[2i] = sin(pos / 10000^(2i / C)), p[2i + 1] = cos of the same (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, c):
        super().__init__()
        rate = 10000.0 ** (-torch.arange(0, c.n_embd, 2, dtype=torch.float64) / c.n_embd)
        angle = torch.outer(torch.arange(c.block_size, dtype=torch.float64), rate)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, pos):
        return self.table[pos]


class Scheme(nn.Module):
    """A position that acts inside attention: forward(q, k, group, past) -> (q, k, more arguments of the attention).

    group: the heads that q and k belong to. past: the number of tokens before q and k.
    """

    scores = True  # whether it gives a bias; running sums cannot hold a bias: with one, all keys and values are kept
    shared = False  # whether all layers share one module
    endless = False  # whether it knows positions past block_size
    extra = 0  # dimensions that it adds to q and k

    def both_sides(self, group) -> bool:
        """Whether it has a meaning for later keys too (lab/examples/bidirectional.py)."""
        return False


class RoPE(Scheme):
    """Rotates q and k by their positions, so that q_i k_j depends on i - j (Su et al. 2021, section 3.4.2).

    Dimensions 2d and 2d + 1 turn together by pos / base^(2d / D), as in the paper. Llama in transformers pairs
    d and d + D/2: the same model, with the rows of the projections in another order.
    """

    scores, shared, endless = False, True, True

    def __init__(self, c):
        super().__init__()
        self.base, self.width = c.rope_base, c.head_dim
        self.register_buffer("turn", self.turn_at(torch.arange(c.block_size)), persistent=False)

    def both_sides(self, group) -> bool:
        return True

    def turn_at(self, at: torch.Tensor) -> torch.Tensor:
        """cos and sin for positions (n): (n, D / 2, 2)."""
        rate = self.base ** (-torch.arange(0, self.width, 2, dtype=torch.float64, device=at.device) / self.width)
        angle = torch.outer(at.double(), rate)
        return torch.stack((angle.cos(), angle.sin()), dim=-1).float()

    def forward(self, q, k, group, past):
        end = past + q.shape[-2]
        turn = self.turn[past:end] if end <= len(self.turn) else self.turn_at(torch.arange(past, end, device=q.device))
        turn = at_least_float32(turn)
        return rotate(q, turn), rotate(k, turn), {}


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) with each pair of dimensions, as a complex number, multiplied by cos + i sin."""
    x = at_least_float32(x).unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # one pass; torch.compile needs real numbers
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(turn)).flatten(-2)
    (a, b), (cos, sin) = x.unbind(-1), turn.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class ALiBi(Scheme):
    """Multiplies every weight, before it is divided by a sum or a norm, by gamma^(i - j), gamma = exp(-slope).

    For softmax and LASER, whose weights are exp(s), this subtracts slope (i - j) from the scores (Press et al. 2021,
    section 3): with a = slope / scale, -a (i - j) = (a, -a i) . (j, 1), two more dimensions of q and k, in every
    kernel. A bfloat16 keeps 8 bits of a number, so each number is split into a sum of two, which makes six dimensions.
    A float16 ends at 65504, so q has (256 a, -a i / 256), and k has (j / 256, 256). An attention whose weights are not
    exp(s), such as beta, takes the slopes as its argument `decay`.
    """

    scores, shared, endless, extra = False, True, True, 6

    def __init__(self, c, learned: bool = False):
        super().__init__()
        n_map = 2 if c.differential else 1
        slopes = torch.tensor(alibi_slopes(c.n_head // n_map)).repeat_interleave(n_map)
        self.scale, self.block_size = c.scale, c.block_size
        self.log_slopes = nn.Parameter(slopes.log()) if learned else None
        self.register_buffer("slopes", None if learned else slopes, persistent=False)
        q, k = (None, None) if learned else self.tables(slopes, torch.arange(c.block_size))
        self.register_buffer("q", q, persistent=False)
        self.register_buffer("k", k, persistent=False)

    def both_sides(self, group) -> bool:
        return group.decays

    def tables(self, slopes: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The dimensions for q, (H, n, 6), and for k, (n, 6), at positions (n)."""
        j = at.float() - self.block_size // 2  # halves the largest number
        a = (slopes / self.scale)[:, None].expand(-1, len(j))
        a1, a2 = in_two(256 * a)
        ai1, ai2 = in_two(-a * j / 256)
        j1, j2 = in_two(j / 256)
        ones = torch.full_like(j, 256.0)
        return torch.stack((a1, a1, a2, a2, ai1, ai2), dim=-1), torch.stack((j1, j2, j1, j2, ones, ones), dim=-1)

    def forward(self, q, k, group, past):
        slopes = self.slopes if self.log_slopes is None else self.log_slopes.exp()
        if group.decays:
            return q, k, {"decay": slopes[group.q][:, None, None]}
        end = past + q.shape[-2]
        if self.q is not None and end <= self.block_size:
            of_q, of_k = self.q[:, past:end], self.k[past:end]
        else:
            of_q, of_k = self.tables(slopes, torch.arange(past, end, device=q.device))
        return beside(of_q[group.q], q), beside(of_k, k), {}


def beside(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) with the E dimensions of table, (H, T, E) or (T, E), before its own: (B, H, T, E + D)."""
    return torch.cat((table.to(x.dtype).expand(*x.shape[:-1], -1), x), dim=-1)


def in_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as a sum of two numbers: its first 8 bits, and the rest. A bfloat16 holds 8 bits of each."""
    high = x.bfloat16().to(x.dtype)
    return high, x - high


def alibi_slopes(n: int) -> list[float]:
    """2^(-8h / n) for h = 1 to n, if n is a power of two. Else the slopes of the largest power of two below n, and
    then every second slope of the power of two above n (as in the ALiBi paper's code)."""
    m = 2 ** int(math.log2(n))
    return [2 ** (-8 * h / m) for h in range(1, m + 1)] + [2 ** (-4 * h / m) for h in range(1, 2 * (n - m), 2)]


class Relative(Scheme):
    """Adds a learned vector for each distance, up to max_distance, to the keys, and another one to the values (Shaw et
    al. 2018, equations 3 to 5): s_ij = q_i (k_j + a_k[i - j]), where q_i a_k is computed apart, as a bias, and
    y_i = sum_j w_ij (v_j + a_v[i - j]). The heads of a layer share the vectors. Memory grows with T max_distance."""

    def __init__(self, c):
        super().__init__()
        n, D = c.max_distance + 1, c.head_dim
        self.scale = c.scale
        self.k = nn.Parameter(0.02 * torch.randn(n, D))
        self.v = nn.Parameter(0.02 * torch.randn(n, 2 * D if c.differential else D))

    def forward(self, q, k, group, past):
        n = past + q.shape[-2]  # there are no larger distances
        return q, k, {"bias": ByDistance(self.scale * (q @ self.k[:n].to(q.dtype).mT), self.v[:n])}


class T5(Scheme):
    """Adds a learned number for each head and bucket of distances to the scores (Raffel et al. 2019, section 2.1)."""

    shared, buckets = True, 32

    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(self.buckets, c.n_head)
        self.register_buffer("bucket", t5_bucket(torch.arange(c.block_size), c.max_distance), persistent=False)

    def forward(self, q, k, group, past):
        return q, k, {"bias": ByDistance(self.table(self.bucket).T[group.q][None, :, None])}


def t5_bucket(distance: torch.Tensor, max_distance: int) -> torch.Tensor:
    """The bucket of each distance. Each distance below 16 has its own; 16 more widen by a factor up to max_distance."""
    exact = T5.buckets // 2
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * (T5.buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=T5.buckets - 1))


# (f(c) -> a module whose f(positions) is added to the token embedding; a Scheme, which acts inside attention)
POSITION: dict[str, tuple[Callable | None, Callable | None]] = {
    "learned": (lambda c: nn.Embedding(c.block_size, c.n_embd), None),
    "sinusoidal": (Sinusoids, None),
    "rope": (None, RoPE),
    "alibi": (None, ALiBi),
    "relative": (None, Relative),
    "t5": (None, T5),
    "none": (None, None),
}

# f(c) -> the module of a layer that makes far keys weigh less, beside any position
DECAY: dict[str, Callable] = {
    "none": lambda c: None,
    "alibi": ALiBi,  # fixed slopes
    "learned": partial(ALiBi, learned=True),  # slopes that begin at ALiBi's and are learned, for each head and layer
}


class ShortConv(nn.Module):
    """x_t + sum_o w_o x_(t - o), o = 0 to width - 1: a causal convolution over time of each channel alone.

    It begins as the identity. x (B, T, C); w (C, width). memory: as in model.CausalSelfAttention.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def forward(self, x, memory=None):
        n, T = self.weight.shape[1] - 1, x.shape[1]
        before = memory.before(self, x, n) if isinstance(memory, Cache) else x.new_zeros(len(x), n, x.shape[-1])
        padded = torch.cat((before, x), dim=1)
        y = x
        for o, w in enumerate(self.weight.to(x.dtype).unbind(1)):
            earlier = padded[:, n - o : n - o + T]
            if isinstance(memory, Documents):  # not those of another document
                earlier = earlier * (memory.pos >= o)[..., None]
            y = torch.addcmul(y, earlier, w)
        return y


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
