"""Times attention: every core, long and short heads, differential, and what other libraries have.

    python bench.py                                  # about ten minutes on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --what=attention --only=sdpa,beta --lengths=4096,8192,16384 --plot
    python bench.py --suite=gpu                      # all tables of a CUDA GPU, in bfloat16, in under eight minutes
    python bench.py --what=attention --device=cuda --dtype=bfloat16 --head_dim=64,128 --lengths=2048,8192 --tokens=32768

Four parts: `attention` (forward, backward and peak memory of the function alone), `model` (a forward pass of the LS
paper's model, its Table 1), `step` (its training step), `decode` (tokens/s and cache bytes). This file has the first;
the others, and how times are measured, are in training/timing.py.

Each attention is checked first: its outputs and gradients are compared with its definition in model.py, computed in
float64 on the CPU from fresh random inputs. One that is wrong is reported, not timed. Repeats are interleaved: every
subject runs once before any subject runs again. Numbers are medians with half their interquartile range; ratios are to
the first subject in the same round. A share is the least time in which the device could do the operations and move the
bytes, divided by the time taken; the rates of the device are those of a matrix product and of a copy, measured at the
start. On a GPU times lie between two events of the device; the host launches the work 2 or 3 ms ahead of the first
event. Everything is written to --out.
"""

import functools
import importlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention.fast import CHUNK, fast_form
from attention.heads import per_head
from attention.scores import spelled_out
from choices import POSITION
from configurator import NotInstalled, UserError, check_writable, configure, pick_device, user_errors
from model import ATTENTION, WHOLE, GPTConfig
from training import timing
from training.estimate import matmul_rate
from training.timing import interleaved, medians, ratios, stopwatch, tried

suite: Literal["all", "quick", "gpu"] = "all"  # settings for a purpose: quick, as --quick; gpu, all tables of a GPU
what = "attention,model,step,decode"  # the parts to run
only = ""  # attention's subjects, separated by commas; empty: all
lengths = "512,2048,8192"  # tokens, for attention
model_lengths = "2048,8192"  # tokens, for the forward pass of a model
step_length = 1024  # tokens of a training step
decode_length = 1024  # tokens to generate
batch_size = 2  # sequences; PyTorch's CPU backward pass gives a core whole heads, so one long head keeps one core busy
tokens = 0  # of a pass, instead of batch_size: as many sequences as fit; 0: batch_size of them
n_head = 6  # heads
head_dim = "32"  # of q, k and v, for attention; several, separated by commas
heads = "SSSSSL"  # the pattern of subjects with short heads
window = 100  # their span, for attention; the models have the LS paper's: 50 up to 2048 tokens, 100 past that
repeats = 9  # of each subject
patience = 20.0  # seconds; a subject that would take longer for one pass is skipped
budget = 0.0  # seconds; after them no further attention is begun, and those left out are named; 0: no limit
quick = False  # short lengths and few repeats: under a minute on two cores
plot = False  # draw time and memory against n to a PNG beside --out (needs matplotlib)
out = "bench.json"  # the file of results
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of q, k and v, and of the models by autocast
seed = 1337  # of q, k, v

SUITE = {  # name: the defaults that it changes
    "all": {},
    "quick": {"lengths": "256,1024", "model_lengths": "1024", "step_length": 256, "decode_length": 128, "repeats": 3},
    "gpu": {
        "what": "model,step,decode,attention",
        "device": "cuda",
        "dtype": "bfloat16",
        "head_dim": "64,128,32",
        "lengths": "2048,8192,32768",
        "tokens": 32768,  # fills the device; with heads of 64 and more it is also more than the device's caches hold
        "repeats": 7,
        "patience": 1.0,
        "budget": 430.0,
        "decode_length": 512,
        "out": "bench-gpu.json",
    },
}
PARTS = ("attention", "model", "step", "decode")
CHECKED_AT = 300  # tokens: past the first blocks of short heads, and where beta is linear
# ||x - exact|| / ||exact|| of an output or gradient: rounding of the inputs, and in float32 on a GPU TF32's
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TF32 = 2e-3
# operations and bytes of each measure, as multiples of a forward pass's; a backward pass has five products (q k^T
# again, and four gradients), where a forward pass has two
MEASURES = {"forward": (1, 1), "backward": (2.5, 2), "both": (3.5, 3)}
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
_began = time.monotonic()


