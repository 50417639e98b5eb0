"""What goes beside any attention: one for each span, a decay, a position, a short convolution."""

import itertools

import torch
from harness import assert_equal, legal, pairwise, parametrize
from reference import (
    FUNCTIONS,
    OF_QKV,
    SIZES,
    assert_bfloat16_is_near,
    cached,
    naive_attention,
    shaken,
)
from test_forms import normalised_keys, sigmoid_attention
from torch import Tensor
from torch.autograd import grad

from attention.cache import run_definitions
from model import ATTENTION, GPT, GPTConfig
from parts import alibi_slopes

V, C, D = 65, 32, 8
LONG = 290  # more than beta's and beta_squared's chunks, and no whole number of them
cores = parametrize("core", FUNCTIONS)


def config(**choices: object) -> GPTConfig:
    return GPTConfig(**SIZES | {"block_size": LONG} | choices, head_dim=D)


def model(by: float = 0.1, **choices: object) -> GPT:
    """A model far from initialisation, in float64."""
    return shaken(config(**choices), by, torch.float64)


def tokens(n: int = LONG, B: int = 2) -> Tensor:
    return torch.randint(V, (B, n))


# -----------------------------------------------------------------------------
# a layer by hand


def by_hand(attn, c, layer, x):
    """A layer's output from the formulas of its parts, head by head and query by query.

    Short heads come first; neighbours share a key and a value.
    """
    letters = c.layer_heads(layer)
    q, k, v = qkv_by_hand(attn, c, x)
    y = []
    for place, h in enumerate(sorted(range(c.n_head), key=lambda h: letters[h] == "L")):
        key = place // (c.n_head // c.n_kv_head)
        y.append(head_by_hand(c, letters[h], h, q[:, [place]], k[:, [key]], v[:, [key]]))
    return attn.c_proj(torch.cat(y, dim=-1)[:, 0])


def qkv_by_hand(attn, c, x):
    before = attn.c_attn(x)  # before the convolution
    qkv = before.clone()
    for offset in range(c.conv):
        earlier = before[:, : x.shape[1] - offset]
        qkv[:, offset:] += attn.conv.weight[:, offset] * earlier
    parts = qkv.split((c.n_head * D, c.n_kv_head * D, c.n_kv_head * D), dim=-1)
    return [part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts]


def head_by_hand(c, letter, h, q, k, v):
    """y (B, 1, T, D) of the head of this letter, number h among the letters."""
    position = "none" if c.nope_long and letter == "L" else c.position
    core = c.attention
    settings = {"scale": c.scale}
    if letter == "S":
        core = c.short_attention
        settings["window"] = c.window
    if position == "rope":
        q = turned(q, c.rope_base or 10000.0)
        k = turned(k, c.rope_base or 10000.0)
    if "alibi" in (c.decay, position):
        settings["decay"] = torch.full((1, 1, 1), alibi_slopes(c.n_head)[h], dtype=q.dtype)
    return naive_attention(core, q, k, v, **settings)


def turned(x, base):
    """x (B, H, T, D), turned by RoPE: pairs of dimensions as complex numbers."""
    theta = base ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angle = torch.arange(x.shape[2])[:, None] * theta
    turn = torch.polar(torch.ones_like(angle), angle)
    x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x * turn).flatten(-2)


ROPE = {"position": "rope", "rope_base": 50.0}
LAYERS = [
    ("SLSL/SSSL", {"decay": "alibi", "conv": 3, "n_kv_head": 2}),
    ("SSLL", {"n_kv_head": 1, "conv": 2}),
    ("LSLS", ROPE | {"decay": "alibi", "n_kv_head": 2}),
    ("SLLS", ROPE | {"nope_long": True}),
    ("SLLS", {"position": "alibi", "nope_long": True}),
    ("SLSLSL", {"position": "alibi", "n_head": 6, "n_kv_head": 3}),  # 3 are no whole number of 2
]


def layers(short: str, long: str, layer: tuple[str, dict]) -> GPTConfig:
    heads, choices = layer
    return config(attention=long, short_attention=short, heads=heads, window=3, **choices)


