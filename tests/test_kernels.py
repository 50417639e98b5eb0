"""attention/kernels.py against the definitions: on a GPU or, by Triton's interpreter (conftest.py), on a CPU."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from harness import ROOT
from reference import fast, naive_attention

from model import ATTENTION, GPT, GPTConfig

pytest.importorskip("triton")
from attention import kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of what is masked
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 80  # more than a block of queries, and no multiple of one
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 6e-3}  # ||x - exact|| / ||exact||


def kernel(core: str):
    """The kernels of an attention, with its fast form for inputs that they do not take."""
    return kernels.KERNEL[core](fast(core))


def inputs(dtype: torch.dtype, T: int = T, D: int = 32, E: int = 16, H: int = 2) -> list[torch.Tensor]:
    """q, k, v and dy; q, k and v are views of one tensor, as those of a layer are."""
    x = torch.randn(1, T, H * (2 * D + E)).to(DEVICE, dtype).requires_grad_()
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in x.split((H * D, H * D, H * E), dim=-1))
    return [q, k, v, torch.randn(1, H, T, E).to(DEVICE, dtype)]


def held_against(exact, run, q, k, v, dy, tolerance: float) -> None:
    """run's output and gradients are those of exact in float64."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    double = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    y = run(q, k, v)
    y_exact = exact(*double)
    assert y.dtype == v.dtype
    grads = torch.autograd.grad(y, (q, k, v), dy)
    grads_exact = torch.autograd.grad(y_exact, double, dy.cpu().double())
    for ours, theirs in ((y, y_exact), *zip(grads, grads_exact, strict=True)):
        scale = theirs.norm() if theirs.any() else y_exact.norm()  # a token alone has no gradient of its score
        assert (ours.cpu().double() - theirs).norm() <= tolerance * scale


dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@dtypes
@pytest.mark.parametrize(
    ("core", "window"), [("beta", None), *itertools.product(("softmax", "laser"), (None, 20))]
)  # short beta heads have no kernel
def test_equal_naive_forward_and_backward(core, window, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LINEAR_FROM", 1)
    q, k, v, dy = inputs(dtype)
    held_against(
        lambda *x: naive_attention(core, *x, window=window, scale=0.3),
        lambda *x: kernel(core)(*x, window=window, scale=0.3),
        *(q, k, v, dy, TOLERANCE[dtype]),
    )


@dtypes
@pytest.mark.parametrize(("value", "window"), [(1000.0, 7), (-1000.0, None)])
def test_laser_of_any_values(value, window, dtype):
    """The first head's values span too much for exp, the second's do not."""
    q, k, v, dy = inputs(dtype, T=36, D=16)
    v = v.detach().clone()
    v[:, 0, 30:32] = value
    run = lambda *x: kernel("laser")(*x, window=window)  # noqa: E731
    held_against(
        lambda *x: naive_attention("laser", *x, window=window),
        *(run, q, k, v, dy, 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]),  # of 1000 float32 has four digits
    )
    before = v.clone()
    before[:, :, 30:] = 0
    y = [run(q, k, x)[:, :, :30].float() for x in (v, before)]
    assert (y[0] - y[1]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)  # what comes later does not matter


@pytest.mark.parametrize(("size", "T", "later"), [(1.0, T, None), (0.05, T, None), (0.05, 33, 100.0)])
def test_lasers_error_in_bfloat16_is_softmaxs(size, T, later):
    """Rounding exp(v) or the weights by themselves would be an error of 2^-9 in y, however small y is; also where
    another channel wants log space."""
    q, k, v, _ = inputs(torch.bfloat16, T)
    v = (v * size).detach()
    if later is not None:
        v[:, :, -1, 3] = later
    y = kernel("laser")(q, k, v)
    exact = naive_attention("laser", *(t.cpu().double() for t in (q, k, v)))
    error = y.cpu().double() - exact
    assert error[:, :, :-1].norm() <= 3e-3 * exact[:, :, :-1].norm()


def test_what_does_not_fit_is_the_fast_form(monkeypatch):
    q, k, v, _ = (t.detach() for t in inputs(torch.float32))

    def no(*args, **kwargs):
        raise AssertionError("a kernel has been called")

    for function in (kernels.Flash, kernels.Beta):
        monkeypatch.setattr(function, "apply", no)
    for core in kernels.KERNEL:
        f = kernel(core)
        for x, choices in (
            ((q[:, :, -3:], k, v), {}),
            ((q.double(), k.double(), v.double()), {}),
            ((q[..., :24], k[..., :24], v), {}),
            ((q, k, v), {"bias": torch.zeros(T, T, device=DEVICE)}),
        ):
            y = f(*x, **choices)
            exact = naive_attention(core, *(t.cpu().double() for t in x))
            assert (y.cpu().double() - exact).norm() <= 1e-5 * exact.norm()
        assert not kernels.fits(core, q, k, v[:, :, :5])
    for core in ("softmax", "beta"):
        assert kernel(core)(q, k, v, dropout=0.5).isfinite().all()


