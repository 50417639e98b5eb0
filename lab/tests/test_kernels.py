"""lab/kernels.py against the definitions: on a GPU or, by Triton's interpreter, on a CPU.

Without a GPU tests/harness.py sets TRITON_INTERPRET=1.
"""

import collections
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from harness import assert_equal, done, parametrize, slow
from reference import fast, naive_attention
from test_gpu import assert_same_gradients
from torch.autograd import grad

from attention.forms import FORM
from model import ATTENTION, GPT, GPTConfig

pytest.importorskip("triton")
from lab import kernels

# The core's tests, which may run in the same process, do not know the kernels.
CORES = list(kernels.AROUND)
ADDED = [(table, f"{core}_triton") for table in (ATTENTION, FORM) for core in CORES]
ADDED = [(table, name, table.pop(name)) for table, name in ADDED]

# numpy's, about numbers that the kernels compute and then mask
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 80  # more than a block of queries, and no multiple of one
# of ||x - exact|| / ||exact||
TOLERANCE = {
    torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5,
    torch.bfloat16: 6e-3,
}
SIZES = {"block_size": T, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 32}
dtypes = parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    for table, name, value in ADDED:
        monkeypatch.setitem(table, name, value)
    kernels.note_once.cache_clear()


@pytest.fixture
def flash(monkeypatch):
    """The function that calls the kernels; it counts its own calls."""
    counted = mock.Mock(wraps=kernels.flash)
    monkeypatch.setattr(kernels, "flash", counted)
    return counted


def inputs(dtype, T=T, D=32):
    """q, k, v and dy of two heads; q, k and v are views of one tensor, as those of a layer are."""
    x = torch.randn(1, T, 2 * (D + D + 16)).to(DEVICE, dtype)
    parts = x.split((2 * D, 2 * D, 2 * 16), dim=-1)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
    return q, k, v, torch.randn(1, 2, T, 16).to(DEVICE, dtype)


def double(*tensors):
    """The tensors in float64 on the CPU, with gradients of their own."""
    return [x.cpu().double().requires_grad_() for x in tensors]


def assert_close(x, exact, tolerance):
    """||x - exact|| is at most the tolerance times ||exact||."""
    assert (x.cpu().double() - exact).norm() <= tolerance * exact.norm()


def check(core, q, k, v, dy, tolerance, **settings):
    """The kernels' output and gradients are those of the naive attention in float64."""
    exact_inputs = double(q, k, v)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    y = fast(f"{core}_triton")(q, k, v, **settings)
    exact = naive_attention(core, *exact_inputs, **settings)
    assert y.dtype == v.dtype
    assert_close(y, exact, tolerance)
    gradients = grad(y, (q, k, v), dy)
    exact_gradients = grad(exact, exact_inputs, dy.cpu().double())
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert_close(gradient, exact_gradient, tolerance)


def models(core, **choices):
    """A model with the kernels, and the core's with the same weights."""
    choices = SIZES | choices
    gpt = GPT(GPTConfig(attention=f"{core}_triton", **choices)).to(DEVICE)
    plain = GPT(GPTConfig(attention=core, **choices)).to(DEVICE)
    plain.load_state_dict(gpt.state_dict())
    return gpt, plain


# -----------------------------------------------------------------------------
# Numbers


@dtypes
@parametrize("core", CORES)
@parametrize("window", [None, 20])
def test_equal_naive_forward_and_backward(core, window, dtype, flash):
    q, k, v, dy = inputs(dtype)
    check(core, q, k, v, dy, TOLERANCE[dtype], window=window, scale=0.3)
    flash.assert_called_once()


