"""Every attention, fast and plain, against one query at a time, and properties that each must have."""

import itertools

import pytest
import torch
from harness import pairwise
from reference import fast, naive_attention, plain
from torch.nn import functional as F

from attention import fast as forms
from attention.scores import takes
from model import ATTENTION

T = 37
WINDOWS = [None, 0, 7, 3 * T]
LONG = 300  # where beta is linear, and short heads are cut into blocks
LONG_WINDOWS = [None, 0, 16, 150, LONG - 2]
cores = pytest.mark.parametrize("core", ATTENTION)
windows = pytest.mark.parametrize("window", WINDOWS)


def qkv(dtype: torch.dtype = torch.float64, dv: int = 8, T: int = T) -> list[torch.Tensor]:
    return [torch.randn(2, 3, T, d, dtype=dtype, requires_grad=True) for d in (8, 8, dv)]


def long_qkv(dtype: torch.dtype = torch.float64, dv: int = 8, T: int = LONG) -> list[torch.Tensor]:
    return [torch.randn(1, 2, T, d, dtype=dtype, requires_grad=True) for d in (8, 8, dv)]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return (a.double() - b.double()).abs().max().item() <= tolerance * max(1.0, b.double().abs().max().item())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


@pytest.mark.parametrize("form", [fast, plain], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("core", "span", "dtype"),
    pairwise(
        ATTENTION, [*((T, w) for w in WINDOWS), *((LONG, w) for w in LONG_WINDOWS)], [torch.float64, torch.float32]
    ),
)
def test_equals_naive_forward_and_backward(core, span, dtype, form):
    """With another width of values. In LONG beta comes from running sums, and short heads are cut into blocks."""
    (n, window), tolerance = span, 1e-12 if dtype == torch.float64 else 1e-5
    q, k, v = qkv(dtype, dv=5, T=n)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    y = form(core)(q, k, v, window=window, scale=0.4)
    y_exact = naive_attention(core, *exact, window=window, scale=0.4)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_exact.backward(dy.double())
    assert y.dtype == dtype and close(y, y_exact, tolerance)
    for ours, theirs in zip((q, k, v), exact, strict=True):
        assert close(ours.grad, theirs.grad, tolerance)


SHAPES = [(LONG, LONG), (2, LONG, LONG), (1, 2, LONG, LONG), (1, 1, 1, LONG), (2, LONG, 1), ()]


@pytest.mark.parametrize(("core", "window", "shape"), pairwise(ATTENTION, LONG_WINDOWS, SHAPES))
def test_a_bias_in_blocks(core, window, shape):
    q, k, v = long_qkv()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    exact = naive_attention(core, q, k, v, window=window, bias=bias.expand(1, 2, LONG, LONG))
    (theirs,) = torch.autograd.grad(exact.sin().sum(), bias)
    for form in (fast, plain):
        y = form(core)(q, k, v, window=window, bias=bias)
        (ours,) = torch.autograd.grad(y.sin().sum(), bias)
        assert close(y, exact, 1e-12) and close(ours, theirs, 1e-12)


DECAYS = [0.0, 1e-3, 0.5, 20.0, 200.0]  # gamma^n of the last three is below float32's smallest number
DECAYING = [name for name in ATTENTION if takes(ATTENTION[name], "fade")]


