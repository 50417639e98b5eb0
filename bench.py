"""Measures how long the attentions take, alone and in whole models, and how much memory they need.

    python bench.py                                  # about ten minutes on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --what=attention --only=sdpa,beta --lengths=4096,8192,16384
    python bench.py --what=attention --device=cuda --dtype=bfloat16 --head_dim=64,128 --tokens=32768

There are four parts. `attention` times the function alone, forward and backward, and finds its peak memory. `model`
times a forward pass of the long-short paper's model, as in its Table 1, and `step` a training step of it. `decode`
times a model that writes text, and finds the size of its cache.

First, the outputs and gradients of each attention are compared with its definition in float64, on random inputs. An
attention that is wrong is reported and not timed. Then all rows are timed in rounds, in which each runs once. A time is
a median, with half of its interquartile range. A ratio compares a row with the first row of the same round.
"""

import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.cache import run_definitions
from attention.forms import SUMS
from attention.scores import takes
from configurator import at_least_one, configure, names, pick_device, positive, user_errors
from errors import UserError, first_line, refuse
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION
from training.optimizers import OPTIMIZER, Settings

# What is measured?
quick = False  # short lengths and few repeats: under a minute on two cores
what = ""  # the parts to run, separated by commas: attention, model, step, decode; empty: all, with --only attention
only = ""  # attention: the rows to measure, separated by commas; empty: all
# How large are the inputs?
lengths = "512,2048,8192"  # attention: sequence lengths in tokens
model_lengths = "2048,8192"  # model: sequence lengths in tokens
step_length = 1024  # step: sequence length in tokens
decode_length = 1024  # decode: number of tokens to generate
batch_size = 2  # sequences at once; with 1, PyTorch's backward pass of a single long head would use one CPU core
tokens = 0  # tokens at once: sets the number of sequences instead of batch_size; 0: batch_size sets it
n_head = 6  # attention: number of heads
head_dim = "32"  # attention: width of a head; several, separated by commas
heads = "SSSSSL"  # in rows with short heads, the heads of a layer: a letter for each head, S short, L long
window = 100  # attention: tokens that a short head sees before its own (model, step: 50, or 100 above 2048 tokens)
# How exact?
repeats = 9  # rounds; in each round everything runs once
# Where do the results go?
out = "bench.json"  # the file of results
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of q, k and v; models use autocast
seed = 1337  # decides the random numbers: q, k, v, weights and generated tokens

QUICK = {"lengths": "256,1024", "model_lengths": "1024", "step_length": 256, "decode_length": 128, "repeats": 3}
# The long-short paper's model (section 5.1). It does not say which GELU; this is PyTorch's default, and faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # nanoGPT's Shakespeare model
CHECKED_AT = 300  # tokens: more than the first blocks of short heads, and enough for beta's linear form
# An output or gradient x is right up to rounding if ||x - exact|| / ||exact|| is at most this. TF32: float32 on a GPU
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TF32 = 2e-3
AHEAD = 5_000_000  # clock cycles that a GPU waits, so that the host can launch what is timed in the meantime
Rounds = dict[str, dict[str, list[float]]]  # {row: {measure: its number in each round}}

# -----------------------------------------------------------------------------
# how times and memory are measured


def clock(dev: str) -> float:
    """The time in seconds, after the device has finished its work."""
    getattr(torch, dev.partition(":")[0]).synchronize()
    return time.perf_counter()


def stopwatch(dev: str, *steps: Callable) -> list[float]:
    """Milliseconds of each of these functions, which are called one after another."""
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


def tried(name: str, f: Callable, dev: str, foreign: bool = False) -> object:
    """f(), or None where it fails: then a line says why. A bug prints its traceback too, unless f is foreign code."""
    try:
        result = f()
        clock(dev)  # a GPU reports an error later
        return result
    except Exception as error:
        if not foreign and not isinstance(error, (UserError, MemoryError, torch.OutOfMemoryError)):
            traceback.print_exc()
        print(f"{name} left out ({type(error).__name__}: {first_line(error)[:90]})", flush=True)


def interleaved(tasks: dict[str, Callable], dev: str, repeats: int) -> Rounds:
    """{measure: its numbers} of each task, which returns {measure: number}, in all rounds after one for warm-up."""
    got = {name: [] for name in tasks}
    for _ in range(1 + repeats):  # every task runs once before any task runs again
        for name in list(got):
            if row := tried(name, tasks[name], dev):
                got[name].append(row)
            else:
                del got[name]
    return {name: {key: [row[key] for row in rows[1:]] for key in rows[0]} for name, rows in got.items()}