@dtypes
@parametrize("value, window, by_kernel", [(1e3, 7, False), (-1e3, None, False), (50.0, 7, True)])
@pytest.mark.filterwarnings("ignore:a channel of the values has a range above")
def test_laser_of_any_values(value, window, by_kernel, dtype, flash):
    """Where the values span too much for exp, the core computes LASER in log space."""
    q, k, v, dy = inputs(dtype, T=36, D=16)
    v = v.clone()
    v[:, 0, 30:32] = value
    float32 = dtype == torch.float32
    # 1000 takes three digits
    check("laser", q, k, v, dy, 2e-5 if float32 else 6e-3, window=window)

    laser = fast("laser_triton")
    y = laser(q, k, v, window=window)
    v[:, :, 30:] = 0  # what comes later does not matter
    same = laser(q, k, v, window=window)
    assert_equal(y[:, :, :30], same[:, :, :30], 1e-5 if float32 else 2e-2)
    assert flash.call_count == (3 if by_kernel else 1)  # the last call's values span little


@parametrize(
    "size, T, last",
    [(1.0, T, 0.0), (0.05, T, 0.0), (0.05, 33, 50.0)],
)
def test_lasers_error_in_bfloat16_is_softmaxs(size, T, last):
    """Rounding exp(v) or the weights by themselves would be an error of 2^-9 in y.

    That is much where y is small. last: of one channel, which makes the other numbers' exp tiny.
    """
    q, k, v, _ = inputs(torch.bfloat16, T)
    v = v * size
    v[:, :, -1, 3] = last
    y = fast("laser_triton")(q, k, v)
    exact = naive_attention("laser", *double(q, k, v))
    assert_close(y[:, :, :-1], exact[:, :, :-1], 3e-3)


# -----------------------------------------------------------------------------
# When the kernels run


def test_an_edited_definition_runs_itself(flash, capsys):
    def zeros(s, seen, v):
        return 0 * v

    ATTENTION["softmax_triton"] = zeros
    q, k, v, _ = inputs(torch.float32)
    assert not fast("softmax_triton")(q, k, v).any()
    flash.assert_not_called()
    assert "its definition was edited" in capsys.readouterr().err


@parametrize("core", CORES)
def test_inputs_that_do_not_fit_go_to_the_core_s_form(core, flash, capsys):
    """And a line says why, once; it says nothing of fewer queries, as when a text is written."""
    q, k, v, _ = inputs(torch.float32)
    attend = fast(f"{core}_triton")
    exact = naive_attention(core, *double(q, k, v))
    assert_close(attend(q[:, :, -3:], k, v), exact[:, :, -3:], 1e-5)
    for _ in range(2):
        assert_close(attend(q.double(), k.double(), v.double()), exact, 1e-5)
    flash.assert_not_called()
    reason = "they take bfloat16 and float32, not torch.float64"
    assert capsys.readouterr().err == f"{core}_triton: the kernels are not used: {reason}\n"


SHORT = {"heads": "SL", "window": 20}
SHARED = {"n_head": 4, "n_embd": 64, "n_kv_head": 2, "differential": True}
# the first layer's short heads have a bias, the second layer's long heads have none
NOPE = {"n_layer": 2, "heads": "S/L", "window": 2, "position": "t5", "nope_long": True}


@parametrize(
    "core, choices, n_calls",
    [
        ("softmax", SHORT, 2),
        ("laser", SHORT, 2),
        ("softmax", SHARED, 1),
        pytest.param("softmax", NOPE, 1, id="without_positions"),
    ],
)
def test_a_model_with_the_kernels_is_the_same(core, choices, n_calls, flash):
    """Logits, gradients and decoding with a cache; each group of heads calls a kernel."""
    gpt, plain = models(core, **choices)
    idx = torch.randint(11, (1, T)).to(DEVICE)
    logits, loss = gpt(idx, idx)
    assert flash.call_count == n_calls
    plain_logits, plain_loss = plain(idx, idx)
    assert_equal(logits, plain_logits, 1e-5)
    gradients = grad(loss, gpt.parameters())
    plain_gradients = grad(plain_loss, plain.parameters())
    assert_same_gradients(gradients, plain_gradients)

    cache = gpt.new_cache()
    parts = [gpt(token, cache=cache)[0] for token in idx.split(1, dim=1)]
    assert_equal(torch.cat(parts, dim=1), plain_logits, 1e-4)


