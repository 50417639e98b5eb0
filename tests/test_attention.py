"""Every attention against one query at a time, and properties that each must have."""

import pytest
import torch
from harness import pairwise, parametrize
from reference import assert_exact, close, fast, in_double, naive_attention, plain
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F

from attention import fast as fast_forms
from attention.fast import LASER_RANGE, laser_by_exp, sdpa
from attention.scores import has_argument
from model import ATTENTION

T = 37
LONG = 300  # where beta is linear, and short heads are cut into blocks
WINDOWS = [None, 0, 7, 3 * T]
LONG_WINDOWS = [None, 0, 16, 150, LONG - 2]
T_SPANS = [(T, window) for window in WINDOWS]
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}  # how far a form may be from naive_attention
HALF = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
cores = parametrize("core", ATTENTION)
windows = parametrize("window", WINDOWS)
LONG_SPANS = [(LONG, window) for window in (None, 0, 16, 100)]
some_spans = parametrize("T, window", [*T_SPANS, (LONG, None), (LONG, 16)])


def qkv(
    T: int = T, dtype: torch.dtype = torch.float64, H: int = 3, Dv: int = 8
) -> dict[str, Tensor]:
    widths = {"q": 8, "k": 8, "v": Dv}
    return {
        name: torch.randn(2, H, T, width, dtype=dtype, requires_grad=True)
        for name, width in widths.items()
    }


def with_value(x: dict[str, Tensor], name: str, token: int, value: float) -> dict[str, Tensor]:
    """A copy of x with another number in one channel of one token."""
    x = {key: t.detach().clone() for key, t in x.items()}
    x[name][0, 1, token, 2] = value
    return {key: t.requires_grad_() for key, t in x.items()}


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    difference = (a.double() - b.double()).abs().max()
    return (difference / b.double().abs().max()).item()


# -----------------------------------------------------------------------------
# outputs and gradients


SPANS = [*T_SPANS, *((LONG, window) for window in LONG_WINDOWS)]


@parametrize("form", [fast, plain])
@parametrize("core, span, dtype", pairwise(ATTENTION, SPANS, EXACT))
def test_equals_naive_forward_and_backward(core, span, dtype, form):
    """With another width of values. LONG: beta from running sums, short heads in blocks."""
    n, window = span
    x = qkv(n, dtype, Dv=5)
    assert_exact(form(core), core, x, EXACT[dtype], window=window, scale=0.4)


SHAPES = [
    (),
    (3, LONG, 1),
    (1, 1, 1, LONG),
    (LONG, LONG),
    (3, LONG, LONG),
    (2, 3, LONG, LONG),
]


@parametrize("core, window, shape, form", pairwise(ATTENTION, LONG_WINDOWS, SHAPES, [fast, plain]))
def test_a_bias_in_blocks(core, window, shape, form):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_exact(form(core), core, qkv(LONG) | {"bias": bias}, 1e-12, window=window)


# gamma^n of the last three is below float32's smallest number
DECAYS = [0.0, 1e-3, 0.5, 20.0, 200.0]
DECAYING = [name for name in ATTENTION if has_argument(ATTENTION[name], "fade")]


