"""What goes beside any attention: one for each span, a decay, a position, a short convolution."""

import itertools
import math

import pytest
import torch
from harness import assert_equal, legal, pairwise, parametrize
from reference import ONE_QUERY, cached, naive_attention, shaken
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F

from attention.cache import run_definitions
from attention.sums import LINEAR_FROM
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION

V, C, H, D = 29, 32, 4, 8
LONG = LINEAR_FROM + 34  # more than beta's and beta_squared's chunks, and no whole number of them
cores = parametrize("core", ATTENTION)


def config(**choices: object) -> GPTConfig:
    sizes = {"block_size": LONG, "vocab_size": V, "n_layer": 2, "n_head": H, "n_embd": C}
    return GPTConfig(**sizes | choices)


def model(by: float = 0.1, **choices: object) -> GPT:
    """A model far from initialisation, in float64."""
    return shaken(config(**choices), by, torch.float64)


def tokens(n: int = LONG, B: int = 2) -> Tensor:
    return torch.randint(V, (B, n))


# -----------------------------------------------------------------------------
# a layer by hand


def by_hand(attn, c, layer, x):
    """A layer's output from the formulas of its parts, head by head and query by query.

    Differential attention: heads 2i and 2i + 1 are a pair, and lambda is exp(q1 k1) - exp(q2 k2)
    + lambda_init (Ye et al. 2024, equations 1 to 3).
    """
    n_map = 2 if c.differential else 1
    q, k, v = qkv_by_hand(attn, c, x)
    y = []
    for h, letter in enumerate(c.layer_heads(layer)):
        value = h // n_map // (H // c.n_kv_head)
        key = n_map * value + h % n_map
        y.append(head_by_hand(attn, c, letter, h, q[:, [h]], k[:, [key]], v[:, [value]]))
    y = torch.cat(y, dim=1)  # (B, H, T, D)
    if c.differential:
        first = (attn.lambda_q1 @ attn.lambda_k1).exp()
        second = (attn.lambda_q2 @ attn.lambda_k2).exp()
        init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        y = y[:, ::2] - (first - second + init) * y[:, 1::2]
        y = F.rms_norm(y, (2 * D,), attn.ln_head.weight, 1e-5) * (1 - init)
    if c.after == "xsa":
        v = v.repeat_interleave(y.shape[1] // v.shape[1], dim=1)
        v = v / v.norm(dim=-1, keepdim=True)
        y = y - (y * v).sum(-1, keepdim=True) * v
    elif c.after != "none":  # a gate for each channel, or for each head
        gate = (x @ attn.after.c_gate.weight.T).sigmoid()
        y = y * gate.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
    return attn.c_proj(y.transpose(1, 2).flatten(2))


def qkv_by_hand(attn, c, x):
    before = attn.c_attn(x)  # before the convolution
    qkv = before.clone()
    for offset in range(c.conv):
        earlier = before[:, : x.shape[1] - offset]
        qkv[:, offset:] += attn.conv.weight[:, offset] * earlier
    parts = qkv.split((H * D, c.n_kv_head * D, c.n_kv_head * D), dim=-1)
    widths = (D, D, 2 * D if c.differential else D)
    return [
        part.unflatten(-1, (-1, width)).transpose(1, 2)
        for part, width in zip(parts, widths, strict=True)
    ]


# {position: f(its Scheme, c, head, q, distances of keys) -> arguments of naive_attention}
BY_HAND = {}


def head_by_hand(attn, c, letter, h, q, k, v):
    """y (B, 1, T, D) of head h."""
    T = q.shape[2]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    position = "none" if c.nope_long and letter == "L" else c.position
    core = c.attention
    settings = {"scale": c.scale}
    if letter == "S":
        core = c.short_attention
        settings["window"] = c.window
    if position == "rope":
        q = turned(q, c.rope_base)
        k = turned(k, c.rope_base)
    elif position in BY_HAND:
        settings |= BY_HAND[position](attn.position, c, h, q, distance)
    if c.per_dim_temperature:
        q = q * F.softplus(attn.per_dim_temperature)
    if c.decay == "learned":
        settings["decay"] = attn.decay.log_slopes[[h], None, None].exp()
    elif "alibi" in (c.decay, position):
        n_map = 2 if c.differential else 1
        slope = 2 ** (-8 * (h // n_map + 1) / (H // n_map))  # of a power of two of heads
        settings["decay"] = torch.full((1, 1, 1), slope, dtype=q.dtype)
    return naive_attention(core, q, k, v, **settings)


def turned(x, base):
    """x (B, H, T, D), turned by RoPE: pairs of dimensions as complex numbers."""
    theta = base ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angle = torch.arange(x.shape[2])[:, None] * theta
    turn = torch.polar(torch.ones_like(angle), angle)
    x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x * turn).flatten(-2)


LAYERS = [
    (
        "SLSL/SSSL",
        {
            "decay": "learned",
            "conv": 3,
            "after": "xsa",
            "n_kv_head": 2,
        },
    ),
    (
        "SSLL",
        {
            "decay": "learned",
            "differential": True,
            "n_kv_head": 2,
            "after": "gate",
        },
    ),
    (
        "LSLS",
        {
            "decay": "alibi",
            "position": "rope",
            "rope_base": 50.0,
            "n_kv_head": 2,
            "per_dim_temperature": True,
        },
    ),
    (
        "SLLS",
        {
            "position": "rope",
            "nope_long": True,
            "per_dim_temperature": True,
        },
    ),
    (
        "SLLS",
        {
            "position": "alibi",
            "nope_long": True,
            "conv": 2,
            "after": "gate_head",
        },
    ),
    ("SS/LL", {"differential": True, "after": "xsa"}),
    ("LSLS", {"after": "gate"}),
]


def layers(short: str, long: str, layer: tuple[str, dict]) -> GPTConfig:
    heads, choices = layer
    return config(attention=long, short_attention=short, heads=heads, window=3, **choices)


def test_every_position_is_in_a_layer():
    """A new one needs a formula in head_by_hand. lab/tests/test_positions.py has the lab's."""
    inside_attention = {name for name, (_, scheme) in POSITION.items() if scheme}
    in_layers = {choices.get("position") for _, choices in LAYERS}
    assert inside_attention - in_layers <= {"relative", "t5"}


@parametrize(
    "short, long, layer",
    pairwise(ATTENTION, ATTENTION, LAYERS, legal=lambda *row: legal(layers, *row)),
)
def test_each_head_is_its_attention_with_its_span(short, long, layer):
    c = layers(short, long, layer)
    gpt = shaken(c, 0.1, torch.float64)
    x = torch.randn(1, 24, C, dtype=torch.float64)
    exact = c.decay == "learned"  # tables of fixed positions are in float32
    for i, block in enumerate(gpt.transformer.h):
        expected = by_hand(block.attn, c.resolved(), i, x)
        assert_equal(block.attn(x), expected, 1e-12 if exact else 2e-6)


# -----------------------------------------------------------------------------
# caches and documents

LEARNED = {
    "decay": "learned",
    "conv": 4,
    "n_kv_head": 2,
    "after": "xsa",
}
NOPE = {
    "position": "alibi",
    "nope_long": True,
    "differential": True,
    "conv": 6,
    "after": "gate",
}
NAMES = [*ATTENTION]
CASES = [
    *zip(NAMES, NAMES[1:] + NAMES[:1], itertools.cycle((LEARNED, NOPE))),
    ("softmax", "beta", LEARNED),
]


@parametrize("short, long, choices", CASES)
def test_cached_packed_and_plain_are_the_same(short, long, choices):
    """Logits and gradients are those of the definitions; caches and documents change nothing."""
    gpt = model(0.05, attention=long, short_attention=short, heads="SSLL", window=20, **choices)
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


def test_learned_slopes_begin_at_alibis():
    """They are of one dimension: not decayed by the optimizer."""
    for block in GPT(config(decay="learned")).transformer.h:
        slopes = block.attn.decay.log_slopes.exp().tolist()
        assert slopes == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256])


