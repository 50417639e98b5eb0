"""What a GPT is made of besides attention: tables of norms, activations and positions.

A new choice is one function or class, and one line in its table. The rules at the end say which
choices go together. `c` is a model.GPTConfig with its defaults filled in (GPTConfig.resolved).
Shapes: B batch, H heads, G heads of keys, T time, C n_embd, D head width.
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.scores import at_least_float32, has_argument

# -----------------------------------------------------------------------------
# norms


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, equation 4) in float32 or wider, also under autocast."""

    def forward(self, x):
        weight = at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), self.normalized_shape, weight, self.eps).to(x.dtype)


# f(c, width) -> the module
NORM = {
    # Ba et al. 2016
    "layernorm": lambda c, width: nn.LayerNorm(width, eps=c.norm_eps, bias=c.bias),
    "rmsnorm": lambda c, width: RMSNorm(width, eps=c.norm_eps),
}

# where a block has norms: (before a sublayer, after it, after its output is added to x)
WHERE = {
    "pre": (True, False, False),  # x + f(norm(x)): GPT-2, Llama
    "post": (False, False, True),  # norm(x + f(x)): Vaswani et al. 2017, GPT-1
    "sandwich": (True, True, False),  # x + norm(f(norm(x))): Gemma 2
    "olmo2": (False, True, False),  # x + norm(f(x)): OLMo 2
}


# f(c, D) -> (the module for a layer's queries, the module for its keys). LASER, section 4, has
# layernorm
QK_NORM = {
    "none": lambda c, D: (nn.Identity(), nn.Identity()),
    **{name: lambda c, D, norm=norm: (norm(c, D), norm(c, D)) for name, norm in NORM.items()},
}

# -----------------------------------------------------------------------------
# activations of the MLP

gelu_tanh = partial(F.gelu, approximate="tanh")
# (f, gated): the MLP is W2 f(W1 x) or, gated, W2 (f(W1 x) * (W3 x)) (Shazeer 2020)
ACTIVATION = {
    "gelu": (gelu_tanh, False),  # GPT-2's own
    "gelu_exact": (F.gelu, False),  # nanoGPT's
    "relu": (F.relu, False),  # Vaswani et al. 2017
    "relu2": (lambda x: F.relu(x).square(), False),  # Primer (So et al. 2021)
    "geglu": (gelu_tanh, True),  # T5 1.1, Gemma
    "swiglu": (F.silu, True),  # PaLM, Llama
}

# -----------------------------------------------------------------------------
# how queries, keys and values are made


class Linear(nn.Linear):
    """q, k and v as linear functions of x (B, T, C): (B, T, width)."""

    def forward(self, x, context=None):
        return super().forward(x)


# f(c, width, layer) -> a module with forward(x, context) -> (B, T, width): q, k and v of all heads,
# side by side. context: see attention.cache.Context; context.kept is for later layers.
QKV = {
    "linear": lambda c, width, layer: Linear(c.n_embd, width, bias=c.bias),
}


class ShortConv(nn.Module):
    """x_t + sum_o w_o x_(t - o), o = 0 to width - 1: a causal convolution of each channel alone.

    It begins as the identity. x (B, T, C); w (C, width). context: an attention.cache.Context.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def forward(self, x, context):
        first, *others = self.weight.to(x.dtype).unbind(1)
        y = torch.addcmul(x, x, first)
        for earlier, w in zip(context.earlier(self, x, len(others)), others, strict=True):
            y = torch.addcmul(y, earlier, w)
        return y


# -----------------------------------------------------------------------------
# positions that are added to the token embedding


class Learned(nn.Embedding):
    """Adds a learned vector for each position to the embedding (GPT-2)."""

    def __init__(self, c):
        super().__init__(c.block_size, c.n_embd)

    def forward(self, x, pos):
        return x + super().forward(pos)

    def resize(self, block_size: int) -> None:
        self.weight = nn.Parameter(self.weight[:block_size])


# -----------------------------------------------------------------------------
# positions inside attention


def turns(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """cos and sin of position / base^(2d / width), for all pairs d: (end - start, width / 2, 2).

    Computed in float64 on the CPU, since some devices (MPS) have no float64; returned in float32.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    positions = torch.arange(start, end, dtype=torch.float64, device="cpu")
    angle = torch.outer(positions, base**-exponent)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float().to(device)


