"""lab/kernels.py against the definitions: on a GPU or, by Triton's interpreter, on a CPU.

Without a GPU tests/harness.py sets TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import ROOT
from reference import fast, naive_attention

from attention.forms import FORM
from model import ATTENTION, GPT, GPTConfig

pytest.importorskip("triton")
from lab import kernels

# The core's tests, which may run in the same process, do not know the kernels.
CORES = list(kernels.KERNEL)
NEW_ATTENTION = {core: ATTENTION.pop(f"{core}_triton") for core in CORES}
NEW_FORM = {core: FORM.pop(f"{core}_triton") for core in CORES}

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
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for core in CORES:
        monkeypatch.setitem(ATTENTION, f"{core}_triton", NEW_ATTENTION[core])
        monkeypatch.setitem(FORM, f"{core}_triton", NEW_FORM[core])
    kernels.note_once.cache_clear()


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """beta's kernels take few tokens too."""
    monkeypatch.setattr(kernels, "LINEAR_FROM", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that a test calls, "Flash" or "Beta" for each call."""
    names = []

    def count(function: type) -> None:
        apply = function.apply

        def counted(*args: object) -> torch.Tensor:
            names.append(function.__name__)
            return apply(*args)

        monkeypatch.setattr(function, "apply", counted)

    count(kernels.Flash)
    count(kernels.Beta)
    return names


def inputs(dtype: torch.dtype, T: int = T, D: int = 32, E: int = 16) -> list[torch.Tensor]:
    """q, k, v and dy of two heads; q, k and v are views of one tensor, as those of a layer are."""
    x = torch.randn(1, T, 2 * (D + D + E)).to(DEVICE, dtype).requires_grad_()
    parts = x.split((2 * D, 2 * D, 2 * E), dim=-1)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
    dy = torch.randn(1, 2, T, E).to(DEVICE, dtype)
    return [q, k, v, dy]


def double(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in float64 on the CPU, with gradients of their own."""
    return [x.detach().cpu().double().requires_grad_() for x in tensors]


def assert_close(x: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """||x - exact|| is at most the tolerance times ||exact||."""
    assert (x.cpu().double() - exact).norm() <= tolerance * exact.norm()


def check(core: str, q, k, v, dy, tolerance: float, **settings) -> None:
    """The kernels' output and gradients are those of the naive attention in float64."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    exact_inputs = double(q, k, v)
    y = fast(f"{core}_triton")(q, k, v, **settings)
    exact = naive_attention(core, *exact_inputs, **settings)
    assert y.dtype == v.dtype
    assert_close(y, exact, tolerance)
    gradients = torch.autograd.grad(y, (q, k, v), dy)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, dy.cpu().double())
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        if exact_gradient.any():
            assert_close(gradient, exact_gradient, tolerance)
        else:  # a token alone has no gradient of its score
            assert gradient.cpu().double().norm() <= tolerance * exact.norm()


def models(core: str, **choices) -> tuple[GPT, GPT]:
    """A model with the kernels, and the core's with the same weights."""
    choices = SIZES | choices
    gpt = GPT(GPTConfig(attention=f"{core}_triton", **choices)).to(DEVICE)
    plain = GPT(GPTConfig(attention=core, **choices)).to(DEVICE)
    plain.load_state_dict(gpt.state_dict())
    return gpt, plain


# -----------------------------------------------------------------------------
# Numbers


@dtypes
@pytest.mark.parametrize(
    ("core", "window"),
    [("softmax", None), ("softmax", 20), ("laser", None), ("laser", 20), ("beta", None)],
)
def test_equal_naive_forward_and_backward(core, window, dtype, any_length, calls):
    q, k, v, dy = inputs(dtype)
    check(core, q, k, v, dy, TOLERANCE[dtype], window=window, scale=0.3)
    assert calls == ["Beta" if core == "beta" else "Flash"]


@dtypes
@pytest.mark.parametrize(("value", "window"), [(1000.0, 7), (-1000.0, None)])
def test_laser_of_any_values(value, window, dtype):
    """The first head's values span too much for exp, the second's do not."""
    q, k, v, dy = inputs(dtype, T=36, D=16)
    v = v.detach().clone()
    v[:, 0, 30:32] = value
    tolerance = 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]  # 1000 takes three digits
    check("laser", q, k, v, dy, tolerance, window=window)

    laser = fast("laser_triton")
    changed = v.clone()
    changed[:, :, 30:] = 0
    y = laser(q, k, v, window=window)[:, :, :30].float()
    same = laser(q, k, changed, window=window)[:, :, :30].float()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y - same).abs().max() <= tolerance  # what comes later does not matter