def fading_attention(s, seen, v, fade):
    """A researcher's own: y = sum_j sigmoid(s_ij) gamma^(i - j) v_j."""
    return fade(s.sigmoid()).where(seen, 0.0) @ v


def sigmoid_attention(s, seen, v):
    return s.sigmoid().where(seen, 0.0) @ v


@parametrize("definition", [fading_attention, sigmoid_attention])
def test_a_new_attention_decays(definition, monkeypatch):
    """With `fade` it gets its heads' slopes, else ALiBi's bias; also in short heads, in blocks."""
    monkeypatch.setitem(ATTENTION, "mine", definition)
    gpt = model(short_attention="mine", heads="SLSS", window=20, decay="learned")
    attn = gpt.transformer.h[0].attn
    x = torch.randn(1, 200, C, dtype=torch.float64)
    expected = by_hand(attn, gpt.config.resolved(), 0, x)
    assert_equal(attn(x), expected, 1e-11)


# -----------------------------------------------------------------------------
# all of it

ALL = {"heads": "SSLL", "window": 20, "decay": "learned", "conv": 4}


@cores
@parametrize("start", [0, 100])  # of the last document
def test_causal_by_gradient_and_of_one_document(core, start):
    """More tokens than chunks: no gradient comes from a later token or from another document."""
    gpt = model(attention=core, short_attention="softmax", **ALL)
    x = tokens(B=1)
    inputs = []
    gpt.transformer.drop.register_forward_hook(lambda module, args, y: inputs.append(y))
    pos = torch.cat((torch.arange(start), torch.arange(LONG - start)))
    logits = gpt(x, x, pos=pos[None] if start else None)[0]
    for i in (start, start + 1, start + 70, LONG - 1):
        (gradient,) = grad(logits[:, i].square().sum(), inputs, retain_graph=True)
        reached = gradient.abs().sum((0, 2)) > 0
        assert reached[start] and reached[i]
        assert not reached[:start].any()
        assert not reached[i + 1 :].any()


@cores
def test_bfloat16_autocast_stays_near_float32(core):
    """All gradients together, and that of the slopes too."""
    gpt = model(0.02, attention=core, **ALL).float()
    x = tokens()

    def gradients(end, half):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = gpt(x, x)[1]
        params = [p for name, p in gpt.named_parameters() if name.endswith(end)]
        return torch.cat([gradient.flatten() for gradient in grad(loss, params)])

    names = ["conv.weight", "c_attn.weight"]
    if core in ONE_QUERY:  # in a sparse attention of your own it may be nearly 0
        names.append("log_slopes")
    for end in names:
        exact = gradients(end, half=False)
        error = gradients(end, half=True) - exact
        assert 0 < error.norm() < 4 * 2**-8 * exact.norm(), end