@parametrize(
    "short, long, layer",
    pairwise(OF_QKV, OF_QKV, LAYERS, legal=lambda *row: legal(layers, *row)),
)
def test_each_head_is_its_attention_with_its_span(short, long, layer):
    c = layers(short, long, layer)
    gpt = shaken(c, 0.1, torch.float64)
    x = torch.randn(1, 24, C, dtype=torch.float64)
    exact = not c.scheme and c.decay == "none"  # tables of positions are in float32
    for i, block in enumerate(gpt.transformer.h):
        expected = by_hand(block.attn, c.resolved(), i, x)
        assert_equal(block.attn(x), expected, 1e-12 if exact else 2e-6)


def test_a_layer_without_its_position():
    """attn.position = None takes effect."""
    gpt = model(position="rope", heads="SL", window=5)
    none = model(position="none", heads="SL", window=5)
    none.load_state_dict(gpt.state_dict())
    x = tokens()
    for block in gpt.transformer.h:
        block.attn.position = None
    assert torch.equal(gpt(x, x)[0], none(x, x)[0])


# -----------------------------------------------------------------------------
# caches and documents

GROUPED = {"heads": "SSL", "n_head": 5, "n_embd": 40, "decay": "alibi", "conv": 4, "n_kv_head": 1}
UNEVEN = {"heads": "SSLLLL", "n_head": 6, "n_kv_head": 2, "position": "rope"}
NOPE = {"heads": "SSLL", "position": "alibi", "nope_long": True, "conv": 6}
NAMES = FUNCTIONS
CASES = [
    *zip(NAMES, NAMES[1:] + NAMES[:1], itertools.cycle((GROUPED, UNEVEN, NOPE))),
    ("softmax", "beta", UNEVEN),
]


@parametrize("short, long, choices", CASES)
def test_cached_packed_and_plain_are_the_same(short, long, choices):
    """Logits and gradients are those of the definitions; caches and documents change nothing."""
    gpt = model(0.05, attention=long, short_attention=short, window=20, **choices)
    x, y = torch.randint(V, (2, 2, LONG))
    logits, loss = gpt(x, y)
    gradients = grad(loss, gpt.parameters())
    # shorter and longer than the convolution
    for sizes in ([1, 1, 1, 2, 1, 7, 1], [267, 1, 3, 1, 18]):
        n = sum(sizes)
        assert_equal(cached(gpt, x[:, :n], sizes), logits[:, :n], 1e-10)
    run_definitions(gpt)
    by_definition, loss = gpt(x, y)
    assert_equal(logits, by_definition, 1e-10)
    expected = grad(loss, gpt.parameters())
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-10)


# -----------------------------------------------------------------------------
# the decay


def fading_attention(s, seen, v, fade):
    """A researcher's own: y = sum_j sigmoid(s_ij) gamma^(i - j) v_j."""
    return fade(s.sigmoid()).where(seen, 0.0) @ v


@parametrize("definition", [fading_attention, sigmoid_attention, normalised_keys])
def test_a_new_attention_decays(definition, monkeypatch):
    """With `fade` it gets its heads' slopes, else lower scores. Keys have no more dimensions."""
    monkeypatch.setitem(ATTENTION, "mine", definition)
    gpt = model(short_attention="mine", heads="SLSS", window=20, decay="alibi")
    attn = gpt.transformer.h[0].attn
    x = torch.randn(1, 200, C, dtype=torch.float64)
    expected = by_hand(attn, gpt.config.resolved(), 0, x)
    assert_equal(attn(x), expected, 2e-6)


@cores
def test_bfloat16_autocast_stays_near_float32(core):
    choices = {"heads": "SSLL", "window": 20, "position": "rope", "decay": "alibi", "conv": 4}
    gpt = model(0.02, attention=core, **choices).float()
    for end in ("conv.weight", "c_attn.weight"):
        assert_bfloat16_is_near(gpt, tokens(), end)