@pytest.mark.parametrize(
    ("core", "window", "form", "dtype"),
    pairwise(DECAYING, [None, 16, 100], [fast, plain], [torch.float64, torch.float32]),
)
def test_a_decay_forward_and_backward(core, window, form, dtype):
    """Outputs, and the gradients of q, k, v and of each head's decay; D is not Dv, and LONG is no whole of chunks."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    x = [torch.randn(2, len(DECAYS), LONG, d, dtype=dtype, requires_grad=True) for d in (8, 8, 5)]
    x.append(torch.tensor(DECAYS, dtype=dtype)[:, None, None].requires_grad_())
    exact = [t.detach().double().requires_grad_() for t in x]
    y = form(core)(*x[:3], window=window, scale=0.4, decay=x[3])
    y_exact = naive_attention(core, *exact[:3], window=window, scale=0.4, decay=exact[3])
    dy = torch.randn_like(y)
    y.backward(dy)
    y_exact.backward(dy.double())
    assert close(y, y_exact, tolerance)
    for ours, theirs in zip(x[:3], exact[:3], strict=True):
        assert close(ours.grad, theirs.grad, tolerance)
    for ours, theirs in zip(x[3].grad, exact[3].grad, strict=True):  # they lie thirty orders of magnitude apart
        assert close(ours, theirs, tolerance)
    for n in (1, 70, LONG - 1):  # the last queries, as in decoding
        last = form(core)(x[0][..., -n:, :], *x[1:3], window=window, scale=0.4, decay=x[3])
        assert close(last, y_exact[..., -n:, :], tolerance)


@pytest.mark.parametrize(("size", "tolerance"), [(10.0, 1e-5), (100.0, 1e-3), (1e6, 20.0)])
def test_beta_where_its_norm_is_the_rounding_of_a_difference(size, tolerance):
    """Queries at a right angle to keys that are nearly all alike: ||s|| is far below |q| ||K||, which is what the
    running sums round by in float32. The error grows with the square of their ratio; no gradient blows up."""
    q, k, v = long_qkv(torch.float32)
    common = F.normalize(torch.randn(8), dim=0)
    k = (k.detach() + size * common).requires_grad_()
    q = (q.detach() - (q.detach() @ common)[..., None] * common).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    y, y_exact = fast("beta")(q, k, v), naive_attention("beta", *exact)
    y.sum().backward()
    y_exact.sum().backward()
    assert relative(y, y_exact) <= tolerance
    assert all(relative(a.grad, b.grad) <= tolerance for a, b in zip((q, k, v), exact, strict=True))


@cores
@windows
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_half_precision_forward(core, window, dtype, tolerance):
    q, k, v = (t.detach() for t in qkv(dtype))
    y = fast(core)(q, k, v, window=window)
    assert y.dtype == dtype
    assert close(y, naive_attention(core, q.double(), k.double(), v.double(), window=window), tolerance)


@cores
@pytest.mark.parametrize(("T", "window"), [*((T, w) for w in WINDOWS), (LONG, None), (LONG, 16)])
def test_causal_by_gradient(core, T, window):
    """Output i depends on its query, and on the keys and values of its span that have a weight, and on nothing else."""
    q, k, v = qkv(T=T)
    exact = naive_attention(core, q, k, v, window=window)
    for i in (0, 5, T // 2, T - 1):
        y = fast(core)(q, k, v, window=window)[..., i, :]
        dq, dk, dv = torch.autograd.grad(y.sum() + (y**2).sum(), (q, k, v))
        distance = i - torch.arange(T)
        seen = (distance >= 0) & (distance <= (T if window is None else window))
        for grad in (dk, dv):
            nonzero = grad.abs().sum((0, 1, 3)) > 0
            assert not nonzero[~seen].any()
        (theirs,) = torch.autograd.grad(exact[..., i, :].sum() + (exact[..., i, :] ** 2).sum(), v, retain_graph=True)
        assert (dv[theirs.abs() > 1e-12] != 0).all()
        assert not (dq.abs().sum((0, 1, 3)) > 0)[torch.arange(T) != i].any()


SPANS = [*((T, w) for w in WINDOWS), *((LONG, w) for w in (None, 0, 16, 100))]
HALVES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # a rounding step of the largest numbers
LARGE = [3.0, 50.0, 120.0, 1000.0], [torch.float64, torch.float32, *HALVES]


@pytest.mark.parametrize(
    ("core", "span", "value", "dtype"),
    [
        *pairwise(ATTENTION, SPANS, *LARGE),
        *(
            ("laser", span, *large)
            for span, large in zip(itertools.cycle(SPANS), itertools.product(*LARGE), strict=False)
        ),
    ],
)
def test_a_large_later_token_changes_nothing_before_it(core, span, value, dtype):
    """Its value, in one channel of one head, or its key, must not reach earlier outputs or gradients, not even
    by rounding them differently, in any precision."""
    (T, window), step = span, HALVES.get(dtype, 1e-5)  # a rounding step may turn over, no more
    at = T - 1

    def outputs(which: int | None) -> tuple:
        torch.manual_seed(1)
        x = [t.detach() for t in qkv(dtype, T=T)]
        x[2] *= 0.3
        if which is not None:
            x[which][0, 1, at, 2] = value
        x = [t.requires_grad_() for t in x]
        y = fast(core)(*x, window=window)
        grads = torch.autograd.grad(y[..., :at, :].float().square().sum(), x)
        return y, x, torch.stack([g[..., :at, :] for g in grads])

    y, _, grads = outputs(None)
    for which in (1, 2):
        y_large, x, grads_large = outputs(which)
        assert y_large.isfinite().all()
        assert relative(y_large[..., :at, :], y[..., :at, :]) <= step
        assert relative(grads_large, grads) <= step
        exact = naive_attention(core, *(t.double() for t in x), window=window)
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, 1e-5)
        assert close(y_large, exact, tolerance)  # the last row too, which sees the large token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.05, 0.2, 1.0])
def test_laser_is_as_accurate_as_softmax_in_half_precision(dtype, size):
    """Relative to the output, also where values are small: exp(v) is near 1 and must not be rounded."""
    q, k, v = (t.detach() for t in qkv(dtype))
    v = v * size
    y, exact = fast("laser")(q, k, v), naive_attention("laser", q.double(), k.double(), v.double())
    assert (y.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("value", [120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_laser_with_a_large_value_anywhere(value, dtype):
    """Finite and right, forward and backward, also in the rows that see the large value."""
    x = [t.detach() for t in qkv(dtype)]
    x[2][0, 1, 11, 2] = value
    x = [t.requires_grad_() for t in x]
    exact = [t.detach().double().requires_grad_() for t in x]
    y, y_exact = fast("laser")(*x), naive_attention("laser", *exact)
    y.float().tanh().sum().backward()
    y_exact.tanh().sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert close(y, y_exact, tolerance)
    assert all(close(a.grad, b.grad, 2 * tolerance) for a, b in zip(x, exact, strict=True))


@pytest.mark.parametrize("spread", [1.0, 0.99 * forms.LASER_RANGE, 1.01 * forms.LASER_RANGE, 500.0])
def test_laser_on_both_sides_of_its_range(spread):
    """exp and log run where they are exact, the definition elsewhere; both agree with the definition."""
    slow = []

    def counted(s, seen, v):
        slow.append(1)
        return ATTENTION["laser"](s, seen, v)

    q, k, v = qkv(torch.float32)
    v = v.detach() / (v.max() - v.min()).item() * spread
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    v.requires_grad_()
    y, y_exact = forms.laser_by_exp(counted)(q, k, v), naive_attention("laser", *exact)
    y.sum().backward()
    y_exact.sum().backward()
    assert bool(slow) == ((v.amax(-2) - v.amin(-2)).max().item() >= forms.LASER_RANGE)
    assert close(y, y_exact, 1e-5)
    assert all(close(a.grad, b.grad, 1e-4) for a, b in zip((q, k, v), exact, strict=True))


def test_laser_of_a_key_that_softmax_gives_no_weight():
    """A weight of exp(-200) on a value of 500: softmax rounds it to 0, log(softmax exp) must not."""
    q = torch.full((1, 1, 2, 1), 20.0)
    k = torch.tensor([-10.0, 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([500.0, 0.0]).view(1, 1, 2, 1)
    assert fast("laser")(q, k, v, scale=1.0)[0, 0, 1, 0].item() == pytest.approx(300.0, abs=1e-3)


@cores
def test_a_window_past_the_start_is_full_attention(core):
    q, k, v = qkv()
    full = fast(core)(q, k, v)
    for window in (T - 1, T, 10 * T):
        assert close(fast(core)(q, k, v, window=window), full, 1e-14)


@windows
def test_equal_values_make_laser_softmax(window):
    q, k, v = qkv()
    v = v[..., :1, :].expand_as(v)  # then both are v itself
    assert close(fast("laser")(q, k, v, window=window), v, 1e-12)
    assert close(fast("softmax")(q, k, v, window=window), v, 1e-12)


def test_laser_is_at_least_softmax():
    """Jensen: log E[exp v] >= E[v], with equality for small v to first order."""
    q, k, v = qkv()
    soft, laser = fast("softmax")(q, k, v), fast("laser")(q, k, v)
    assert (laser - soft >= -1e-12).all()
    small = fast("laser")(q, k, 1e-4 * v)
    assert close(small / 1e-4, soft, 1e-3)


@cores
@pytest.mark.parametrize(("T", "window"), [*((T, w) for w in WINDOWS), (LONG, None), (LONG, 16)])
def test_zero_queries_have_finite_gradients(core, T, window):
    q, k, v = qkv(torch.float32, T=T)
    x = [(t.detach() * z).requires_grad_() for t, z in ((q, 0.0), (k, 1.0), (v, 1.0))]
    fast(core)(*x, window=window).sum().backward()
    assert all(t.grad.isfinite().all() for t in x)


@cores
@windows
def test_scores_past_float16s_largest_number(core, window):
    q, k, v = (t.detach() for t in qkv(torch.float16))
    q, k = 150 * q.sign(), 150 * k.sign()  # |q k| up to 180,000; float16 ends at 65,504
    y = fast(core)(q, k, v, window=window)
    exact = naive_attention(core, q.double(), k.double(), v.double(), window=window)
    if exact.abs().max() > 60000:
        pytest.skip("the output itself is past float16's largest number")
    assert close(y, exact, 4e-3)


@pytest.mark.parametrize("window", [None, 0, 16, 100])
@pytest.mark.parametrize("value", [1000.0, -1000.0])
def test_laser_in_log_space(window, value):
    x = [t.detach() for t in long_qkv(torch.float32)]
    x[2][0, 1, 211, 2] = value
    x = [t.requires_grad_() for t in x]
    exact = [t.detach().double().requires_grad_() for t in x]
    y, y_exact = fast("laser")(*x, window=window), naive_attention("laser", *exact, window=window)
    y.tanh().sum().backward()
    y_exact.tanh().sum().backward()
    assert close(y, y_exact, 1e-5)
    assert all(close(a.grad, b.grad, 1e-5) for a, b in zip(x, exact, strict=True))


@pytest.mark.filterwarnings("error")
def test_the_slow_form_of_laser_says_so(monkeypatch):
    q, k, v = (t.detach() for t in qkv(torch.float32))
    fast("laser")(q, k, v)
    with pytest.warns(UserWarning, match="values has a range above 60: LASER"):
        fast("laser")(q, k, 100 * v)


@pytest.mark.parametrize("core", ["softmax", "beta"])
def test_dropout_on_weights_keeps_the_mean(core):
    q, k, v = (t.detach() for t in qkv(torch.float32, T=6))
    many = torch.stack([fast(core)(q, k, v, dropout=0.3) for _ in range(3000)])
    assert many.std(0).max() > 0.1
    assert (many.mean(0) - fast(core)(q, k, v)).abs().max() < 0.15
