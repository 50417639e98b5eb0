"""Times the attention cores against PyTorch's fused causal SDPA.

    python bench.py
    python bench.py --lengths=1024,4096 --head_dim=64 --device=cuda --dtype=bfloat16

Each subject's output and gradients are checked against the naive form first; one that is wrong is
reported and not timed. Repeats are interleaved: every subject runs once before any runs again.
"""

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F

from configurator import configure, pick_device, user_errors
from model import ATTENTION, ONE_QUERY, naive_attention

lengths = "256,512,1024,2048"  # tokens, separated by commas
batch_size = 1  # sequences
n_head = 6  # heads
head_dim = 32  # of q, k and v
repeats = 15  # of each subject
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of q, k, v
seed = 1337  # of q, k, v

SUBJECTS: dict[str, Callable] = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    **ATTENTION,
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def inputs(T: int, dev: str, dt: torch.dtype) -> list[torch.Tensor]:
    """Random q, k, v (B, H, T, D)."""
    return [torch.randn(batch_size, n_head, T, head_dim, device=dev, dtype=dt, requires_grad=True) for _ in range(3)]


def error(name: str, dev: str, dt: torch.dtype) -> float:
    """The largest difference of a subject's output and gradients from the naive form's in float64, on 128 tokens."""
    x = inputs(128, dev, dt)
    exact = [t.detach().cpu().double().requires_grad_() for t in x]
    y, y_exact = SUBJECTS[name](*x), naive_attention(name if name in ATTENTION else "softmax", *exact)
    pairs = [
        (y, y_exact),
        *zip(
            torch.autograd.grad(y.sum(), x, materialize_grads=True),
            torch.autograd.grad(y_exact.sum(), exact),
            strict=True,
        ),
    ]
    return max((a.detach().cpu().double() - b).abs().max().item() for a, b in pairs)


def seconds(f: Callable, qkv: list[torch.Tensor], backward: bool) -> float:
    """Wall time of one forward, or one forward and backward."""
    for t in qkv:
        t.grad = None
    synchronize = getattr(torch, qkv[0].device.type).synchronize
    synchronize()
    begin = time.perf_counter()
    if backward:
        y = f(*qkv)
        y.backward(torch.ones_like(y))
    else:
        with torch.no_grad():
            f(*qkv)
    synchronize()
    return time.perf_counter() - begin


def main() -> None:
    dev, dt_name, _ = pick_device(device, dtype)
    dt = getattr(torch, dt_name)
    try:
        sizes = [int(n) for n in lengths.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(*sizes, repeats, batch_size, n_head, head_dim) < 1:
        raise ValueError(f"lengths, repeats and sizes must be positive integers; got --lengths={lengths}")
    torch.manual_seed(seed)
    print(f"{dev}, {dt_name}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads, ", end="")
    print(f"B {batch_size}, H {n_head}, D {head_dim}; medians of {repeats} interleaved repeats, ratio to sdpa")
    right = []
    for name in SUBJECTS:
        if name in ATTENTION and name not in ONE_QUERY:
            print(f"{name} has no line in ONE_QUERY: timed, but not checked")
            right.append(name)
        elif (e := error(name, dev, dt)) <= TOLERANCE[dt]:
            right.append(name)
        else:
            print(f"{name} is WRONG: it differs from the naive form by {e:.2g}; not timed")
    for backward in (False, True):
        print(f"\n{'forward + backward' if backward else 'forward':20}" + "".join(f"{f'n = {n}':>22}" for n in sizes))
        columns = []
        for n in sizes:
            qkv = inputs(n, dev, dt)
            for name in right:  # warm-up
                seconds(SUBJECTS[name], qkv, backward)
            times = {name: [] for name in right}
            for _ in range(repeats):
                for name in right:
                    times[name].append(seconds(SUBJECTS[name], qkv, backward))
            columns.append({name: statistics.median(t) for name, t in times.items()})
        for name in right:
            cells = [f"{c[name] * 1e3:10.2f} ms {c[name] / c.get('sdpa', c[name]):6.2f}x" for c in columns]
            print(f"{name:20}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
