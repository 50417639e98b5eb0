"""Positions: how a model knows the order of its tokens. POSITION and DECAY are tables.

A position is added to the token embedding (Learned, Sinusoids), or it is a Scheme, which acts inside attention. A new
one is one class here, which says itself what it needs and refuses, and one line in POSITION. `c` is a model.GPTConfig
with its defaults filled in (GPTConfig.resolved). Shapes: B batch, H heads, T time, D head width.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn as nn

from attention.forms import linear_in_values
from attention.scores import at_least_float32, distances, learned_of, takes

# -----------------------------------------------------------------------------
# Added to the token embedding


class Learned(nn.Embedding):
    """A learned vector for each position (GPT-2)."""

    def __init__(self, c):
        super().__init__(c.block_size, c.n_embd)

    def resize(self, block_size: int) -> None:
        self.weight = nn.Parameter(self.weight[:block_size])


class Sinusoids(nn.Module):
    """p[2i] = sin(pos / 10000^(2i / C)), p[2i + 1] = cos of the same (Vaswani et al. 2017, section 3.5).

    Before these are added, the token embedding is multiplied by sqrt(C) (section 3.4).
    """

    def __init__(self, c):
        super().__init__()
        self.embedding_scale = c.n_embd**0.5
        self.register_buffer("table", torch.empty(0, c.n_embd), persistent=False)
        self.resize(c.block_size)

    def forward(self, pos):
        return self.table[pos]

    def resize(self, block_size: int) -> None:
        C = self.table.shape[1]
        rate = 10000.0 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
        angle = torch.outer(torch.arange(block_size, dtype=torch.float64), rate)
        self.table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).to(self.table)


# -----------------------------------------------------------------------------
# Inside attention


class Scheme(nn.Module):
    """A position that acts inside attention: forward(q, k, group, past) -> (q, k, more arguments of the attention).

    group: the HeadGroup that q and k belong to. past: the number of tokens before q and k.
    """

    biased = False  # whether it gives a bias: n^2 numbers, and a cache keeps all keys and values
    shared = False  # whether all layers share one module
    endless = False  # whether a text may go on without end, at a constant cost for each token
    rotates = False  # whether it turns q and k: then a temperature per dimension comes after it, else before it
    extra = 0  # dimensions that it adds to q and k
    defaults: dict = {}  # the fields of GPTConfig that it alone uses, and what None stands for in them

    @classmethod
    def refuses(cls, c, definitions: dict[str, Callable]) -> Iterator[tuple[bool, str]]:
        """Yields (whether a GPTConfig breaks a rule, the message). definitions: of its attentions, by name."""
        for name, definition in definitions.items():
            yield (cls.biased and takes(definition, "fade"),
                   f"position={c.position!r} adds a number to scores, so that far keys can weigh less. In {name} a low "
                   f"score is no small weight, but a negative or a large one: use alibi, rope or relative")  # fmt: skip


class RoPE(Scheme):
    """Rotates q and k by their positions, so that q_i k_j depends on i - j (Su et al. 2021, section 3.4.2).

    Dimensions 2d and 2d + 1 turn together by pos / base^(2d / D), as in the paper. Llama in transformers pairs
    d and d + D/2: the same model, with the rows of the projections in another order.
    """

    shared, endless, rotates, defaults = True, True, True, {"rope_base": 10000.0}

    def __init__(self, c):
        super().__init__()
        self.base, self.width = c.rope_base, c.head_dim
        self.register_buffer("turn", self.turn_at(torch.arange(c.block_size)), persistent=False)

    @staticmethod
    def refuses(c, definitions):
        D = c.head_dim or c.n_embd // c.n_head
        yield D % 2 == 1, f"position='rope' turns dimensions in pairs, but a head has {D}: head_dim must be even"

    def turn_at(self, at: torch.Tensor) -> torch.Tensor:
        """cos and sin for positions (n): (n, D / 2, 2)."""
        rate = self.base ** (-torch.arange(0, self.width, 2, dtype=torch.float64, device=at.device) / self.width)
        angle = torch.outer(at.double(), rate)
        return torch.stack((angle.cos(), angle.sin()), dim=-1).float()

    def forward(self, q, k, group, past):
        end = past + q.shape[-2]
        turn = self.turn[past:end] if end <= len(self.turn) else self.turn_at(torch.arange(past, end, device=q.device))
        return rotate(q, turn), rotate(k, turn), {}


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) with each pair of dimensions, as a complex number, multiplied by cos + i sin."""
    x, turn = at_least_float32(x).unflatten(-1, (-1, 2)), at_least_float32(turn)
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
    exp(s), such as beta, has a `fade`: it gets the slopes as its `decay`.
    """

    shared, endless, extra = True, True, 6

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
        if group.fades:
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
    y_i = sum_j w_ij (v_j + a_v[i - j]). It is for short texts: memory grows with T^2, long heads' time with T^3."""

    biased, defaults = True, {"max_distance": 16}  # the paper's

    def __init__(self, c):
        super().__init__()
        n, D = c.max_distance + 1, c.head_dim
        self.scale = c.scale
        self.k = nn.Parameter(0.02 * torch.randn(n, D))
        self.v = nn.Parameter(0.02 * torch.randn(n, 2 * D if c.differential else D))

    @staticmethod
    def refuses(c, definitions):
        for name, definition in definitions.items():
            yield (not linear_in_values(definition),
                   f"position='relative' adds a vector to the values for each distance: the attention must be linear "
                   f"in its values, and {name} is not. Use rope, alibi, t5, learned, sinusoidal or none")  # fmt: skip

    def forward(self, q, k, group, past):
        bias = self.scale * (q @ self.k.to(q.dtype).mT)  # (B, H, T, n), of each distance
        at = distances(q.shape[-2], past + q.shape[-2], q.device).clamp(0, len(self.k) - 1)
        return q, k, {"bias": bias.gather(-1, at.expand(*bias.shape[:2], -1, -1)), "far": self.v}