@pytest.mark.parametrize(
    ("size", "T", "last"),
    [(1.0, T, None), (0.05, T, None), (0.05, 33, 100.0)],
)
def test_lasers_error_in_bfloat16_is_softmaxs(size, T, last):
    """Rounding exp(v) or the weights by themselves would be an error of 2^-9 in y.

    That is much where y is small. last: one channel needs log space.
    """
    q, k, v, _ = inputs(torch.bfloat16, T)
    v = (v * size).detach()
    if last is not None:
        v[:, :, -1, 3] = last
    y = fast("laser_triton")(q, k, v)
    exact = naive_attention("laser", *double(q, k, v))
    assert_close(y[:, :, :-1], exact[:, :, :-1], 3e-3)


# -----------------------------------------------------------------------------
# When the kernels run


def test_the_three_are_the_core_s_attentions(calls, capsys):
    """Importing the file has added them, with the core's definitions; an edited one runs itself."""
    for core in CORES:
        assert NEW_ATTENTION[core] is ATTENTION[core]

    def zeros(s, seen, v):
        return 0 * v

    ATTENTION["softmax_triton"] = zeros
    q, k, v, _ = inputs(torch.float32)
    assert not fast("softmax_triton")(q, k, v).any()
    assert not calls
    assert "its definition was edited" in capsys.readouterr().err


MISFITS = {  # what is made of q, k and v, and the reason that is given
    "a few queries": (
        lambda q, k, v: (q[:, :, -3:], k, v),
        None,  # as when a text is written
    ),
    "float64": (
        lambda q, k, v: (q.double(), k.double(), v.double()),
        "they take bfloat16 and float32, not torch.float64",
    ),
    "24 wide": (
        lambda q, k, v: (q[..., :24], k[..., :24], v),
        "queries and values are (24, 16) wide; they take the widths (16, 32, 64, 128)",
    ),
}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", MISFITS)
def test_inputs_that_do_not_fit_go_to_the_core_s_form(core, case, calls, capsys, any_length):
    """And a line says why, once."""
    change, reason = MISFITS[case]
    q, k, v, _ = (x.detach() for x in inputs(torch.float32))
    q, k, v = change(q, k, v)
    attend = fast(f"{core}_triton")
    y = attend(q, k, v)
    attend(q, k, v)
    assert not calls
    assert_close(y, naive_attention(core, *double(q, k, v)), 1e-5)
    lines = capsys.readouterr().err.splitlines()
    if reason is None:
        assert not lines
    else:
        assert lines == [f"{core}_triton: the kernels are not used: {reason}"]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    "choices",
    [
        {"heads": "SL", "window": 20},
        {"n_head": 4, "n_embd": 64, "n_kv_head": 2, "differential": True},
    ],
)
def test_a_model_with_the_kernels_is_the_same(core, choices, any_length, calls):
    """Logits, gradients and decoding with a cache; each group of heads calls a kernel."""
    gpt, plain = models(core, **choices)
    idx = torch.randint(11, (1, T)).to(DEVICE)
    logits, loss = gpt(idx, idx)
    if core == "beta":  # short heads of beta have no kernel
        assert calls == ["Beta"]
    else:
        assert calls == ["Flash"] * (2 if "heads" in choices else 1)

    plain_logits, plain_loss = plain(idx, idx)
    assert (logits - plain_logits).abs().max() <= 1e-5
    gradients = torch.autograd.grad(loss, gpt.parameters())
    plain_gradients = torch.autograd.grad(plain_loss, plain.parameters())
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * expected.norm() + 1e-7

    calls.clear()
    cache = gpt.new_cache()
    parts = [gpt(token, cache=cache)[0] for token in idx.split(1, dim=1)]
    assert (torch.cat(parts, dim=1) - plain_logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("core", "choices", "reason"),
    [
        ("beta", {"block_size": 8}, "for long heads and 256 tokens or more"),
        ("beta", {"block_size": 256, "n_embd": 128}, "float32 heads up to 32 wide on"),
        ("beta", {"block_size": 256, "decay": "alibi"}, "they do not take decay"),
        ("laser", {"position": "t5"}, "they do not take bias"),
        ("softmax", {"position": "t5"}, "they do not take bias"),
        ("softmax", {"position": "alibi"}, "(22, 16) wide"),
        ("softmax", {"decay": "learned"}, "(22, 16) wide"),
        ("softmax", {"dropout": 0.2}, "they do not take dropout"),
        ("softmax", {"head_dim": 20}, "(20, 20) wide"),
        ("softmax", {"head_dim": 128, "differential": True}, "(128, 256) wide"),
    ],
)
def test_a_model_that_the_kernels_do_not_fit(core, choices, reason, calls, capsys):
    """The core's form runs, and a line says why."""
    gpt, plain = models(core, n_layer=2, **choices)
    idx = torch.randint(11, (1, gpt.config.block_size)).to(DEVICE)
    torch.manual_seed(1)
    logits = gpt(idx)[0]
    torch.manual_seed(1)
    assert torch.equal(logits, plain(idx)[0])
    assert not calls
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{core}_triton: the kernels are not used: ")
    assert reason in line


