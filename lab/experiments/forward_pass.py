"""Times the forward pass of the long-short paper's model, as its Table 1 does, for each attention.

    python -m lab.experiments.forward_pass                     # the table of docs/benchmarks.md
    python -m lab.experiments.forward_pass --device=cuda --dtype=bfloat16 --tokens=32768

The forward pass ends with the logits of the last token. A short head sees 50 tokens before its own,
or 100 where the text is longer than 2048 tokens. Times and ratios are as in bench.py's tables.
"""

from functools import partial

import torch

from bench import LS_MODEL, interleaved, milliseconds, models, table
from configurator import at_least_one, pick_device, positive, run_script
from lab.experiments.results import check_writable, save

# How large are the inputs?
lengths = "2048,8192"  # sequence lengths in tokens
batch_size = 2  # sequences at once
tokens = 0  # tokens at once: sets the number of sequences instead of batch_size; 0: batch_size does
heads = "SSSSSL"  # in rows with short heads, a letter for each head of a layer: S short, L long
# How exact?
repeats = 9  # rounds; in each round every model runs once
# Where do the results go?
out = "forward-pass.json"  # the file of results
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype = "auto"  # auto: bfloat16 or float16 on CUDA, else float32; or one of these three
seed = 1337  # decides the random numbers: weights and tokens


def measure(dev: str, amp: object, n: int) -> list[dict]:
    """Time a forward pass of B sequences of n tokens; print a table and return its rows."""
    B = max(1, tokens // n) if tokens else batch_size
    x = torch.randint(LS_MODEL["vocab_size"], (B, n), device=dev)

    @torch.no_grad()
    def forward(gpt):
        with amp:
            gpt(x)

    tasks = {}
    for name, gpt in models(dev, heads, block_size=n, **LS_MODEL).items():
        tasks[name] = partial(milliseconds, dev, forward, gpt)
    rounds = interleaved(tasks, dev, repeats)
    return table("forward pass", {"n": n, "batch": B}, rounds, {})


def main() -> None:
    at_least_one(batch_size=batch_size, repeats=repeats)
    check_writable(out)
    dev, precision, amp = pick_device(device, dtype)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    about = {"device": dev, "dtype": precision, "torch": torch.__version__}
    rows = []
    for n in positive("lengths", lengths):
        rows += measure(dev, amp, n)
        save(out, {"about": about, "model": rows})


if __name__ == "__main__":
    run_script(globals())
