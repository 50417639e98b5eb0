"""The attentions of lab/ideas: their formulas, and the tests that every attention passes."""

import math

import pytest
import test_attention as common
import torch
from apart import FORMS, NEW, assert_packed_documents_are_alone
from harness import assert_equal, parametrize, refusal
from reference import (
    assert_bfloat16_is_near,
    assert_exact,
    assert_one_model,
    naive_attention,
    plain,
    shaken,
)
from torch.autograd import grad
from torch.nn import functional as F
from torch.testing import assert_close

import lab.ideas.activations
import lab.ideas.norms
import lab.ideas.positions
import lab.ideas.temperature  # noqa: F401
from attention import fast
from attention.cache import run_definitions
from attention.forms import code_of
from attention.scores import scores
from errors import UserError
from lab.ideas.after import AFTER
from lab.ideas.entmax import Entmax15
from lab.ideas.stick_breaking import BLOCK
from model import ATTENTION, GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("ideas")
idea = parametrize("core", NEW)
windows = parametrize("window", [None, 7])
SIZES = {
    "n_layer": 1,
    "n_head": 4,
    "n_embd": 16,
    "vocab_size": 11,
    "block_size": 200,
}


def qkv() -> list[torch.Tensor]:
    return [x.detach() for x in common.qkv().values()]


# -----------------------------------------------------------------------------
# formulas: y of one query with the scores s (n) over n keys, the last one its own, and values v


def sink(s, v):
    return s.exp() @ v / (1 + s.exp().sum())


def ssmax(s, v):
    return (0.43 * math.log(len(s)) * s).softmax(-1) @ v


def softpick(s, v):
    x = s.exp() - 1
    return x.relu() @ v / x.abs().sum()


def top_k(s, v):
    largest = s.topk(min(8, len(s)))
    return largest.values.softmax(-1) @ v[largest.indices]


def stick(s):
    """What is left for the token itself; the weights of the keys before it, the last one first."""
    weights = []
    left = torch.ones((), dtype=s.dtype)
    for share in s[:-1].sigmoid().flip(0):
        weights.append(share * left)
        left = left * (1 - share)
    return torch.stack([left, *weights])


def stick_breaking(s, v):
    return stick(s)[1:] @ v[:-1].flip(0)


def stick_laser(s, v):
    return (stick(s) @ v.exp().flip(0)).log()


@parametrize("formula", [sink, ssmax, softpick, top_k, stick_breaking, stick_laser])
@windows
def test_its_formula(formula, window):
    q, k, v = qkv()
    y = plain(formula.__name__)(q, k, v, window=window, scale=1.0)
    for i in (0, 1, 9, 36):
        first = 0 if window is None else max(0, i - window)
        keys = slice(first, i + 1)
        exact = formula(k[1, 2, keys] @ q[1, 2, i], v[1, 2, keys])
        rtol = 1e-6 if formula is softpick else 1e-11
        assert_close(y[1, 2, i], exact, rtol=rtol, atol=1e-6)


@windows
def test_the_delta_rule_step_by_step(window):
    q, k, v = qkv()
    y = plain("delta_rule")(q, k, v, window=window, scale=1.0)
    q, k, v, y = (x[1, 2] for x in (q, k, v, y))
    for i in (0, 1, 9, 36):
        state = torch.zeros(8, 8, dtype=torch.float64)
        first = 0 if window is None else max(0, i - window)
        for j in range(first, i + 1):
            square = k[j].square().sum()
            rate = square / (1 + square)
            unit = k[j] / k[j].norm()
            old = state @ unit  # the value of this key so far, which makes room
            state = state + rate * torch.outer(v[j] - old, unit)
        assert_close(y[i], state @ q[i], rtol=1e-10, atol=1e-10)


def test_lucid():
    """Of the last query; a window's keys are chosen as in the delta rule."""
    x = qkv()
    q, k, v = (t[1, 2] for t in x)
    similar = (8**0.5 * (F.cosine_similarity(k[:, None], k, dim=-1) - 1)).exp().tril()
    weights = (k @ q[-1] / 8**0.5).softmax(-1)
    assert_close(plain("lucid")(*x)[1, 2, -1], weights @ similar.inverse() @ v)


