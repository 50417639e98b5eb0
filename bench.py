"""Measures the time of all attentions of nanoattn, with long, short and differential heads, and of other libraries.

    python bench.py                                  # about ten minutes on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --what=attention --only=sdpa,beta --lengths=4096,8192,16384 --plot
    python bench.py --suite=gpu                      # all tables on a CUDA GPU: under eight minutes
    python bench.py --what=attention --device=cuda --dtype=bfloat16 --head_dim=64,128 --tokens=32768

There are four parts. `attention` measures the function alone: forward pass, backward pass and peak memory. `model`
measures a forward pass of the long-short paper's model, as in its Table 1. `step` measures a training step of this
model. `decode` measures tokens per second, and the bytes of the cache. This file has the first part; training/timing.py
has the other three, and the clock for all four.

First, the outputs and gradients of each attention are compared with its definition in float64, on fresh random inputs.
An attention that is wrong is reported and not timed. Then all attentions are timed in rounds, in which each runs once.
A time is a median, with half of its interquartile range. A ratio compares an attention with the first one of the same
round. A share is the least time that the computation could take on this device, divided by the time that it took; the
least time follows from the measured speed of a matrix product and of a copy.
"""

import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention.forms import SUMS, fast_form, takes
from attention.heads import HeadGroup
from attention.scores import plain_form
from choices import POSITION
from configurator import check_writable, configure, names, pick_device, positive, user_errors
from errors import refuse
from model import ATTENTION, WHOLE, GPTConfig
from training import timing

# What is measured?
suite: Literal["all", "quick", "gpu"] = "all"  # a set of defaults; quick: as --quick; gpu: all tables on a CUDA GPU
quick = False  # short lengths and few repeats: under a minute on two cores
what = "attention,model,step,decode"  # the parts to run, separated by commas
only = ""  # attention: the rows to measure, separated by commas; empty: all
# How large are the inputs?
lengths = "512,2048,8192"  # attention: sequence lengths in tokens
model_lengths = "2048,8192"  # model: sequence lengths in tokens
step_length = 1024  # step: sequence length in tokens
decode_length = 1024  # decode: number of tokens to generate
batch_size = 2  # sequences at once; with 1, PyTorch's backward pass of a single long head would use one CPU core
tokens = 0  # tokens at once: sets the number of sequences instead of batch_size; 0: batch_size sets it
n_head = 6  # number of heads
head_dim = "32"  # attention: width of a head; several, separated by commas
heads = "SSSSSL"  # in rows with short heads, the heads of a layer: a letter for each head, S short, L long
window = 100  # attention: tokens that a short head sees before its own (model, step: 50, or 100 above 2048 tokens)
# How exact, and how long?
repeats = 9  # rounds; in each round everything runs once
patience = 20.0  # seconds; a row that would take longer than this for one pass is skipped
budget = 0.0  # seconds; after this time no new row of attention begins, and the skipped rows are named; 0: no limit
# Where do the results go?
out = "bench.json"  # the file of results
plot = False  # also draw time and memory by length, as a PNG beside --out (needs matplotlib)
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of q, k and v; models use autocast
seed = 1337  # decides the random numbers: q, k, v, weights and generated tokens

SUITE = {  # name: values for the flags that are not given
    "all": {},
    "quick": {"lengths": "256,1024", "model_lengths": "1024", "step_length": 256, "decode_length": 128, "repeats": 3},
    "gpu": {
        "what": "model,step,decode,attention", "device": "cuda", "dtype": "bfloat16", "out": "bench-gpu.json",
        "head_dim": "64,128,32", "lengths": "2048,8192,32768", "decode_length": 512, "repeats": 7,
        "patience": 1.0, "budget": 430.0, "tokens": 32768,  # it fills a GPU and, in heads of 64 or more, its caches
    },
}  # fmt: skip
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa math": SDPBackend.MATH,
}  # fmt: skip
CHECKED_AT = 300  # tokens: more than the first blocks of short heads, and enough for beta's linear form
# An output or gradient x is right up to rounding if ||x - exact|| / ||exact|| is at most this. TF32: float32 on a GPU
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TF32 = 2e-3
# (operations, bytes) as multiples of a forward pass's. A forward pass has two products, a backward pass five
MEASURES = {"forward": (1, 1), "backward": (2.5, 2), "both": (3.5, 3)}
_began = time.monotonic()

