"""Attention that is not causal, with padding, and between two texts: against one query at a time, and in the layers."""

import pytest
import torch
from harness import pairwise
from reference import fast, naive_attention
from test_attention import DECAYING, DECAYS, LONG, close, saved_bytes

from attention.scores import scores, visible
from attention.sums import SUMS
from errors import UserError
from lab.examples.bidirectional import Bidirectional
from model import ATTENTION, GPT, GPTConfig

T = 23
cores = pytest.mark.parametrize("core", ATTENTION)
forms = pytest.mark.parametrize("form", [fast, ATTENTION.get], ids=["fast", "plain"])
both_sides = pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])


def qkv(B: int, Tq: int, T: int, dtype: torch.dtype = torch.float64, dv: int = 5) -> list[torch.Tensor]:
    return [torch.randn(B, 2, n, d, dtype=dtype, requires_grad=True) for n, d in ((Tq, 8), (T, 8), (T, dv))]


def padding(T: int) -> torch.Tensor:
    """(6, 1, 1, T): none; padding on the right, on the left, in holes; one key alone; nothing but padding."""
    at = torch.arange(T)
    rows = [at >= 0, at < T - T // 3, at >= T // 4, at % 3 != 1, at == T // 2, at < 0]
    return torch.stack(rows)[:, None, None, :]


def same(form, core, x: list[torch.Tensor], tolerance: float, **settings) -> bool:
    """Whether a form has the naive attention's outputs and gradients. decay, if given, is the last of x.

    A query that sees nothing but padding has any finite output.
    """
    found, means = [], sees_a_token(x[0].shape[-2], x[1].shape[-2], **settings)
    for attend, convert in (
        (form(core), lambda t: t),
        (lambda *a, **b: naive_attention(core, *a, **b), torch.Tensor.double),
    ):
        inputs = [convert(t.detach()).requires_grad_() for t in x]
        y = attend(*inputs[:3], **settings, **({"decay": inputs[3]} if len(x) > 3 else {}))
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
        assert y.isfinite().all()
        found.append((y * means, *torch.autograd.grad(y, inputs, dy * means)))
    assert found[0][0].dtype == x[0].dtype
    return all(close(a, b, tolerance) for a, b in zip(*found, strict=True))


def sees_a_token(Tq: int, T: int, *, causal: bool, window=None, seen=None, **_) -> torch.Tensor:
    """(B, 1, Tq, 1): whether a query sees a key that is no padding."""
    if seen is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    far = torch.arange(T - Tq, T)[:, None] - torch.arange(T)
    near = (far.abs() <= (T + Tq if window is None else window)) & ((far >= 0) | torch.tensor(not causal))
    return (near & seen).any(-1, keepdim=True)


@cores
@forms
@pytest.mark.parametrize("window", [None, 0, 5, T - 1])
@pytest.mark.parametrize(("causal", "padded"), [(False, False), (False, True), (True, True)])
def test_equals_naive_forward_and_backward(core, form, causal, window, padded):
    seen = padding(T) if padded else None
    settings = {"window": window, "scale": 0.4, "causal": causal, "seen": seen}
    assert same(form, core, qkv(6 if padded else 1, T, T), 1e-12, **settings)
    assert same(
        form, core, qkv(1, T, T, torch.float32), 1e-5, **settings | {"seen": padding(T)[[3]] if padded else None}
    )


LONG_TEXTS = {  # texts, which are padding; the precision, its tolerance
    "padding": (2, padding(LONG)[[2, 5]], torch.float64, 1e-12),
    "float32": (1, padding(LONG)[[1]], torch.float32, 1e-5),
    "no padding": (1, None, torch.float64, 1e-12),
}


@pytest.mark.parametrize(
    ("core", "causal", "window", "texts"), pairwise(ATTENTION, [False, True], [None, 16, 100], LONG_TEXTS)
)
def test_the_fast_forms_of_long_texts(core, causal, window, texts):
    """Running sums over all keys; short heads in blocks with padding on both sides."""
    B, seen, dtype, tolerance = LONG_TEXTS[texts]
    assert same(fast, core, qkv(B, LONG, LONG, dtype), tolerance, window=window, causal=causal, seen=seen)


@cores
@pytest.mark.parametrize(("Tq", "n"), [(5, T), (T, 5), (1, T), (T, 1), (256, 270), (270, 256)])
def test_keys_of_another_text(core, Tq, n):
    """More or fewer keys than queries; with padding, and without."""
    rows = 6 if max(Tq, n) < 256 else 1
    for form in (fast, ATTENTION.get) if rows > 1 else (fast,):
        assert same(form, core, qkv(rows, Tq, n), 1e-12, causal=False, seen=padding(n)[3 - rows // 2 :][:rows])
        assert same(form, core, qkv(1, Tq, n), 1e-12, causal=False)


@cores
@pytest.mark.parametrize("rows", [2**6, 2**9])
def test_a_few_queries_at_a_time(core, rows, monkeypatch):
    monkeypatch.setattr("attention.fast.ROWS", rows)
    for causal in (False, True):
        assert same(fast, core, qkv(6, T, T), 1e-12, causal=causal, seen=padding(T))
    assert same(fast, core, qkv(6, 5, T), 1e-12, causal=False, seen=padding(T))


@pytest.mark.parametrize(
    ("core", "causal", "window", "form"),
    pairwise(DECAYING, [False, True], [None, 16], [fast, ATTENTION.get]),
)
def test_a_decay_to_both_sides(core, causal, window, form, monkeypatch):
    x = [torch.randn(6, 3, 150, d, dtype=torch.float64) for d in (8, 8, 5)]
    x.append(torch.tensor(DECAYS[:3], dtype=torch.float64)[:, None, None])
    monkeypatch.setattr("attention.fast.ROWS", 2**6)
    assert same(form, core, x, 1e-12, causal=causal, window=window, seen=padding(150))


@cores
@forms
@pytest.mark.parametrize(("n", "window"), [(T, None), (T, 3), (LONG, None), (LONG, 16)])
def test_what_a_query_sees(core, form, n, window):
    """By gradients: tokens on both sides, as far as the window reaches, and no padding; a hard change of the padding's
    keys and values changes no output."""
    q, k, v = qkv(1, n, n)
    seen = padding(n)[[3]]
    for i in (0, n // 2, n - 1):
        y = form(core)(q, k, v, window=window, causal=False, seen=seen)[..., i, :]
        near = seen.flatten() & ((torch.arange(n) - i).abs() <= (n if window is None else window))
        for grad in torch.autograd.grad(y.sum() + (y**2).sum(), (k, v)):
            assert torch.equal(grad.abs().sum((0, 1, 3)) > 0, near)
    hard = 1000.0 * ~seen.mT
    changed = form(core)(q, k + hard, v + hard, window=window, causal=False, seen=seen)
    assert close(changed, form(core)(q, k, v, window=window, causal=False, seen=seen), 1e-12)


@cores
@pytest.mark.parametrize(("n", "window"), [(T, None), (LONG, None), (LONG, 16)])
def test_identities(core, n, window):
    """A text read backwards gives its outputs backwards; padding after a text changes nothing."""
    q, k, v = qkv(2, n, n)
    y = fast(core)(q, k, v, window=window, causal=False)
    back = fast(core)(q.flip(-2), k.flip(-2), v.flip(-2), window=window, causal=False)
    assert close(back.flip(-2), y, 1e-12)
    longer = [torch.cat((x, torch.randn_like(x)), dim=-2) for x in (q, k, v)]
    seen = (torch.arange(2 * n) < n).view(1, 1, 1, -1)
    assert close(fast(core)(*longer, window=window, causal=False, seen=seen)[..., :n, :], y, 1e-12)


def test_laser_of_equal_values_is_softmax_of_them_on_both_sides():
    q, k, _ = qkv(6, T, T)
    v = torch.full((6, 2, T, 5), 3.0, dtype=torch.float64)
    y = [fast(core)(q, k, v, causal=False, seen=padding(T)) for core in ("laser", "softmax")]
    assert close(*y, 1e-12) and close(y[0], v, 1e-12)


def test_beta_of_queries_and_keys_of_zeros_has_finite_gradients():
    q, k, v = qkv(1, LONG, LONG, torch.float32)
    y = fast("beta")(0 * q, k, v, causal=False)
    y = y + fast("beta")(q, 0 * k, v, causal=False)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), (q, k, v)))


@cores
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_half_precision(core, dtype, tolerance):
    q, k, v = (t.detach() for t in qkv(6, T, T, dtype))
    y = fast(core)(q, k, v, causal=False, seen=padding(T))
    assert y.dtype == dtype
    assert close(y, naive_attention(core, q.double(), k.double(), v.double(), causal=False, seen=padding(T)), tolerance)


@cores
@pytest.mark.parametrize("window", [None, 20])
def test_memory_grows_with_the_tokens_and_not_with_their_square(core, window):
    if window is None and core not in SUMS:
        pytest.skip("only sums over all keys hold no square")
    x = {n: qkv(1, n, n, torch.float32) for n in (1024, 4096)}
    small, large = (saved_bytes(lambda n=n: fast(core)(*x[n], window=window, causal=False)) for n in x)
    assert large <= 4.4 * small


# -----------------------------------------------------------------------------
# in a model: GPT's own layers, with a Bidirectional as their memory

SIZES = {"block_size": 40, "vocab_size": 11, "n_layer": 2, "n_head": 4, "n_embd": 32}
CHOICES = [
    {"heads": "SL", "window": 4},
    {"heads": "SSLL", "window": 4, "differential": True, "n_kv_head": 2},
    {"position": "rope", "qk_norm": "rmsnorm", "per_dim_temperature": True},
    {"position": "none", "conv": 4, "where": "post", "mlp": "swiglu"},
]


@cores
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@torch.no_grad()
def test_a_padded_batch_is_as_each_text_alone(core, choices):
    gpt = GPT(GPTConfig(**SIZES, attention=core, **choices)).double().eval()
    idx, lengths = torch.randint(11, (3, 40)), (40, 23, 1)
    seen = torch.arange(40) < torch.tensor(lengths)[:, None]
    y = gpt.hidden(idx, Bidirectional(seen))
    for row, n in enumerate(lengths):
        torch.testing.assert_close(y[row, :n], gpt.hidden(idx[[row], :n], Bidirectional())[0], rtol=0, atol=1e-12)
    later = idx.clone()
    later[:, -1] = (later[:, -1] + 1) % 11
    assert (gpt.hidden(later, Bidirectional(seen)) - y)[0, 0].abs().max() > 1e-9  # the last token is seen by the first
    assert close(gpt.hidden(later, Bidirectional(seen))[1, :23], y[1, :23], 1e-12)  # but here it is padding


@pytest.mark.parametrize(
    ("choices", "name"),
    [({"position": "t5"}, "T5"), ({"position": "relative"}, "Relative"), ({"position": "alibi"}, "ALiBi"),
     ({"decay": "learned"}, "ALiBi"), ({"position": "relative", "decay": "alibi", "attention": "beta"}, "Relative")],
)  # fmt: skip
def test_numbers_by_distance_are_refused(choices, name):
    gpt = GPT(GPTConfig(**SIZES, **choices))
    with pytest.raises(UserError, match=f"{name} counts how far a key lies behind a query"):
        gpt.hidden(torch.zeros(1, 4, dtype=torch.long), Bidirectional())


@torch.no_grad()
def test_a_decay_of_beta_goes_to_both_sides():
    gpt = GPT(GPTConfig(**SIZES, attention="beta", decay="alibi", position="none")).eval()
    idx = torch.randint(11, (1, 9))
    backwards = gpt.hidden(idx.flip(1), Bidirectional()).flip(1)
    torch.testing.assert_close(gpt.hidden(idx, Bidirectional()), backwards, rtol=0, atol=1e-6)


def test_an_attention_of_ones_own_that_is_causal_is_refused(monkeypatch):
    def mine(q, k, v, *, window=None, scale=None, bias=None):
        return scores(q, k, scale, bias).masked_fill(~visible(q, k, window), 0.0).to(v.dtype) @ v

    monkeypatch.setitem(ATTENTION, "mine", mine)
    gpt = GPT(GPTConfig(**SIZES, attention="mine"))
    with pytest.raises(UserError, match="attention='mine' is causal: its function takes no `causal`"):
        gpt.hidden(torch.zeros(1, 4, dtype=torch.long), Bidirectional())