class Scheme(nn.Module):
    """A position inside attention: forward(q, k, heads, past) -> (q, k, arguments).

    q (B, H, T, D) and k (B, G, T, D) of some attention.forms.Heads; past: the number of tokens
    before them. It turns q and k, or adds dimensions before theirs. A bfloat16 holds 8 bits, so
    a position above 256 takes two dimensions (_in_two). arguments: what the attention gets by name
    besides, such as {"decay": ...} (scores.plain_form).

    A scheme that changes scores or values in another way has wrap(definition) -> a definition that
    gets the scheme's arguments by name, and runs without them too. This costs T^2 in short heads
    and in beta.
    """

    wrap = None


class RoPE(Scheme):
    """Rotates q and k by their positions: q_i k_j depends on i - j (Su et al. 2021, section 3.4.2).

    Dimensions 2d and 2d + 1 turn together by pos / base^(2d / D), as in the paper. Llama in
    transformers pairs d and d + D/2: the same model, with the rows of the projections in another
    order.
    """

    def __init__(self, c, width: int | None = None):
        super().__init__()
        self.base = c.rope_base or 10000.0
        self.width = width or c.head_dim
        turn = turns(0, c.block_size, self.width, self.base, torch.get_default_device())
        self.register_buffer("turn", turn, persistent=False)

    def forward(self, q, k, heads, past):
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

    # torch.compile needs real numbers
    a, b = x.unbind(-1)
    cos, sin = turn.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class ALiBi(Scheme):
    """Multiplies every weight by gamma^(i - j), gamma = exp(-slope), before weights are normalised.

    For softmax and LASER, whose weights are exp(s), this subtracts slope (i - j) from the scores
    (Press et al. 2021, section 3), which softcap then limits: with a = slope / scale, -a (i - j) =
    (a, -a i) . (j, 1), more dimensions of q and k, which every kernel takes. A float16 ends at
    65504, so q has (256 a, -a i / 256), and k has (j / 256, 256). A definition that takes `fade`,
    `q` or `k` gets the slopes as its `decay` instead.
    """

    def __init__(self, c):
        super().__init__()
        self.scale = c.scale
        self.middle = c.block_size // 2  # positions are counted from here: half as large
        self.register_buffer("slopes", torch.tensor(alibi_slopes(c.n_head)), persistent=False)

    def slopes_of(self, heads) -> Tensor:
        """The slopes of some heads, (H,)."""
        # a list as an index would make a GPU wait
        return torch.stack([self.slopes[h] for h in heads.indices])

    def forward(self, q, k, heads, past):
        slopes = self.slopes_of(heads)[:, None]  # (H, 1)
        if heads.takes_decay:
            return q, k, {"decay": slopes[..., None]}

        # 256 a times j / 256, each in two parts; and an intercept, in two parts
        T = q.shape[-2]
        j = (torch.arange(past, past + T, device=q.device) - self.middle) / 256
        a = (slopes / self.scale).expand(-1, T)  # (H, T)
        ones = torch.full_like(j, 256.0)
        a1, a2 = _in_two(256 * a)
        j1, j2 = _in_two(j)
        of_q = torch.stack((a1, a1, a2, a2, *_in_two(-a * j)), dim=-1)  # (H, T, 6)
        of_k = torch.stack((j1, j2, j1, j2, ones, ones), dim=-1)  # (T, 6)
        return beside(of_q, q), beside(of_k, k), {}


def _in_two(x):
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


# (f(c) -> a module f(x, pos) -> x with positions, for the embedding x (B, T, C), or None; a Scheme,
# a position inside attention, or None)
POSITION = {
    "learned": (Learned, None),
    "rope": (None, RoPE),
    "alibi": (None, ALiBi),
    "none": (None, None),
}

# f(c) -> a Scheme that makes far keys weigh less, beside any position
DECAY = {
    "none": lambda c: None,
    "alibi": ALiBi,
}

# -----------------------------------------------------------------------------
# trained numbers that a definition asks for


def learned_scalars(layer_heads: list) -> nn.ParameterDict:
    """{name: (H,)} of the learned scalars of a layer, 0 in heads that do not ask for one."""
    H = layer_heads[-1].queries.stop
    numbers = nn.ParameterDict()
    for heads in layer_heads:
        for name, start in heads.scalars.items():
            number = numbers.setdefault(name, torch.zeros(H))
            number.data[heads.queries] = start
    return numbers