# -----------------------------------------------------------------------------
# what is timed


@dataclass
class Subject:
    """Something that is timed, and what it has to compute: an attention on the heads of a layer."""

    core: str = "softmax"  # a name in ATTENTION
    pattern: str = "L"  # of its heads
    differential: bool = False
    position: str | None = None  # a name in POSITION, of those that act inside attention
    run: Callable | None = None  # (q, k, v) -> y, all (B, H, T, D); None: the form of the core that a model runs
    foreign: bool = False  # the code of another library
    triton: bool = False  # a kernel of attention/kernels.py
    quadratic: bool = False  # holds all T^2 scores at once
    backward: bool = True  # has a backward pass here
    error: float = math.nan  # the largest that the check found

    def __post_init__(self):
        self.meaning = self.core, self.pattern, self.differential, self.position
        self.run = self.run or layer(fast(self.core), *self.meaning[1:])


def layer(core: Callable, pattern: str, differential: bool, position: str | None) -> Callable:
    """(q, k, v) -> y, all (B, H, T, D): a core on short and long heads, on pairs of heads, or with a position."""
    if differential:
        return in_pairs(core)
    if position is not None:
        return at_positions(core, position)
    n = letters(pattern).count("S")
    if n == 0:
        return core

    def run(q, k, v):  # the first heads are the short ones
        short = core(q[:, :n], k[:, :n], v[:, :n], window=window)
        return torch.cat((short, core(q[:, n:], k[:, n:], v[:, n:])), dim=1) if n < n_head else short

    return run


def fast(core: str) -> Callable:
    """ATTENTION[core] as a model runs it, found when it is called: a definition with a bug raises there."""

    def attend(q, k, v, **settings):
        return fast_form(core, ATTENTION[core], whole=core in WHOLE)(q, k, v, **settings)

    return attend


