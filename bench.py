"""Times attention: every core, long and short heads, differential, and what else there is to use.

    python bench.py                                  # about ten minutes on two CPU cores
    python bench.py --quick                          # under a minute
    python bench.py --what=attention --only=sdpa,beta --lengths=4096,8192,16384 --plot
    python bench.py --lengths=2048,8192,32768 --head_dim=64 --device=cuda --dtype=bfloat16 --plot

Four parts: `attention` (forward, backward and peak memory of the function alone), `model` (a forward pass of
the LS paper's model, its Table 1), `step` (its training step), `decode` (tokens/s and cache bytes).
Outputs and gradients of each attention are checked against the naive form first; one that is wrong is
reported, not timed. Repeats are interleaved: every subject runs once before any runs again. Numbers are
medians with half their interquartile range; ratios are to the first subject in the same round. Everything is
written to --out.
"""

import contextlib
import functools
import importlib
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

from configurator import configure, first_line, pick_device, user_errors
from model import ATTENTION, GPT, ONE_QUERY, POSITION, GPTConfig, naive_attention, per_head
from optimizers import OPTIMIZER, Settings

what = "attention,model,step,decode"  # the parts to run
only = ""  # attention's subjects, separated by commas; empty: all
lengths = "512,2048,8192"  # tokens, for attention
model_lengths = "2048,8192"  # tokens, for the forward pass of a model
step_length = 1024  # tokens of a training step
decode_length = 1024  # tokens to generate
batch_size = 2  # sequences; PyTorch's CPU backward pass gives a core whole heads, so one long head keeps one core busy
n_head = 6  # heads
head_dim = 32  # of q, k and v
heads = "SSSSSL"  # the pattern of the LS subjects
window = 100  # its span; the models have the LS paper's, 50 up to 2048 tokens and 100 past that
repeats = 9  # of each subject
patience = 20.0  # seconds; what would take longer for one pass is skipped
quick = False  # short lengths and few repeats: under a minute on two cores
plot = False  # draw time and memory against n to a PNG beside --out (needs matplotlib)
out = "bench.json"  # the file of results
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of q, k and v, and of the models by autocast
seed = 1337  # of q, k, v

QUICK = {"lengths": "256,1024", "model_lengths": "1024", "step_length": 256, "decode_length": 128, "repeats": 3}
CHECKED_AT = 300  # tokens: past the first blocks of short heads, and where beta is linear
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# The LS paper's, section 5.1; it does not say which GELU: this one is PyTorch's default, and the faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # nanoGPT's Shakespeare model


# -----------------------------------------------------------------------------
# what is timed


@dataclass
class Subject:
    run: Callable  # (q, k, v) -> y, all (B, H, T, D)
    exact: Callable | None  # the same, naively; None: it cannot be checked
    quadratic: bool = False  # holds all T^2 scores at once
    backward: bool = True


def by_heads(short: Callable, long: Callable) -> Callable:
    """(q, k, v) -> y, where the first heads are short's and the others long's, as many as `heads` says."""
    n = (heads * n_head)[:n_head].count("S")

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
def scheme(position: str, T: int, dev: str) -> torch.nn.Module:
    """What a position is to a layer's attention."""
    sizes = {"n_embd": n_head * head_dim, "n_head": n_head, "head_dim": head_dim, "block_size": T}
    return POSITION[position][1](GPTConfig(position=position, **sizes)).to(dev)


def positioned(position: str, core: Callable) -> Callable:
    """(q, k, v) -> y of heads that are all long, at their positions."""

    def run(q, k, v):
        at = scheme(position, q.shape[-2], str(q.device))
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
def compiled_flex() -> Callable:
    return torch.compile(flex_attention)


@functools.cache
def flex_mask(T: int, dev: str, pattern: str) -> object:
    n = (pattern * n_head)[:n_head].count("S")

    def seen(b, h, i, j):
        return (i >= j) & ((i - j <= window) | (h >= n))

    return create_block_mask(seen, None, n_head, T, T, device=dev)


def flex(pattern: str) -> Callable:
    """FlexAttention, which skips what a block mask leaves out."""
    return lambda q, k, v: compiled_flex()(q, k, v, block_mask=flex_mask(q.shape[-2], str(q.device), pattern))


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