class TokenNumbers(nn.Module):
    """The numbers of each token that a definition gets by name (scores.of_token).

    A linear function of the layer's input x (B, T, C), in float32 or wider: (B, G, T, n) for the
    heads' G keys, n numbers for each.
    """

    def __init__(self, c, heads):
        super().__init__()
        asked = heads.of_tokens.values()
        start = torch.cat([torch.full((x.width,), float(x)) for x in asked])
        G = heads.keys.stop - heads.keys.start
        self.n = len(start)
        self.weight = nn.Parameter(torch.zeros(G * self.n, c.n_embd))
        self.bias = nn.Parameter(start.repeat(G))

    def forward(self, x, q, k):
        with torch.autocast(x.device.type, enabled=False):
            # (B, T, G n)
            numbers = F.linear(*map(at_least_float32, (x, self.weight, self.bias)))
        numbers = numbers.unflatten(-1, (-1, self.n)).transpose(1, 2)  # (B, G, T, n)
        q = at_least_float32(q)
        return q, torch.cat((k.to(q.dtype), numbers.to(q.dtype)), dim=-1)


# -----------------------------------------------------------------------------
# what None stands for in a GPTConfig, and which of its choices go together
# A rule is one statement: `yield (whether it is broken, the message)`. Here `c` is a GPTConfig as
# the user gave it, and ATTENTION is model.ATTENTION.

# {a field: its possible values}
TABLES = {
    "qkv": QKV,
    "qk_norm": QK_NORM,
    "position": POSITION,
    "decay": DECAY,
    "norm": NORM,
    "where": WHERE,
    "block": ("serial", "parallel"),
    "mlp": ACTIVATION,
}
# (fields with spaces between them, whether a value is legal, what it must be)
RANGES = [
    (
        "block_size vocab_size n_layer n_head n_embd n_kv_head head_dim n_hidden",
        lambda x: x >= 1,
        "at least 1",
    ),
    ("window", lambda x: x >= 0, "0 (a token sees itself alone) or more"),
    ("dropout attn_dropout label_smoothing", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("temperature logit_softcap rope_base norm_eps", lambda x: x > 0, "a positive number"),
    ("conv z_loss", lambda x: x >= 0, "0 or more"),
]
# fields that only attention reads
OF_ATTENTION = """
    n_kv_head head_dim attn_dropout qkv qk_norm temperature conv position decay window nope_long
    heads
""".split()


def attentions(c) -> list[str]:
    """The names of a configuration's attentions: of the long heads, then of the short ones."""
    return [*dict.fromkeys((c.attention, c.short_attention or c.attention))]


def definition_of(own: Callable, ATTENTION: dict) -> Callable | None:
    """The function of scores that an entry of ATTENTION computes in its heads.

    A layer class names it in `attention`, or has it there. A class without it computes none.
    """
    name = getattr(own, "attention", None) if isinstance(own, type) else own
    return ATTENTION.get(name, name)


def uses(own: Callable, field: str, ATTENTION: dict) -> bool:
    """Whether an entry of ATTENTION reads a field of GPTConfig.

    A class without a function of scores says it in its `uses`; all others read each field.
    """
    return definition_of(own, ATTENTION) is not None or field in getattr(own, "uses", ())


def with_defaults(c, ATTENTION: dict):
    """GPTConfig.resolved(): c with its default in the place of each None that stands for one."""
    defaults = {
        "n_kv_head": c.n_head,
        "head_dim": c.n_embd // c.n_head,
        "n_hidden": 4 * c.n_embd,
        "attn_dropout": c.dropout,
    }

    # gated, with two of three matrices as wide: about as many weights
    if ACTIVATION[c.mlp][1]:
        defaults["n_hidden"] = 8 * max(1, round(c.n_embd / 3))
    names = attentions(c)
    definitions = [definition_of(ATTENTION[name], ATTENTION) for name in names]
    if not all(has_argument(f, "drop") for f in definitions if f):
        defaults["attn_dropout"] = 0.0
    if "S" in c.heads:
        defaults["short_attention"] = c.attention
        if uses(ATTENTION[names[-1]], "window", ATTENTION):
            defaults["window"] = 50 if c.block_size <= 2048 else 100  # long-short paper, 5.1

    resolved = copy.copy(c)  # not checked again: it has what the user left out
    for name, value in defaults.items():
        if getattr(c, name) is None:
            setattr(resolved, name, value)
    return resolved


def rules(c, ATTENTION: dict) -> Iterator:
    """Yields (whether a rule is broken, its message). A rule may assume that all before it hold."""
    # numbers
    for fields, is_legal, needed in RANGES:
        for field in fields.split():
            value = getattr(c, field)
            yield value is not None and not is_legal(value), f"{field}={value} must be {needed}"

    # names in tables
    tables = {"attention": ATTENTION, "short_attention": (None, *ATTENTION)} | TABLES
    for name, table in tables.items():
        value = getattr(c, name)
        yield (
            value not in table,
            f"{name}={value!r} is not one of {', '.join(filter(None, table))} "
            "(--import= adds your own)",
        )

    # sizes
    yield (
        c.head_dim is None and c.n_embd % c.n_head,
        f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}: set n_head to a divisor of it, "
        "or set head_dim",
    )
    G = c.n_kv_head or c.n_head
    yield (
        c.n_head % G,
        f"n_head={c.n_head} is not a multiple of n_kv_head={G}: set n_kv_head to a divisor of it",
    )
    yield (
        c.block == "parallel" and c.where == "post",
        "where='post' has a norm after each of two sums, but a parallel block has one sum: use "
        "where='pre'",
    )
    yield from rules_of_heads(c)
    yield from rules_of_attention(c, ATTENTION)