# -----------------------------------------------------------------------------
# what is timed, and whether it is right

sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
optional = functools.cache(timing.tried)  # cached: what is left out is reported once
kernels = functools.partial(importlib.import_module, "attention.kernels")  # they need Triton


@dataclass
class Subject:
    """An attention on the heads of a layer: what it computes, and who computes it."""

    core: str = "softmax"  # a name in ATTENTION
    pattern: str = "L"  # of its heads
    differential: bool = False
    position: str | None = None  # a name in POSITION whose Scheme acts inside attention
    run: Callable | None = None  # (q, k, v) -> y, all (B, H, T, D); None: as a model computes it
    foreign: bool = False  # `run` is the code of another library
    backward: bool = True  # whether it has a backward pass on this device
    error: float = math.nan  # the largest relative error that the check found

    def __post_init__(self):
        self.run = self.run or functools.partial(self.layer, as_in_a_model(self.core))

    def layer(self, core: Callable, q, k, v):
        """y of these heads with this core, (B, H, T, D)."""
        if self.differential:  # heads in pairs, whose values are joined: A1 V - 0.5 A2 V (Ye et al. 2024)
            joined = torch.cat((v[:, ::2], v[:, 1::2]), dim=-1)  # (B, H / 2, T, 2 D)
            y = core(q, k, joined.repeat_interleave(2, dim=1))
            y = y[:, ::2] - 0.5 * y[:, 1::2]
            return torch.stack(y.chunk(2, dim=-1), dim=2).flatten(1, 2)
        if self.position:
            group = HeadGroup([*range(n_head)], 1, 1, None)
            group.decays = takes(ATTENTION[self.core], "decay")
            q, k, more = scheme(self.position, *q.shape[-2:]).to(q.device)(q, k, group, 0)
            return core(q.to(v.dtype), k.to(v.dtype), v, **more)
        n = n_short(self.pattern)
        if n == 0:
            return core(q, k, v)
        short = core(q[:, :n], k[:, :n], v[:, :n], window=window)
        return torch.cat((short, core(q[:, n:], k[:, n:], v[:, n:])), dim=1) if n < n_head else short


def as_in_a_model(core: str) -> Callable:
    """ATTENTION[core] in the form that a model runs. It is looked up at each call, so that a bug is reported there."""
    return lambda *qkv, **settings: fast_form(core, ATTENTION[core], whole=core in WHOLE)(*qkv, **settings)


@functools.cache
def scheme(position: str, T: int, D: int) -> torch.nn.Module:
    """The module of a position in a layer's attention."""
    config = GPTConfig(position=position, n_embd=n_head * D, n_head=n_head, head_dim=D, block_size=T)
    return config.scheme(config.resolved())


def n_short(pattern: str) -> int:
    """How many heads of a layer are short. Here these are its first ones."""
    return (pattern * n_head)[:n_head].count("S")


def work(subject: Subject, n: int, D: int) -> tuple[float, float]:
    """The least (FLOPs, numbers read or written) that a head's forward pass over n tokens needs."""
    long = (n + 1) / 2  # keys that a query sees, in the mean
    if kind := SUMS.get(subject.core):  # half a chunk and the running sums, as in training.estimate.flops
        long = min(long, (kind.chunk(D) + 1) / 2 + kind.state_size(D, D) / D)
    w = min(window, n - 1)
    short = (w + 1) * (1 - w / (2 * n))
    keys = long + (short - long) * n_short(subject.pattern) / n_head
    widths = 3 * D if subject.differential else 2 * D  # of a key and its value
    return 2 * widths * keys * n, 4 * D * n  # two products; q, k, v and y are read or written once


