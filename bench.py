"""Measures how long the attentions take, forward and backward, and how much memory they need.

    python bench.py                                  # a quarter of an hour on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --only=sdpa,beta --lengths=4096,8192,16384
    python bench.py --device=cuda --dtype=bfloat16 --head_dim=64,128 --tokens=32768

--import=my.ideas adds rows for the functions of scores of a module of your own.

First, the outputs and gradients of each attention are compared with its definition in float64, on
random inputs. An attention that is wrong is reported and not timed. Then all rows are timed in
rounds; in each round every row runs once. A time is a median, with half of its interquartile range.
A ratio compares a row with the first row of the same round.

In this file, dev is a device such as "cuda:0". A row's name stands for what it measures, and rounds
are {name: [{measure: number} of each round]}.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial

from configurator import DTYPE, at_least_one, names, pick_device, positive, run_script

import numpy as np
import torch
from torch.autograd.profiler import profile
from torch.nn.functional import scaled_dot_product_attention

from attention.cache import Context, run_definitions
from attention.scores import has_argument
from errors import UserError, first_line
from model import ATTENTION, GPT, GPTConfig
from parts import POSITION

# What is measured?
quick = False  # short lengths and few repeats: under a minute on two cores
only = ""  # the rows to measure, separated by commas; empty: all
# How large are the inputs?
lengths = "512,2048,8192"  # sequence lengths in tokens, separated by commas
batch_size = 2  # sequences at once; one long head of one sequence uses only one CPU core backward
tokens = 0  # tokens at once: sets the number of sequences instead of batch_size; 0: batch_size does
n_head = 6  # number of heads
head_dim = "32"  # width of a head; several, separated by commas
heads = "SSSSSL"  # in rows with short heads, a letter for each head of a layer: S short, L long
window = 100  # tokens that a short head sees before its own
# How exact?
repeats = 9  # rounds; in each round every row runs once
# Where do the results go?
out = "bench.json"  # the file of results
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: DTYPE = "auto"  # of q, k and v
seed = 1337  # decides the random numbers: q, k, v and weights

QUICK = {"lengths": "256,1024", "repeats": 3}
# Tokens: more than the first blocks of short heads, enough for the sums of beta (not beta_squared)
CHECKED_AT = 300
# An output or gradient x is right up to rounding if ||x - exact|| / ||exact|| is at most this
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TF32 = 2e-3  # of float32 on a GPU
sdpa = partial(scaled_dot_product_attention, is_causal=True)  # PyTorch's own

# -----------------------------------------------------------------------------
# how times and memory are measured


def clock(dev: str) -> float:
    """The time in seconds, after the device has finished its work."""
    getattr(torch, dev.partition(":")[0]).synchronize()
    return time.perf_counter()


def stopwatch(dev: str, f: Callable, *args) -> tuple:
    """(the milliseconds that f(*args) takes, what it returns)."""
    if not dev.startswith("cuda"):
        began = clock(dev)
        result = f(*args)
        return (clock(dev) - began) * 1e3, result
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(5_000_000)  # clock cycles, in which the host launches what is timed
    start.record()
    result = f(*args)
    end.record()
    clock(dev)
    return start.elapsed_time(end), result


def _tried(name, f, dev):
    """f(), or None if it fails: then a line says why. A bug prints its traceback as well."""
    try:
        result = f()
        clock(dev)  # a GPU reports an error later
        return result
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(f"{name} left out ({type(error).__name__}: {first_line(error)[:90]})", flush=True)


def interleaved(tasks: dict, dev: str, repeats: int) -> dict:
    """{name: what the task returned in each round}; a task returns {measure: number}.

    Every task runs once before any task runs again. One more round comes first, as warm-up. A task
    that fails is left out.
    """
    rounds = {name: [] for name in tasks}
    for _ in range(1 + repeats):
        for name in list(rounds):
            row = _tried(name, tasks[name], dev)
            if row:
                rounds[name].append(row)
            else:
                del rounds[name]
    return {name: rows[1:] for name, rows in rounds.items()}


def medians(rows: list[dict]) -> tuple[dict, dict]:
    """(median, half the interquartile range as a share of the median) of each measure."""
    median = {}
    spread = {}
    for key in rows[0]:
        low, median[key], high = np.quantile([row[key] for row in rows], (0.25, 0.5, 0.75)).tolist()
        spread[key] = (high - low) / 2 / median[key]
    return median, spread


def ratios(rounds: dict, name: str, base: str) -> dict:
    """The median of each measure's ratios to base in the same round.

    What slows a round down cancels out.
    """
    pairs = zip(rounds[name], rounds[base], strict=True)
    return medians([{key: row[key] / other[key] for key in row} for row, other in pairs])[0]


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
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return int(np.cumsum(changes).max())


def table(title: str, about: dict, rounds: dict, extra: dict) -> list[dict]:
    """Print and return each row's medians, spreads, ratios to the first row, and extra numbers.

    about: what all rows have in common. extra: {row: {name: number}}, of all rows or of none.
    """
    print(f"\n{title}", about)
    first, *_ = rounds
    results = []
    for name, rows in rounds.items():
        median, spread = medians(rows)
        ratio = ratios(rounds, name, first)
        numbers = extra.get(name, {})
        row = {"subject": name, "median": median, "spread": spread, "ratio": ratio}
        results.append(row | about | numbers)

        # name  forward 1.23 ± 4% 1.00x  backward ...  peak bytes 1,234
        cells = [
            f"{key} {median[key]:9.2f} ±{spread[key]:3.0%}{ratio[key]:6.2f}x" for key in median
        ]
        cells += [f"{key} {x:,}" for key, x in numbers.items()]
        print(f"{name:28}", *cells, sep="  ", flush=True)
    return results


# -----------------------------------------------------------------------------
# what is timed, and whether it is right


def _layer(fields, x, plain=False):
    """The attention of a layer with these fields of GPTConfig: run(q, k, v) -> y, all (B, H, T, D).

    x: a tensor (..., T, D) on this device. plain: compute it by its definition. Without fields it
    is PyTorch's own.
    """
    if not (fields or plain):
        return sdpa
    torch.manual_seed(seed)  # both forms get the same weights of a position
    T, D = x.shape[-2:]
    n_embd = n_head * D
    gpt = GPT(GPTConfig(T, vocab_size=1, n_layer=1, n_head=n_head, n_embd=n_embd, **fields))
    if plain:
        run_definitions(gpt)
    attend = gpt.to(x.device).transformer.h[0].attn.attend
    no_input = x.float().new_zeros(1, 1, n_embd)  # numbers of tokens are what they begin as

    return lambda q, k, v: attend(q, k, v, no_input.expand(len(q), q.shape[2], -1), Context())


def chosen_rows():
    """{name: the fields of GPTConfig whose attention it is} of the chosen rows.

    A layer of one's own is in none.
    """
    rows = {"sdpa": {}}
    for name, definition in ATTENTION.items():
        if isinstance(definition, type):
            continue
        rows[name] = {"attention": name}
        rows[f"{name} {heads}"] = {"attention": name, "heads": heads, "window": window}
        if has_argument(definition, "fade"):
            rows[f"{name} decay"] = {"attention": name, "decay": "alibi"}

    for name, (_, scheme) in POSITION.items():
        if scheme and not quick:
            rows[name] = {"position": name}
    return {name: rows[name] for name in names(only, rows)}


def _outputs(run, x):
    """y = run(q, k, v), and the gradients of q, k and v; x: q, k, v and dy."""
    *qkv, dy = x
    y = run(*qkv)
    return [y, *torch.autograd.grad(y, qkv, dy)]


def _checked(fields, x):
    """The largest relative error of a layer's outputs on x. Raises UserError for a large one."""
    # the definition, in float64 on the CPU
    double = [t.detach().cpu().double().requires_grad_() for t in x]
    exact = _outputs(_layer(fields, double[0], plain=True), double)

    pairs = zip(_outputs(_layer(fields, x[0]), x), exact, strict=True)
    errors = torch.stack([(a.cpu().double() - b).norm() / b.norm() for a, b in pairs])
    error = float(f"{errors.max():.2g}")  # of a NaN: NaN
    if not error <= max(TOLERANCE[x[0].dtype], TF32 * x[0].is_cuda):
        raise UserError(f"it is WRONG: output or gradients are off by {error:g}")
    return error