def in_pairs(core: Callable) -> Callable:
    """(q, k, v) -> y of heads in pairs, whose values are joined: A1 V - 0.5 A2 V (Ye et al. 2024)."""

    def run(q, k, v):
        joined = torch.cat((v[:, ::2], v[:, 1::2]), dim=-1)  # (B, H / 2, T, 2 D)
        y = core(q, k, per_head(joined, [h // 2 for h in range(q.shape[1])]))
        y = y[:, ::2] - 0.5 * y[:, 1::2]
        return torch.stack(y.chunk(2, dim=-1), dim=2).flatten(1, 2)

    return run


def at_positions(core: Callable, position: str) -> Callable:
    """(q, k, v) -> y of long heads, with what a position does to q, k and the scores."""

    def run(q, k, v):
        q, k, bias = scheme(position, *q.shape[-2:]).to(q.device)(q, k, slice(0, n_head), 0)
        return core(q.to(v.dtype), k.to(v.dtype), v, bias=bias)

    return run


@functools.cache
def scheme(position: str, T: int, D: int) -> torch.nn.Module:
    """The module of a position in a layer."""
    config = GPTConfig(position=position, n_embd=n_head * D, n_head=n_head, head_dim=D, block_size=T)
    return config.scheme(config.resolved())


def letters(pattern: str) -> str:
    """S or L for each head."""
    return (pattern * n_head)[:n_head]


def work(subject: Subject, n: int, D: int) -> tuple[float, float]:
    """(FLOPs, numbers read or written) of a head's forward pass over n tokens, as few as its result needs.

    Two products per query and key that it sees; or chunks and sums of beta as in training.estimate.flops, but half a
    chunk. q, k, v and y are read or written once.
    """
    long = (n + 1) / 2
    if subject.core == "beta":
        long = min(long, (CHUNK + 1) / 2 + 2 * D)
    w = min(window, n - 1)
    short = (w + 1) * (1 - w / (2 * n))
    each = letters(subject.pattern)
    keys = (each.count("L") * long + each.count("S") * short) / n_head
    widths = D + (2 * D if subject.differential else D)  # of keys and of values
    return 2 * widths * keys * n, 4 * D * n


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def pinned(backend: SDPBackend) -> Callable:
    """SDPA through one of its backends."""

    def run(q, k, v):
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return run


def flex(pattern: str, dynamic: bool) -> Callable:
    """FlexAttention, which skips what a block mask leaves out. dynamic: compiled once for all lengths, with checks of
    bounds that a multiple of 128 tokens would not need; else for each length."""

    def run(q, k, v):
        return compiled_flex(dynamic)(q, k, v, block_mask=flex_mask(q.shape[-2], str(q.device), pattern))

    return run


@functools.cache
def compiled_flex(dynamic: bool) -> Callable:
    torch._dynamo.config.recompile_limit = 64  # for each length, head dim, pattern, and with gradients
    return torch.compile(flex_attention, dynamic=dynamic)


@functools.cache
def flex_mask(T: int, dev: str, pattern: str) -> object:
    n = letters(pattern).count("S")

    def causal(b, h, i, j):
        return i >= j

    def mixed(b, h, i, j):
        return (i >= j) & ((i - j <= window) | (h >= n))

    return create_block_mask(mixed if n else causal, None, n_head, T, T, device=dev)


def x_transformers() -> Callable:
    """Softmax attention of the library x-transformers."""
    from x_transformers.attend import Attend

    attend = Attend(causal=True, flash=True)

    def run(q, k, v):
        return attend(q, k, v)[0]

    return run


def fla_beta() -> Callable:
    """beta through flash-linear-attention: linear attention with the values widened to [V | K]."""
    from fla.ops.linear_attn import chunk_linear_attn

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D), as it wants them
        scale = q.shape[-1] ** -0.5
        o, _ = chunk_linear_attn(q, k, torch.cat((v, k), -1), scale=scale, normalize=False)
        norm = (scale * q.float() * o[..., v.shape[-1] :].float()).sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
        return (o[..., : v.shape[-1]] / (1 + norm)).to(v.dtype).transpose(1, 2)

    return run


def triton_kernels() -> dict[str, Callable]:
    """The attentions of attention/kernels.py."""
    from attention.kernels import KERNEL

    return {core: KERNEL[core](fast(core)) for core in KERNEL if core in ATTENTION}


@functools.cache
def optional(name: str, make: Callable) -> object:
    """make(), or None where its library is not installed or does not run here; then it says so, once."""
    try:
        return make()
    except Exception as error:
        print(f"{name}: left out ({timing.why(error)})")
        return None


def subjects(dev: str, D: int) -> dict[str, Subject]:
    """Everything there is to time here, SDPA first."""
    on_gpu = dev.startswith("cuda")
    short = [heads] if "S" in heads else []
    table = {"sdpa": Subject(run=sdpa, foreign=True)}
    if suite != "quick":
        for name, backend in BACKENDS.items():
            table[name] = Subject(run=pinned(backend), foreign=True, quadratic=backend == SDPBackend.MATH)
    for core in ATTENTION:
        table[core] = Subject(core)
        table |= {f"{core} {pattern}": Subject(core, pattern) for pattern in short}
        if n_head % 2 == 0:
            table[f"{core} differential"] = Subject(core, differential=True)
    if suite == "all":
        table |= {name: Subject(position=name) for name, (_, inside) in POSITION.items() if inside}
    if suite != "quick":
        dynamic = not on_gpu or D != numbers("head_dim")[0]
        for pattern in ("L", *short):  # on a CPU FlexAttention has no backward pass
            run = flex(pattern, dynamic)
            table[f"flex {pattern}"] = Subject(pattern=pattern, run=run, foreign=True, backward=on_gpu)
    if on_gpu or "triton" in only:  # on a CPU in the interpreter, minutes for each
        kernels = optional("Triton's kernels", triton_kernels) or {}
        table |= {f"{core} triton": Subject(core, run=run, triton=True) for core, run in kernels.items()}
        for core, run in kernels.items() if short else ():
            run = functools.partial(run, window=window, n_short=letters(heads).count("S"))
            table[f"{core} {heads} triton"] = Subject(core, heads, run=run, triton=True)
    for name, core, make in (("x-transformers", "softmax", x_transformers), ("fla beta", "beta", fla_beta)):
        if run := optional(name, make):
            table[name] = Subject(core, run=run, foreign=True)
    if unknown := set(filter(None, only.split(","))) - set(table):
        raise UserError(f"--only={only}: {', '.join(sorted(unknown))} is none of {', '.join(table)}")
    return {name: subject for name, subject in table.items() if not only or name in only.split(",")}


# -----------------------------------------------------------------------------
# whether it is right


def inputs(B: int, T: int, D: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v and dy, (B, H, T, D)."""
    x = [torch.randn(B, n_head, T, D, device=dev, dtype=dt) for _ in range(4)]
    return [*(t.requires_grad_() for t in x[:3]), x[3]]


def derivatives(f: Callable, x: list[torch.Tensor], backward: bool = True) -> list[torch.Tensor]:
    """y = f(q, k, v) for x = [q, k, v, dy] and, unless told not to, the gradients of q, k and v; in float64."""
    if not backward:
        return [f(*(t.detach() for t in x[:3])).cpu().double()]
    y = f(*x[:3])
    grads = torch.autograd.grad(y, x[:3], x[3], materialize_grads=True)
    return [t.detach().cpu().double() for t in (y, *grads)]


def right_subjects(dev: str, dt: torch.dtype, D: int) -> dict[str, Subject]:
    """The subjects whose outputs and gradients are those of their definition in float64, up to rounding."""
    x = inputs(2, CHECKED_AT, D, dev, dt)
    double = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in x]
    tolerance = TF32 if dt == torch.float32 and dev.startswith("cuda") else TOLERANCE[dt]

    @functools.cache
    def exact(core: str, *choices: object) -> list[torch.Tensor]:
        return derivatives(layer(spelled_out(ATTENTION[core]), *choices), double)

    def errors_of(subject: Subject) -> list[float]:
        found = derivatives(subject.run, x, subject.backward)
        pairs = zip(found, exact(*subject.meaning), strict=False)
        return [((a - b).norm() / b.norm()).item() for a, b in pairs]

    right = {}
    for name, subject in subjects(dev, D).items():
        if subject.triton and not fits(subject.core, x):
            print(f"{name}: left out, it would be the plain form (its kernel takes no head dim {D}, {dt} on {dev})")
            continue
        errors = tried(name, functools.partial(errors_of, subject), dev, subject.foreign)
        if errors is None:
            continue
        subject.error = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
        if subject.error <= tolerance:
            right[name] = subject
        else:
            found = ", ".join(f"{which} {e:.2g}" for which, e in zip(("y", "dq", "dk", "dv"), errors, strict=False))
            print(f"{name} is WRONG: it differs from the definition by {found}; not timed")
    return right


def fits(core: str, x: list[torch.Tensor]) -> bool:
    from attention import kernels

    return kernels.fits(core, *x[:3])


# -----------------------------------------------------------------------------
# what is measured of it


def passes(subject: Subject, x: list[torch.Tensor], dev: str) -> dict[str, float]:
    """Milliseconds of a forward pass without gradients, of a backward pass, and of both with gradients."""
    *qkv, dy = x
    y = []

    @torch.no_grad()
    def inference() -> None:
        subject.run(*(t.detach() for t in qkv))

    def forward() -> None:
        y.append(subject.run(*qkv))

    def backward() -> None:  # grad, since backward() would copy what is laid out in another way than q, k and v
        torch.autograd.grad(y[0], qkv, dy)

    row = {"forward": stopwatch(dev, inference)[0]}
    if subject.backward:
        both = stopwatch(dev, forward, backward)
        row |= {"backward": both[1], "both": sum(both)}
    return row


def ceilings(dev: str, dt: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product, and bytes/s, read and written, of a large copy."""
    rate = matmul_rate(dev, str(dt).removeprefix("torch."))
    x = torch.randn(2**28 if dev.startswith("cuda") else 2**25, device=dev)
    y = torch.empty_like(x)
    ms = min(stopwatch(dev, lambda: y.copy_(x))[0] for _ in range(10))
    return {"flops": rate, "bytes_per_s": 2 * x.nbytes / ms * 1e3}


def peak_memory(f: Callable, dev: str) -> int:
    """Bytes that f() needed at most at once, beyond what was there before."""
    if dev.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the profiler announces itself on every start
    try:
        with profile(profile_memory=True) as p:
            f()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    events = [event for event in p.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def free_memory(dev: str) -> int:
    """Bytes that are free on the device; where nobody says, as if there were 8 GiB."""
    if dev.startswith("cuda"):
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except OSError:
        return 8 * 2**30


# -----------------------------------------------------------------------------
# the tables of attention


def attention(dev: str, dt: torch.dtype, sizes: list[int], dims: list[int], top: dict) -> Iterator[list[dict]]:
    """Prints a table for each head dim and length, and yields its rows."""
    for D in dims:
        if late():
            print(f"
head dim {D}: out of time (--budget)")
            continue
        print(f"
attention, head dim {D}")
        table = right_subjects(dev, dt, D)
        pace = {}  # {subject: seconds of a pass, for each pair of tokens}
        for n in sizes:
            x = inputs(sequences(n), n, D, dev, dt)
            tasks = {name: warmed_up(name, subject, x, pace, dev) for name, subject in table.items()}
            tasks = {name: task for name, task in tasks.items() if task is not None}
            yield attention_table(tasks, table, x, dev, top)


def warmed_up(name: str, subject: Subject, x: list[torch.Tensor], pace: dict, dev: str) -> Callable | None:
    """What times a pass of a subject, after a first pass; None where that fails, or would take too much."""
    B, _, n, _ = x[0].shape
    pairs = B * n * n
    once = pace.get(name, 0.0) * pairs
    need = 32 * n_head * pairs if subject.quadratic else 0
    reason = ""
    if late():
        reason = "out of time (--budget)"
    elif once > patience:
        reason = f"would take up to {once:.1f} s a pass"
    elif need > free_memory(dev) / 2:
        reason = f"would need {need / 2**30:.1f} GiB"
    if reason:
        print(f"n = {n}: {name} skipped, {reason}")
        return None
    task = functools.partial(passes, subject, x, dev)
    row = tried(f"n = {n}: {name}", lambda: task() and task(), dev, subject.foreign)  # the first one may compile
    if row is None:
        return None
    pace[name] = (row["forward"] + row.get("both", 0.0)) / 1e3 / pairs
    return task


def attention_table(tasks: dict, table: dict, x: list[torch.Tensor], dev: str, top: dict) -> list[dict]:
    """Times the tasks, prints their table and returns its rows."""
    rounds = interleaved(tasks, dev, repeats)
    B, _, n, D = x[0].shape
    columns = "".join(f"{c:>22}{'share':>6}" for c in ("forward", "backward", "forward + backward"))
    print(f"
{f'n = {n}, d = {D}, B = {B}':24}{columns}{'memory':>12}{'error':>9}")
    first = next(iter(rounds), "sdpa")
    if first != "sdpa":
        print(f"(ratios to {first})")
    rows = []
    for name in rounds:
        ms, spread = medians(rounds[name])
        ratio = ratios(rounds, name, first)
        flops, moved = (B * n_head * part for part in work(table[name], n, D))
        share = {}
        for key in ms:
            operations, reads = MEASURES[key]
            least = max(operations * flops / top["flops"], reads * moved * x[0].itemsize / top["bytes_per_s"])
            share[key] = 1e3 * least / ms[key]
        memory = tried(f"memory of {name}", functools.partial(peak_memory, tasks[name], dev), dev) or 0
        cells = {key: f"{ms[key]:8.2f} ms ±{spread[key]:3.0%}{ratio.get(key, math.nan):5.2f}x{share[key]:6.0%}" for key in ms}
        line = "".join(f"{cells.get(key, '-'):>28}" for key in MEASURES)
        print(f"{name:24}{line}{memory / 2**20:8.1f} MiB{table[name].error:9.1e}", flush=True)
        row = {"subject": name, "n": n, "d": D, "batch": B, "error": table[name].error}
        row |= {"ms": ms, "spread": spread, "ratio": ratio, "share": share, "peak_bytes": memory}
        row["against"] = {base: ratios(rounds, name, base) for base in BACKENDS if base in rounds}
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> None:
    """How many times as fast as SDPA's kernels, forward + backward (forward alone where there is no backward)."""
    bases = [base for base in ("sdpa flash", "sdpa cudnn") if any(row["subject"] == base for row in rows)]
    sizes = sorted({row["n"] for row in rows})

    def times(against: dict, key: str) -> str:
        return " / ".join(f"{1 / against[base][key]:.2f}" if key in against.get(base, ()) else "-" for base in bases)

    for D in sorted({row["d"] for row in rows}) if bases else ():
        against = {(row["subject"], row["n"]): row["against"] for row in rows if row["d"] == D}
        print(f"
d = {D}: how many times as fast as {' / '.join(bases)}, forward + backward (forward alone)")
        print(f"{'':24}" + "".join(f"{f'n = {n}':>28}" for n in sizes))
        for name in dict.fromkeys(name for name, _ in against):
            found = [against.get((name, n)) for n in sizes]
            cells = [f"{times(a, 'both')} ({times(a, 'forward')})" if a else "-" for a in found]
            print(f"{name:24}" + "".join(f"{cell:>28}" for cell in cells))


def draw(rows: list[dict], path: str) -> None:
    """Time and memory of forward + backward against n, at the first head dim, on log axes."""
    if not rows:
        print("nothing was timed: there is nothing to draw")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
    D = rows[0]["d"]
    rows = [row for row in rows if row["d"] == D]
    ticks = sorted({row["n"] for row in rows})
    rows = [row for row in rows if "both" in row["ms"]]
    for i, name in enumerate(dict.fromkeys(row["subject"] for row in rows)):
        mine = [row for row in rows if row["subject"] == name]
        sizes = [row["n"] for row in mine]
        style = {"label": name, "marker": "o", "markersize": 4, "linestyle": ("-", "--", ":")[i // 10 % 3]}
        axes[0].plot(sizes, [row["ms"]["both"] for row in mine], **style)
        axes[1].plot(sizes, [row["peak_bytes"] / 2**20 for row in mine], **style)
    for ax, label in zip(axes, ("forward + backward, ms", "peak memory, MiB"), strict=True):
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"attention, {f'{tokens} tokens' if tokens else f'B {batch_size}'}, H {n_head}, D {D}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drew {path}")


# -----------------------------------------------------------------------------


def late() -> bool:
    """Whether the time of --budget is over."""
    return 0 < budget < time.monotonic() - _began


def sequences(length: int) -> int:
    """How many sequences of this length a pass has."""
    return max(1, tokens // length) if tokens else batch_size


def numbers(flag: str) -> list[int]:
    """The integers of a flag. Raises UserError where they are none, or below 1."""
    try:
        got = [int(n) for n in globals()[flag].split(",")]
    except ValueError:
        got = []
    if not got or min(got) < 1:
        raise UserError(f"--{flag} must be positive integers, separated by commas; got {globals()[flag]}")
    return got if flag == "head_dim" else sorted(got)


def choose_suite() -> None:
    """Sets the flags that were not given to those of --suite."""
    if quick and "suite" in given:
        raise UserError("--quick and --suite are two choices of settings: leave one out")
    if quick:
        globals()["suite"] = "quick"
    if suite == "gpu" and "device" not in given and not torch.cuda.is_available():
        raise UserError("--suite=gpu needs a CUDA GPU, and there is none here (or this PyTorch is built without CUDA)")
    globals().update({name: value for name, value in SUITE[suite].items() if name not in given})


def check_flags() -> None:
    """Raises UserError for flags that do not fit, before anything is timed."""
    parts = what.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--what={what}: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if min(repeats, batch_size, n_head, step_length, decode_length - 1) < 1 or not patience > 0:
        raise UserError("sizes, repeats and patience must be positive, decode_length at least 2")
    if tokens < 0 or budget < 0:
        raise UserError(f"--tokens={tokens} and --budget={budget} must not be negative")
    for sizes in ({"n_head": n_head, "n_embd": n_head}, timing.LS_MODEL, timing.GPT_10M):  # or they say why not
        GPTConfig(**sizes, heads=heads, window=window if "S" in heads else None)
    if "/" in heads:
        raise UserError(f"--heads={heads}: here it is the pattern of one layer, without a /")
    if (plot or only) and "attention" not in parts:
        raise UserError("--plot and --only are for --what=attention")
    check_writable(out)
    for flag in ("head_dim", "lengths", "model_lengths"):
        numbers(flag)
    if plot:
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise NotInstalled("--plot draws with matplotlib: pip install matplotlib") from None


def main() -> None:
    choose_suite()
    check_flags()
    dev, dt_name, amp = pick_device(device, dtype)
    dt = getattr(torch, dt_name)
    if ":" in dev:
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("high")  # as train.py: TF32 on a GPU, nothing on a CPU
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest weights are zeros
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else platform.processor() or platform.machine()
    about = {"device": dev, "chip": chip, "dtype": dt_name, "torch": torch.__version__}
    about |= {"threads": torch.get_num_threads(), "B": f"{tokens} / n" if tokens else batch_size, "H": n_head}
    about |= {"heads": heads, "window": window, "repeats": repeats}
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    torch.manual_seed(seed)
    top = ceilings(dev, dt)
    print(f"ceilings: {top['flops'] / 1e12:.3g} TFLOP/s (matrix product), {top['bytes_per_s'] / 1e9:,.0f} GB/s (copy)")
    at = timing.Setting(dev, amp, heads, repeats, seed)

    def tables(part: str) -> Iterator[list[dict]]:
        """The rows of each table of a part, when it has been printed."""
        if part == "attention":
            yield from attention(dev, dt, numbers("lengths"), numbers("head_dim"), top)
        elif part == "model":
            for n in numbers("model_lengths"):
                yield timing.forward_or_step(at, n, sequences(n), train=False)
        elif part == "step":
            yield timing.forward_or_step(at, step_length, sequences(step_length), train=True)
        else:
            yield timing.decoding(at, decode_length)

    parts = what.split(",")
    results: dict = {"about": about, "ceilings": top} | {part: [] for part in parts}
    for part in parts:
        for rows in tables(part):
            results[part] += rows
            with open(out, "w", encoding="utf-8") as f:
                json.dump(results, f, indent=1)
    summary(results.get("attention", []))
    print(f"
wrote {out}, after {time.monotonic() - _began:.0f} s")
    if plot:
        draw(results["attention"], os.path.splitext(out)[0] + ".png")


if __name__ == "__main__":
    config, given = configure(globals())
    globals().update(config)
    with user_errors():
        main()