@functools.cache
def flex(pattern: str, dynamic: bool) -> Callable:
    """FlexAttention, which skips the blocks that its mask leaves out; compiled once (dynamic) or for each length."""
    torch._dynamo.config.recompile_limit = 64  # one for each length, head dim and pattern, with and without gradients
    attend = torch.compile(flex_attention, dynamic=dynamic)  # dynamic: it always checks bounds
    n = n_short(pattern)

    def seen(b, h, i, j):
        return (i >= j) & ((i - j <= window) | (h >= n)) if n else i >= j

    mask = functools.cache(functools.partial(create_block_mask, seen, None, n_head))
    return lambda q, k, v: attend(q, k, v, block_mask=mask(q.shape[-2], q.shape[-2], device=q.device))


def x_transformers() -> Callable:
    from x_transformers.attend import Attend

    attend = Attend(causal=True, flash=True)
    return lambda q, k, v: attend(q, k, v)[0]


def fla_beta() -> Callable:
    """beta through flash-linear-attention: linear attention with the values widened to [V | K]."""
    from fla.ops.linear_attn import chunk_linear_attn

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D), as fla takes them
        scale = q.shape[-1] ** -0.5
        o, _ = chunk_linear_attn(q, k, torch.cat((v, k), -1), scale=scale, normalize=False)
        norm = (scale * q.float() * o[..., v.shape[-1] :].float()).sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
        return (o[..., : v.shape[-1]] / (1 + norm)).to(v.dtype).transpose(1, 2)

    return run


def subjects(dev: str, D: int) -> dict[str, Subject]:
    """All subjects that can be timed on this device, SDPA first."""
    on_gpu = dev.startswith("cuda")
    patterns = ["L", heads] if "S" in heads else ["L"]
    table = {"sdpa": Subject(run=sdpa, foreign=True)}
    if suite != "quick":
        table |= {name: Subject(run=sdpa_kernel(x)(sdpa), foreign=True) for name, x in BACKENDS.items()}
    for core in ATTENTION:
        table |= {f"{core} {pattern}".removesuffix(" L"): Subject(core, pattern) for pattern in patterns}
        if n_head % 2 == 0:
            table[f"{core} differential"] = Subject(core, differential=True)
        if takes(ATTENTION[core], "decay"):
            table[f"{core} decay"] = Subject(core, position="alibi")
    if suite == "all":
        table |= {name: Subject(position=name) for name, (_, inside) in POSITION.items() if inside}
    if suite != "quick":  # FlexAttention has no backward pass on a CPU
        flexes = {pattern: flex(pattern, not on_gpu or D != numbers("head_dim")[0]) for pattern in patterns}
        table |= {f"flex {p}": Subject("softmax", p, run=f, foreign=True, backward=on_gpu) for p, f in flexes.items()}
    if on_gpu or "triton" in only:  # on a CPU Triton's interpreter takes minutes for each
        triton = optional("Triton's kernels", kernels, dev, foreign=True)
        cores = [core for core in triton.KERNEL if core in ATTENTION] if triton else []
        for pattern, core in itertools.product(patterns, cores):
            name = f"{core} {pattern}".removesuffix(" L") + " triton"
            few = {"window": window, "n_short": n_short(pattern)} if pattern != "L" else {}
            table[name] = Subject(core, pattern, run=functools.partial(triton.KERNEL[core](as_in_a_model(core)), **few))
    for name, core, make in (("x-transformers", "softmax", x_transformers), ("fla beta", "beta", fla_beta)):
        if run := optional(name, make, dev, foreign=True):
            table[name] = Subject(core, run=run, foreign=True)
    chosen = names(only, table)
    return {name: subject for name, subject in table.items() if name in chosen}


