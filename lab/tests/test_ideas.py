"""Each idea of lab/ideas.py: against its formula, one query at a time, and by the tests that every attention passes."""

import math

import pytest
import test_attention as common
import torch
from reference import plain, shaken
from torch.nn import functional as F

import lab.ideas  # noqa: F401
from attention.forms import FAST, WRITTEN_FOR, fast_form, fingerprint
from attention.heads import HeadGroup
from choices import AFTER
from errors import UserError
from lab.stick_breaking import BLOCK
from model import ATTENTION, GPT, GPTConfig

# The core's tests, which may run in the same process, do not know the ideas.
NEW = {name: ATTENTION.pop(name) for name, f in [*ATTENTION.items()] if f.__module__ == "lab.ideas"}
V2 = AFTER.pop("differential_v2")
ideas = pytest.mark.parametrize("core", NEW)
ONE = {  # y of one query with the scores s (n) over n keys, the last one its own, with values v (n, Dv)
    "sink": lambda s, v: s.exp() @ v / (math.exp(0.0) + s.exp().sum()),
    "ssmax": lambda s, v: (0.43 * math.log(len(s)) * s).softmax(-1) @ v,
    "softpick": lambda s, v: (s.exp() - 1).relu() @ v / (s.exp() - 1).abs().sum(),
    "top_k": lambda s, v: s.topk(min(8, len(s))).values.softmax(-1) @ v[s.topk(min(8, len(s))).indices],
    "beta_learned": lambda s, v: s @ v / (math.exp(0.0) + s.square().sum().sqrt()),
    "beta_squared_learned": lambda s, v: s.square() @ v / (math.exp(0.0) + s.square().sum()),
    "laser_temperature": lambda s, v: (s.softmax(-1) @ v.exp()).log(),
    "stick_breaking": lambda s, v: stick(s) @ v[:-1],
    "stick_laser": lambda s, v: (stick(s) @ v[:-1].exp() + (1 - stick(s).sum()) * v[-1].exp()).log(),
}


@pytest.fixture(autouse=True)
def _ideas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, definition in NEW.items():
        monkeypatch.setitem(ATTENTION, name, definition)
    monkeypatch.setitem(AFTER, "differential_v2", V2)


def stick(s: torch.Tensor) -> torch.Tensor:
    """The weights of the keys before the own one, from the last to the first."""
    weights, left = [], torch.ones((), dtype=s.dtype)
    for x in s[:-1].sigmoid().flip(0):
        weights.append(x * left)
        left = left * (1 - x)
    return torch.stack(weights[::-1]) if weights else s[:0]