def passes(run: Callable, x: list, dev: str) -> dict:
    """Milliseconds of y = run(q, k, v) without gradients, of its backward pass, and of both.

    x: q, k, v and dy. `both` is the backward pass and the forward pass that it needs.
    """
    *qkv, dy = x
    with torch.no_grad():
        forward = stopwatch(dev, run, *qkv)[0]
    for_backward, y = stopwatch(dev, run, *qkv)
    # grad(), as y.backward() copies gradients not laid out as q, k and v
    backward = stopwatch(dev, torch.autograd.grad, y, qkv, dy)[0]
    return {"forward": forward, "backward": backward, "both": for_backward + backward}


def _tables(dev, dt):
    """Time the passes of each attention; yield the rows of a table for each head dim and length."""

    def inputs(B, T, D):  # q, k, v and dy
        return torch.randn(4, B, n_head, T, D, device=dev, dtype=dt, requires_grad=True).unbind()

    for D in positive("head_dim", head_dim):
        # {name: error} of the attentions that are right
        x = inputs(2, CHECKED_AT, D)
        rows = chosen_rows()
        checks = {name: _tried(name, partial(_checked, rows[name], x), dev) for name in rows}
        errors = {name: error for name, error in checks.items() if error is not None}

        for n in positive("lengths", lengths):
            B = max(1, tokens // n) if tokens else batch_size
            x = inputs(B, n, D)
            tasks = {name: partial(passes, _layer(rows[name], x[0]), x, dev) for name in errors}
            rounds = interleaved(tasks, dev, repeats)
            if not rounds:
                raise UserError("no row is left")
            extra = {
                name: {"peak bytes": peak_memory(tasks[name], dev), "error": errors[name]}
                for name in rounds
            }
            yield table("attention, ms", {"n": n, "d": D, "batch": B}, rounds, extra)


# -----------------------------------------------------------------------------


def main() -> None:
    dev, precision, _ = pick_device(device, dtype)
    at_least_one(repeats=repeats, batch_size=batch_size)
    torch.set_float32_matmul_precision("high")  # as train.py: TF32 on a GPU, no effect on a CPU
    torch.manual_seed(seed)

    about = {
        "device": dev,
        "dtype": precision,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "heads": heads,
        "window": window,
    }
    print(about)

    results = []
    for rows in _tables(dev, getattr(torch, precision)):
        results += rows
        with open(out, "w") as f:
            json.dump({"about": about, "attention": results}, f, indent=1)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    run_script(globals())