def test_a_misfit_does_not_interrupt_a_compiled_graph(capsys):
    """The line is printed while torch.compile traces."""
    gpt, plain = models("softmax", position="t5")
    idx = torch.randint(11, (1, T)).to(DEVICE)
    torch._dynamo.reset()
    logits = torch.compile(gpt, backend="eager", fullgraph=True)(idx)[0]
    torch.testing.assert_close(logits, plain(idx)[0])
    assert capsys.readouterr().err.count("the kernels are not used") == 1


def test_long_heads_without_positions_have_kernels(calls):
    """The first layer's short heads have a bias, the second layer's long heads have none."""
    choices = {"n_layer": 2, "heads": "S/L", "window": 2, "position": "t5", "nope_long": True}
    gpt, plain = models("softmax", **choices)
    idx = torch.randint(11, (1, T)).to(DEVICE)
    torch.testing.assert_close(gpt(idx)[0], plain(idx)[0], rtol=0, atol=1e-5)
    assert calls == ["Flash"]


def test_bench_compares_and_times_them(run, tmp_path, calls):
    out = tmp_path / "bench.json"
    code, printed, _ = run(
        "bench.py",
        "--import=lab.kernels",
        "--what=attention",
        "--only=sdpa,softmax,softmax_triton",
        "--lengths=64",
        "--n_head=2",
        "--head_dim=16",
        "--heads=SL",
        "--batch_size=1",
        "--repeats=1",
        f"--device={DEVICE}",
        "--dtype=float32",
        f"--out={out}",
    )
    assert code == 0
    assert "WRONG" not in printed and "left out" not in printed
    rows = json.loads(out.read_text())["attention"]
    assert [row["subject"] for row in rows] == ["sdpa", "softmax", "softmax_triton"]
    assert all(row["median"]["both"] > 0 for row in rows)
    assert set(calls) == {"Flash"}


# -----------------------------------------------------------------------------
# For a GPU, as far as that can be seen without one


def rows_printed_by(script: str, *flags: str) -> list[list[str]]:
    """The words of each line that a script of lab/tests prints, without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.path.join(ROOT, "lab", "tests", script)
    command = [sys.executable, "-W", "ignore", path, *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_they_compile_for_an_h100():
    """Each fits into its shared memory, and has only a few registers' worth on the stack."""
    rows = rows_printed_by("resources.py", "--widths=64")[1:]
    assert len(rows) == 17
    for row in rows:
        assert int(row[-1]) <= 232448  # bytes of shared memory
        assert int(row[-2]) <= 512  # bytes of the stack


@pytest.mark.slow
def test_the_graph_with_kernels_is_one_and_copies_no_input():
    """As torch.compile sees it with a GPU."""
    rows = rows_printed_by("graphs.py")
    counts = {core: sum(row[0] == core for row in rows) for core in CORES}
    assert counts == {"softmax": 8, "laser": 18, "beta": 7}
    inputs = {
        "softmax": {"q", "k", "v", "g"},
        "laser": {"q", "k", "v", "wide", "shift"},
        "beta": {"q", "k", "v", "y"},
    }
    for core, kernel, written in rows:
        read = inputs[core]
        if kernel == "beta_forward_kernel":
            read = read - {"y"}  # its result
        assert not read & set(written.split(",")), (core, kernel)
