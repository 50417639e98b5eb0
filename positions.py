"""Positions: how a model knows the order of its tokens. POSITION and DECAY are tables.

A position is added to the token embedding (Learned, Sinusoids), or it is a Scheme, which acts
inside attention. A new one is one class here, which says what it needs and what it refuses, and one
line in POSITION. `c` is a model.GPTConfig with its defaults filled in (GPTConfig.resolved). Shapes:
B batch, H heads, T time, D head width.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.scores import at_least_float32, has_argument, learned_of, of_token

# -----------------------------------------------------------------------------
# Added to the token embedding


class Learned(nn.Embedding):
    """A learned vector for each position (GPT-2)."""

    def __init__(self, c):
        super().__init__(c.block_size, c.n_embd)

    def resize(self, block_size: int) -> None:
        self.weight = nn.Parameter(self.weight[:block_size])


class Sinusoids(nn.Module):
    """p[2i] = sin(pos / 10000^(2i / C)), p[2i + 1] = cos of it (Vaswani et al. 2017, section 3.5).

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
        turn = turns(0, block_size, self.table.shape[1], 10000.0, self.table.device)
        self.table = turn.flip(-1).flatten(1).to(self.table)  # (n, C / 2, 2) -> (n, C)


def turns(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """cos and sin of position / base^(2d / width), for all pairs d: (end - start, width / 2, 2).

    Computed in float64 on the CPU, since some devices (MPS) have no float64; returned in float32.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    positions = torch.arange(start, end, dtype=torch.float64, device="cpu")
    angle = torch.outer(positions, base**-exponent)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float().to(device)


# -----------------------------------------------------------------------------
# Inside attention


class Scheme(nn.Module):
    """A position that acts inside attention: forward(q, k, group, past) -> (q, k, arguments).

    q (B, H, T, D) and k (B, G, T, D) of a HeadGroup; past: the number of tokens before them.
    arguments: what the attention gets by name besides, such as {"bias": ...} (scores.plain_form);
    their names are always the same. In bfloat16 all dimensions of q and k are rounded to 8 bits,
    also those that a scheme adds, so positions above 256 would be wrong: add_to_scores splits
    numbers in two.
    """

    biased = False  # whether it gives a bias: n^2 numbers, and a cache keeps all keys and values
    shared = False  # whether all layers share one module
    endless = False  # whether a text may go on without end, at a constant cost for each token
    rotates = False  # whether it turns q and k: a temperature per dimension comes after that
    defaults: dict = {}  # the fields of GPTConfig that it alone uses, and what None stands for

    @classmethod
    def refuses(cls, c, definitions: dict[str, Callable]) -> Iterator[tuple[bool, str]]:
        """Yields (whether a GPTConfig breaks a rule, the message).

        definitions: of its attentions, by name.
        """
        choice = f"decay={c.decay!r}" if cls is DECAY[c.decay] else f"position={c.position!r}"
        for name, definition in definitions.items():
            yield (
                cls.biased and has_argument(definition, "fade"),
                f"{choice} adds a number to scores, so that far keys can weigh "
                f"less. In {name} a low score is no small weight, but a negative or a large one: "
                "use alibi or rope",
            )


class RoPE(Scheme):
    """Rotates q and k by their positions: q_i k_j depends on i - j (Su et al. 2021, section 3.4.2).

    Dimensions 2d and 2d + 1 turn together by pos / base^(2d / D), as in the paper. Llama in
    transformers pairs d and d + D/2: the same model, with the rows of the projections in another
    order.
    """

    shared = True
    endless = True
    rotates = True
    defaults = {"rope_base": 10000.0}

    def __init__(self, c):
        super().__init__()
        self.base = c.rope_base
        self.width = c.head_dim
        turn = turns(0, c.block_size, self.width, self.base, torch.get_default_device())
        self.register_buffer("turn", turn, persistent=False)

    @staticmethod
    def refuses(c, definitions):
        D = c.head_dim or c.n_embd // c.n_head
        yield (
            D % 2 == 1,
            f"position='rope' turns dimensions in pairs, but a head has {D}: head_dim must be even",
        )

    def forward(self, q, k, group, past):
        end = past + q.shape[-2]
        if end <= len(self.turn):
            turn = self.turn[past:end]
        else:
            turn = turns(past, end, self.width, self.base, q.device)
        return rotate(q, turn), rotate(k, turn), {}


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x (B, H, T, D) with each pair of dimensions, as a complex number, times cos + i sin."""
    x = at_least_float32(x).unflatten(-1, (-1, 2))  # (B, H, T, D / 2, 2)
    turn = at_least_float32(turn)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # one pass over x
        turned = torch.view_as_complex(x) * torch.view_as_complex(turn)
        return torch.view_as_real(turned).flatten(-2)
    a, b = x.unbind(-1)  # torch.compile needs real numbers
    cos, sin = turn.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class ALiBi(Scheme):
    """Multiplies every weight by gamma^(i - j), gamma = exp(-slope), before weights are normalised.

    For softmax and LASER, whose weights are exp(s), this subtracts slope (i - j) from the scores
    (Press et al. 2021, section 3): with a = slope / scale, -a (i - j) = (a, -a i) . (j, 1), more
    dimensions of q and k, which every kernel takes. A float16 ends at 65504, so q has
    (256 a, -a i / 256), and k has (j / 256, 256). An attention whose weights are not exp(s), such
    as beta, has a `fade`: it gets the slopes as its `decay`.
    """

    shared = True
    endless = True
    learned = False  # whether the slopes are trained

    def __init__(self, c):
        super().__init__()
        n_map = 2 if c.differential else 1
        slopes = torch.tensor(alibi_slopes(c.n_head // n_map)).repeat_interleave(n_map)
        self.scale = c.scale
        self.block_size = c.block_size
        self.log_slopes = nn.Parameter(slopes.log()) if self.learned else None
        q, k = self.tables(slopes, torch.arange(0 if self.learned else c.block_size))
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("q", q, persistent=False)
        self.register_buffer("k", k, persistent=False)

    def tables(self, slopes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The dimensions for q, (H, n, 6), and for k, (n, 6), at positions (n)."""
        j = positions.float() - self.block_size // 2  # halves the largest number
        a = (slopes / self.scale)[:, None].expand(-1, len(j))  # (H, n)
        ones = torch.full_like(j, 256.0)
        of_q, of_k = split_products(256 * a, j / 256)
        intercepts = in_two(-a * j / 256)
        q = torch.stack((*of_q, *intercepts), dim=-1)
        k = torch.stack((*of_k, ones, ones), dim=-1)
        return q, k

    def forward(self, q, k, group, past):
        slopes = self.slopes if self.log_slopes is None else self.log_slopes.exp()
        if group.takes_decay:
            return q, k, {"decay": slopes[group.q][:, None, None]}
        end = past + q.shape[-2]
        if end <= len(self.k):
            of_q = self.q[:, past:end]
            of_k = self.k[past:end]
        else:
            of_q, of_k = self.tables(slopes, torch.arange(past, end, device=q.device))
        return beside(of_q[group.q], q), beside(of_k, k), {}


class LearnedALiBi(ALiBi):
    """ALiBi with slopes that begin at ALiBi's and are trained, for each head and layer."""

    learned = True


def add_to_scores(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k (B, G, T, D) with four more dimensions, for a Scheme of your own.

    They add of_q of_k to the product of q and k, that is scale of_q of_k to the score. of_q (H, T)
    and of_k (T) or (G, T); in bfloat16 each is right to 16 bits instead of 8.
    """
    of_q, of_k = split_products(of_q, of_k)
    return beside(torch.stack(of_q, dim=-1), q), beside(torch.stack(of_k, dim=-1), k)


def split_products(a: Tensor, b: Tensor) -> tuple:
    """Four factors for q and four for k, of 8 bits each, whose products sum to a b."""
    a1, a2 = in_two(a)
    b1, b2 = in_two(b)
    return (a1, a1, a2, a2), (b1, b2, b1, b2)


def in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a sum of two: its first 8 bits, and the rest. A bfloat16 holds 8 bits of each."""
    high = x.bfloat16().to(x.dtype)
    return high, x - high


def beside(table: Tensor, x: Tensor) -> Tensor:
    """x (B, H, T, D) with the E dimensions of table, (H, T, E) or (T, E), before its own."""
    table = table.to(x.dtype).expand(*x.shape[:-1], -1)  # (B, H, T, E)
    return torch.cat((table, x), dim=-1)


def alibi_slopes(n: int) -> list[float]:
    """2^(-8h / n) for h = 1 to n, if n is a power of two.

    Else the slopes of the largest power of two below n, and then every second slope of the power of
    two above n (as in the ALiBi paper's code).
    """
    m = 2 ** int(math.log2(n))
    halves = [*range(2, 2 * m + 1, 2), *range(1, 2 * (n - m), 2)]
    return [2 ** (-4 * h / m) for h in halves]


class LearnedScalars(Scheme):
    """The learned scalars of a layer's definitions; a definition gets its own by name."""

    endless = True

    def __init__(self, definitions: list[Callable]):  # of each head
        super().__init__()
        for name in dict.fromkeys(name for f in definitions for name in learned_of(f)):
            start = [learned_of(f).get(name, 0.0) for f in definitions]
            self.register_parameter(name, nn.Parameter(torch.tensor(start)))

    def forward(self, q, k, group, past):
        names = learned_of(group.definition)
        return q, k, {name: getattr(self, name)[group.q][:, None, None] for name in names}


class TokenNumbers(nn.Module):
    """The numbers of each token that a definition gets by name (scores.of_token).

    A linear function of the layer's input x (B, T, C), in float32 or wider: (B, G, T, 2 n) of n
    numbers for the group's G heads of keys. Each is split in two, which bfloat16 holds to 16 bits:
    8 bits of a forget gate would be an error of 0.1 in the logits.
    """

    def __init__(self, c, group):
        super().__init__()
        starts = torch.tensor([*learned_of(group.definition, of_token).values()])
        self.n = len(starts)
        heads = len(set(group.k_of))
        self.weight = nn.Parameter(torch.zeros(heads * self.n, c.n_embd))
        self.bias = nn.Parameter(starts.repeat(heads))

    def forward(self, x):
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        with torch.autocast(x.device.type, enabled=False):
            numbers = F.linear(x.to(weight.dtype), weight, bias)  # (B, T, G n)
        numbers = numbers.unflatten(-1, (-1, self.n)).transpose(1, 2)  # (B, G, T, n)
        return torch.cat(in_two(numbers), dim=-1)


# -----------------------------------------------------------------------------

# (f(c) -> a module whose f(positions) is added to the token embedding; a Scheme)
POSITION: dict[str, tuple[Callable | None, type[Scheme] | None]] = {
    "learned": (Learned, None),
    "sinusoidal": (Sinusoids, None),
    "rope": (None, RoPE),
    "alibi": (None, ALiBi),
    "none": (None, None),
}

# a Scheme of each layer, which makes far keys weigh less, beside any position
DECAY: dict[str, type[Scheme] | None] = {
    "none": None,
    "alibi": ALiBi,
    "learned": LearnedALiBi,
}
