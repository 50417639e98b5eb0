"""Which function computes short heads fastest on a GPU: PyTorch's own, with windows, or our blocks?

    python -m lab.experiments.short_heads          # the table of docs/benchmarks.md
    python -m lab.experiments.short_heads --windows=100 --lengths=8192

Forward and backward in bfloat16. "error" is the largest difference from the blocks, of the output
and the three gradients; the row "all keys" is another function, so it differs.
"""

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention.fast import in_blocks, sdpa, windowed
from bench import interleaved, outputs, peak_memory, table, tried
from configurator import at_least_one, pick_device, positive, run_script
from lab.experiments.times import milliseconds

lengths = "1024,2048,8192,32768"  # tokens of a sequence
windows = "100,1024"  # tokens that a head sees before its own
widths = "64,128"  # of a head
n_embd = 768  # the heads' widths together
tokens = 32768  # tokens at once, in one or several sequences
repeats = 9  # rounds
device = "cuda"  # cpu: to try the script

compiled_flex = torch.compile(flex_attention, dynamic=True)


@cache
def block_mask(T: int, window: int, dev: torch.device) -> object:
    """FlexAttention's mask of a window."""

    def seen(b, h, i, j):
        return (i >= j) & (i - j <= window)

    return create_block_mask(seen, None, None, T, T, device=dev)


def flex(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """FlexAttention, compiled."""
    return compiled_flex(q, k, v, block_mask=block_mask(q.shape[-2], window, q.device))


def all_keys(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """What a window has to beat: SDPA, by the kernel that PyTorch chooses."""
    return sdpa(q, k, v)


ROWS = {
    "blocks": in_blocks(sdpa),
    "varlen_attn": windowed,
    "FlexAttention": flex,
    "all keys": all_keys,
}


def measure(dev: str, width: int, T: int, window: int) -> None:
    """Print the times of all rows at this size."""
    B = max(1, tokens // T)
    new = partial(torch.randn, B, T, n_embd // width, width, device=dev, dtype=torch.bfloat16)
    x = [new(requires_grad=True).transpose(1, 2) for _ in range(4)]  # views, as a layer makes them
    tasks = {}
    found = {}
    extra = {}
    for name, attend in ROWS.items():
        task = partial(outputs, partial(attend, window=window), x)
        found[name] = tried(name, task, dev)
        if found[name]:
            tasks[name] = partial(milliseconds, dev, task)
            pairs = zip(found[name], found["blocks"], strict=True)
            errors = [(a - b).norm() / b.norm() for a, b in pairs]
            extra[name] = {"MiB": peak_memory(task, dev) >> 20, "error": max(errors).item()}
    about = {"n": T, "window": window, "width": width}
    table("short heads", about, interleaved(tasks, dev, repeats), extra)


def main() -> None:
    at_least_one(tokens=tokens, repeats=repeats)
    dev, _, _ = pick_device(device, "auto")
    torch.manual_seed(1337)
    for width in positive("widths", widths):
        for T in positive("lengths", lengths):
            for window in positive("windows", windows):
                measure(dev, width, T, window)


if __name__ == "__main__":
    run_script(globals())