def with_decays(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A decay for each head; D is not Dv, and LONG is no whole number of chunks."""
    decay = torch.tensor(DECAYS, dtype=dtype)[:, None, None].requires_grad_()
    return qkv(LONG, dtype, H=len(DECAYS), Dv=5) | {"decay": decay}


@parametrize(
    "core, window, form, dtype",
    pairwise(DECAYING, [None, 16, 100], [fast, plain], EXACT),
)
def test_a_decay_forward_and_backward(core, window, form, dtype):
    x = with_decays(dtype)
    settings = {"window": window, "scale": 0.4}
    assert_exact(form(core), core, x, EXACT[dtype], **settings)
    exact = naive_attention(core, **in_double(x), **settings)
    for n in (1, 70, LONG - 1):  # the last queries, as in decoding
        last = form(core)(**x | {"q": x["q"][..., -n:, :]}, **settings)
        assert close(last, exact[..., -n:, :], EXACT[dtype])


@parametrize("size, tolerance", [(10.0, 1e-5), (100.0, 1e-3), (1e6, 20.0)])
def test_beta_where_its_norm_is_the_rounding_of_a_difference(size, tolerance):
    """Queries at a right angle to keys that are nearly all alike.

    ||s|| is far below |q| ||K||, by which the running sums round in float32. The error grows with
    the square of their ratio; no gradient blows up.
    """
    q, k, v = (t.detach() for t in qkv(LONG, torch.float32).values())
    common = F.normalize(torch.randn(8), dim=0)
    x = {
        "q": q - (q @ common)[..., None] * common,
        "k": k + size * common,
        "v": v,
    }
    x = {name: t.requires_grad_() for name, t in x.items()}
    exact = in_double(x)
    y = fast("beta")(**x)
    y_exact = naive_attention("beta", **exact)
    ours = grad(y.sum(), [*x.values()])
    theirs = grad(y_exact.sum(), [*exact.values()])
    for a, b in zip((y, *ours), (y_exact, *theirs), strict=True):
        assert relative(a, b) <= tolerance


@cores
@windows
def test_scores_past_float16s_largest_number(core, window):
    x = qkv(dtype=torch.float16)
    for name in ("q", "k"):  # |q k| up to 180,000; float16 ends at 65,504
        x[name] = 150 * x[name].sign()
    exact = naive_attention(core, **in_double(x), window=window)
    if exact.abs().max() > 60000:
        pytest.skip("the output itself is past float16's largest number")
    assert close(fast(core)(**x, window=window), exact, 4e-3)


# -----------------------------------------------------------------------------
# what an output depends on


@cores
@some_spans
def test_causal_by_gradient(core, T, window):
    """Output i depends on its query, and on the keys and values that it sees and weighs."""
    x = qkv(T)
    y = fast(core)(**x, window=window)
    exact = naive_attention(core, **x, window=window)

    def gradients(y, i):
        output = y[..., i, :]
        return grad((output + output**2).sum(), [*x.values()], retain_graph=True)

    for i in (0, 5, T // 2, T - 1):
        dq, dk, dv = gradients(y, i)
        distance = i - torch.arange(T)
        seen = (distance >= 0) & (distance <= (T if window is None else window))
        assert not dk[..., ~seen, :].any()
        assert not dv[..., ~seen, :].any()
        assert not dq[..., distance != 0, :].any()
        weighs = gradients(exact, i)[2].abs() > 1e-12
        assert (dv[weighs] != 0).all()


# A rounding step of the largest numbers: it may turn over, no more.
STEP = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}
LARGE = (
    [*T_SPANS, *LONG_SPANS],
    [3.0, 50.0, 120.0, 1000.0],
    STEP,
)


@parametrize(
    "core, span, value, dtype",
    [*pairwise(ATTENTION, *LARGE), *pairwise(["laser"], *LARGE)],
)
def test_a_large_later_token_changes_nothing_before_it(core, span, value, dtype):
    """Neither its value nor its key reaches earlier outputs or gradients, not even by rounding."""
    n, window = span
    last = n - 1
    x = qkv(n, dtype)
    x["v"] = 0.3 * x["v"]

    def outputs(x):
        y = fast(core)(**x, window=window)
        before = y[..., :last, :].float()
        gradients = grad(before.square().sum(), [*x.values()])
        return y, torch.stack(gradients)[..., :last, :]

    y, gradients = outputs(x)
    for name in ("k", "v"):
        large = with_value(x, name, last, value)
        y_large, gradients_large = outputs(large)
        assert y_large.isfinite().all()
        assert relative(y_large[..., :last, :], y[..., :last, :]) <= STEP[dtype]
        assert relative(gradients_large, gradients) <= STEP[dtype]
        exact = naive_attention(core, **in_double(large), window=window)
        assert close(y_large, exact, HALF.get(dtype, 1e-5))  # the last row sees the large token


@cores
@some_spans
def test_zero_queries_have_finite_gradients(core, T, window):
    x = qkv(T, torch.float32)
    x["q"] = torch.zeros_like(x["q"]).requires_grad_()
    y = fast(core)(**x, window=window)
    for gradient in grad(y.sum(), [*x.values()]):
        assert gradient.isfinite().all()


@cores
@some_spans
def test_gradients_are_finite_on_ties_and_on_large_scores(core, T, window):
    """Equal keys, each of two keys, and scores up to 10,000, in float32."""
    for case in ("equal", "two", "large"):
        x = {name: t.detach() for name, t in qkv(T, torch.float32).items()}
        if case == "large":
            x["q"] = 3e3 * x["q"]
        else:
            index = torch.zeros(T, dtype=torch.long) if case == "equal" else torch.arange(T) % 2
            x["k"] = x["k"][:, :, index]
        x = {name: t.requires_grad_() for name, t in x.items()}
        y = fast(core)(**x, window=window)
        for gradient in grad(y.sum(), [*x.values()]):
            assert gradient.isfinite().all(), case


# -----------------------------------------------------------------------------
# LASER


@parametrize("dtype", HALF)
@parametrize("size", [0.05, 0.2, 1.0])
def test_laser_is_as_accurate_as_softmax_in_half_precision(dtype, size):
    """Relative to the output, for small values too: exp(v) is near 1 and must not be rounded."""
    x = qkv(dtype=dtype)
    x["v"] = size * x["v"]
    y = fast("laser")(**x)
    exact = naive_attention("laser", **in_double(x))
    assert (y.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps


@parametrize(
    "span, value, dtype",
    pairwise([(T, None), *LONG_SPANS], [120.0, 1000.0, -1000.0], [torch.float32, *HALF]),
)
def test_laser_with_a_large_value_anywhere(span, value, dtype):
    """Right also in the rows that see the large value."""
    n, window = span
    x = with_value(qkv(n, dtype), "v", 2 * n // 3, value)
    assert_exact(fast("laser"), "laser", x, (EXACT | HALF)[dtype], window=window)


@parametrize("spread", [1.0, 0.99 * LASER_RANGE, 1.01 * LASER_RANGE, 500.0])
def test_laser_on_both_sides_of_its_range(spread):
    """exp and log run where they are exact, the definition elsewhere."""
    calls = []

    def counted(s, seen, v):
        calls.append(v)
        return ATTENTION["laser"](s, seen, v)

    x = qkv(dtype=torch.float32)
    v = x["v"].detach()
    x["v"] = (v / (v.max() - v.min()) * spread).requires_grad_()
    assert_exact(laser_by_exp(sdpa, counted), "laser", x, 1e-5)
    widest = (x["v"].amax(-2) - x["v"].amin(-2)).max()
    assert bool(calls) == (widest.item() >= LASER_RANGE)


@parametrize("scale, spread, last", [(0.3, 0.3, 0.0), (0.3, 1.0, 0.0), (2.0, 1.0, 3.5)])
@parametrize("size", [1e4, 1e-9])
def test_laser_in_16_bits(scale, spread, last, size, monkeypatch):
    """As a GPU computes it, on a CPU: its errors are those of softmax in bfloat16.

    last: is added to the last token's values, which earlier queries do not see.
    """
    monkeypatch.setattr(fast_forms, "fast_in_16_bits", lambda x: True)
    x = qkv(600, torch.bfloat16)
    v = spread * x["v"].detach()
    v[:, :, -1] += last
    x["v"] = v.requires_grad_()
    assert (v.amax(-2) - v.amin(-2)).max() < fast_forms.HALF_RANGE
    ours = fast("laser")(**x, scale=scale)
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    theirs = naive_attention("laser", **exact, scale=scale)
    dy = size * torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, x.values(), dy)
    exact_gradients = torch.autograd.grad(theirs, exact.values(), dy.double())
    for a, b in zip([ours, *gradients], [theirs, *exact_gradients], strict=True):
        assert 1e-3 * b.norm() < (a - b).norm() < 8e-3 * b.norm()


def test_a_cpu_computes_short_texts_of_bfloat16_in_float32():
    for n in (300, 600):
        x = torch.randn(3, 1, 2, n, 16).bfloat16()
        assert sdpa(*x).equal(sdpa(*x.float()).bfloat16()) == (n == 300)


def test_laser_of_a_key_that_softmax_gives_no_weight():
    """A weight of exp(-200) on a value of 500: softmax rounds it to 0, LASER must not."""
    q = torch.full((1, 1, 2, 1), 20.0)
    k = torch.tensor([-10.0, 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([500.0, 0.0]).view(1, 1, 2, 1)
    y = fast("laser")(q, k, v, scale=1.0)
    assert y[0, 0, 1, 0].item() == pytest.approx(300.0, abs=1e-3)


@pytest.mark.filterwarnings("error")
def test_the_slow_form_of_laser_says_so():
    x = qkv(dtype=torch.float32)
    fast("laser")(**x)
    with pytest.warns(UserWarning, match="values has a range above 60: LASER"):
        fast("laser")(**x | {"v": 100 * x["v"]})