@idea
@parametrize("T", [common.T, common.LONG])
@parametrize("window", [None, 16])
def test_as_every_attention(core, T, window):
    """Causal; in blocks as a whole; gradients in float64; zero queries."""
    common.test_causal_by_gradient(core, T, window)
    span = (T, window)
    common.test_equals_naive_forward_and_backward(core, span, torch.float64, common.fast)
    if (
        core not in ("delta_rule", "lucid") or window is None
    ):  # with a window it solves for each query: slow
        common.test_a_large_later_token_changes_nothing_before_it(core, span, 50.0, torch.float32)
    if core != "beta_learned":  # as beta, whose norm has its own gradient at 0
        common.test_zero_queries_have_finite_gradients(core, T, window, 0.0, common.LONG)


def test_the_limits():
    q, k, v = qkv()
    softmax = plain("softmax")(q, k, v)
    number = torch.ones(3, 1, 1, dtype=torch.float64)
    # LASER's temperature: softmax at 0, LASER at 1.
    assert_equal(plain("laser_temperature")(q, k, v, t=1e-6 * number), softmax, 1e-4)
    assert_close(plain("laser_temperature")(q, k, v), plain("laser")(q, k, v))
    # s / (4 + ||s||) is beta of s / 4; s^2 / (4 + sum s^2) is beta squared of s / 2.
    for name, scale in (("beta", 1 / 4), ("beta_squared", 1 / 2)):
        y = plain(f"{name}_learned")(q, k, v, b=math.log(4) * number, scale=1.0)
        assert_close(y, plain(name)(q, k, v, scale=scale))


# -----------------------------------------------------------------------------
# forms


@parametrize("name", FORMS)
def test_the_fast_forms_are_written_for_the_definitions(name):
    assert FORMS[name].written_for == code_of(NEW[name])


@parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@parametrize("last", [1, 9, 2 * BLOCK + 5])
def test_stick_breaking_in_blocks_ends_early(dtype, tolerance, last):
    """The last queries of 500 tokens. Keys that no stick reaches are not read: not even NaN."""
    x = common.qkv(500, dtype, Dv=5)
    x["q"] = x["q"].detach()[..., -last:, :].requires_grad_()
    attend = FORMS["stick_breaking"].long(NEW["stick_breaking"])
    assert_exact(attend, "stick_breaking", x, tolerance)
    with torch.no_grad():
        y = attend(**x)
        x["k"][..., :100, :] = math.nan
        assert torch.equal(attend(**x), y)


# -----------------------------------------------------------------------------
# layers


def gated(attn, x, y, v):
    gate = (x @ attn.c_gate.weight.T).sigmoid()  # of each channel, or of each head
    return y * gate.unflatten(-1, (4, -1)).transpose(1, 2)


def xsa(attn, x, y, v):
    unit = v / v.norm(dim=-1, keepdim=True)
    strength = attn.a.tanh() if hasattr(attn, "a") else 1.0
    return y - strength * (y * unit).sum(-1, keepdim=True) * unit


def differential_v2(attn, x, y, v):
    rate = (x @ attn.c_lambda.weight.T).sigmoid()  # of each token and pair
    pairs = [y[:, 2 * i] - rate[..., [i]] * y[:, 2 * i + 1] for i in (0, 1)]
    return torch.stack(pairs, dim=1)


FORMULAS = [*zip(AFTER, (gated, gated, xsa, xsa, differential_v2), strict=True)]


def layer_of(attention: str, G: int = 2):
    """A layer, an input, and q, k and v of each head (B, 1, T, D): two heads are short."""
    choices = {"n_kv_head": G, "head_dim": 8, "position": "none", "heads": "SSLL", "window": 5}
    gpt = shaken(GPTConfig(**SIZES, attention=attention, **choices), dtype=torch.float64)
    attn = gpt.transformer.h[0].attn
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    parts = attn.c_attn(x).unflatten(-1, (-1, 8)).transpose(1, 2).split((4, G, G), dim=1)
    return attn, x, *(part.split(1, dim=1) for part in parts)


