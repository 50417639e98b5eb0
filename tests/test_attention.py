"""Every attention against one query at a time, and properties that each must have."""

import pytest
import torch
from harness import assert_equal, pairwise, parametrize
from reference import FUNCTIONS, assert_exact, close, fast, in_double, naive_attention, plain
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F

import bench
from attention import fast as fast_forms
from attention.fast import LASER_RANGE, by_rows, laser_by_exp, sdpa
from attention.scores import has_argument, of_token, plain_form
from model import ATTENTION

T = 37
LONG = 300  # where beta is linear, and short heads are cut into blocks
WINDOWS = [None, 0, 7, 3 * T]
LONG_WINDOWS = [None, 0, 16, 150, LONG - 2]
T_SPANS = [(T, window) for window in WINDOWS]
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}  # how far a form may be from naive_attention
HALF = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
cores = parametrize("core", FUNCTIONS)
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
@parametrize("core, span, dtype", pairwise(FUNCTIONS, SPANS, EXACT))
def test_equals_naive_forward_and_backward(core, span, dtype, form):
    """With another width of values. LONG: beta from running sums, short heads in blocks."""
    n, window = span
    x = qkv(n, dtype, Dv=5)
    assert_exact(form(core), core, x, EXACT[dtype], window=window, scale=0.4)


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
    [3.0, 50.0, 120.0, 1000.0, -1000.0],
    STEP,
)