def subjects(dev: str) -> dict[str, Subject]:
    """Everything there is to time here, SDPA first."""
    naive = {core: functools.partial(naive_attention, core) for core in ONE_QUERY}
    softmax = naive["softmax"]
    table = {"sdpa": Subject(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), softmax)}
    for core, f in ATTENTION.items():
        exact = naive.get(core)
        table[core] = Subject(f, exact)
        if "S" in heads:
            mixed = exact and by_heads(functools.partial(exact, window=window), exact)
            table[f"{core} {heads}"] = Subject(by_heads(functools.partial(f, window=window), f), mixed)
        if n_head % 2 == 0:
            table[f"{core} differential"] = Subject(differential(f), exact and differential(exact))
    if not quick:
        for name in (name for name, (_, inside) in POSITION.items() if inside):
            table[name] = Subject(positioned(name, ATTENTION["softmax"]), positioned(name, softmax))
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            name = "sdpa " + backend.lower().removesuffix("_attention")
            table[name] = Subject(pinned(getattr(SDPBackend, backend)), softmax, quadratic=backend == "MATH")
        on_gpu = dev.startswith("cuda")  # FlexAttention has no backward pass on a CPU
        ls = by_heads(functools.partial(softmax, window=window), softmax)
        table |= {f"flex {p}": Subject(flex(p), e, backward=on_gpu) for p, e in (("L", softmax), (heads, ls))}
    for name, (package, core, make) in PEERS.items():
        try:
            table[name] = Subject(make(importlib.import_module(package)), naive[core])
        except Exception as error:  # not installed, or not for this machine
            print(f"{name}: left out ({why(error)})")
    if unknown := set(filter(None, only.split(","))) - set(table):
        raise ValueError(f"--only={only}: {', '.join(sorted(unknown))} is none of {', '.join(table)}")
    return {name: subject for name, subject in table.items() if not only or name in only.split(",")}


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:90]}"


# -----------------------------------------------------------------------------
# how it is measured


