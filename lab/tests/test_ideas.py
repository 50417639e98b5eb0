"""Each idea of lab/ideas/scores.py: its formula, and the tests that every attention passes."""

import math

import pytest
import test_attention as common
import torch
from apart import FORMS, NEW, TABLES
from harness import assert_equal, parametrize, refusal
from reference import assert_exact, cached, plain, shaken
from torch.nn import functional as F
from torch.testing import assert_close

from attention.forms import print_of
from choices import AFTER
from errors import UserError
from lab.ideas.entmax import Entmax15
from lab.ideas.stick_breaking import BLOCK
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def _ideas(monkeypatch):
    for table, added in TABLES:
        for name, value in added.items():
            monkeypatch.setitem(table, name, value)


ideas = parametrize("core", NEW)
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


@parametrize(
    "formula",
    [
        sink,
        ssmax,
        softpick,
        top_k,
        stick_breaking,
        stick_laser,
    ],
)
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


@ideas
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
        common.test_zero_queries_have_finite_gradients(core, T, window)


@ideas
@torch.no_grad()
def test_cached_decoding(core):
    """With short and long heads, whose learned numbers differ, after more than two blocks."""
    c = GPTConfig(
        **SIZES | {"n_layer": 2},
        attention=core,
        heads="SSLL",
        window=5,
        n_kv_head=2,
        position="rope",
        after="gate",
    )
    gpt = shaken(c, dtype=torch.float64)
    idx = torch.randint(11, (2, 160))
    assert_equal(cached(gpt, idx, [70, 80, *[1] * 10]), gpt(idx, idx)[0], 1e-9)


def test_the_limits():
    q, k, v = qkv()
    softmax = plain("softmax")(q, k, v)
    number = torch.ones(3, 1, 1, dtype=torch.float64)
    # A sink of e^-inf is softmax, and so is LASER's temperature at 0; at 1 it is LASER.
    assert_close(plain("sink")(q, k, v, b=-1e4 * number), softmax)
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
    assert FORMS[name].written_for == print_of(NEW[name])


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
# after attention


def test_differential_v2_is_its_formula():
    choices = {"n_kv_head": 2, "head_dim": 8, "position": "none"}
    c = GPTConfig(**SIZES, after="differential_v2", **choices)
    attn = shaken(c).transformer.h[0].attn
    x = torch.randn(2, 9, 16)
    qkv = attn.c_attn(x).split((32, 16, 16), dim=-1)
    heads = [t.unflatten(-1, (-1, 8)) for t in qkv]  # (B, T, H, D)
    q, k, v = (t.transpose(1, 2) for t in heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    rate = (x @ attn.after.c_lambda.weight.T).sigmoid()  # of each token and pair
    first = y[:, 0] - rate[..., [0]] * y[:, 1]
    second = y[:, 2] - rate[..., [1]] * y[:, 3]
    assert_close(attn(x), attn.c_proj(torch.cat((first, second), dim=-1)))
    with refusal("n_kv_head must divide n_head / 2", UserError):
        GPT(GPTConfig(**SIZES, after="differential_v2"))


def test_xsa_with_a_strength():
    """From none to XSA's."""
    gpt = GPT(GPTConfig(**SIZES, after="xsa_learned", n_kv_head=2))
    after = gpt.transformer.h[0].attn.after
    y, v = torch.randn(2, 4, 9, 4), torch.randn(2, 2, 9, 4)
    assert after(y, None, v).equal(y)
    after.a.data += 20
    assert_close(after(y, None, v), AFTER["xsa"](gpt.config)(y, None, v))


def test_the_numbers_of_two_attentions_in_one_layer():
    """Each head has its own definition's numbers, and they begin as it says."""
    gpt = GPT(GPTConfig(**SIZES, attention="ssmax", short_attention="sink", heads="SL"))
    attn = gpt.transformer.h[0].attn
    assert attn.numbers.b.tolist() == pytest.approx([0.0, 0.43, 0.0, 0.43])
    assert [group.name for group in attn.groups] == ["sink", "ssmax"]


def test_entmax():
    """Its weights are max(0, s / 2 - tau)^2 and sum to 1, on ties too."""
    s = torch.tensor(
        [[3.0, 1.0, 0.9, -9.0], [2.0, 2.0, 2.0, 2.0], [1.0, 0.0, -math.inf, -math.inf]]
    )
    p = Entmax15.apply(s.double())
    torch.testing.assert_close(p.sum(-1), torch.ones(3).double())
    for row, scores in zip(p, s.double(), strict=True):
        tau = scores / 2 - row.sqrt()
        torch.testing.assert_close(tau[row > 0], tau[0].expand(int((row > 0).sum())))
        assert (scores[row == 0] / 2 <= tau[0]).all()
    assert torch.autograd.gradcheck(Entmax15.apply, torch.randn(3, 5).double().requires_grad_())