@pytest.mark.parametrize("core", kernels.KERNEL)
@pytest.mark.parametrize("choices", [{"heads": "SL", "window": 20}, {"differential": True, "n_kv_head": 2}])
def test_a_model_with_the_kernels_is_the_same(core, choices, monkeypatch):
    monkeypatch.setattr(kernels, "LINEAR_FROM", 1)
    used = []
    for function in (kernels.Flash, kernels.Beta):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *x, apply=apply: used.append(1) or apply(*x))
    n_head = 4 if "differential" in choices else 2
    sizes = {"block_size": T, "vocab_size": 11, "n_layer": 1, "n_head": n_head, "n_embd": 16 * n_head}
    gpt, idx = GPT(GPTConfig(attention=core, **sizes, **choices)).to(DEVICE), torch.randint(11, (1, T)).to(DEVICE)
    plain = gpt(idx, idx)
    expected = torch.autograd.grad(plain[1], gpt.parameters())
    kernels.use(gpt, ATTENTION[gpt.config.attention])
    ours = gpt(idx, idx)
    assert len(used) == (2 if "heads" in choices and core != "beta" else 1)  # beta's short heads have none
    assert (ours[0] - plain[0]).abs().max() <= 1e-5
    for a, b in zip(torch.autograd.grad(ours[1], gpt.parameters()), expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    cache = gpt.new_cache()
    decoded = torch.cat([gpt(part, cache=cache)[0] for part in idx.split(1, dim=1)], dim=1)
    assert (decoded - plain[0]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"attention": "laser"}, "has no Triton kernel, but softmax, beta have"),
        ({"attention": "beta_squared"}, "attention='beta_squared' has no Triton kernel"),
        ({"short_attention": "beta", "heads": "SL", "window": 2}, "short heads have 'beta' and long ones 'softmax'"),
        ({"attention": "beta", "block_size": 256, "decay": "alibi", "position": "rope"}, "kernel knows no decay"),
        ({"decay": "learned"}, r"queries are 22 wide \(6 of these for the decay\) and values 16"),
        ({"attention": "beta"}, "long heads and a block_size of 256 or more"),
        ({"dropout": 0.2}, "attn_dropout is 0.2: set --attn_dropout=0"),
        ({"position": "t5"}, "no bias by distance, and position='t5' has one"),
        ({"head_dim": 20}, "queries are 20 wide and values 20"),
        ({"position": "alibi"}, r"queries are 22 wide \(6 of these for alibi\) and values 16"),
        ({"head_dim": 128, "differential": True}, "128 wide and values 256"),
    ],
)
def test_kernels_that_would_not_be_used_are_refused(choices, says, monkeypatch):
    monkeypatch.delitem(kernels.KERNEL, "laser")
    with pytest.raises(ValueError, match=says):
        gpt = GPT(GPTConfig(**{"block_size": 8, "vocab_size": 5, "n_layer": 1, "n_head": 2, "n_embd": 32} | choices))
        kernels.use(gpt, ATTENTION[gpt.config.attention])


def test_long_heads_without_positions_have_kernels():
    sizes = {"block_size": 8, "vocab_size": 5, "n_layer": 2, "n_head": 2, "n_embd": 32, "heads": "S/L", "window": 2}
    gpt, idx = GPT(GPTConfig(**sizes, position="t5", nope_long=True)).to(DEVICE), torch.zeros(1, 8, dtype=torch.long)
    plain = gpt(idx.to(DEVICE))[0]
    kernels.use(gpt, ATTENTION[gpt.config.attention])
    torch.testing.assert_close(gpt(idx.to(DEVICE))[0], plain, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_they_compile_for_an_h100():
    """Each fits into its shared memory and has no more than a few registers' worth on the stack."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, os.path.join(ROOT, "tests", "resources.py"), "--widths=64"]
    got = subprocess.run(command, capture_output=True, text=True, env=env)
    assert got.returncode == 0, got.stderr
    rows = [line.split() for line in got.stdout.splitlines()[1:]]
    assert len(rows) == 17 and all(int(shared) <= 232448 and int(stack) <= 512 for *_, stack, shared in rows)