def inputs(T: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v (B, H, T, D)."""
    return [torch.randn(batch_size, n_head, T, head_dim, device=dev, dtype=dt, requires_grad=True) for _ in range(3)]


def error_of(subject: Subject, x: list[torch.Tensor]) -> float:
    """The largest difference of output and gradients from the naive form's in float64."""
    exact = [t.detach().cpu().double().requires_grad_() for t in x]
    y_exact = subject.exact(*exact)
    if not subject.backward:
        with torch.no_grad():
            return (subject.run(*(t.detach() for t in x)).cpu().double() - y_exact).abs().max().item()
    y = subject.run(*x)
    grads = torch.autograd.grad(y.sum(), x, materialize_grads=True)
    pairs = [(y, y_exact), *zip(grads, torch.autograd.grad(y_exact.sum(), exact), strict=True)]
    return torch.stack([(a.detach().cpu().double() - b).abs().max() for a, b in pairs]).max().item()  # or NaN


def clock(dev: str) -> float:
    getattr(torch, dev.partition(":")[0]).synchronize()
    return time.perf_counter()


def passes(subject: Subject, qkv: list[torch.Tensor], dev: str) -> dict[str, float]:
    """Milliseconds of a forward pass without gradients, of a backward pass, and of both with gradients."""
    for t in qkv:
        t.grad = None
    begin = clock(dev)
    with torch.no_grad():
        subject.run(*(t.detach() for t in qkv))
    row = {"forward": (clock(dev) - begin) * 1e3}
    if subject.backward:
        begin = clock(dev)
        y = subject.run(*qkv)
        middle = clock(dev)
        y.backward(torch.ones_like(y))
        end = clock(dev)
        row |= {"backward": (end - middle) * 1e3, "both": (end - begin) * 1e3}
    return row


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
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except OSError:
        return 8 * 2**30


def interleaved(tasks: dict[str, Callable]) -> Iterator[tuple[str, dict, dict, dict]]:
    """(name, medians, spreads, ratios) of each task's dicts of numbers; every task runs once before any runs again.

    A ratio is the median of those to the first task in the same round: what slows a round down cancels.
    """
    rows = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            rows[name].append(task())
    for name, got in rows.items():
        columns = {key: [row[key] for row in got] for key in got[0]}
        median = {k: statistics.median(c) for k, c in columns.items()}
        quarter = (len(got) - 1) / 4
        spread = {
            k: (sorted(c)[round(3 * quarter)] - sorted(c)[round(quarter)]) / 2 / median[k] for k, c in columns.items()
        }
        first = next(iter(rows.values()))
        ratio = {
            k: statistics.median(t / f[k] for t, f in zip(c, first, strict=True))
            for k, c in columns.items()
            if k in first[0]
        }
        yield name, median, spread, ratio


# -----------------------------------------------------------------------------
# the four parts; each prints its table and returns its rows


def attention(dev: str, dt: torch.dtype, sizes: list[int]) -> list[dict]:
    """Each subject at each length: milliseconds, spreads, ratios to the first subject, peak memory."""
    table, rows, seconds = {}, [], {}
    x = inputs(CHECKED_AT, dev, dt)
    for name, subject in subjects(dev).items():
        try:
            e = error_of(subject, x) if subject.exact else 0.0
        except Exception as error:
            print(f"{name}: does not run here ({why(error)})")
            continue
        if not e <= TOLERANCE[dt]:
            print(f"{name} is WRONG: it differs from the naive form by {e:.2g}; not timed")
            continue
        if not subject.exact:
            print(f"{name} has no line in ONE_QUERY: timed, but not checked")
        table[name] = subject
    for n in sizes:
        qkv, tasks = inputs(n, dev, dt), {}
        for name, subject in table.items():
            expected = (n / seconds[name][0]) ** 2 * seconds[name][1] if name in seconds else 0.0
            need = 32 * batch_size * n_head * n * n if subject.quadratic else 0
            if expected > patience or need > free_memory(dev) / 2:
                reason = (
                    f"take up to {expected:.0f} s a pass" if expected > patience else f"need {need / 2**30:.1f} GiB"
                )
                print(f"n = {n}: {name} skipped, would {reason}")
                continue
            try:
                passes(subject, qkv, dev)  # warm-up, and compilation
                row = passes(subject, qkv, dev)
            except Exception as error:
                print(f"n = {n}: {name} skipped ({why(error)})")
                continue
            seconds[name] = n, (row["forward"] + row.get("both", 0.0)) / 1e3
            tasks[name] = functools.partial(passes, subject, qkv, dev)
        columns = ("forward", "backward", "forward + backward")
        print(f"\n{f'n = {n}':24}" + "".join(f"{c:>22}" for c in columns) + f"{'memory':>12}")
        if tasks and next(iter(tasks)) != "sdpa":
            print(f"(ratios to {next(iter(tasks))})")
        for name, median, spread, ratio in interleaved(tasks):
            for t in qkv:
                t.grad = None
            memory = peak_memory(tasks[name], dev)
            cells = [
                f"{median[k]:8.2f} ms ±{spread[k]:3.0%}{ratio.get(k, math.nan):5.2f}x" if k in median else "-"
                for k in ("forward", "backward", "both")
            ]
            print(f"{name:24}" + "".join(f"{c:>22}" for c in cells) + f"{memory / 2**20:8.1f} MiB", flush=True)
            rows.append({"subject": name, "n": n, "ms": median, "spread": spread, "ratio": ratio, "peak_bytes": memory})
    return rows


def models(T: int, sizes: dict, dev: str) -> dict[str, GPT]:
    """A model for each core, with long heads and with the pattern `heads`."""
    names = [(core, pattern) for core in ATTENTION for pattern in dict.fromkeys(("L", heads))]
    return {f"{c} {p}": GPT(GPTConfig(block_size=T, **sizes, attention=c, heads=p)).to(dev) for c, p in names}


def model(dev: str, amp: contextlib.AbstractContextManager, length: int, train: bool) -> list[dict]:
    """Milliseconds of a whole forward pass (up to the last token's logits), or of a training step."""
    gpts, rows = models(length, LS_MODEL, dev), []
    x = torch.randint(LS_MODEL["vocab_size"], (batch_size, length), device=dev)
    kind = dev.partition(":")[0]
    settings = Settings(1e-4, (0.9, 0.95), 0.1, fused=kind in ("cuda", "cpu"))
    adamw = {name: OPTIMIZER["adamw"](gpt, settings)[0] for name, gpt in gpts.items() if train}

    def once(name: str) -> dict[str, float]:
        begin = clock(dev)
        with amp, torch.set_grad_enabled(train):
            loss = gpts[name](x, x if train else None)[1]
        if train:
            loss.backward()
            adamw[name].step()
            adamw[name].zero_grad()
        return {"ms": (clock(dev) - begin) * 1e3}

    for name in gpts:  # warm-up
        once(name)
    title = "training step" if train else "forward pass"
    print(f"\n{title} of the LS paper's model (6 layers, 192 wide, 6 heads), n = {length}, batch {batch_size}")
    for name, median, spread, ratio in interleaved({name: functools.partial(once, name) for name in gpts}):
        ms = median["ms"]
        row = {"subject": name, "n": length, "ms": ms, "spread": spread["ms"], "change": ratio["ms"] - 1}
        row["tokens_per_s"] = batch_size * length / ms * 1e3
        print(f"{name:24}{ms:10.1f} ms ±{spread['ms']:3.0%}{row['change']:+9.1%}{row['tokens_per_s']:12,.0f} tokens/s")
        rows.append(row)
    return rows


def decode(dev: str, amp: contextlib.AbstractContextManager) -> list[dict]:
    """Tokens/s of one sequence from one token to decode_length, and the size of the cache."""
    rows, n = [], decode_length
    columns = ("tokens/s", "first tenth", "last tenth")
    print(f"\ndecoding, 6 layers, 384 wide, 6 heads\n{f'one sequence to {n} tokens':30}", end="")
    print("".join(f"{c:>16}" for c in columns))
    for name, gpt in models(n, GPT_10M, dev).items():
        for cached in (True, False) if name == "softmax L" else (True,):
            ticks, start = [clock(dev)], torch.zeros(1, 1, dtype=torch.long, device=dev)
            with amp:
                for _ in gpt.eval().stream(start, n - 1, temperature=0.8, seed=seed, use_cache=cached):
                    ticks.append(clock(dev))
            tenth = max(1, (n - 1) // 10)
            row = {"tokens_per_s": (n - 1) / (ticks[-1] - ticks[0])}
            row |= {"first": tenth / (ticks[tenth] - ticks[0]), "last": tenth / (ticks[-1] - ticks[-1 - tenth])}
            rows.append({"subject": name + ("" if cached else ", no cache"), "n": n, **row})
            print(f"{rows[-1]['subject']:30}" + "".join(f"{x:16.1f}" for x in row.values()), flush=True)
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
    """Time and memory of forward + backward against n, on log axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
    rows, ticks = [row for row in rows if "both" in row["ms"]], sorted({row["n"] for row in rows})
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
    figure.suptitle(f"attention, B {batch_size}, H {n_head}, D {head_dim}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drew {path}")


def numbers(text: str) -> list[int]:
    """The integers of a flag. Raises ValueError where they are none, or below 1."""
    try:
        got = [int(n) for n in text.split(",")]
    except ValueError:
        got = []
    if not got or min(got) < 1:
        raise ValueError(f"lengths must be positive integers, separated by commas; got {text}")
    return sorted(got)


def main() -> None:
    if quick:
        globals().update({name: value for name, value in QUICK.items() if name not in given})
    parts, all_parts = what.split(","), ("attention", "model", "step", "decode")
    if unknown := set(parts) - set(all_parts):
        raise ValueError(f"--what={what}: {', '.join(sorted(unknown))} is none of {', '.join(all_parts)}")
    if min(repeats, batch_size, n_head, head_dim, step_length, decode_length - 1) < 1 or not patience > 0:
        raise ValueError("sizes, repeats and patience must be positive, decode_length at least 2")
    for sizes in ({"n_head": n_head, "n_embd": n_head}, LS_MODEL, GPT_10M):  # or they say why not
        GPTConfig(**sizes, heads=heads, window=window if "S" in heads else None)
    if "/" in heads or (plot or only) and "attention" not in parts:
        raise ValueError("--heads is the pattern of one layer here, and --plot and --only are for --what=attention")
    if plot:
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise ImportError("--plot draws with matplotlib: pip install matplotlib") from None
    sizes = {"attention": numbers(lengths), "model": numbers(model_lengths)}
    dev, dt_name, amp = pick_device(device, dtype)
    if ":" in dev:
        torch.cuda.set_device(dev)
    torch.set_float32_matmul_precision("high")  # as train.py: TF32 on a GPU, nothing on a CPU
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest weights are zeros
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else platform.processor() or platform.machine()
    about = {"device": dev, "chip": chip, "dtype": dt_name, "torch": torch.__version__}
    about |= {"threads": torch.get_num_threads(), "B": batch_size, "H": n_head, "D": head_dim}
    about |= {"heads": heads, "window": window, "repeats": repeats}
    print(", ".join(f"{k} {v}" for k, v in about.items()) + "\n")
    torch.manual_seed(seed)
    results: dict = {"about": about}
    run = {
        "attention": lambda: attention(dev, getattr(torch, dt_name), sizes["attention"]),
        "model": lambda: [row for n in sizes["model"] for row in model(dev, amp, n, train=False)],
        "step": lambda: model(dev, amp, step_length, train=True),
        "decode": lambda: decode(dev, amp),
    }
    for part in parts:
        results[part] = run[part]()
        with open(out, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
    print(f"\nwrote {out}")
    if plot:
        draw(results["attention"], os.path.splitext(out)[0] + ".png")


if __name__ == "__main__":
    config, given = configure(globals())
    globals().update(config)
    with user_errors():
        main()