def medians(columns: dict[str, list[float]]) -> tuple[dict, dict]:
    """(median, half the interquartile range as a share of it) of each measure."""
    quartiles = {key: np.quantile(c, (0.25, 0.5, 0.75)).tolist() for key, c in columns.items()}
    median = {key: middle for key, (_, middle, _) in quartiles.items()}
    return median, {key: (high - low) / 2 / middle for key, (low, middle, high) in quartiles.items()}


def ratios(rounds: Rounds, name: str, base: str) -> dict[str, float]:
    """For each measure the median of its ratios to base in the same round: what slows a round down cancels out."""
    mine, theirs = rounds[name], rounds[base]
    return {key: float(np.median(np.divide(mine[key], theirs[key]))) for key in mine if key in theirs}


def peak_memory(f: Callable, dev: str) -> int:
    """The most bytes that f() needed at any time, beyond those allocated before."""
    if dev.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler announces itself on every start
    with profile(profile_memory=True) as p:
        f()
    events = sorted(p.kineto_results.events(), key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))


def table(title: str, about: dict, rounds: Rounds, more: dict[str, dict] | None = None) -> list[dict]:
    """Prints and returns each row's medians, spreads and ratios to the first row, and more, {row: {column: number}}."""
    rows = []
    for name, columns in rounds.items():
        median, spread = medians(columns)
        ratio, rest = ratios(rounds, name, next(iter(rounds))), (more or {}).get(name, {})
        if not rows:
            print(f"\n{title:30}" + "".join(f"{key:>24}" for key in columns) + "".join(f"{key:>14}" for key in rest))
        cells = [f"{median[key]:12.2f} ±{spread[key]:3.0%}{ratio[key]:6.2f}x" for key in columns]
        cells += [f"{x:14,}" if isinstance(x, int) else f"{x:14.1e}" for x in rest.values()]
        print(f"{name:30}" + "".join(cells), flush=True)
        rows.append({"subject": name, **about, "median": median, "spread": spread, "ratio": ratio, **rest})
    return rows


# -----------------------------------------------------------------------------
# attention: what is timed, and whether it is right


def with_kernels(gpt: GPT) -> None:
    """Makes a GPT run Triton's kernels."""
    from attention import kernels  # here: not every machine has Triton

    kernels.use(gpt, ATTENTION[gpt.config.attention])


def layer(fields: dict, form: Callable = lambda gpt: None) -> Callable:
    """The attention of a model's layer with these fields of GPTConfig, run(q, k, v) -> y, all (B, H, T, D).

    form(gpt) makes the model compute it in another way: run_definitions or with_kernels.
    """

    @cache
    def attention_layer(T: int, D: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)  # a position's weights are the same in all forms
            gpt = GPT(GPTConfig(T, 1, 1, n_head, n_head * D, head_dim=D, **{"position": "none"} | fields))
        form(gpt)
        return gpt.transformer.h[0].attn

    def run(q, k, v):
        attn = attention_layer(max(CHECKED_AT, q.shape[-2]), q.shape[-1]).to(q.device)
        if attn.n_map == 2:  # pairs of heads share their values
            v = torch.cat((v[:, ::2], v[:, 1::2]), dim=-1)  # (B, H / 2, T, 2 D)
        y = attn.mix(q, k, v)
        if attn.n_map == 2:
            y = y[:, ::2] - 0.5 * y[:, 1::2]
        return y.reshape(q.shape)

    return run


def rows_on(dev: str) -> dict[str, tuple[Callable, dict]]:
    """{name: (run, the fields of GPTConfig whose attention it is)} of all rows for this device, SDPA first."""
    on_gpu, short = dev.startswith("cuda"), {"heads": heads, "window": window}
    sdpa = partial(scaled_dot_product_attention, is_causal=True)
    table = {"sdpa": (sdpa, {})}
    if on_gpu:
        table["sdpa flash"] = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(sdpa), {}
        table["sdpa cudnn"] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa), {}
    kinds = {"": {}, f" {heads}": short, " differential": {"differential": True}, " decay": {"decay": "alibi"}}
    for attention, (kind, more) in itertools.product(ATTENTION, kinds.items()):
        fields = {"attention": attention} | more
        if kind != " decay" or takes(ATTENTION[attention], "fade"):
            table[attention + kind] = layer(fields), fields
        if kind in ("", f" {heads}") and (on_gpu or "triton" in only):  # on a CPU its interpreter takes minutes
            table[f"{attention}{kind} triton"] = layer(fields, with_kernels), fields
    positions = [{"position": name} for name, (_, inside) in POSITION.items() if inside and not quick]
    table |= {fields["position"]: (layer(fields), fields) for fields in positions}
    chosen = names(only, table)
    return {name: row for name, row in table.items() if name in chosen}


