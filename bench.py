"""Times attention: every core, long and short heads, differential, and what else there is to use.

    python bench.py                                  # about ten minutes on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --what=attention --only=sdpa,beta --lengths=4096,8192,16384 --plot
    python bench.py --suite=gpu                      # all tables of a CUDA GPU, in bfloat16, in under eight minutes
    python bench.py --what=attention --device=cuda --dtype=bfloat16 --head_dim=64,128 --lengths=2048,8192 --tokens=32768

Four parts: `attention` (forward, backward and peak memory of the function alone), `model` (a forward pass of
the LS paper's model, its Table 1), `step` (its training step), `decode` (tokens/s and cache bytes).
Outputs and gradients of each attention are checked against the naive form in float64 first, on fresh random
inputs; one that is wrong is reported, not timed. Repeats are interleaved: every subject runs once before any
runs again. Numbers are medians with half their interquartile range; ratios are to the first subject in the
same round. A share is that of the least time that the operations and bytes of what is computed take, at the
rates of a matrix product and of a copy that are measured first. On a GPU times lie between events of the
device, of which the host has a start of 2 or 3 ms. Everything is written to --out.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from configurator import NotInstalled, UserError, check_writable, configure, first_line, pick_device, user_errors
from model import ATTENTION, CHUNK, GPT, ONE_QUERY, POSITION, GPTConfig, naive_attention, per_head
from training.estimate import matmul_rate
from training.optimizers import OPTIMIZER, Settings

suite: Literal["all", "quick", "gpu"] = "all"  # settings for a purpose: quick, as --quick; gpu, all tables of a GPU
what = "attention,model,step,decode"  # the parts to run
only = ""  # attention's subjects, separated by commas; empty: all
lengths = "512,2048,8192"  # tokens, for attention
model_lengths = "2048,8192"  # tokens, for the forward pass of a model
step_length = 1024  # tokens of a training step
decode_length = 1024  # tokens to generate
batch_size = 2  # sequences; PyTorch's CPU backward pass gives a core whole heads, so one long head keeps one core busy
tokens = 0  # of a pass, in the place of batch_size: as many sequences as fit; 0: batch_size of them
n_head = 6  # heads
head_dim = "32"  # of q, k and v, for attention; several, separated by commas
heads = "SSSSSL"  # the pattern of the LS subjects
window = 100  # its span; the models have the LS paper's, 50 up to 2048 tokens and 100 past that
repeats = 9  # of each subject
patience = 20.0  # seconds; what would take longer for one pass is skipped
budget = 0.0  # seconds; past them no other attention is begun, which is said; 0: all of them
quick = False  # short lengths and few repeats: under a minute on two cores
plot = False  # draw time and memory against n to a PNG beside --out (needs matplotlib)
out = "bench.json"  # the file of results
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of q, k and v, and of the models by autocast
seed = 1337  # of q, k, v

SUITE = {  # name: flags that are not given
    "all": {},
    "quick": {"lengths": "256,1024", "model_lengths": "1024", "step_length": 256, "decode_length": 128, "repeats": 3},
    "gpu": {
        "what": "model,step,decode,attention",
        "device": "cuda",
        "dtype": "bfloat16",
        "head_dim": "64,128,32",
        "lengths": "2048,8192,32768",
        "tokens": 32768,  # fills the device; of heads of 64 and more also its caches, more than once
        "repeats": 7,
        "patience": 1.0,
        "budget": 430.0,
        "decode_length": 512,
        "out": "bench-gpu.json",
    },
}
CHECKED_AT = 300  # tokens: past the first blocks of short heads, and where beta is linear
# ||x - exact|| / ||exact|| of an output or gradient: rounding of the inputs, and in float32 on a GPU TF32's
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TF32 = 2e-3
_began = time.monotonic()
AHEAD = 5_000_000  # clock cycles that a GPU is kept busy with nothing, while the host launches what is timed
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
# The LS paper's, section 5.1; it does not say which GELU: this one is PyTorch's default, and the faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # nanoGPT's Shakespeare model


# -----------------------------------------------------------------------------
# what is timed


@dataclass
class Subject:
    run: Callable  # (q, k, v) -> y, all (B, H, T, D)
    exact: Callable | None  # the same, naively; None: it cannot be checked
    core: str = "softmax"  # what it computes, from which its least work follows
    pattern: str = "L"  # of its heads
    wide: int = 1  # how many times as wide as its queries a head's values are
    quadratic: bool = False  # holds all T^2 scores at once
    backward: bool = True
    error: float = math.nan  # of what has been checked


def letters(pattern: str) -> str:
    """S or L for each head."""
    return (pattern * n_head)[:n_head]


def late() -> bool:
    """Whether the time of --budget is over."""
    return 0 < budget < time.monotonic() - _began


def work(subject: Subject, n: int, D: int) -> tuple[float, float]:
    """(FLOPs, numbers read or written) of a head's forward pass over n tokens, as few as its result needs.

    Two products per query and key that it sees, or chunks and sums of beta as in GPT.flops, but of half a chunk;
    q, k, v and y once. A backward pass has five products (q k^T again, and four gradients) and twice the numbers.
    """
    long = (n + 1) / 2
    if subject.core == "beta":
        long = min(long, (CHUNK + 1) / 2 + 2 * D)
    w = min(window, n - 1)
    short = (w + 1) * (1 - w / (2 * n))
    each = letters(subject.pattern)
    keys = (each.count("L") * long + each.count("S") * short) / n_head
    return 2 * (D + subject.wide * D) * keys * n, 4 * D * n


def by_heads(short: Callable, long: Callable) -> Callable:
    """(q, k, v) -> y, where the first heads are short's and the others long's, as many as `heads` says."""
    n = letters(heads).count("S")

    def run(q, k, v):
        groups = ((short, slice(0, n)), (long, slice(n, n_head)))
        y = [f(q[:, part], k[:, part], v[:, part]) for f, part in groups if part.start < part.stop]
        return torch.cat(y, dim=1)

    return run


def differential(core: Callable) -> Callable:
    """(q, k, v) -> y of heads in pairs, whose values are joined: A1 V - 0.5 A2 V (Ye et al. 2024)."""

    def run(q, k, v):
        y = core(q, k, per_head(torch.cat((v[:, ::2], v[:, 1::2]), dim=-1), [h // 2 for h in range(q.shape[1])]))
        y = y[:, ::2] - 0.5 * y[:, 1::2]
        return torch.stack(y.chunk(2, dim=-1), dim=2).flatten(1, 2)

    return run


@functools.cache
def scheme(position: str, T: int, D: int, dev: str) -> torch.nn.Module:
    """What a position is to a layer's attention."""
    sizes = {"n_embd": n_head * D, "n_head": n_head, "head_dim": D, "block_size": T}
    return POSITION[position][1](GPTConfig(position=position, **sizes)).to(dev)


