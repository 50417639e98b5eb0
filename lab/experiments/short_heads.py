"""Which function computes short heads fastest on a GPU: PyTorch's own, with windows, or our blocks?

    python -m lab.experiments.short_heads          # a table for docs/benchmarks.md
    python -m lab.experiments.short_heads --windows=100 --lengths=8192

Forward and backward in bfloat16. q, k and v are views as a layer makes them. The outputs and
gradients of each function with a window are compared with those of the blocks: "error".
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention.fast import in_blocks, sdpa, windowed
from bench import interleaved, outputs, peak_memory, stopwatch, tried
from configurator import at_least_one, pick_device, positive, run_script

lengths = "1024,2048,8192,32768"  # tokens of a sequence
windows = "100,1024"  # tokens that a head sees before its own
widths = "64,128"  # of a head
n_embd = 768  # the heads' widths together
tokens = 32768  # tokens at once, in one or several sequences
repeats = 9  # rounds
device = "cuda"  # cpu: to try the script

compiled_flex = torch.compile(flex_attention, dynamic=True)


@cache
def block_mask(T: int, window: int, dev: str) -> object:
    """FlexAttention's mask of a window."""

    def seen(b, h, i, j):
        return (i >= j) & (i - j <= window)

    return create_block_mask(seen, None, None, T, T, device=dev)


def flex(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """FlexAttention, compiled."""
    mask = block_mask(q.shape[-2], window, str(q.device))
    return compiled_flex(q, k, v, block_mask=mask)


def by(backend: SDPBackend) -> Callable:
    """All keys, by one of PyTorch's kernels."""

    def attend(q, k, v, window):
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return attend


ROWS = {
    "blocks": in_blocks(sdpa),
    "a window of FlashAttention": windowed,
    "FlexAttention": flex,
    "all keys": lambda q, k, v, window: sdpa(q, k, v),
    "all keys, flash": by(SDPBackend.FLASH_ATTENTION),
    "all keys, cuDNN": by(SDPBackend.CUDNN_ATTENTION),
}


def table(dev: str, width: int, T: int, window: int) -> None:
    """Print the times of all rows at this size."""
    shape = max(1, tokens // T), T, n_embd // width, width
    x = [torch.randn(shape, device=dev).bfloat16().transpose(1, 2) for _ in range(4)]
    x = [t.requires_grad_() for t in x]  # q, k, v and dy
    tasks = {}
    for name, attend in ROWS.items():

        def task(attend: Callable = attend) -> list[Tensor]:
            return outputs(lambda q, k, v: attend(q, k, v, window=window), x)

        tasks[name] = task
    right = {name: tried(name, task, dev) for name, task in tasks.items()}
    tasks = {name: task for name, task in tasks.items() if right[name]}
    timed = {
        name: lambda task=task: {"ms": stopwatch(dev, task)[0]} for name, task in tasks.items()
    }
    print(f"\n{T} tokens, a window of {window}, heads {width} wide")
    for name, rounds in interleaved(timed, dev, repeats).items():
        ms = sorted(row["ms"] for row in rounds)[len(rounds) // 2]
        memory = peak_memory(tasks[name], dev) / 2**20
        pairs = zip(right[name], right["blocks"], strict=True)
        error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        words = "" if name.startswith("all") else f", error {error:.1e}"
        print(f"{name:28}{ms:9.2f} ms{memory:8.0f} MiB{words}", flush=True)


def main() -> None:
    at_least_one(tokens=tokens, repeats=repeats)
    dev, _, _ = pick_device(device, "auto")
    torch.manual_seed(1337)
    for width in positive("widths", widths):
        for T in positive("lengths", lengths):
            for window in positive("windows", windows):
                if window < T:
                    table(dev, width, T, window)


if __name__ == "__main__":
    run_script(globals())