def derivatives(f: Callable, x: list[torch.Tensor], backward: bool = True) -> list[torch.Tensor]:
    """y = f(q, k, v) for x = [q, k, v, dy] and, unless told not to, the gradients of q, k and v; in float64."""
    y = f(*x[:3]) if backward else f(*(t.detach() for t in x[:3]))
    grads = torch.autograd.grad(y, x[:3], x[3], materialize_grads=True) if backward else ()
    return [t.detach().cpu().double() for t in (y, *grads)]


def right_subjects(dev: str, dt: torch.dtype, D: int) -> dict[str, Subject]:
    """The subjects whose outputs and gradients equal those of the definition in float64, up to rounding."""
    x = timing.inputs(2, n_head, CHECKED_AT, D, dev, dt)
    double = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in x]
    rows = list(zip(*(t.split(1) for t in double), strict=True))  # sequence by sequence: LASER holds T x T x D numbers
    tolerance = TF32 if dt == torch.float32 and dev.startswith("cuda") else TOLERANCE[dt]
    exact = {}  # {what a subject computes: its derivatives}
    right = {}

    def errors_of(subject: Subject) -> list[float]:
        found = derivatives(subject.run, x, subject.backward)
        meaning = subject.core, subject.pattern, subject.differential, subject.position
        if meaning not in exact:
            definition = functools.partial(subject.layer, plain_form(ATTENTION[subject.core]))
            parts = [derivatives(definition, row) for row in rows]
            exact[meaning] = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact[meaning], strict=False)]

    for name, subject in subjects(dev, D).items():
        if name.endswith("triton") and not kernels().fits(subject.core, *x[:3]):
            print(f"{name} left out (its kernel takes no head dim {D} in {dt} on {dev})")
        elif errors := timing.tried(name, functools.partial(errors_of, subject), dev, subject.foreign):
            subject.error = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
            if subject.error <= tolerance:
                right[name] = subject
            else:
                found = ", ".join(f"{which} {e:.2g}" for which, e in zip(("y", "dq", "dk", "dv"), errors, strict=False))
                print(f"{name} is WRONG: it differs from the definition by {found}; not timed")
    return right


# -----------------------------------------------------------------------------
# the tables of attention


def attention(dev: str, dt: torch.dtype, top: dict) -> Iterator[list[dict]]:
    """Prints a table for each head dim and length, and yields its rows. top: timing.ceilings."""
    for D in numbers("head_dim"):
        if 0 < budget < time.monotonic() - _began:
            print(f"\nhead dim {D}: out of time (--budget)")
            continue
        print(f"\nattention, head dim {D}")
        table = right_subjects(dev, dt, D)
        pace = {}  # {subject: seconds of a pass for each pair of tokens}
        for n in numbers("lengths"):
            x = timing.inputs(sequences(n), n_head, n, D, dev, dt)
            tasks = {name: warmed_up(name, subject, x, dev, pace) for name, subject in table.items()}
            yield attention_table({name: task for name, task in tasks.items() if task}, table, x, dev, top)


def warmed_up(name: str, subject: Subject, x: list[torch.Tensor], dev: str, pace: dict) -> Callable | None:
    """A function that times a subject's passes, called twice already; None if it fails or needs too much."""
    B, _, n, _ = x[0].shape
    task = functools.partial(timing.passes, subject.run, x, dev, subject.backward)
    seconds = pace.get(name, 0.0) * B * n * n
    need = 32 * B * n_head * n * n if name == "sdpa math" else 0  # it holds all scores at once
    if 0 < budget < time.monotonic() - _began:
        print(f"n = {n}: {name} skipped, out of time (--budget)")
    elif seconds > patience:
        print(f"n = {n}: {name} skipped, would take up to {seconds:.1f} s a pass (--patience)")
    elif need > timing.free_memory(dev) / 2:
        print(f"n = {n}: {name} skipped, would need {need / 2**30:.1f} GiB")
    elif row := timing.tried(f"n = {n}: {name}", lambda: task() and task(), dev, subject.foreign):  # 1st: compiling
        pace[name] = (row["forward"] + row.get("both", 0.0)) / 1e3 / (B * n * n)
        return task


