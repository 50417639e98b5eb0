"""What None stands for in a GPTConfig, and which of its choices go together.

with_defaults() fills in the defaults. check() raises UserError where choices do not go together. A rule is one
statement: `yield (whether it is broken, the message)`. `c` is a model.GPTConfig as the user gave it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from attention.scores import takes
from choices import ACTIVATION, AFTER, NORM, QK_NORM, WHERE
from errors import refuse
from positions import DECAY, POSITION


def with_defaults(c, ATTENTION: dict[str, Callable]):
    """GPTConfig.resolved(): c with its default in the place of each None that stands for a default."""
    window = 50 if c.block_size <= 2048 else 100  # long-short paper, section 5.1
    short, scheme = c.short_attention or c.attention, POSITION[c.position][1]
    drops = all(takes(ATTENTION[name], "drop") for name in (c.attention, short))
    return replace(
        c,
        short_attention=short if "S" in c.heads else None,
        n_kv_head=c.n_kv_head or c.n_head,
        head_dim=c.head_dim or c.n_embd // c.n_head,
        attn_dropout=(c.dropout if drops else 0.0) if c.attn_dropout is None else c.attn_dropout,
        window=window if c.window is None and "S" in c.heads else c.window,
        **{name: getattr(c, name) or value for name, value in (scheme.defaults if scheme else {}).items()},
        n_hidden=c.n_hidden or (8 * max(1, round(c.n_embd / 3)) if ACTIVATION[c.mlp][1] else 4 * c.n_embd),
    )


def check(c, ATTENTION: dict[str, Callable]) -> None:
    """Raises UserError for a GPTConfig whose choices do not fit, with the sentence of the first rule that it breaks."""
    refuse(rules(c, ATTENTION))


# fmt: off
def rules(c, ATTENTION: dict[str, Callable]) -> Iterator[tuple[bool, str]]:
    """Yields (whether a rule is broken, the message for it). A rule may assume that all rules before it hold."""
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "n_hidden"):
        value = getattr(c, name)
        yield value is not None and value < 1, f"{name}={value} must be at least 1"
    yield (c.head_dim is None and c.n_embd % c.n_head != 0,
           f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}: set n_head to a divisor of it, or set head_dim")
    tables = {"attention": ATTENTION, "qk_norm": QK_NORM, "position": POSITION, "decay": DECAY, "norm": NORM}
    tables |= {"where": WHERE, "block": ("serial", "parallel"), "mlp": ACTIVATION, "after": AFTER}
    if c.short_attention is not None:
        tables["short_attention"] = ATTENTION
    for name, table in tables.items():
        yield (getattr(c, name) not in table,
               f"{name}={getattr(c, name)!r} is not one of {', '.join(table)} (--import= adds your own)")
    for name in ("dropout", "attn_dropout"):
        yield not 0 <= (getattr(c, name) or 0.0) < 1, f"{name}={getattr(c, name)} must be in [0, 1)"
    for name in attentions(c):
        yield (bool(c.attn_dropout) and not takes(ATTENTION[name], "drop"),
               f"attention={name!r} allows no dropout on attention weights (its function takes no `drop`; in "
               f"LASER a dropped weight can be log(0)): leave attn_dropout out, or set it to 0")
    positive = {"temperature": "; 1.0 changes no score", "logit_softcap": "; Gemma 2's is 30", "rope_base": ""}
    for name, hint in positive.items():
        value = getattr(c, name)
        yield value is not None and not 0 < value < math.inf, f"{name}={value} must be a positive number{hint}"
    yield (c.block == "parallel" and c.where == "post",
           "where='post' has a norm after each of two sums, but a parallel block has one sum: use where='pre'")
    yield not 0 <= c.conv <= 64, f"conv={c.conv} must be 0 (no convolution) or a width up to 64: 4 is usual"
    yield not 0 < c.norm_eps < 1, f"norm_eps={c.norm_eps} must be between 0 and 1"
    yield not 0 <= c.label_smoothing < 1, f"label_smoothing={c.label_smoothing} must be in [0, 1): 0.1 is usual"
    yield not 0 <= c.z_loss < math.inf, f"z_loss={c.z_loss} must not be negative; PaLM's is 1e-4"
    yield from rules_of_heads(c)
    yield from rules_of_position(c, ATTENTION)


def rules_of_heads(c) -> Iterator[tuple[bool, str]]:
    G = c.n_kv_head or c.n_head
    yield c.n_head % G != 0, f"n_head={c.n_head} is not a multiple of n_kv_head={G}: set n_kv_head to a divisor of it"
    layers = c.heads.split("/")
    yield (not all(layers) or bool(set(c.heads) - set("SL/")),
           f"heads={c.heads!r} must be made of S (short) and L (long) with / between layers: L, SSSL, S/S/L")
    most = max(map(len, layers))
    yield (len(layers) > c.n_layer or most > c.n_head,
           f"heads={c.heads!r} is too long (layers: {len(layers)}, heads in a layer: {most}): the model has "
           f"n_layer={c.n_layer} and n_head={c.n_head}")
    yield ("S" not in c.heads and c.window is not None,
           f"window={c.window} needs a short head, but heads={c.heads!r} has no S: use for example --heads=SSSL")
    yield (c.short_attention not in (None, c.attention) and not {"S", "L"} <= set(c.heads),
           f"short_attention={c.short_attention!r} needs both short and long heads, but heads={c.heads!r} has one "
           f"kind: use for example --heads=SSSL, or --attention alone")
    yield c.window is not None and c.window < 0, f"window={c.window} must be 0 (a token sees itself alone) or more"
    if not c.differential:
        return
    yield c.n_head % 2 == 1, f"differential attention pairs the heads, but n_head={c.n_head} is odd"
    yield G % 2 == 1, f"differential attention pairs the heads, but n_kv_head={G} is odd"
    for letters in map(c.layer_heads, range(c.n_layer)):
        yield (letters[::2] != letters[1::2],
               f"heads={c.heads!r} with differential: heads 2i and 2i + 1 are a pair and need the same letter, "
               f"but the letters of a layer are {letters}; write each letter twice: SSLL")


def rules_of_position(c, ATTENTION: dict[str, Callable]) -> Iterator[tuple[bool, str]]:
    schemes = {name: scheme for name, (_, scheme) in POSITION.items() if scheme}  # those inside attention
    yield (c.position == "sinusoidal" and c.n_embd % 2 == 1,
           f"position='sinusoidal' is made of pairs of a sine and a cosine, but n_embd={c.n_embd} is odd")
    yield (c.position == "alibi" and c.decay != "none",
           f"position='alibi' is a decay itself: leave decay={c.decay!r} out, or use --position=none")
    for name in dict.fromkeys(name for scheme in schemes.values() for name in scheme.defaults):
        users, value = [p for p, scheme in schemes.items() if name in scheme.defaults], getattr(c, name)
        yield (value is not None and c.position not in users,
               f"{name}={value} is used only with position={' or '.join(users)}, not {c.position!r}: leave it out")
    yield c.max_distance is not None and c.max_distance < 1, f"max_distance={c.max_distance} must be at least 1"
    if c.position in schemes:
        yield from schemes[c.position].refuses(c, {name: ATTENTION[name] for name in attentions(c)})
    yield (c.nope_long and c.position not in schemes,
           f"nope_long is for positions inside attention ({', '.join(schemes)}), not for position={c.position!r}")
    yield (c.nope_long and not {"S", "L"} <= set(c.heads),
           f"nope_long needs both short and long heads, but heads={c.heads!r} has one kind: use --heads=S/S/S/L, or "
           f"--position=none")
# fmt: on


def attentions(c) -> list[str]:
    """The names of the attentions of a configuration: that of the long heads, then that of the short ones."""
    return [*dict.fromkeys((c.attention, c.short_attention or c.attention))]