class T5(Scheme):
    """Adds a learned number for each head and bucket of distances to the scores (Raffel et al. 2019, section 2.1).
    Memory grows with T^2."""

    biased, shared, defaults = True, True, {"max_distance": 128}  # the paper's
    buckets = 32

    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(self.buckets, c.n_head)
        self.register_buffer("bucket", t5_bucket(torch.arange(c.max_distance + 1), c.max_distance), persistent=False)

    @classmethod
    def refuses(cls, c, definitions):
        least = cls.buckets // 2 + 1
        yield (c.max_distance is not None and c.max_distance < least,
               f"max_distance={c.max_distance} must be at least {least} for position='t5'")  # fmt: skip
        yield from super().refuses(c, definitions)

    def forward(self, q, k, group, past):
        end = past + q.shape[-2]
        bucket = self.bucket[torch.arange(end, device=q.device).clamp(max=len(self.bucket) - 1)]
        by_distance = self.table(bucket).T[group.q]  # (H, past + T)
        return q, k, {"bias": by_distance[None, :, distances(q.shape[-2], end, q.device).clamp(min=0)]}


def t5_bucket(distance: torch.Tensor, max_distance: int) -> torch.Tensor:
    """The bucket of each distance. Each distance below 16 has its own; 16 more widen by a factor up to max_distance."""
    exact = T5.buckets // 2
    far = torch.log(distance.clamp(min=exact) / exact) / math.log(max_distance / exact) * (T5.buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=T5.buckets - 1))


class Numbers(Scheme):
    """The learned numbers of a layer's definitions. A definition gets its numbers as it gets a position's decay."""

    endless = True

    def __init__(self, definitions: list[Callable]):  # of each head
        super().__init__()
        for name in dict.fromkeys(name for definition in definitions for name in learned_of(definition)):
            start = [learned_of(definition).get(name, 0.0) for definition in definitions]
            self.register_parameter(name, nn.Parameter(torch.tensor(start)))

    def forward(self, q, k, group, past):
        return q, k, {name: getattr(self, name)[group.q][:, None, None] for name in learned_of(group.definition)}


# -----------------------------------------------------------------------------

# (f(c) -> a module whose f(positions) is added to the token embedding; a Scheme, which acts inside attention)
POSITION: dict[str, tuple[Callable | None, Callable | None]] = {
    "learned": (Learned, None),
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
