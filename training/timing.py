"""How bench.py measures times and memory; and the times of whole models: forward passes, training steps, decoding."""

import collections
import functools
import itertools
import os
import time
import traceback
from collections.abc import Callable

import numpy as np
import torch
from torch.autograd.profiler import profile

from attention.sums import SUMS
from errors import UserError, first_line
from model import ATTENTION, GPT, GPTConfig
from text.sampling import stream
from training.estimate import matmul_rate
from training.optimizers import OPTIMIZER, Settings

AHEAD = 5_000_000  # clock cycles that a GPU waits, so that the host can launch what is timed in the meantime
# The long-short paper's model (section 5.1). It does not say which GELU; this is PyTorch's default, and faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # nanoGPT's Shakespeare model
# Errors of memory, CUDA, Triton or a compiler have one of these in their text; they are no bugs in the timed code
OF_THE_MACHINE = ("OutOfMemoryError", "MemoryError", "allocate memory", "CUDA", "triton.", "torch._dynamo", "_inductor")
Rounds = dict[str, dict[str, list[float]]]  # {task: {measure: its number in each round}}


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


def inputs(B: int, H: int, T: int, D: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v and dy of an attention, (B, H, T, D)."""
    return [torch.randn(B, H, T, D, device=dev, dtype=dt, requires_grad=grad) for grad in (True, True, True, False)]


def passes(run: Callable, x: list[torch.Tensor], dev: str, backward: bool) -> dict[str, float]:
    """Milliseconds of y = run(q, k, v) without gradients, of its backward pass, and of both; x: q, k, v and dy."""
    *qkv, dy = x
    y = []
    with torch.no_grad():
        row = {"forward": stopwatch(dev, lambda: run(*(t.detach() for t in qkv)))[0]}
    if backward:  # grad(), as y.backward() copies gradients not laid out as q, k and v
        both = stopwatch(dev, lambda: y.append(run(*qkv)), lambda: torch.autograd.grad(y[0], qkv, dy))
        row |= {"backward": both[1], "both": sum(both)}
    return row


def ceilings(dev: str, dtype: str) -> dict[str, float]:
    """FLOP/s of a large matrix product, and bytes/s, read and written, of a large copy."""
    x = torch.randn(2**28 if dev.startswith("cuda") else 2**25, device=dev)
    y = torch.empty_like(x)
    ms = min(stopwatch(dev, lambda: y.copy_(x))[0] for _ in range(10))
    return {"flops": matmul_rate(dev, dtype), "bytes_per_s": 2 * x.nbytes / ms * 1e3}


def peak_memory(f: Callable, dev: str) -> int:
    """The most bytes that f() needed at any time, beyond those allocated before."""
    if dev.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the profiler announces itself on every start
    try:
        with profile(profile_memory=True) as p:
            f()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    events = sorted(p.kineto_results.events(), key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))


def free_memory(dev: str) -> int:
    """The free bytes of the device; 8 GiB where that is unknown."""
    if dev.startswith("cuda"):
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if not os.path.exists("/proc/meminfo"):
        return 8 * 2**30
    with open("/proc/meminfo", encoding="ascii") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))


def tried(name: str, f: Callable, dev: str, foreign: bool = False) -> object:
    """f(), or None where it fails: then a line says why. Raises UserError where the device can no longer be used."""
    try:
        return f()
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)[:90]}"
        of_the_machine = any(sign in f"{type(error).__module__}.{why}" for sign in OF_THE_MACHINE)
        if not (foreign or of_the_machine or isinstance(error, UserError)):  # foreign: f is another library's
            traceback.print_exc()
        print(f"{name} left out ({why})", flush=True)
    try:
        clock(dev)
    except Exception as error:  # as after a kernel that wrote where it should not
        raise UserError(f"{name} broke {dev} ({first_line(error)[:90]}): use --only= to leave {name} out") from None


def interleaved(tasks: dict[str, Callable], dev: str, repeats: int) -> Rounds:
    """Each task's numbers in all rounds; a task returns {measure: number}. One that fails is left out, with a line."""
    got = {name: [] for name in tasks}
    for _ in range(repeats):  # every task runs once before any task runs again
        for name in list(got):
            if row := tried(name, tasks[name], dev):
                got[name].append(row)
            else:
                del got[name]
    return {name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in got.items()}


def medians(columns: dict[str, list[float]]) -> tuple[dict, dict]:
    """(median, half the interquartile range as a share of it) of each measure."""
    quartiles = {key: np.quantile(c, (0.25, 0.5, 0.75)).tolist() for key, c in columns.items()}
    median = {key: middle for key, (_, middle, _) in quartiles.items()}
    return median, {key: (high - low) / 2 / middle for key, (low, middle, high) in quartiles.items()}


def ratios(rounds: Rounds, name: str, base: str) -> dict[str, float]:
    """For each measure the median of its ratios to base in the same round: what slows a round down cancels out."""
    mine, theirs = rounds[name], rounds[base]
    return {key: float(np.median(np.divide(mine[key], theirs[key]))) for key in mine if key in theirs}


# -----------------------------------------------------------------------------
# models

# amp: the context of mixed precision. heads: the pattern of those models that have short heads
Setting = collections.namedtuple("Setting", ("dev", "amp", "heads", "repeats", "seed"))


def models(at: Setting, T: int, sizes: dict) -> dict[str, GPT]:
    """A model for each attention, with long heads and with at.heads; those that cannot be built are left out."""
    gpts = {}
    for core, pattern in itertools.product(ATTENTION, dict.fromkeys(("L", at.heads))):
        config = GPTConfig(block_size=T, attention=core, heads=pattern, **sizes)
        gpts[f"{core} {pattern}"] = tried(f"{core} {pattern}", functools.partial(GPT, config), at.dev)
    if {"S", "L"} <= set(at.heads):  # softmax in short heads, another attention in long ones, and a short convolution
        for core in SUMS:
            mixed = GPTConfig(T, attention=core, short_attention="softmax", heads=at.heads, conv=4, **sizes)
            name = f"softmax/{core} conv {at.heads}"
            gpts[name] = tried(name, functools.partial(GPT, mixed), at.dev)
    return {name: gpt.to(at.dev) for name, gpt in gpts.items() if gpt is not None}


def forward_or_step(at: Setting, length: int, B: int, train: bool) -> list[dict]:
    """Milliseconds of a whole forward pass (up to the last token's logits), or of a training step; prints its table."""
    gpts = models(at, length, LS_MODEL)
    x = torch.randint(LS_MODEL["vocab_size"], (B, length), device=at.dev)
    settings = Settings(1e-4, (0.9, 0.95), 0.1, fused=not at.dev.startswith("mps"))
    adamw = {name: OPTIMIZER["adamw"](gpt, settings)[0] for name, gpt in gpts.items() if train}

    def timed(name: str) -> dict[str, float]:
        def once() -> None:
            with at.amp, torch.set_grad_enabled(train):
                loss = gpts[name](x, x if train else None)[1]
            if train:
                loss.backward()
                adamw[name].step()
                adamw[name].zero_grad()

        return {"ms": stopwatch(at.dev, once)[0]}

    tasks = {name: functools.partial(timed, name) for name in gpts}
    tasks = {name: task for name, task in tasks.items() if tried(name, task, at.dev)}  # warm-up
    title = "training step" if train else "forward pass"
    print(f"\n{title} of the long-short paper's model (6 layers, 192 wide, 6 heads), n = {length}, batch {B}")
    rounds = interleaved(tasks, at.dev, at.repeats)
    rows = []
    for name, columns in rounds.items():
        ms, spread = (measure["ms"] for measure in medians(columns))
        change = ratios(rounds, name, next(iter(rounds)))["ms"] - 1
        speed = B * length / ms * 1e3
        row = {"subject": name, "n": length, "batch": B, "ms": ms, "ms_per_sequence": ms / B, "spread": spread}
        rows.append(row | {"change": change, "tokens_per_s": speed})
        print(f"{name:24}{ms:10.1f} ms ±{spread:3.0%}{change:+9.1%}{ms / B:10.2f} ms a sequence", end="")
        print(f"{speed:12,.0f} tokens/s", flush=True)
    return rows


def writers(at: Setting, T: int) -> dict[str, GPT]:
    """The models of `decoding`: those of `models`, and softmax with 2 heads of keys and values (GQA) and 1 (MQA)."""
    shared = {"softmax L, GQA 2": 2, "softmax L, MQA": 1}
    gpts = {name: GPT(GPTConfig(block_size=T, n_kv_head=n, **GPT_10M)).to(at.dev) for name, n in shared.items()}
    return models(at, T, GPT_10M) | gpts


def decoding(at: Setting, n: int) -> list[dict]:
    """Tokens/s of one sequence from one token to n, and the size of the cache; prints both tables.

    Medians of up to three rounds, but without a cache one run. Speeds are compared in each round.
    """
    print("\ndecoding, 6 layers, 384 wide, 6 heads")
    print(f"{f'one sequence to {n} tokens':30}{'tokens/s':>16}{'first tenth':>16}{'last tenth':>16}")
    gpts, rows = writers(at, n), []
    tasks = {name: functools.partial(speeds, at, gpt.eval(), n, True) for name, gpt in gpts.items()}
    rounds, base = interleaved(tasks, at.dev, min(at.repeats, 3)), next(iter(gpts))
    slow = {f"{base}, no cache": functools.partial(speeds, at, gpts[base], n, False)}
    for name, columns in (rounds | interleaved(slow, at.dev, 1)).items():
        row = {"subject": name, "n": n, **medians(columns)[0]}
        print(f"{name:30}" + "".join(f"{row[key]:16.1f}" for key in columns), end="")
        if name in rounds and base in rounds:
            row["ratio"] = ratios(rounds, name, base)["tokens_per_s"]
            print(f"{row['ratio']:10.2f}x", end="")
        print(flush=True)
        rows.append(row)
    gpts = {T: writers(at, T) for T in (1024, 8192)}
    print(f"\n{'bytes of its cache':30}" + "".join(f"{f'n = {T}':>16}" for T in gpts))
    most = None
    for name in gpts[8192]:
        if size := tried(name, lambda name=name: {T: cache_bytes(at, gpts[T][name]) for T in gpts}, at.dev):
            most = most or size[8192]  # softmax with long heads, which comes first
            rows += [{"subject": name, "n": T, "cache_bytes": size[T]} for T in size]
            print(f"{name:30}{size[1024]:16,}{size[8192]:16,}{most / size[8192]:10.2f}x less at 8192")
    return rows


def speeds(at: Setting, gpt: GPT, n: int, cached: bool) -> dict[str, float]:
    """Tokens/s of all of a sequence, of its first tenth and of its last."""
    start = torch.zeros(1, 1, dtype=torch.long, device=at.dev)
    with at.amp:
        gpt.generate(start, min(8, n - 1), seed=at.seed, use_cache=cached)  # warm-up
        ticks = [clock(at.dev)]
        ticks += [clock(at.dev) for _ in stream(gpt, start, n - 1, temperature=0.8, seed=at.seed, use_cache=cached)]
    tenth = max(1, (n - 1) // 10)
    row = {"tokens_per_s": (n - 1) / (ticks[-1] - ticks[0]), "first": tenth / (ticks[tenth] - ticks[0])}
    return row | {"last": tenth / (ticks[-1] - ticks[-1 - tenth])}


@torch.no_grad()
def cache_bytes(at: Setting, gpt: GPT) -> int:
    """The size of a full cache: the first token allocates that of long heads, 200 tokens fill that of short ones."""
    cache = gpt.new_cache()
    with at.amp:
        gpt(torch.zeros(1, min(200, gpt.config.block_size), dtype=torch.long, device=at.dev), cache=cache)
    return cache.nbytes
