"""Times of models: forward passes, training steps, decoding; and how all times of bench.py are measured.

Repeats are interleaved: every task runs once before any task runs again. A task that fails is left out, and says why.
"""

import collections
import contextlib
import functools
import itertools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configurator import UserError, first_line
from model import ATTENTION, GPT, GPTConfig
from training.optimizers import OPTIMIZER, Settings

AHEAD = 5_000_000  # clock cycles for which a GPU is kept busy with nothing, while the host launches what is timed
# The LS paper's, section 5.1; it does not say which GELU: this one is PyTorch's default, and the faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # nanoGPT's Shakespeare model
Rounds = dict[str, dict[str, list[float]]]  # {task: {measure: its number in each round}}


# -----------------------------------------------------------------------------
# how times are measured


def clock(dev: str) -> float:
    """Seconds, read after the device has done all of its work."""
    getattr(torch, dev.partition(":")[0]).synchronize()
    return time.perf_counter()


def stopwatch(dev: str, *steps: Callable) -> list[float]:
    """Milliseconds of each of these functions, called one after another."""
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
    """f(), or None where it fails. A line says why; a bug is shown with its traceback as well.

    foreign: f is the code of another library, which may just not run here. Raises UserError where the device can no
    longer be used, as after a kernel that wrote where it should not.
    """
    try:
        return f()
    except Exception as error:
        if not foreign and not of_the_machine(error):
            traceback.print_exc()
        print(f"{name} left out ({why(error)})", flush=True)
    try:
        clock(dev)
    except Exception as error:
        raise UserError(f"{name} broke {dev} ({why(error)}): leave it out with --only=") from None
    return None


def of_the_machine(error: Exception) -> bool:
    """Whether an error comes from memory, CUDA, Triton or a compiler, and not from the code that ran."""
    said = f"{type(error).__module__}.{type(error).__name__}: {error}"
    signs = "OutOfMemoryError", "MemoryError", "can't allocate memory", "CUDA", "triton.", "torch._dynamo", "torch._ind"
    return any(sign in said for sign in signs)


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:90]}"


def interleaved(tasks: dict[str, Callable], dev: str, repeats: int) -> Rounds:
    """The numbers of tasks, each of which returns a dict of them. Those that fail are left out."""
    got = {name: [] for name in tasks}
    for _ in range(repeats):
        for name in list(got):
            row = tried(name, tasks[name], dev)
            if row is None:
                del got[name]
            else:
                got[name].append(row)
    return {name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in got.items()}


def medians(columns: dict[str, list[float]]) -> tuple[dict, dict]:
    """(median, half the interquartile range as a share of it) of each measure."""
    middle, spread = {}, {}
    for key, column in columns.items():
        quarter = (len(column) - 1) / 4
        low = sorted(column)[round(quarter)]
        high = sorted(column)[round(3 * quarter)]
        middle[key] = statistics.median(column)
        spread[key] = (high - low) / 2 / middle[key]
    return middle, spread


def ratios(rounds: Rounds, name: str, base: str) -> dict[str, float]:
    """Of each measure the median of its ratios to base's in the same round: what slows a round down cancels."""
    pairs = {key: zip(rounds[name][key], rounds[base][key], strict=True) for key in rounds[name] if key in rounds[base]}
    return {key: statistics.median(mine / other for mine, other in pair) for key, pair in pairs.items()}


# -----------------------------------------------------------------------------
# models


@dataclass
class Setting:
    """Where models are timed, which, and how often."""

    dev: str
    amp: contextlib.AbstractContextManager  # mixed precision
    heads: str  # the pattern of models with short heads
    repeats: int
    seed: int


def models(at: Setting, T: int, sizes: dict) -> dict[str, GPT]:
    """A model for each attention, with long heads and with the pattern; those that cannot be built are left out."""
    found = {}
    for core, pattern in itertools.product(ATTENTION, dict.fromkeys(("L", at.heads))):
        config = GPTConfig(block_size=T, attention=core, heads=pattern, **sizes)
        gpt = tried(f"{core} {pattern}", functools.partial(GPT, config), at.dev)
        if gpt is not None:
            found[f"{core} {pattern}"] = gpt.to(at.dev)
    return found