def positioned(position: str, core: Callable) -> Callable:
    """(q, k, v) -> y of heads that are all long, at their positions."""

    def run(q, k, v):
        at = scheme(position, *q.shape[-2:], str(q.device))
        q, k, bias = at(q, k, slice(0, n_head), 0)
        return core(q.to(v.dtype), k.to(v.dtype), v, bias=bias)

    return run


def pinned(backend: SDPBackend) -> Callable:
    """SDPA through one of its backends."""

    def run(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

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


def flex(pattern: str) -> Callable:
    """FlexAttention, which skips what a block mask leaves out. On a GPU and at the first head dim it is compiled for
    each length, elsewhere once for all, with checks of bounds that a multiple of 128 tokens would not need."""

    def run(q, k, v):
        attend = compiled_flex(dynamic=not (q.is_cuda and q.shape[-1] == numbers("head_dim")[0]))
        return attend(q, k, v, block_mask=flex_mask(q.shape[-2], str(q.device), pattern))

    return run


def fla_beta(chunk_linear_attn: Callable) -> Callable:
    """beta through flash-linear-attention: linear attention with the values widened to [V | K]."""

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D), as it wants them
        scale = q.shape[-1] ** -0.5
        o, _ = chunk_linear_attn(q, k, torch.cat((v, k), -1), scale=scale, normalize=False)
        norm = (scale * q.float() * o[..., v.shape[-1] :].float()).sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
        return (o[..., : v.shape[-1]] / (1 + norm)).to(v.dtype).transpose(1, 2)

    return run