@parametrize(
    "core, span, value, dtype",
    pairwise(FUNCTIONS, *LARGE),
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
@parametrize("size, n_keys", [(0.0, LONG), (3e3, LONG), (1.0, 1), (1.0, 2)])
def test_zero_queries_have_finite_gradients(core, T, window, size, n_keys):
    """So have scores up to 10,000, equal keys, and each of two keys, in float32."""
    x = {name: t.detach() for name, t in qkv(T, torch.float32).items()}
    x["q"] = size * x["q"]
    x["k"] = x["k"][:, :, torch.arange(T) % n_keys]
    x = {name: t.requires_grad_() for name, t in x.items()}
    y = fast(core)(**x, window=window)
    for gradient in grad(y.sum(), [*x.values()]):
        assert gradient.isfinite().all()


# -----------------------------------------------------------------------------
# a definition a few queries at a time


def forgetting(s, seen, v, drop, f=of_token(4.0)):
    c = F.logsigmoid(f).cumsum(-2).mT
    return drop((s - c).where(seen, -torch.inf).softmax(-1)) @ v


ROWS = [{}, {"IN_CACHE": 0}, {"KEPT": 0, "AT_ONCE": 2**16}]  # 128, 64; few, computed again


@parametrize("limits", ROWS)
@parametrize("definition", [ATTENTION["softcap"], ATTENTION["laser"], forgetting])
def test_rows_are_the_whole(definition, limits, monkeypatch):
    """Outputs, gradients, and the last queries alone, as in decoding."""
    for name, number in limits.items():
        monkeypatch.setattr(fast_forms, name, number)
    x = qkv(LONG)
    if definition is forgetting:
        numbers = torch.randn(2, 3, LONG, 1, dtype=torch.float64)
        x["k"] = torch.cat((x["k"].detach(), numbers), dim=-1).requires_grad_()
    y = by_rows(definition)(**x)
    whole = plain_form(definition)(**x)
    assert_equal(y, whole, 1e-12)
    ours, theirs = (grad(out.sin().sum(), [*x.values()]) for out in (y, whole))
    assert_equal(ours, theirs, 1e-12)
    last = by_rows(definition)(**x | {"q": x["q"][..., -70:, :]})
    assert_equal(last, whole[..., -70:, :], 1e-12)


def test_laser_in_log_space_holds_a_few_queries_at_once(monkeypatch):
    """Forward and backward, of T x T x Dv numbers: a tenth of 1 GiB where there are 2 heads."""
    monkeypatch.setattr(fast_forms, "KEPT", fast_forms.KEPT // 16)
    monkeypatch.setattr(fast_forms, "AT_ONCE", fast_forms.AT_ONCE // 16)

    def edited(s, seen, v):
        return 2 * ATTENTION["laser"](s, seen, v)

    q, k, v = torch.randn(3, 2, 1, 512, 32, requires_grad=True)
    attend = by_rows(edited)
    peak = bench.peak_memory(lambda: attend(q, k, v).sum().backward(), "cpu")
    assert peak < 2**29 / 16


# -----------------------------------------------------------------------------
# LASER


@torch.autocast("cpu", torch.bfloat16)
def autocast(q, k, v):
    return sdpa(q, k, v)


def errors(attend, core, x, rows) -> list[Tensor]:
    """||error|| / ||exact|| of each channel of y, and of the gradients of q, k and v."""
    exact = in_double(x)
    y, y_exact = attend(**x)[..., rows, :], fast(core)(**exact)[..., rows, :]
    dy = torch.randn_like(y)
    ours = [y, *grad(y, x.values(), dy)]
    theirs = [y_exact, *grad(y_exact, exact.values(), dy.double())]
    return [(a - b).norm(dim=-2) / b.norm(dim=-2) for a, b in zip(ours, theirs, strict=True)]


@parametrize("values", [0.02, 0.1, 0.3, 1.0, 3.0, "student", "later"])
def test_laser_in_16_bits(values):
    """Nearly as exact as softmax. lab/experiments/laser_precision.py has a GPU's fused kernel.

    values: their standard deviation; heavy tails; the rows before a value of a hundred times that.

    Of heavy tails in most channels: where a value lies ten below all others, y is less exact.
    """
    x = torch.randn(3, 2, 2, 512, 32)
    rows = slice(None)
    if values == "student":
        x[2] = 0.1 * torch.distributions.StudentT(3.0).sample(x[2].shape)
    elif values == "later":
        x[2] *= 0.02
        x[2, :, :, -1] = -2.0
        rows = slice(-1)
    else:
        x[2] *= values
    x = dict(zip("qkv", (t.bfloat16().requires_grad_() for t in x), strict=True))
    over_channels = Tensor.median if values == "student" else Tensor.mean
    of_laser = errors(laser_by_exp(autocast, ATTENTION["laser"]), "laser", x, rows)
    of_softmax = errors(autocast, "softmax", x, rows)
    pairs = zip(of_laser, of_softmax, strict=True)
    y, *gradients = (over_channels(a) / over_channels(b) for a, b in pairs)
    assert y <= 1.6 and max(gradients) <= 1.8


def test_laser_where_the_host_may_not_wait(monkeypatch):
    """A range above LASER_RANGE gives NaN in all rows of its channel, where no sum overflows."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    v = torch.randn(1, 3, T, 8)
    v[:, 1:, 20, 5] = torch.tensor([0.9, 1.1]) * LASER_RANGE
    x = {"q": v, "k": v, "v": v - v.amin(-2, keepdim=True)}
    is_nan = fast("laser")(**x).isnan()
    assert is_nan[:, 2, :, 5].all() and is_nan.sum() == T


@parametrize(
    "span, value, dtype",
    pairwise([(T, None), *LONG_SPANS], [120.0, 1000.0, -1000.0], [torch.float32, *HALF]),
)
def test_laser_with_a_large_value_anywhere(span, value, dtype):
    """Right also in the rows that see the large value."""
    n, window = span
    x = with_value(qkv(n, dtype), "v", 2 * n // 3, value)
    assert_exact(fast("laser"), "laser", x, (EXACT | HALF)[dtype], window=window)


@pytest.mark.filterwarnings("error")
def test_laser_of_a_key_that_softmax_gives_no_weight():
    """A weight of exp(-200) on a value of 500: softmax rounds it to 0, LASER must not.

    Its slow form says so.
    """
    fast("laser")(**qkv())
    q = torch.full((1, 1, 2, 1), 20.0)
    k = torch.tensor([-10.0, 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([500.0, 0.0]).view(1, 1, 2, 1)
    with pytest.warns(UserWarning, match="values has a range above 80: LASER"):
        y = fast("laser")(q, k, v, scale=1.0)
    assert y[0, 0, 1, 0].item() == pytest.approx(300.0, abs=1e-3)