def forward_or_step(at: Setting, length: int, B: int, train: bool) -> list[dict]:
    """Milliseconds of a whole forward pass (up to the last token's logits), or of a training step; prints its table."""
    gpts = models(at, length, LS_MODEL)
    x = torch.randint(LS_MODEL["vocab_size"], (B, length), device=at.dev)
    settings = Settings(1e-4, (0.9, 0.95), 0.1, fused=not at.dev.startswith("mps"))
    adamw = {name: OPTIMIZER["adamw"](gpt, settings)[0] for name, gpt in gpts.items() if train}

    def once(name: str) -> None:
        with at.amp, torch.set_grad_enabled(train):
            loss = gpts[name](x, x if train else None)[1]
        if train:
            loss.backward()
            adamw[name].step()
            adamw[name].zero_grad()

    def timed(name: str) -> dict:
        return {"ms": stopwatch(at.dev, functools.partial(once, name))[0]}

    tasks = {name: functools.partial(timed, name) for name in gpts}
    tasks = {name: task for name, task in tasks.items() if tried(name, task, at.dev)}  # warm-up
    title = "training step" if train else "forward pass"
    print(f"\n{title} of the LS paper's model (6 layers, 192 wide, 6 heads), n = {length}, batch {B}")
    rounds = interleaved(tasks, at.dev, at.repeats)
    rows = []
    for name, columns in rounds.items():
        middle, spread = medians(columns)
        ms = middle["ms"]
        row = {"subject": name, "n": length, "batch": B, "ms": ms, "ms_per_sequence": ms / B, "spread": spread["ms"]}
        row["change"] = ratios(rounds, name, next(iter(rounds)))["ms"] - 1
        row["tokens_per_s"] = B * length / ms * 1e3
        cells = f"{ms:10.1f} ms ±{row['spread']:3.0%}{row['change']:+9.1%}{ms / B:10.2f} ms a sequence"
        print(f"{name:24}{cells}{row['tokens_per_s']:12,.0f} tokens/s", flush=True)
        rows.append(row)
    return rows


def decoding(at: Setting, n: int) -> list[dict]:
    """Tokens/s of one sequence from one token to n, and the size of the cache; prints both tables."""
    print(f"\ndecoding, 6 layers, 384 wide, 6 heads\n{f'one sequence to {n} tokens':30}", end="")
    print("".join(f"{column:>16}" for column in ("tokens/s", "first tenth", "last tenth")))
    rows = []
    for name, gpt in models(at, n, GPT_10M).items():
        for cached in (True, False) if name == "softmax L" else (True,):
            subject = name if cached else f"{name}, no cache"
            row = tried(subject, functools.partial(speeds, at, gpt.eval(), n, cached), at.dev)
            if row is not None:
                rows.append({"subject": subject, "n": n, **row})
                print(f"{subject:30}" + "".join(f"{x:16.1f}" for x in row.values()), flush=True)
    return rows + caches(at)


def speeds(at: Setting, gpt: GPT, n: int, cached: bool) -> dict:
    """Tokens/s of all of the sequence, of its first tenth and of its last."""
    start = torch.zeros(1, 1, dtype=torch.long, device=at.dev)
    sampling = {"seed": at.seed, "use_cache": cached}
    with at.amp:
        collections.deque(gpt.stream(start, min(8, n - 1), **sampling), maxlen=0)  # warm-up
        ticks = [clock(at.dev)]
        ticks += [clock(at.dev) for _ in gpt.stream(start, n - 1, temperature=0.8, **sampling)]
    tenth = max(1, (n - 1) // 10)
    return {
        "tokens_per_s": (n - 1) / (ticks[-1] - ticks[0]),
        "first": tenth / (ticks[tenth] - ticks[0]),
        "last": tenth / (ticks[-1] - ticks[-1 - tenth]),
    }


def caches(at: Setting) -> list[dict]:
    """Bytes of a full cache at two lengths."""
    lengths = (1024, 8192)
    print(f"\n{'bytes of its cache':30}" + "".join(f"{f'n = {T}':>16}" for T in lengths))
    gpts = {T: models(at, T, GPT_10M) for T in lengths}
    rows = []
    for name in gpts[8192]:
        size = {T: tried(name, functools.partial(cache_bytes, at, gpts[T][name]), at.dev) for T in lengths}
        if None in size.values():
            continue
        rows += [{"subject": name, "n": T, "cache_bytes": size[T]} for T in lengths]
        most = rows[1]["cache_bytes"]  # softmax's at 8192, all long, which comes first
        print(f"{name:30}" + "".join(f"{x:16,}" for x in size.values()) + f"{most / size[8192]:10.2f}x less at 8192")
    return rows


@torch.no_grad()
def cache_bytes(at: Setting, gpt: GPT) -> int:
    """The size of a full cache: long heads' memory is taken at once, and 200 tokens fill the short ones."""
    cache = gpt.new_cache()
    with at.amp:
        gpt(torch.zeros(1, min(200, gpt.config.block_size), dtype=torch.long, device=at.dev), cache=cache)
    return cache.nbytes
