"""What None stands for in a GPTConfig, and which of its choices go together.

with_defaults() fills in the defaults. rules() says which choices do not go together. A rule is one
statement: `yield (whether it is broken, the message)`. `c` is a model.GPTConfig as the user gave
it; ATTENTION is model.ATTENTION.
"""

import copy
import math
from collections.abc import Callable, Iterator

from attention.scores import has_argument
from choices import ACTIVATION, AFTER, NORM, QK_NORM, WHERE
from errors import out_of_range
from positions import DECAY, POSITION

Rules = Iterator[tuple[bool, str]]
SIZES = "block_size vocab_size n_layer n_head n_embd n_kv_head head_dim n_hidden max_distance"
RANGES = [  # see errors.out_of_range
    (SIZES, lambda x: x >= 1, "at least 1"),
    ("window", lambda x: x >= 0, "0 (a token sees itself alone) or more"),
    ("dropout attn_dropout label_smoothing", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("temperature logit_softcap rope_base", lambda x: 0 < x < math.inf, "a positive number"),
    ("conv", lambda x: 0 <= x <= 64, "0 (no convolution) or a width up to 64: 4 is usual"),
    ("norm_eps", lambda x: 0 < x < 1, "between 0 and 1"),
    ("z_loss", lambda x: 0 <= x < math.inf, "0 or more; PaLM's is 1e-4"),
]


def with_defaults(c, ATTENTION: dict[str, Callable]):
    """GPTConfig.resolved(): c with its default in the place of each None that stands for one."""
    defaults = {
        "n_kv_head": c.n_head,
        "head_dim": c.n_embd // c.n_head,
        "n_hidden": 4 * c.n_embd,
        "attn_dropout": c.dropout,
    }
    if ACTIVATION[c.mlp][1]:  # gated, with two of three matrices as wide: about as many weights
        defaults["n_hidden"] = 8 * max(1, round(c.n_embd / 3))
    if not all(has_argument(ATTENTION[name], "drop") for name in attentions(c)):
        defaults["attn_dropout"] = 0.0
    if "S" in c.heads:
        defaults["short_attention"] = c.attention
        if uses(ATTENTION[c.short_attention or c.attention], "window"):
            defaults["window"] = 50 if c.block_size <= 2048 else 100  # long-short paper, 5.1
    if c.scheme is not None:
        defaults |= c.scheme.defaults
    missing = {name: value for name, value in defaults.items() if getattr(c, name) is None}
    resolved = copy.copy(c)  # not checked again: it has what the user left out
    vars(resolved).update(missing)
    return resolved


def attentions(c) -> list[str]:
    """The names of a configuration's attentions: of the long heads, then of the short ones."""
    return [*dict.fromkeys((c.attention, c.short_attention or c.attention))]


def rules(c, ATTENTION: dict[str, Callable]) -> Rules:
    """Yields (whether a rule is broken, its message). A rule may assume that all before it hold."""
    yield from out_of_range(vars(c), RANGES)
    yield (
        c.head_dim is None and c.n_embd % c.n_head != 0,
        f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}: set n_head to a divisor of it, "
        "or set head_dim",
    )
    yield from rules_of_names(c, ATTENTION)
    for name in attentions(c):
        yield (
            bool(c.attn_dropout) and not has_argument(ATTENTION[name], "drop"),
            f"attention={name!r} allows no dropout on attention weights (its function takes no "
            "`drop`; in LASER a dropped weight can be log(0)): leave attn_dropout out, or set it "
            "to 0",
        )
    yield (
        c.block == "parallel" and c.where == "post",
        "where='post' has a norm after each of two sums, but a parallel block has one sum: use "
        "where='pre'",
    )
    yield from rules_of_heads(c)
    yield from rules_of_layers(c, ATTENTION)
    yield from rules_of_position(c, ATTENTION)


def rules_of_names(c, ATTENTION: dict[str, Callable]) -> Rules:
    """Rules of fields that are a name in a table."""
    tables = {
        "attention": ATTENTION,
        "qk_norm": QK_NORM,
        "position": POSITION,
        "decay": DECAY,
        "norm": NORM,
        "where": WHERE,
        "block": ("serial", "parallel"),
        "mlp": ACTIVATION,
        "after": AFTER,
    }
    if c.short_attention is not None:
        tables["short_attention"] = ATTENTION
    for name, table in tables.items():
        value = getattr(c, name)
        yield (
            value not in table,
            f"{name}={value!r} is not one of {', '.join(table)} (--import= adds your own)",
        )