def rules_of_heads(c) -> Iterator:
    """Rules of long and short heads."""
    layers = c.heads.split("/")
    yield (
        not all(layers) or set(c.heads) - set("SL/"),
        f"heads={c.heads!r} must be made of S (short) and L (long) with / between layers: L, SSSL, "
        "S/S/L",
    )
    most = max(map(len, layers))
    yield (
        len(layers) > c.n_layer or most > c.n_head,
        f"heads={c.heads!r} is too long (layers: {len(layers)}, heads in a layer: {most}): the "
        f"model has n_layer={c.n_layer} and n_head={c.n_head}",
    )
    yield (
        "S" not in c.heads and c.window is not None,
        f"window={c.window} needs a short head, but heads={c.heads!r} has no S: use for example "
        "--heads=SSSL",
    )

    # choices that tell short heads from long ones
    has_one_kind = "S" not in c.heads or "L" not in c.heads
    yield (
        c.short_attention not in (None, c.attention) and has_one_kind,
        f"short_attention={c.short_attention!r} needs both short and long heads, but "
        f"heads={c.heads!r} has one kind: use for example --heads=SSSL, or --attention alone",
    )
    yield (
        c.nope_long and (c.scheme is None or has_one_kind),
        f"nope_long needs both short and long heads, and a position inside attention: "
        f"heads={c.heads!r}, position={c.position!r}",
    )


def rules_of_attention(c, ATTENTION: dict) -> Iterator:
    """Rules of what each attention can take, and of positions inside attention."""
    names = attentions(c)
    is_mixed = any(len({*c.layer_heads(layer)}) > 1 for layer in range(c.n_layer))
    for name in names:
        own = ATTENTION[name]
        yield (
            isinstance(own, type) and is_mixed and len(names) > 1,
            f"attention={name!r} is a whole layer, so all heads of a layer need the same letter, "
            f"not heads={c.heads!r}: use for example --heads=S/S/L",
        )
        definition = definition_of(own, ATTENTION)
        yield (
            c.attn_dropout and definition and not has_argument(definition, "drop"),
            f"attention={name!r} allows no dropout on attention weights (its function takes no "
            "`drop`; in LASER a dropped weight can be log(0)): leave attn_dropout out, or set it "
            "to 0",
        )

    for field in OF_ATTENTION:
        users = names[-1:] if field in ("window", "nope_long") else names  # only short heads
        value, default = getattr(c, field), getattr(type(c), field)
        is_given = value != default
        if field == "position":
            is_given = c.scheme is not None  # else it is added to the embedding
        yield (
            is_given and not any(uses(ATTENTION[name], field, ATTENTION) for name in users),
            f"{field}={value!r} is not used by attention={', '.join(users)}: use {default!r}",
        )

    # positions
    yield (
        c.position == "alibi" and c.decay != "none",
        f"position='alibi' is a decay itself: leave decay={c.decay!r} out",
    )
    is_rope = issubclass(c.scheme or object, RoPE)
    yield (
        is_rope and (c.head_dim or c.n_embd // c.n_head) % 2,
        f"position={c.position!r} turns pairs of dimensions, so a head's width must be even",
    )
    yield (
        c.rope_base is not None and not is_rope,
        f"rope_base={c.rope_base} is not used by position={c.position!r}, only by rope: leave it "
        "out",
    )