@parametrize("name, formula", FORMULAS)
@parametrize("core", ["softmax", "laser", "beta"])
def test_what_follows_attention(core, name, formula):
    attn, x, q, k, v = layer_of(f"{core}_{name}")
    y = [
        naive_attention(core, q[h], k[h // 2], v[h // 2], window=5 if h < 2 else None)
        for h in range(4)
    ]
    own = torch.cat((v[0], v[0], v[1], v[1]), dim=1)
    y = formula(attn, x, torch.cat(y, dim=1), own)
    assert_equal(attn(x), attn.c_proj(y.transpose(1, 2).flatten(2)), 1e-12)
    assert issubclass(ATTENTION[name], AFTER[name]) and ATTENTION[name].attention == "softmax"


@parametrize("name", ["differential", "differential_laser", "differential_beta"])
@parametrize("G", [2, 4])
def test_differential(name, G):
    """Equations 1 to 3; the first pair is short. With G = 2 pairs share the keys of a pair."""
    attn, x, q, k, v = layer_of(name, G)
    core = attn.attention
    first = (attn.lambda_q1 @ attn.lambda_k1).exp()
    second = (attn.lambda_q2 @ attn.lambda_k2).exp()
    init = 0.8 - 0.6  # of layer 0
    outputs = []
    for pair, window in enumerate((5, None)):
        g = 2 * pair if G == 4 else 0
        value = torch.cat(v[g : g + 2], dim=-1)
        maps = zip(q[2 * pair : 2 * pair + 2], k[g : g + 2], strict=True)
        a, b = (naive_attention(core, *qk, value, window=window) for qk in maps)
        y = a - (first - second + init) * b
        outputs.append(F.rms_norm(y, (16,), attn.ln_head.weight, 1e-5) * (1 - init))
    assert_equal(attn(x), attn.c_proj(torch.cat(outputs, dim=-1)[:, 0]), 1e-12)


REFUSED = {
    "n_head=1 is odd": {"attention": "differential", "n_head": 1},
    "n_kv_head=1 is odd": {"attention": "differential_beta", "n_kv_head": 1},
    "of a layer are SSSL: write each twice": {"attention": "differential", "heads": "SSSL"},
    "n_kv_head must divide n_head / 2": {"attention": "differential_v2"},
}


@parametrize("says, fields", REFUSED.items())
def test_pairs_of_heads_that_are_none(says, fields):
    with refusal(says, UserError):
        GPT(GPTConfig(**SIZES | fields))


def test_what_a_layer_begins_as():
    """XSA's learned strength at none; of softmax, these layers and these queries change nothing."""
    x = torch.randn(2, 9, 16)

    def layer(**fields):
        torch.manual_seed(0)
        return GPT(GPTConfig(**SIZES, **fields)).transformer.h[0].attn

    for fields in ({"attention": "xsa_learned"}, {"qk_norm": "per_dim"}):
        assert_close(layer(**fields)(x), layer()(x))


# -----------------------------------------------------------------------------
# queries and keys, and the MLP


def test_a_temperature_per_dimension_and_norms_by_length():
    q, k = torch.randn(2, 1, 4, 9, 4)
    attn = shaken(GPTConfig(**SIZES, qk_norm="per_dim")).transformer.h[0].attn
    assert_close(attn.q_norm(q), q * (1 + attn.q_norm.p.exp()).log())
    assert attn.k_norm(k) is k

    attn = GPT(GPTConfig(**SIZES, qk_norm="l2")).transformer.h[0].attn
    g = math.log2(200**2 - 200)
    cosine = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    assert_close(scores(attn.q_norm(q), attn.k_norm(k)), g * cosine)


GATES = {"glu": torch.sigmoid, "reglu": torch.relu, "liglu": torch.clone}


@parametrize("name, f", GATES.items())
def test_gated_activations(name, f):
    mlp = GPT(GPTConfig(**SIZES, mlp=name)).transformer.h[0].mlp
    x = torch.randn(3, 16)
    first, second = mlp.c_fc(x).chunk(2, dim=-1)
    assert_close(mlp(x), mlp.c_proj(f(first) * second))


# -----------------------------------------------------------------------------
# caches, documents and gradients


def own_attention(s, seen, v, q, k):
    """A researcher's own, of its queries and keys too."""
    return (s.sigmoid() * q[..., :1] * k[..., :1].mT).where(seen, 0.0) @ v


PAIRS = {"position": "rope", "n_kv_head": 2, "conv": 3}
FAR = {"position": "relative", "n_kv_head": 2}
NEAR = {"position": "t5", "nope_long": True}
CHOICES = [
    *({"attention": name} for name in NEW),
    *({"attention": f"forgetting_{name}", "n_kv_head": 2} for name in AFTER),
    {"attention": "differential"} | PAIRS,
    {"attention": "differential_laser", "decay": "learned"} | PAIRS,
    {"attention": "differential_beta", "position": "alibi"},
    {"attention": "differential"} | NEAR,
    {"attention": "beta_xsa", "short_attention": "beta_xsa", "decay": "learned"},
    *({"attention": name} | FAR for name in ("softmax", "beta", "ssmax", "own")),
    *({"attention": name} | NEAR for name in ("laser", "forgetting", "own")),
    *({"attention": name, "decay": "learned"} for name in ("laser", "beta", "own")),
    {"decay": "learned"} | FAR,
    {"qk_norm": "per_dim", "position": "rope", "decay": "learned"},
    {"qk_norm": "l2", "mlp": "reglu"},
]


@parametrize("choices", CHOICES, ids=str)
def test_cached_packed_checkpointed_and_plain_are_the_same(choices, monkeypatch):
    """With short and long heads, whose code runs for a few queries at a time; and causal."""
    monkeypatch.setitem(ATTENTION, "own", own_attention)
    monkeypatch.setattr(fast, "KEPT", 0)
    monkeypatch.setattr(fast, "AT_ONCE", 2**20)
    c = GPTConfig(**SIZES | {"n_layer": 2, "heads": "SSLL", "window": 5} | choices)
    gpt = shaken(c, dtype=torch.float64)
    idx = torch.randint(11, (2, 160))
    _, gradients = assert_one_model(gpt, idx, [70, 80, *[1] * 10], 100)
    # RoPE's table is in float32
    assert_packed_documents_are_alone(gpt, idx, 90, 2e-6 if c.position == "rope" else 1e-9)
    run_definitions(gpt)
    assert_close(grad(gpt(idx, idx)[1], gpt.parameters()), gradients, rtol=1e-7, atol=1e-10)


@parametrize("choices", CHOICES[len(NEW) :], ids=str)
def test_bfloat16_autocast_stays_near_float32(choices, monkeypatch):
    monkeypatch.setitem(ATTENTION, "own", own_attention)
    gpt = shaken(GPTConfig(**SIZES | {"heads": "SSLL", "window": 5} | choices), by=0.02)
    assert_bfloat16_is_near(gpt, torch.randint(11, (2, 160)))


# -----------------------------------------------------------------------------
# what some have of their own


def test_entmax():
    """Its weights are max(0, s / 2 - tau)^2 and sum to 1, on ties too."""
    s = torch.tensor(
        [[3.0, 1.0, 0.9, -9.0], [2.0, 2.0, 2.0, 2.0], [1.0, 0.0, -math.inf, -math.inf]]
    )
    p = Entmax15.apply(s.double())
    torch.testing.assert_close(p.sum(-1), torch.ones(3).double())
    for row, of_row in zip(p, s.double(), strict=True):
        tau = of_row / 2 - row.sqrt()
        torch.testing.assert_close(tau[row > 0], tau[0].expand(int((row > 0).sum())))
        assert (of_row[row == 0] / 2 <= tau[0]).all()
    assert torch.autograd.gradcheck(Entmax15.apply, torch.randn(3, 5).double().requires_grad_())
