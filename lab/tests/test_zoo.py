"""Attentions since 2024, each against its paper: one token after the other, in float64."""

import cmath
import math
import re

import pytest
import torch
from apart import assert_packed_documents_are_alone
from harness import assert_equal, parametrize, refusal
from reference import assert_bfloat16_is_near, assert_one_model, shaken
from torch.nn import functional as F

from attention.cache import Context
from errors import UserError
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("ideas")
T = 70  # more than four blocks of keys
SIZES = {"block_size": T, "vocab_size": 11, "n_layer": 2, "n_head": 4, "n_embd": 24, "head_dim": 8}
D = 8


def layer(number=0, **fields):
    """(a layer, its input (1, T, C))."""
    gpt = shaken(GPTConfig(**SIZES | {"position": "none"} | fields), dtype=torch.float64)
    return gpt.transformer.h[number].attn, torch.randn(1, T, 24, dtype=torch.float64)


def qkv_of(attn, x):
    """q, k and v (T, H, D) of a layer."""
    return attn.c_attn(x, Context()).view(T, 3, 4, D).unbind(1)


def attended(attn, x):
    """y (H, T, D) of a layer."""
    q, k, v = (part.transpose(0, 1)[None] for part in qkv_of(attn, x))
    return attn.attend(q, k, v, x, Context())[0]


def softmax_sum(s, v):
    """sum of softmax(s) v for lists of scores and values."""
    return torch.stack(s).softmax(0) @ torch.stack(v)


# -----------------------------------------------------------------------------
# queries, keys and values: of token t, from its input x (C)


def rms(x):
    return x / x.square().mean().sqrt()


def turned(x, t):
    """RoPE of a vector at position t, by complex numbers."""
    pairs = [
        complex(a, b) * cmath.exp(1j * t / 10000 ** (2 * d / len(x)))
        for d, (a, b) in enumerate(x.view(-1, 2).tolist())
    ]
    return torch.tensor([y for z in pairs for y in (z.real, z.imag)], dtype=x.dtype)


def test_mla():
    """Equations 9 to 18: scores of k_C and of k_R, which alone are turned."""
    attn, x = layer(qkv="mla", position="half_rope")
    m = attn.c_attn
    (norm_q, up_q), (norm_kv, up_kv) = m.up_q, m.up_kv
    y = attended(attn, x)
    latent = [(m.down.weight @ x_t).split((16, 8, 4)) for x_t in x[0]]
    for t, h in [(0, 0), (5, 1), (69, 3)]:
        q = (up_q.weight @ (norm_q.weight * rms(latent[t][0]))).view(4, D)[h]
        s, v = [], []
        for j in range(t + 1):
            of_head = up_kv.weight.view(4, 12, 8)[h]
            k_c, v_c = (of_head @ (norm_kv.weight * rms(latent[j][1]))).split((4, 8))
            of_rope = turned(q[:4], t) @ turned(latent[j][2], j)
            s.append((q[4:] @ k_c + of_rope) / D**0.5)
            v.append(v_c)
        assert_equal(y[h, t], softmax_sum(s, v), 1e-6)  # RoPE's table is in float32


def gta(m, x, first):
    q, v, k_r = (m.qv.weight @ x + m.qv.bias).split((32, 16, 4))
    k = [torch.cat((k_r, head[4:])) for head in v.view(2, 8)]
    return q, torch.cat(k), v


def tpa(m, x, first):
    parts = []
    for part, n, R in ((m.q, 4, 6), (m.k, 2, 2), (m.v, 2, 2)):
        a, b = (part.a.weight @ x).view(n, R), (part.b.weight @ x).view(R, D)
        y = sum(torch.outer(a[:, r], b[r]) for r in range(R)).flatten() / R
        parts.append(y * (2 / (24 + n * R)) ** 0.5 * (2 / (24 + R * D)) ** 0.5 / 0.02**2)
    return parts


def tied(m, x, first):
    q, k = (m.qk.weight @ x + m.qk.bias).split((32, 16))
    return q, k, k


def value_residual(m, x, first):
    q, k, v = (m.qkv.weight @ x + m.qkv.bias).split((32, 16, 16))
    return q, k, v if first is None else (first[2] + v) / 2