def x_transformers(Attend: Callable) -> Callable:
    attend = Attend(causal=True, flash=True)
    return lambda q, k, v: attend(q, k, v)[0]


PEERS = {  # name: (package, what it computes, module -> function)
    "x-transformers": ("x_transformers.attend", "softmax", lambda m: x_transformers(m.Attend)),
    "fla beta": ("fla.ops.linear_attn", "beta", lambda m: fla_beta(m.chunk_linear_attn)),
}


@functools.cache
def triton_kernels() -> dict[str, Callable]:
    """What kernels.py has, where there is Triton."""
    try:
        return importlib.import_module("attention.kernels").KERNEL
    except ImportError as error:
        print(f"Triton's kernels: left out ({why(error)})")
        return {}


@functools.cache
def peers() -> dict[str, tuple[Callable, str]]:
    """(function, core) of the libraries that are installed and run on this machine."""
    table = {}
    for name, (package, core, make) in PEERS.items():
        try:
            table[name] = make(importlib.import_module(package)), core
        except Exception as error:
            print(f"{name}: left out ({why(error)})")
    return table


def subjects(dev: str) -> dict[str, Subject]:
    """Everything there is to time here, SDPA first."""
    naive = {core: functools.partial(naive_attention, core) for core in ONE_QUERY}
    mixed = {core: by_heads(functools.partial(f, window=window), f) for core, f in naive.items()}
    softmax = naive["softmax"]
    table = {"sdpa": Subject(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), softmax)}
    if suite != "quick":
        for name, backend in BACKENDS.items():
            table[name] = Subject(pinned(backend), softmax, quadratic=backend == SDPBackend.MATH)
    for core, f in ATTENTION.items():
        exact = naive.get(core)
        table[core] = Subject(f, exact, core)
        if "S" in heads:
            run = by_heads(functools.partial(f, window=window), f)
            table[f"{core} {heads}"] = Subject(run, mixed.get(core), core, heads)
        if n_head % 2 == 0:
            table[f"{core} differential"] = Subject(differential(f), exact and differential(exact), core, wide=2)
    if suite == "all":
        for name in (name for name, (_, inside) in POSITION.items() if inside):
            table[name] = Subject(positioned(name, ATTENTION["softmax"]), positioned(name, softmax))
    if suite != "quick":
        on_gpu = dev.startswith("cuda")  # FlexAttention has no backward pass on a CPU
        table["flex L"] = Subject(flex("L"), softmax, backward=on_gpu)
        if "S" in heads:
            table[f"flex {heads}"] = Subject(flex(heads), mixed["softmax"], pattern=heads, backward=on_gpu)
    if dev.startswith("cuda") or "triton" in only:  # on a CPU in the interpreter, minutes for each
        for core, f in triton_kernels().items():
            table[f"{core} triton"] = Subject(f, naive[core], core)
        if "S" in heads:
            few = {"window": window, "n_short": letters(heads).count("S")}
            for core, f in triton_kernels().items():
                table[f"{core} {heads} triton"] = Subject(functools.partial(f, **few), mixed[core], core, heads)
    table |= {name: Subject(run, naive[core], core) for name, (run, core) in peers().items()}
    if unknown := set(filter(None, only.split(","))) - set(table):
        raise UserError(f"--only={only}: {', '.join(sorted(unknown))} is none of {', '.join(table)}")
    return {name: subject for name, subject in table.items() if not only or name in only.split(",")}


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:90]}"