@pytest.mark.parametrize("core", ONE)
@pytest.mark.parametrize("window", [None, 7])
def test_its_formula(core, window):
    q, k, v = (x.detach() for x in common.qkv())
    y = plain(core)(q, k, v, window=window, scale=1.0)
    for i in (0, 1, 9, 36):
        first = 0 if window is None else max(0, i - window)
        exact = ONE[core](k[1, 2, first : i + 1] @ q[1, 2, i], v[1, 2, first : i + 1])
        torch.testing.assert_close(y[1, 2, i], exact, rtol=1e-6 if core == "softpick" else 1e-11, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_the_delta_rule_step_by_step(window):
    q, k, v = (x.detach()[1, 2] for x in common.qkv())
    y = plain("delta_rule")(*(x[None, None] for x in (q, k, v)), window=window, scale=1.0)[0, 0]
    for i in (0, 1, 9, 36):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for j in range(0 if window is None else max(0, i - window), i + 1):
            b, unit = k[j].square().sum() / (1 + k[j].square().sum()), k[j] / k[j].norm()
            state = state + b * torch.outer(v[j] - state @ unit, unit)  # the old value of this key makes room
        torch.testing.assert_close(y[i], state @ q[i], rtol=1e-10, atol=1e-10)


@ideas
@pytest.mark.parametrize("T", [common.T, common.LONG])
@pytest.mark.parametrize("window", [None, 16])
def test_as_every_attention(core, T, window):
    """Causal, by gradients and by a large later token; in blocks = whole; gradients in float64; zero queries."""
    common.test_causal_by_gradient(core, T, window)
    common.test_equals_naive_forward_and_backward(core, (T, window), torch.float64, common.fast)
    if core != "delta_rule" or window is None:  # a second solve for each query: too slow for 300 of them
        common.test_a_large_later_token_changes_nothing_before_it(core, (T, window), 50.0, torch.float32)
    if core != "beta_learned":  # as beta, whose norm has its own gradient at 0
        common.test_zero_queries_have_finite_gradients(core, T, window)


@ideas
def test_cached_decoding_and_numbers_of_each_head(core):
    """With short and long heads, whose learned numbers differ, after text of more than two blocks."""
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "vocab_size": 11, "block_size": 200}
    gpt = shaken(GPTConfig(attention=core, heads="SSLL", window=5, position="rope", after="gate", **sizes))
    gpt = gpt.double()
    idx, cache = torch.randint(11, (2, 160)), gpt.new_cache()
    with torch.no_grad():
        full = gpt(idx, idx)[0]
        parts = [gpt(x, x, cache=cache)[0] for x in idx.split([70, 80, *[1] * 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-9)
    names = {name.rpartition(".")[2] for name, _ in gpt.named_parameters() if ".numbers." in name}
    takes = {"sink": {"b"}, "ssmax": {"b"}, "laser_temperature": {"t"}}
    assert names == takes.get(core, {"b"} if core.endswith("_learned") else set())


def test_the_limits():
    """A sink of e^-inf is softmax; SSMax has one key; LASER's temperature at 0 and 1; 8 keys are all of 8; a stick
    gives at most all of itself; softpick gives nothing to negative scores."""
    q, k, v = (x.detach() for x in common.qkv())
    softmax = plain("softmax")(q, k, v)
    number = torch.full((3, 1, 1), -1e4, dtype=torch.float64)
    torch.testing.assert_close(plain("sink")(q, k, v, b=number), softmax)
    one = plain("ssmax")(q, k, v)[..., 0, :], plain("top_k")(q, k, v)[..., 0, :]
    assert all(torch.equal(x, v[..., 0, :]) for x in one)
    torch.testing.assert_close(plain("top_k")(q, k, v)[..., :8, :], softmax[..., :8, :])
    small = plain("laser_temperature")(q, k, v, t=torch.full_like(number, 1e-6))
    torch.testing.assert_close(small, softmax, rtol=0, atol=1e-4)
    torch.testing.assert_close(plain("laser_temperature")(q, k, v), plain("laser")(q, k, v))
    for name in ("beta", "beta_squared"):
        torch.testing.assert_close(plain(f"{name}_learned")(q, k, v), plain(name)(q, k, v))
    weights = plain("stick_breaking")(q, k, torch.ones_like(v))
    assert weights.min() >= 0 and weights.max() <= 1 and (weights[..., 0, :] == 0).all()
    assert (plain("softpick")(-q.abs(), k.abs(), v) == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("last", [1, 9, 2 * BLOCK + 5])
def test_stick_breaking_in_blocks_ends_early(dtype, tolerance, last):
    """The last queries of 500 tokens. In blocks, nothing is computed of keys that no stick reaches: not even NaN."""
    x = [torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True) for n, d in ((last, 8), (500, 8), (500, 5))]
    attend, name = fast_form("stick_breaking", ATTENTION["stick_breaking"]), "stick_breaking"
    y, exact = attend(*x), plain(name)(*x)
    dy = torch.randn_like(y)
    assert common.close(y, exact, tolerance)
    for ours, theirs in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(exact, x, dy), strict=True):
        assert common.close(ours, theirs, tolerance)
    with torch.no_grad():
        x[1][..., :100, :] = math.nan
        assert torch.equal(attend(*x), y)
    assert all(WRITTEN_FOR[name] == fingerprint(NEW[name]) for name in FAST if name in NEW)


def test_differential_v2_is_its_formula():
    sizes = {"n_layer": 1, "n_head": 4, "head_dim": 8, "n_embd": 16, "vocab_size": 11, "block_size": 16}
    attn = shaken(GPTConfig(after="differential_v2", n_kv_head=2, position="none", **sizes)).transformer.h[0].attn
    x = torch.randn(2, 9, 16)
    q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in attn.c_attn(x).split((32, 16, 16), dim=-1))
    y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    rate = (x @ attn.after.c_lambda.weight.T).sigmoid()  # of each token and pair
    pairs = [y[:, 2 * i] - rate[..., i, None] * y[:, 2 * i + 1] for i in (0, 1)]
    torch.testing.assert_close(attn(x), attn.c_proj(torch.cat(pairs, dim=-1)))
    with pytest.raises(UserError, match="n_kv_head must divide n_head / 2"):
        GPT(GPTConfig(after="differential_v2", **sizes))


def test_the_numbers_of_two_attentions_in_one_layer():
    """Each head has its own definition's numbers, and they begin as it says."""
    sizes = {"n_layer": 1, "n_head": 4, "n_embd": 16, "vocab_size": 11, "block_size": 16, "heads": "SL"}
    gpt = GPT(GPTConfig(attention="ssmax", short_attention="sink", **sizes))
    assert gpt.transformer.h[0].attn.numbers.b.tolist() == pytest.approx([0.0, 0.43, 0.0, 0.43])
    groups: list[HeadGroup] = gpt.transformer.h[0].attn.groups
    assert [group.name for group in groups] == ["sink", "ssmax"]