def attention_table(tasks: dict, table: dict, x: list[torch.Tensor], dev: str, top: dict) -> list[dict]:
    """Times the tasks, prints their table and returns its rows."""
    rounds = timing.interleaved(tasks, dev, repeats)
    B, _, n, D = x[0].shape
    columns = "".join(f"{c:>22}{'share':>6}" for c in ("forward", "backward", "forward + backward"))
    print(f"\n{f'n = {n}, d = {D}, B = {B}':24}{columns}{'memory':>12}{'error':>9}")
    first = next(iter(rounds), "sdpa")
    if first != "sdpa":
        print(f"(ratios to {first})")
    rows = []
    for name in rounds:
        ms, spread = timing.medians(rounds[name])
        ratio = timing.ratios(rounds, name, first)
        flops, moved = work(table[name], n, D)
        least = B * n_head * flops / top["flops"], B * n_head * moved * x[0].itemsize / top["bytes_per_s"]  # seconds
        share = {k: 1e3 * max(MEASURES[k][0] * least[0], MEASURES[k][1] * least[1]) / ms[k] for k in ms}
        memory = timing.tried(f"memory of {name}", functools.partial(timing.peak_memory, tasks[name], dev), dev) or 0
        cell = {k: f"{ms[k]:8.2f} ms ±{spread[k]:3.0%}{ratio.get(k, math.nan):5.2f}x{share[k]:6.0%}" for k in ms}
        print(f"{name:24}" + "".join(f"{cell.get(k, '-'):>28}" for k in MEASURES), end="")
        print(f"{memory / 2**20:8.1f} MiB{table[name].error:9.1e}", flush=True)
        row = {"subject": name, "n": n, "d": D, "batch": B, "error": table[name].error}
        row |= {"ms": ms, "spread": spread, "ratio": ratio, "share": share, "peak_bytes": memory}
        rows.append(row | {"against": {base: timing.ratios(rounds, name, base) for base in BACKENDS if base in rounds}})
    return rows


def summary(rows: list[dict]) -> None:
    """Prints how many times as fast as SDPA's kernels each subject is: forward + backward (forward alone)."""
    bases = [base for base in ("sdpa flash", "sdpa cudnn") if any(row["subject"] == base for row in rows)]
    sizes = sorted({row["n"] for row in rows})

    def times(row: dict, k: str) -> str:
        against = [row["against"].get(base, {}) for base in bases]
        return " / ".join(f"{1 / a[k]:.2f}" if k in a else "-" for a in against)

    for D in sorted({row["d"] for row in rows}) if bases else ():
        mine = [row for row in rows if row["d"] == D and row["against"]]
        cells = {(row["subject"], row["n"]): f"{times(row, 'both')} ({times(row, 'forward')})" for row in mine}
        print(f"\nd = {D}: how many times as fast as {' / '.join(bases)}, forward + backward (forward alone)")
        print(f"{'':24}" + "".join(f"{f'n = {n}':>28}" for n in sizes))
        for name in dict.fromkeys(row["subject"] for row in rows if row["d"] == D):
            print(f"{name:24}" + "".join(f"{cells.get((name, n), '-'):>28}" for n in sizes))