# -----------------------------------------------------------------------------
# how it is measured


def inputs(B: int, T: int, D: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v and dy, (B, H, T, D)."""
    x = [torch.randn(B, n_head, T, D, device=dev, dtype=dt) for _ in range(4)]
    return [*(t.requires_grad_() for t in x[:3]), x[3]]


def derivatives(f: Callable, x: list[torch.Tensor], backward: bool = True) -> list[torch.Tensor]:
    """y = f(q, k, v) for x = [q, k, v, dy] and, unless told not to, the gradients of q, k and v."""
    y = f(*x[:3]) if backward else f(*(t.detach() for t in x[:3]))
    return [y.detach(), *(torch.autograd.grad(y, x[:3], x[3], materialize_grads=True) if backward else ())]


def checked_subjects(dev: str, dt: torch.dtype, D: int) -> dict[str, Subject]:
    """The subjects that are right: their outputs and gradients are the naive form's in float64, up to rounding."""
    table, references, x = {}, {}, inputs(2, CHECKED_AT, D, dev, dt)
    in_tf32 = dt == torch.float32 and dev.startswith("cuda")
    double = [t.detach().cpu().double() for t in x]
    double = [*(t.requires_grad_() for t in double[:3]), double[3]]
    for name, subject in subjects(dev).items():
        if subject.exact is None:
            print(f"{name} has no line in ONE_QUERY: timed, but not checked")
            table[name] = subject
            continue
        if name.endswith("triton") and not importlib.import_module("attention.kernels").fits(subject.core, *x[:3]):
            print(f"{name}: left out, it would be the plain form (its kernel takes no head dim {D}, {dt} on {dev})")
            continue
        try:
            got = [t.cpu().double() for t in derivatives(subject.run, x, subject.backward)]
        except Exception as error:
            print(f"{name}: does not run here ({why(error)})")
            still_there(name, dev)
            continue
        if subject.exact not in references:
            references[subject.exact] = derivatives(subject.exact, double)
        pairs = zip(got, references[subject.exact], strict=False)
        errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
        subject.error = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
        if subject.error <= (TF32 if in_tf32 else TOLERANCE[dt]):
            table[name] = subject
        else:
            found = ", ".join(f"{what} {e:.2g}" for what, e in zip(("y", "dq", "dk", "dv"), errors, strict=False))
            print(f"{name} is WRONG: it differs from the naive form by {found}; not timed")
    return table


def still_there(name: str, dev: str) -> None:
    """Raises ValueError where a device can no longer be used, as after a kernel that wrote where it should not."""
    try:
        clock(dev)
    except Exception as error:
        raise UserError(f"{name} broke {dev} ({why(error)}): leave it out with --only=") from None


def clock(dev: str) -> float:
    getattr(torch, dev.partition(":")[0]).synchronize()
    return time.perf_counter()


def stopwatch(dev: str, *steps: Callable) -> list[float]:
    """Milliseconds of each of the steps, which follow one another."""
    if not dev.startswith("cuda"):
        ticks = [clock(dev)]
        for step in steps:
            step()
            ticks.append(clock(dev))
        return [(b - a) * 1e3 for a, b in itertools.pairwise(ticks)]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def passes(subject: Subject, x: list[torch.Tensor], dev: str) -> dict[str, float]:
    """Milliseconds of a forward pass without gradients, of a backward pass, and of both with gradients."""
    *qkv, dy = x
    y = []

    @torch.no_grad()
    def inference() -> None:
        subject.run(*(t.detach() for t in qkv))

    def backward() -> None:  # grad, since backward() would copy what is laid out in another way than q, k and v
        torch.autograd.grad(y[0], qkv, dy)

    row = {"forward": stopwatch(dev, inference)[0]}
    if subject.backward:
        both = stopwatch(dev, lambda: y.append(subject.run(*qkv)), backward)
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
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the profiler announces itself on every start
    try:
        with profile(profile_memory=True) as p:
            f()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    now = peak = 0
    for event in sorted((e for e in p.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
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


Rounds = dict[str, dict[str, list[float]]]  # task: measure: a number of each round


def interleaved(tasks: dict[str, Callable], dev: str) -> Rounds:
    """The numbers of tasks that give dicts of them; every task runs once before any runs again. One that fails is
    left out, and says why."""
    got = {name: [] for name in tasks}
    for _ in range(repeats):
        for name in list(got):
            if (row := tried(name, tasks[name], dev)) is None:
                del got[name]
            else:
                got[name].append(row)
    return {name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in got.items()}


def tried(name: str, f: Callable, dev: str) -> object:
    """f(), or None where it fails, which is said."""
    try:
        return f()
    except Exception as error:
        print(f"{name} left out ({why(error)})")
        still_there(name, dev)
        return None


def medians(columns: dict[str, list[float]]) -> tuple[dict, dict]:
    """(median, half the interquartile range as a share of it) of each measure."""
    quarter = (repeats - 1) / 4
    median = {k: statistics.median(c) for k, c in columns.items()}
    quartiles = {k: (sorted(c)[round(quarter)], sorted(c)[round(3 * quarter)]) for k, c in columns.items()}
    return median, {k: (high - low) / 2 / median[k] for k, (low, high) in quartiles.items()}


def ratios(rounds: Rounds, name: str, base: str) -> dict[str, float]:
    """Of each measure the median of its ratios to base's in the same round: what slows a round down cancels."""
    mine, others = rounds[name], rounds[base]
    return {k: statistics.median(t / f for t, f in zip(mine[k], others[k], strict=True)) for k in mine if k in others}


def sequences(length: int) -> int:
    return max(1, tokens // length) if tokens else batch_size


# -----------------------------------------------------------------------------
# the four parts; each prints its tables and yields their rows, table by table


def attention(dev: str, dt: torch.dtype, sizes: list[int], dims: list[int], top: dict) -> Iterator[list[dict]]:
    """Each subject at each head dim and length: milliseconds, spreads, ratios, shares, peak memory."""
    for D in dims:
        if late():
            print(f"\nhead dim {D}: out of time (--budget)")
            continue
        print(f"\nattention, head dim {D}")
        table, seconds = checked_subjects(dev, dt, D), {}
        for n in sizes:
            B = sequences(n)
            x, tasks = inputs(B, n, D, dev, dt), {}
            for name, subject in table.items():
                once, at = seconds.get(name, (0.0, 1))
                once *= B * n * n / at
                need = 32 * B * n_head * n * n if subject.quadratic else 0
                if (over := late()) or once > patience or need > free_memory(dev) / 2:
                    reason = f"take up to {once:.1f} s a pass" if once > patience else f"need {need / 2**30:.1f} GiB"
                    print(f"n = {n}: {name} skipped, " + ("out of time (--budget)" if over else f"would {reason}"))
                    continue
                task = functools.partial(passes, subject, x, dev)
                row = tried(f"n = {n}: {name}", lambda task=task: task() and task(), dev)  # the first compiles
                if row is not None:
                    seconds[name], tasks[name] = ((row["forward"] + row.get("both", 0.0)) / 1e3, B * n * n), task
            yield attention_table(tasks, table, B, n, D, x, dev, top)


def attention_table(tasks: dict, table: dict, B: int, n: int, D: int, x: list, dev: str, top: dict) -> list[dict]:
    """Times the tasks, prints their table and returns its rows."""
    rounds, rows, columns = interleaved(tasks, dev), [], ("forward", "backward", "forward + backward")
    print(
        f"\n{f'n = {n}, d = {D}, B = {B}':24}"
        + "".join(f"{c:>22}{'share':>6}" for c in columns)
        + f"{'memory':>12}{'error':>9}"
    )
    first = next(iter(rounds), "sdpa")
    if first != "sdpa":
        print(f"(ratios to {first})")
    for name, columns in rounds.items():
        (median, spread), ratio = medians(columns), ratios(rounds, name, first)
        flops, numbers = (B * n_head * w for w in work(table[name], n, D))
        of_forward = {"forward": (1, 1), "backward": (2.5, 2), "both": (3.5, 3)}  # operations, bytes
        most = top["flops"] / flops, top["bytes_per_s"] / (numbers * x[0].itemsize)  # forward passes a second
        least = {k: (operations / most[0], moved / most[1]) for k, (operations, moved) in of_forward.items()}
        share = {k: 1e3 * max(least[k]) / ms for k, ms in median.items()}
        memory = tried(f"memory of {name}", functools.partial(peak_memory, tasks[name], dev), dev) or 0
        cells = [
            f"{median[k]:8.2f} ms ±{spread[k]:3.0%}{ratio.get(k, math.nan):5.2f}x{share[k]:6.0%}"
            if k in median
            else "-"
            for k in of_forward
        ]
        print(f"{name:24}" + "".join(f"{c:>28}" for c in cells) + f"{memory / 2**20:8.1f} MiB", end="")
        print(f"{table[name].error:9.1e}", flush=True)
        row = {"subject": name, "n": n, "d": D, "batch": B, "error": table[name].error}
        row |= {"ms": median, "spread": spread, "ratio": ratio, "share": share, "peak_bytes": memory}
        row["against"] = {base: ratios(rounds, name, base) for base in BACKENDS if base in rounds}
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> None:
    """How many times as fast as SDPA's kernels, forward + backward (forward alone where there is no backward)."""
    bases = [base for base in ("sdpa flash", "sdpa cudnn") if any(row["subject"] == base for row in rows)]
    sizes = sorted({row["n"] for row in rows})
    for D in sorted({row["d"] for row in rows}) if bases else ():
        mine = {(row["subject"], row["n"]): row for row in rows if row["d"] == D}
        print(f"\nd = {D}: how many times as fast as {' / '.join(bases)}, forward + backward (forward alone)")
        print(f"{'':24}" + "".join(f"{f'n = {n}':>28}" for n in sizes))
        for name in dict.fromkeys(name for name, _ in mine):
            cells = []
            for n in sizes:
                against = mine[name, n]["against"] if (name, n) in mine else {}
                both, alone = (
                    " / ".join(f"{1 / against[b][k]:.2f}" if k in against.get(b, ()) else "-" for b in bases)
                    for k in ("both", "forward")
                )
                cells.append(f"{both} ({alone})" if against else "-")
            print(f"{name:24}" + "".join(f"{c:>28}" for c in cells))


def models(T: int, sizes: dict, dev: str) -> dict[str, GPT]:
    """A model for each core, with long heads and with the pattern `heads`."""
    names = [(core, pattern) for core in ATTENTION for pattern in dict.fromkeys(("L", heads))]
    return {f"{c} {p}": GPT(GPTConfig(block_size=T, **sizes, attention=c, heads=p)).to(dev) for c, p in names}


def model(dev: str, amp: contextlib.AbstractContextManager, length: int, train: bool) -> list[dict]:
    """Milliseconds of a whole forward pass (up to the last token's logits), or of a training step."""
    gpts, rows, B = models(length, LS_MODEL, dev), [], sequences(length)
    x = torch.randint(LS_MODEL["vocab_size"], (B, length), device=dev)
    kind = dev.partition(":")[0]
    settings = Settings(1e-4, (0.9, 0.95), 0.1, fused=kind in ("cuda", "cpu"))
    adamw = {name: OPTIMIZER["adamw"](gpt, settings)[0] for name, gpt in gpts.items() if train}

    def once(name: str) -> None:
        with amp, torch.set_grad_enabled(train):
            loss = gpts[name](x, x if train else None)[1]
        if train:
            loss.backward()
            adamw[name].step()
            adamw[name].zero_grad()

    def timed(name: str) -> dict:
        return {"ms": stopwatch(dev, lambda: once(name))[0]}

    tasks = {name: functools.partial(timed, name) for name in gpts}
    tasks = {name: task for name, task in tasks.items() if tried(name, task, dev)}  # warm-up
    title = "training step" if train else "forward pass"
    print(f"\n{title} of the LS paper's model (6 layers, 192 wide, 6 heads), n = {length}, batch {B}")
    rounds = interleaved(tasks, dev)
    for name, columns in rounds.items():
        (ms,), (spread,) = (x.values() for x in medians(columns))
        change = ratios(rounds, name, next(iter(rounds)))["ms"] - 1
        row = {"subject": name, "n": length, "batch": B, "ms": ms, "ms_per_sequence": ms / B, "spread": spread}
        row |= {"change": change, "tokens_per_s": B * length / ms * 1e3}
        speed = f"{row['tokens_per_s']:12,.0f} tokens/s"
        print(f"{name:24}{ms:10.1f} ms ±{spread:3.0%}{change:+9.1%}{ms / B:10.2f} ms a sequence{speed}", flush=True)
        rows.append(row)
    return rows


def decode(dev: str, amp: contextlib.AbstractContextManager) -> list[dict]:
    """Tokens/s of one sequence from one token to decode_length, and the size of the cache."""
    rows, n = [], decode_length
    columns = ("tokens/s", "first tenth", "last tenth")
    print(f"\ndecoding, 6 layers, 384 wide, 6 heads\n{f'one sequence to {n} tokens':30}", end="")
    print("".join(f"{c:>16}" for c in columns))

    def speeds(gpt: GPT, cached: bool) -> dict:
        """Tokens/s."""
        start, sampling = torch.zeros(1, 1, dtype=torch.long, device=dev), {"seed": seed, "use_cache": cached}
        with amp:
            collections.deque(gpt.stream(start, min(8, n - 1), **sampling), maxlen=0)  # warm-up
            ticks = [clock(dev)]
            ticks += [clock(dev) for _ in gpt.stream(start, n - 1, temperature=0.8, **sampling)]
        tenth = max(1, (n - 1) // 10)
        row = {"tokens_per_s": (n - 1) / (ticks[-1] - ticks[0]), "first": tenth / (ticks[tenth] - ticks[0])}
        return row | {"last": tenth / (ticks[-1] - ticks[-1 - tenth])}

    for name, gpt in models(n, GPT_10M, dev).items():
        for cached in (True, False) if name == "softmax L" else (True,):
            subject = name + ("" if cached else ", no cache")
            if row := tried(subject, functools.partial(speeds, gpt.eval(), cached), dev):
                rows.append({"subject": subject, "n": n, **row})
                print(f"{subject:30}" + "".join(f"{x:16.1f}" for x in row.values()), flush=True)
    gpts, full = {T: models(T, GPT_10M, dev) for T in (1024, 8192)}, None
    print(f"\n{'bytes of its cache':30}" + "".join(f"{f'n = {T}':>16}" for T in gpts))
    for name in gpts[8192]:
        with amp:
            size = {T: cache_bytes(gpts[T][name], dev) for T in gpts}
        full = full or size[8192]  # softmax's, all long, which comes first
        rows += [{"subject": name, "n": T, "cache_bytes": size[T]} for T in size]
        print(f"{name:30}" + "".join(f"{x:16,}" for x in size.values()) + f"{full / size[8192]:10.2f}x less at 8192")
    return rows


@torch.no_grad()
def cache_bytes(gpt: GPT, dev: str) -> int:
    """The size of a full cache: long heads' memory is taken at once, and 200 tokens fill the short ones."""
    cache = gpt.new_cache()
    gpt(torch.zeros(1, min(200, gpt.config.block_size), dtype=torch.long, device=dev), cache=cache)
    return cache.nbytes


def draw(rows: list[dict], path: str) -> None:
    """Time and memory of forward + backward against n, at the first head dim, on log axes."""
    if not rows:
        print("nothing was timed: there is nothing to draw")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
    D, row_of = rows[0]["d"], [row for row in rows if row["d"] == rows[0]["d"]]
    rows, ticks = [row for row in row_of if "both" in row["ms"]], sorted({row["n"] for row in row_of})
    for i, name in enumerate(dict.fromkeys(row["subject"] for row in rows)):
        mine = [row for row in rows if row["subject"] == name]
        style = {"label": name, "marker": "o", "markersize": 4, "linestyle": ("-", "--", ":")[i // 10 % 3]}
        axes[0].plot([row["n"] for row in mine], [row["ms"]["both"] for row in mine], **style)
        axes[1].plot([row["n"] for row in mine], [row["peak_bytes"] / 2**20 for row in mine], **style)
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


def numbers(flag: str) -> list[int]:
    """The integers of a flag. Raises ValueError where they are none, or below 1."""
    try:
        got = [int(n) for n in globals()[flag].split(",")]
    except ValueError:
        got = []
    if not got or min(got) < 1:
        raise UserError(f"--{flag} must be positive integers, separated by commas; got {globals()[flag]}")
    return got if flag == "head_dim" else sorted(got)


def main() -> None:
    if quick and "suite" in given:
        raise UserError("--quick and --suite are two choices of settings: leave one out")
    if quick:
        globals()["suite"] = "quick"
    if suite == "gpu" and "device" not in given and not torch.cuda.is_available():
        raise UserError("--suite=gpu needs a CUDA GPU, and there is none here (or this PyTorch is built without CUDA)")
    globals().update({name: value for name, value in SUITE[suite].items() if name not in given})
    parts, all_parts = what.split(","), ("attention", "model", "step", "decode")
    if unknown := set(parts) - set(all_parts):
        raise UserError(f"--what={what}: {', '.join(sorted(unknown))} is none of {', '.join(all_parts)}")
    if min(repeats, batch_size, n_head, step_length, decode_length - 1) < 1 or not patience > 0:
        raise UserError("sizes, repeats and patience must be positive, decode_length at least 2")
    if tokens < 0 or budget < 0:
        raise UserError(f"--tokens={tokens} and --budget={budget} must not be negative")
    for sizes in ({"n_head": n_head, "n_embd": n_head}, LS_MODEL, GPT_10M):  # or they say why not
        GPTConfig(**sizes, heads=heads, window=window if "S" in heads else None)
    if "/" in heads:
        raise UserError(f"--heads={heads}: here it is the pattern of one layer, without a /")
    if (plot or only) and "attention" not in parts:
        raise UserError("--plot and --only are for --what=attention")
    check_writable(out)
    if plot:
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise NotInstalled("--plot draws with matplotlib: pip install matplotlib") from None
    dims, sizes = numbers("head_dim"), {"attention": numbers("lengths"), "model": numbers("model_lengths")}
    dev, dt_name, amp = pick_device(device, dtype)
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
    top = ceilings(dev, getattr(torch, dt_name))
    print(f"ceilings: {top['flops'] / 1e12:.3g} TFLOP/s (matrix product), {top['bytes_per_s'] / 1e9:,.0f} GB/s (copy)")
    results: dict = {"about": about, "ceilings": top} | {part: [] for part in parts}
    run = {
        "attention": lambda: attention(dev, getattr(torch, dt_name), sizes["attention"], dims, top),
        "model": lambda: (model(dev, amp, n, train=False) for n in sizes["model"]),
        "step": lambda: [model(dev, amp, step_length, train=True)],
        "decode": lambda: [decode(dev, amp)],
    }
    for part in parts:
        for rows in run[part]():
            results[part] += rows
            with open(out, "w", encoding="utf-8") as f:
                json.dump(results, f, indent=1)
    summary(results.get("attention", []))
    print(f"\nwrote {out}, after {time.monotonic() - _began:.0f} s")
    if plot:
        draw(results["attention"], os.path.splitext(out)[0] + ".png")


if __name__ == "__main__":
    config, given = configure(globals())
    globals().update(config)
    with user_errors():
        main()