def right_rows(dev: str, dt: torch.dtype, D: int) -> dict[str, tuple[Callable, float]]:
    """{name: (run, its largest error)} of the rows whose outputs and gradients are the definition's, up to rounding."""
    tolerance = TF32 if dt == torch.float32 and dev.startswith("cuda") else TOLERANCE[dt]
    x = inputs(2, CHECKED_AT, D, dev, dt)
    double = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in x]

    def derivatives(f: Callable, q, k, v, dy) -> list[torch.Tensor]:
        y = f(q, k, v)
        return [t.detach().cpu().double() for t in (y, *torch.autograd.grad(y, (q, k, v), dy))]

    def error(run: Callable, fields: dict) -> float:
        pairs = zip(derivatives(run, *x), derivatives(layer(fields, run_definitions), *double), strict=True)
        return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # of a NaN: NaN

    right = {}
    for name, row in rows_on(dev).items():
        found = tried(name, partial(error, *row), dev, foreign=name.startswith("sdpa"))
        if found is not None and found <= tolerance:
            right[name] = row[0], found
        elif found is not None:
            print(f"{name} is WRONG: its output or a gradient differs from the definition's by {found:.2g}; not timed")
    return right


def inputs(B: int, T: int, D: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v and dy of an attention, (B, H, T, D)."""
    size = B, n_head, T, D
    return [torch.randn(size, device=dev, dtype=dt, requires_grad=grad) for grad in (True, True, True, False)]


def passes(run: Callable, x: list[torch.Tensor], dev: str) -> dict[str, float]:
    """Milliseconds of y = run(q, k, v) without gradients, of its backward pass, and of both; x: q, k, v and dy."""
    *qkv, dy = x
    y = []
    with torch.no_grad():
        (forward,) = stopwatch(dev, lambda: run(*(t.detach() for t in qkv)))
    # grad(), as y.backward() copies gradients not laid out as q, k and v
    both = stopwatch(dev, lambda: y.append(run(*qkv)), lambda: torch.autograd.grad(y[0], qkv, dy))
    return {"forward": forward, "backward": both[1], "both": sum(both)}


def attention(dev: str, dt: torch.dtype) -> Iterator[list[dict]]:
    """Times the passes of each attention; yields the rows of a table for each head dim and length."""
    for D in positive("head_dim", head_dim):
        print(f"\nattention, head dim {D}")
        right = right_rows(dev, dt, D)
        for n in positive("lengths", lengths):
            x = inputs(tokens // n or 1 if tokens else batch_size, n, D, dev, dt)
            tasks = {name: partial(passes, run, x, dev) for name, (run, _) in right.items()}
            rounds = interleaved(tasks, dev, repeats)
            more = {name: {"peak bytes": peak_memory(tasks[name], dev), "error": right[name][1]} for name in rounds}
            about = {"n": n, "d": D, "batch": len(x[0])}
            yield table(f"n = {n}, d = {D}, B = {len(x[0])}, ms", about, rounds, more)


# -----------------------------------------------------------------------------
# models: a forward pass, a training step, decoding


def models(dev: str, T: int, sizes: dict, more: dict[str, dict] | None = None) -> dict[str, GPT]:
    """A model for each attention, with long heads and with --heads, and for each of more, {name: fields}."""
    rows = {f"{name} {p}": {"attention": name, "heads": p} for name in ATTENTION for p in ("L", heads)}
    if {"S", "L"} <= set(heads):  # softmax in short heads, another attention in long ones, and a short convolution
        mixed = {"short_attention": "softmax", "heads": heads, "conv": 4}
        rows |= {f"softmax/{name} conv {heads}": mixed | {"attention": name} for name in SUMS}
    configs = {name: GPTConfig(block_size=T, **sizes, **row) for name, row in (rows | (more or {})).items()}
    return {name: GPT(config).to(dev) for name, config in configs.items()}


def forward_or_step(dev: str, amp: object, n: int, train: bool) -> list[dict]:
    """Times a whole forward pass (up to the last token's logits), or a training step; returns its table's rows."""
    gpts, B = models(dev, n, LS_MODEL), tokens // n or 1 if tokens else batch_size
    x = torch.randint(LS_MODEL["vocab_size"], (B, n), device=dev)
    settings = Settings(1e-4, (0.9, 0.95), 0.1, fused=not dev.startswith("mps"))
    adamw = {name: OPTIMIZER["adamw"](gpt, settings)[0] for name, gpt in gpts.items()}

    def once(name: str) -> None:
        with amp, torch.set_grad_enabled(train):
            loss = gpts[name](x, x if train else None)[1]
        if train:
            loss.backward()
            adamw[name].step()
            adamw[name].zero_grad()

    tasks = {name: lambda name=name: {"ms": stopwatch(dev, lambda: once(name))[0]} for name in gpts}
    print(f"\n{'training step' if train else 'forward pass'} of the long-short paper's model (6 layers, 192 wide)")
    return table(f"n = {n}, B = {B}", {"n": n, "batch": B}, interleaved(tasks, dev, repeats))


def decoding(dev: str, amp: object, n: int) -> list[dict]:
    """Times how nanoGPT's Shakespeare model writes one sequence of n tokens, the likeliest ones; up to three rounds."""
    few = {"softmax L, GQA 2": {"n_kv_head": 2}, "softmax L, MQA": {"n_kv_head": 1}}  # heads of keys and values

    @torch.no_grad()
    def write(gpt: GPT) -> dict[str, float]:
        token, cache, began = torch.zeros(1, 1, dtype=torch.long, device=dev), gpt.new_cache(), clock(dev)
        with amp:
            for _ in range(n):
                token = gpt(token, cache=cache)[0].argmax(-1)
        return {"tokens/s": n / (clock(dev) - began), "bytes": cache.nbytes}

    tasks = {name: partial(write, gpt.eval()) for name, gpt in models(dev, n, GPT_10M, few).items()}
    rounds = interleaved(tasks, dev, min(repeats, 3))
    cache = {name: {"cache, bytes": columns.pop("bytes")[0]} for name, columns in rounds.items()}
    print("\ndecoding, 6 layers, 384 wide, 6 heads")
    return table(f"one sequence of {n} tokens", {"n": n}, rounds, cache)


# -----------------------------------------------------------------------------


def main() -> None:
    dev, precision, amp = pick_device(device, dtype)
    run: dict[str, Callable] = {  # each yields the rows of its tables, one table at a time
        "attention": lambda: attention(dev, getattr(torch, precision)),
        "model": lambda: (forward_or_step(dev, amp, n, train=False) for n in positive("model_lengths", model_lengths)),
        "step": lambda: [forward_or_step(dev, amp, step_length, train=True)],
        "decode": lambda: [decoding(dev, amp, decode_length)],
    }
    parts = names(what or ("attention" if only else ""), run)
    at_least_one(repeats=repeats, batch_size=batch_size, step_length=step_length, decode_length=decode_length)
    refuse([
        ("/" in heads or "S" not in heads, f"--heads={heads} must be the letters of one layer, with an S"),
        (bool(only) and "attention" not in parts, "--only is for --what=attention"),
    ])  # fmt: skip
    GPTConfig(n_head=n_head, n_embd=n_head, heads=heads, window=window)  # checks them
    if dev.startswith("cuda:"):
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("high")  # as train.py: TF32 on a GPU, no effect on a CPU
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest weights are zeros
    torch.manual_seed(seed)
    about = {"device": dev, "dtype": precision, "torch": torch.__version__, "threads": torch.get_num_threads()}
    about |= {"heads": heads, "window": window, "repeats": repeats}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = {"about": about} | {part: [] for part in parts}
    for part in parts:
        for rows in run[part]():
            results[part] += rows
            with open(out, "w", encoding="utf-8") as f:
                json.dump(results, f, indent=1)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    config, given = configure(globals())
    if config["quick"]:
        config |= {name: value for name, value in QUICK.items() if name not in given}
    globals().update(config)
    with user_errors():
        main()