def draw(rows: list[dict], path: str) -> None:
    """Draws time and memory of forward + backward against n, at the first head dim, on log axes."""
    from matplotlib.figure import Figure

    if not rows:
        print("nothing was timed: there is nothing to draw")
        return
    figure = Figure(figsize=(13, 6), layout="tight")
    shown = [row for row in rows if row["d"] == rows[0]["d"] and "both" in row["ms"]]
    for ax, label in zip(figure.subplots(1, 2), ("forward + backward, ms", "peak memory, MiB"), strict=True):
        for i, name in enumerate(dict.fromkeys(row["subject"] for row in shown)):
            mine = [row for row in shown if row["subject"] == name]
            y = [row["ms"]["both"] if "ms" in label else row["peak_bytes"] / 2**20 for row in mine]
            ax.plot([row["n"] for row in mine], y, ("o-", "o--", "o:")[i // 10 % 3], markersize=4, label=name)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        ax.set_xticks(numbers("lengths"), [str(n) for n in numbers("lengths")])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    batch = f"{tokens} tokens" if tokens else f"{batch_size} sequences"
    figure.suptitle(f"attention, {batch}, H {n_head}, D {rows[0]['d']}")
    figure.savefig(path, dpi=110)
    print(f"drew {path}")


def sequences(length: int) -> int:
    """How many sequences of this length are in one pass."""
    return max(1, tokens // length) if tokens else batch_size


def numbers(flag: str) -> list[int]:
    """The integers that a flag lists: lengths in order of size, the first width of a head as the first."""
    found = positive(flag, globals()[flag])
    return found if flag == "head_dim" else sorted(found)


# fmt: off
def wrong_flags(parts: list[str], all_parts: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Yields (whether a rule is broken, the message for it). A rule may assume that all rules before it hold."""
    yield quick and "suite" in given, "--quick and --suite both choose the settings: leave one out"
    yield (suite == "gpu" and "device" not in given and not torch.cuda.is_available(),
           "--suite=gpu needs a CUDA GPU, and there is none here (or this PyTorch is built without CUDA)")
    unknown = sorted(set(parts) - set(all_parts))
    yield bool(unknown), f"--what={what}: {', '.join(unknown)} is not one of {', '.join(all_parts)}"
    yield (min(repeats, batch_size, n_head, step_length, decode_length - 1) < 1 or not patience > 0,
           "sizes, repeats and patience must be positive, decode_length at least 2")
    yield tokens < 0 or budget < 0, f"--tokens={tokens} and --budget={budget} must not be negative"
    for sizes in ({"n_head": n_head, "n_embd": n_head}, timing.LS_MODEL, timing.GPT_10M):  # a check
        GPTConfig(**sizes, heads=heads, window=window if "S" in heads else None)
    yield "/" in heads, f"--heads={heads}: bench.py takes the pattern of one layer, without a /"
    yield bool(plot or only) and "attention" not in parts, "--plot and --only are for --what=attention"
    check_writable(out)
    for flag in ("head_dim", "lengths", "model_lengths"):
        numbers(flag)
    yield plot and not importlib.util.find_spec("matplotlib"), "--plot draws with matplotlib: pip install matplotlib"
# fmt: on


def main() -> None:
    run: dict[str, Callable] = {  # each yields the rows of its tables, one table at a time
        "attention": lambda: attention(dev, getattr(torch, dt_name), top),
        "model": lambda: (timing.forward_or_step(at, n, sequences(n), train=False) for n in numbers("model_lengths")),
        "step": lambda: [timing.forward_or_step(at, step_length, sequences(step_length), train=True)],
        "decode": lambda: [timing.decoding(at, decode_length)],
    }
    chosen = "quick" if quick else suite
    globals().update({"suite": chosen} | {name: value for name, value in SUITE[chosen].items() if name not in given})
    parts = what.split(",")
    refuse(wrong_flags(parts, run))
    dev, dt_name, amp = pick_device(device, dtype)
    at = timing.Setting(dev, amp, heads, repeats, seed)
    if dev.startswith("cuda:"):
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("high")  # as train.py: TF32 on a GPU, no effect on a CPU
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest weights are zeros
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else platform.processor() or platform.machine()
    about = {"device": dev, "chip": chip, "dtype": dt_name, "torch": torch.__version__}
    about |= {"threads": torch.get_num_threads(), "B": f"{tokens} / n" if tokens else batch_size, "H": n_head}
    about |= {"heads": heads, "window": window, "repeats": repeats}
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    torch.manual_seed(seed)
    top = timing.ceilings(dev, dt_name)
    print(f"ceilings: {top['flops'] / 1e12:.3g} TFLOP/s (matrix product), {top['bytes_per_s'] / 1e9:,.0f} GB/s (copy)")
    results = {"about": about, "ceilings": top} | {part: [] for part in parts}
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