def rules_of_heads(c) -> Rules:
    """Rules of long, short, grouped and differential heads."""
    G = c.n_kv_head or c.n_head
    yield (
        c.n_head % G != 0,
        f"n_head={c.n_head} is not a multiple of n_kv_head={G}: set n_kv_head to a divisor of it",
    )
    layers = c.heads.split("/")
    yield (
        not all(layers) or bool(set(c.heads) - set("SL/")),
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
    yield (
        c.short_attention not in (None, c.attention) and not mixed(c),
        f"short_attention={c.short_attention!r} needs both short and long heads, but "
        f"heads={c.heads!r} has one kind: use for example --heads=SSSL, or --attention alone",
    )
    if not c.differential:
        return
    for name, n in (("n_head", c.n_head), ("n_kv_head", G)):
        yield n % 2 == 1, f"differential attention pairs the heads, but {name}={n} is odd"
    for layer in range(c.n_layer):
        letters = c.layer_heads(layer)
        yield (
            letters[::2] != letters[1::2],
            f"heads={c.heads!r} with differential: heads 2i and 2i + 1 are a pair and need the "
            f"same letter, but the letters of a layer are {letters}; write each letter twice: SSLL",
        )


def mixed(c) -> bool:
    """Whether a configuration has both short and long heads."""
    return "S" in c.heads and "L" in c.heads


# Fields that only attention reads
OF_ATTENTION = (
    "n_kv_head head_dim differential qk_norm temperature per_dim_temperature conv after position "
    "decay window nope_long"
).split()


def uses(attention: Callable, field: str) -> bool:
    """Whether an attention reads a field of GPTConfig. A class says it in its `uses`."""
    return not isinstance(attention, type) or field in getattr(attention, "uses", ())


def rules_of_layers(c, ATTENTION: dict[str, Callable]) -> Rules:
    """Rules of attentions that are classes: each is a whole layer."""
    for name in attentions(c):
        yield (
            isinstance(ATTENTION[name], type)
            and any({name} < set(c.layer_attentions(layer)) for layer in range(c.n_layer)),
            f"attention={name!r} is a whole layer, so all heads of a layer need the same letter, "
            f"not heads={c.heads!r}: use for example --heads=S/S/L",
        )
    for field in OF_ATTENTION:
        names = attentions(c)
        if field in ("window", "nope_long"):  # only short heads read them
            names = names[-1:]
        value = getattr(c, field)
        is_given = value != getattr(type(c), field)
        if field == "position":
            is_given = c.scheme is not None  # else it is added to the embedding
        yield (
            is_given and not any(uses(ATTENTION[name], field) for name in names),
            f"{field}={value!r} is not used by attention={', '.join(names)}: leave it out",
        )


def rules_of_position(c, ATTENTION: dict[str, Callable]) -> Rules:
    """Rules of positions and decays; a Scheme has some of its own."""
    schemes = {name: scheme for name, (_, scheme) in POSITION.items() if scheme}
    yield (
        c.position == "sinusoidal" and c.n_embd % 2 == 1,
        "position='sinusoidal' is made of pairs of a sine and a cosine, but "
        f"n_embd={c.n_embd} is odd",
    )
    yield (
        c.position == "alibi" and c.decay != "none",
        f"position='alibi' is a decay itself: leave decay={c.decay!r} out, or use --position=none",
    )
    for name in ("rope_base", "max_distance"):
        users = [position for position, scheme in schemes.items() if name in scheme.defaults]
        value = getattr(c, name)
        yield (
            value is not None and c.position not in users,
            f"{name}={value} is not used by position={c.position!r}, only by "
            f"{' or '.join(users) or 'positions that --import= adds'}: leave it out",
        )
    definitions = {}  # of scores
    for name in attentions(c):
        if not isinstance(ATTENTION[name], type):
            definitions[name] = ATTENTION[name]
    for scheme in (c.scheme, DECAY[c.decay]):
        if scheme is not None:
            yield from scheme.refuses(c, definitions)
    yield (
        c.nope_long and c.position not in schemes,
        f"nope_long is for positions inside attention ({', '.join(schemes)}), not for "
        f"position={c.position!r}",
    )
    yield (
        c.nope_long and not mixed(c),
        f"nope_long needs both short and long heads, but heads={c.heads!r} has one kind: use "
        "--heads=S/S/S/L, or --position=none",
    )