@parametrize(
    "core, choices, reason",
    [
        ("laser", {"position": "t5"}, "they do not take bias"),
        ("softmax", {"position": "alibi"}, "(22, 16) wide"),
        ("softmax", {"dropout": 0.2}, "they do not take dropout"),
        ("softmax", {"head_dim": 128, "differential": True}, "(128, 256) wide"),
    ],
)
def test_a_model_that_the_kernels_do_not_fit(core, choices, reason, flash, capsys):
    """The core's form runs, and a line says why; neither interrupts softmax's compiled graph."""
    gpt, plain = models(core, n_layer=2, **choices)
    idx = torch.randint(11, (1, gpt.config.block_size)).to(DEVICE)
    if core == "softmax":
        torch._dynamo.reset()  # sizes that other tests compiled would be symbols here
        gpt = torch.compile(gpt, backend="eager", fullgraph=True)
    torch.manual_seed(1)
    logits = gpt(idx)[0]
    torch.manual_seed(1)
    assert torch.equal(logits, plain(idx)[0])
    flash.assert_not_called()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{core}_triton: the kernels are not used: ")
    assert reason in line


def test_bench_compares_and_times_them(run, tmp_path, flash):
    out = tmp_path / "bench.json"
    flags = (
        "--import=lab.kernels --what=attention --only=sdpa,softmax,softmax_triton --lengths=64 "
        "--n_head=2 --head_dim=16 --heads=SL --batch_size=1 --repeats=1 --dtype=float32 "
        f"--device={DEVICE} --out={out}"
    )
    assert "WRONG" not in done(run("bench.py", *flags.split()))
    rows = json.loads(out.read_text())["attention"]
    assert [row["subject"] for row in rows] == ["sdpa", "softmax", "softmax_triton"]
    flash.assert_called()


def test_training_on_a_gpu(run, tmp_path):
    """Other ways to compute the loss, with a kernel among them, give the same loss."""
    out = tmp_path / "gpu.json"
    same = "plain,no wait,flash,triton,logits in bfloat16,chunks"
    flags = "--size=tiny --device=cpu --dtype=float32 --no-compile --steps=6"
    args = [*flags.split(), f"--only={same},beta,batch x 2", f"--out={out}"]
    done(run("lab.experiments.gpu_training", *args))
    rows = json.loads(out.read_text())["rows"]
    losses = [rows[name]["loss"] for name in same.split(",")]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    assert abs(rows["beta"]["loss"] - losses[0]) > 1e-6
    for name, n in (("plain", 48), ("batch x 2", 96)):  # tokens of a step
        assert rows[name]["tokens_per_s"] * rows[name]["ms"] / 1e3 == pytest.approx(n)


# -----------------------------------------------------------------------------
# For a GPU, as far as that can be seen without one


def rows_printed_by(script, *flags):
    """The words of each line that a script of lab/tests prints, without the interpreter."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", f"lab/tests/{script}.py", *flags]
    out = subprocess.check_output(command, text=True, env=env)
    return [line.split() for line in out.splitlines()]


@slow
def test_they_compile_for_an_h100():
    """Each fits into its shared memory, and has only a few registers' worth on the stack."""
    rows = rows_printed_by("resources", "--widths=64")[1:]
    assert len(rows) == 6
    for row in rows:
        assert int(row[-1]) <= 232448  # bytes of shared memory
        assert int(row[-2]) <= 512  # bytes of the stack


@slow
def test_the_graph_with_kernels_is_one_and_copies_no_input():
    """As torch.compile sees it with a GPU."""
    rows = rows_printed_by("graphs")
    counts = collections.Counter(core for core, _, _ in rows)
    assert counts == {"softmax": 6, "laser": 6}
    for core, kernel, written in rows:
        assert {"q", "k", "v", "low", "g"}.isdisjoint(written.split(",")), (core, kernel)