def cla(m, x, first):
    qkv = m.qkv.weight @ x + m.qkv.bias
    return qkv.split((32, 16, 16)) if first is None else (qkv, *first[1:])


@parametrize("formula", [gta, tpa, tied, value_residual, cla])
def test_queries_keys_and_values(formula):
    """Of both layers, with two heads of keys."""
    context = Context()
    first = [None] * T
    position = "half_rope" if formula is gta else "none"
    for number in (0, 1):
        attn, x = layer(number, qkv=formula.__name__, n_kv_head=2, position=position)
        ours = attn.c_attn(x, context)[0]
        first = [formula(attn.c_attn, *of) for of in zip(x[0], first, strict=True)]
        assert_equal(ours, torch.stack([torch.cat(parts) for parts in first]), 1e-10)


# -----------------------------------------------------------------------------
# scores of one query i of head h: s (i + 1) over its keys, v (i + 1, D) their values


def mta(attn, s, v, x, h):
    kernel = [attn.numbers[name][h] for name in "abcde"]
    padded = [0, 0, *s, 0, 0]
    mixed = [sum(w * padded[j + n] for n, w in enumerate(kernel)) for j in range(len(s))]
    return torch.stack(mixed).softmax(0) @ v


def moba(attn, s, v, x, h):
    own = (len(s) - 1) // 16
    means = [s[16 * b : 16 * b + 16].mean() for b in range(own)]
    best = sorted(range(own), key=lambda b: -means[b])[:2]
    keys = [j for j in range(len(s)) if j // 16 in (*best, own)]
    return s[keys].softmax(0) @ v[keys]


def nsa(attn, s, v, x, h):
    n = len(s)
    blocks = [slice(16 * b, 16 * b + 16) for b in range(n // 16)]
    weights = []
    compressed = torch.zeros(D, dtype=s.dtype)
    if blocks:
        weights = torch.stack([s[b].mean() for b in blocks]).softmax(0)
        compressed = weights @ torch.stack([v[b].mean(0) for b in blocks])
    own = (n - 1) // 16
    always = {0, own - 1, own}
    others = sorted(set(range(len(blocks))) - always, key=lambda b: -weights[b])
    chosen = {*always, *others[: 4 - len(always & {*range(own + 1)})]}
    keys = [j for j in range(n) if j // 16 in chosen]
    numbers = attn.token_numbers[0]
    gates = (numbers.weight @ x + numbers.bias).view(4, 3)[h].sigmoid()
    selected = s[keys].softmax(0) @ v[keys]
    return gates[0] * compressed + gates[1] * selected + gates[2] * (s[-32:].softmax(0) @ v[-32:])


def log_linear(attn, s, v, x, h):
    """Stretches as the paper cuts them: of i, its lowest bit, then the next, back to 0."""
    i = len(s) - 1
    numbers = attn.token_numbers[0]
    lambdas = 2 * (numbers.weight @ x + numbers.bias).view(4, 16)[h].sigmoid()
    y = lambdas[0] * s[i] * v[i]
    end = i
    while end > 0:
        bit = end & -end
        stretch = slice(end - bit, end)
        y = y + lambdas[bit.bit_length()] * s[stretch] @ v[stretch]
        end -= bit
    return attn.ln_head.weight * y / (y.square().mean() + 1e-5).sqrt()


def queries(attn, x):
    """(i, h, s, v) of some queries."""
    q, k, v = qkv_of(attn, x)
    for i, h in [(0, 1), (15, 0), (16, 2), (40, 3), (69, 1)]:
        yield i, h, k[: i + 1, h] @ q[i, h] / D**0.5, v[: i + 1, h]


@parametrize("formula", [mta, moba, nsa, log_linear])
def test_a_query(formula):
    attn, x = layer(attention=formula.__name__)
    y = attended(attn, x)
    for i, h, s, v in queries(attn, x):
        assert_equal(y[h, i], formula(attn, s, v, x[0, i], h), 1e-10)


def test_talking_heads():
    attn, x = layer(attention="talking_heads")
    q, k, v = qkv_of(attn, x)
    y = attended(attn, x)
    before, after = (torch.eye(4) + m.weight for m in (attn.decay.before, attn.decay.after))
    for i in (0, 40):
        s = torch.stack([k[: i + 1, h] @ q[i, h] / D**0.5 for h in range(4)])
        mixed = [sum(before[g, h] * s[g] for g in range(4)).softmax(0) for h in range(4)]
        for h in range(4):
            weights = sum(after[g, h] * mixed[g] for g in range(4))
            assert_equal(y[h, i], weights @ v[: i + 1, h], 1e-10)


def test_selective():
    """What an earlier query gives a key, by the first head's scores, is taken from later scores."""
    attn, x = layer(attention="selective")
    q, k, v = qkv_of(attn, x)
    y = attended(attn, x)
    less = [0.0] * T
    for i in range(T):
        for h in range(4):
            s = torch.stack([k[j, h] @ q[i, h] / D**0.5 - less[j] for j in range(i + 1)])
            assert_equal(y[h, i], s.softmax(0) @ v[: i + 1, h], 1e-10)
        for j in range(1, i):
            less[j] = less[j] + (k[j, 0] @ q[i, 0] / D**0.5).relu()


def test_interleaved_heads():
    """Algorithm 1: two tokens of each, one after the other, all of them causal."""
    attn, x = layer(attention="iha")
    m = attn.c_attn
    parts = (x[0] @ m.qkv.weight.T + m.qkv.bias).view(T, 3, 4, D).unbind(1)  # (T, H, D)
    alphas = [torch.eye(4).repeat_interleave(2, 1) + change.weight for change in m.mix]
    q, k, v = (torch.einsum("tgd,gn->ntd", z, a) for z, a in zip(parts, alphas, strict=True))
    q, k, v = (z.view(4, 2, T, D).transpose(1, 2).reshape(4, 2 * T, D) for z in (q, k, v))
    s = (q @ k.mT / D**0.5).masked_fill(torch.ones(2 * T, 2 * T).triu(1) > 0, -math.inf)
    of_each = (s.softmax(-1) @ v).view(4, T, 2, D)
    R = torch.eye(4).repeat_interleave(2, 0) / 2 + attn.collapse.weight
    y = torch.einsum("htpd,hpg->tgd", of_each, R.view(4, 2, 4))
    assert_equal(attn(x)[0], attn.c_proj(y.flatten(1)), 1e-10)


def test_wall():
    """A gate for each channel: what is left of it is a product over the tokens between."""
    attn, x = layer(attention="wall")
    q, k, v = qkv_of(attn, x)
    gates = (x[0] @ attn.c_gate.weight.T + attn.c_gate.bias + 8).sigmoid().view(T, 4, D)
    y = attended(attn, x)
    for i, h in [(0, 0), (9, 1), (69, 3)]:
        s = []
        left = torch.ones(D, dtype=x.dtype)
        for j in range(i, -1, -1):
            s.insert(0, (q[i, h] * left) @ k[j, h] / D**0.5)
            left = left * gates[j, h]
        assert_equal(y[h, i], torch.stack(s).softmax(0) @ v[: i + 1, h], 1e-10)


def test_kda():
    """Equations 1 and 10."""
    attn, x = layer(attention="kda")
    q, k, v, gate = (x[0] @ attn.c_attn.weight.T + attn.c_attn.bias).view(T, 4, 4, D).unbind(1)
    q, k = (F.normalize(F.silu(z), dim=-1) for z in (q, k))
    rates = (x[0] @ attn.c_rates.weight.T).sigmoid()
    steps = F.softplus(attn.c_alpha(x[0]) + attn.dt).view(T, 4, D)
    alpha = (-attn.log_A.exp()[:, None] * steps).exp()
    y = torch.zeros(T, 4, D, dtype=x.dtype)
    for h in range(4):
        S = torch.zeros(D, D, dtype=x.dtype)
        for t in range(T):
            erase = torch.eye(D) - rates[t, h] * torch.outer(k[t, h], k[t, h])
            S = erase @ torch.diag(alpha[t, h]) @ S
            S = S + rates[t, h] * torch.outer(k[t, h], F.silu(v[t, h]))
            y[t, h] = q[t, h] @ S
    y = F.rms_norm(y, (D,), attn.ln_head.weight, 1e-5) * gate.sigmoid()
    assert_equal(attn(x)[0], attn.c_proj(y.flatten(1)), 1e-10)


# -----------------------------------------------------------------------------
# models

ROPE = {"position": "rope"}
OWN = "kda", "gated_delta"
LONG = "moba", "nsa", "log_linear", "selective", "talking_heads"
SHORT = {"heads": "SSLL", "window": 9}
ALL = [
    *({"qkv": name, "position": "half_rope"} | SHORT for name in ("mla", "gta")),
    *({"qkv": name} | ROPE | SHORT for name in ("tpa", "tied", "value_residual", "cla")),
    *({"attention": name} | ROPE | SHORT for name in ("mta", "iha")),
    *({"attention": name} | ROPE for name in LONG),
    {"attention": "wall"} | SHORT,
    *({"attention": name, "conv": 3} for name in OWN),
]


@parametrize("fields", ALL, ids=str)
def test_cached_packed_causal_checkpointed_and_in_bfloat16(fields):
    name = fields.get("attention")
    groups = {} if name in OWN else {"n_kv_head": 2}
    c = GPTConfig(**SIZES | {"block_size": 280, "n_layer": 3, "position": "none"} | groups | fields)
    by = 0.02 if fields.get("qkv") == "tpa" else 0.2  # its scores are products of products
    gpt = shaken(c, by, dtype=torch.float64)
    x = torch.randint(11, (2, 280))
    assert_one_model(gpt, x, [7, 1, 1, 262, 1, 8], 150)
    assert_packed_documents_are_alone(gpt, x, 150, 1e-5)
    most = 12 if name in (*OWN, "log_linear") else 4  # a norm follows, of sums that may be small
    assert_bfloat16_is_near(shaken(c, by=0.02), x[:, :160], most=most)


REFUSED = [
    *(({"attention": name} | SHORT, "the heads of its layers are long") for name in LONG),
    ({"attention": "talking_heads", "decay": "alibi"}, "talking_heads takes no decay"),
    ({"attention": "wall"} | ROPE, "add --position=none"),
    ({"attention": "selective", "qkv": "cla"}, "it takes no qkv='cla'"),
    ({"attention": "iha", "position": "alibi"}, "iha takes no position='alibi'"),
    ({"attention": "iha", "temperature": 2.0}, "iha takes no temperature=2.0"),
    ({"attention": "log_linear", "block_size": 2**16}, "is above 2^15"),
    ({"qkv": "mla"} | ROPE, "mla and gta need --position=half_rope"),
    ({"head_dim": 6, "position": "half_rope"}, "head_dim=6 is no multiple of 4"),
    (
        {"qkv": "cla", "attention": "kda", "short_attention": "softmax", "heads": "S/L"},
        "cla takes keys from the layer before",
    ),
]


@parametrize("fields, says", REFUSED)
def test_what_does_not_fit(fields, says):
    with refusal(re.escape(says), UserError):
        GPT(GPTConfig(**SIZES | {"position": "none"} | fields))


# -----------------------------------------------------------------------------
# what they are if one thing is left out


def zero(*names):
    def change(attn):
        for name in names:
            attn.get_parameter(name).data.zero_()

    return change


def no_neighbours(attn):
    for name, p in attn.numbers.items():
        p.data.fill_(name == "c")


def open_gates(attn):
    attn.c_gate.weight.data.zero_()
    attn.c_gate.bias.data.fill_(1e3)


@parametrize(
    "name, change, tokens",
    [
        ("talking_heads", zero("decay.before.weight", "decay.after.weight"), T),
        ("mta", no_neighbours, T),
        ("wall", open_gates, T),
        ("moba", zero(), 48),
        ("selective", zero(), 2),
    ],
)
def test_softmax_is_their_limit(name, change, tokens):
    """With the same weights, but for what softmax lacks, both have the same output."""
    attn, x = layer(attention=name)
    softmax = layer()[0]
    change(attn)
    known = softmax.state_dict()
    softmax.load_state_dict({name: p for name, p in attn.state_dict().items() if name in known})
    assert_equal(attn(x[:, :tokens]), softmax(x[:, :tokens]), 1e-10)
