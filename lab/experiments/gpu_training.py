"""Where the time of a training step goes on a GPU, and what makes a step shorter: GPT-2 (124M).

    python -m lab.experiments.gpu_training --profile    # all rows; compilation takes longest
    python -m lab.experiments.gpu_training --only="plain,beta,laser"

The row `plain` trains as nanoGPT does: bfloat16, a micro-batch of 12, torch.compile, fused AdamW,
the SDPA kernel that PyTorch chooses, and a loss that is read after every step. Each other row
changes what its name says. All rows start from the same weights and see the same few batches of
random tokens. So the last column, the final loss, shows whether two rows compute the same (rows
with another batch size or attention do not). MFU is in percent of the GPU's peak, as in train.py's
log (0: the peak is not known). Each row is written to --out as soon as it is measured.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bench import clock, tried
from configurator import at_least_one, names, pick_device, run_script
from errors import UserError
from lab.experiments.results import check_writable, save
from model import GPT, GPTConfig
from training.estimate import flops, peak_flops
from training.optimizers import OPTIMIZER, Settings

# What is measured?
only = ""  # the rows to run, separated by commas; empty: all
size: Literal["gpt2", "shakespeare", "tiny"] = "gpt2"  # the model; tiny: a test of the script
profile = False  # also list the kernels that take most of the time in a step of the row plain
steps = 30  # steps per row; the first third is not timed
budget = 500.0  # seconds; after this time no new row begins, and the skipped rows are named
out = "gpu-training.json"  # the file of results
# What does it run on?
compile = True  # compile the model with torch.compile
device: Literal["cuda", "cpu"] = "cuda"  # cpu: to try the script
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # the precision of autocast

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
SHAKESPEARE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 97}
# {size: (fields of GPTConfig, sequences of a step)}
SIZES = {"gpt2": (GPT2, 12), "shakespeare": (SHAKESPEARE, 64), "tiny": (TINY, 2)}
BATCHES = 4  # batches of random tokens, which are used again and again


PLAIN = {
    "batch": 1,  # times the sequences of a step
    "wait": True,  # read the loss after each step
    "mode": None,  # of torch.compile
}
# What each row changes of PLAIN; the rest are fields of GPTConfig.
ROWS = {
    "plain": {},
    "no wait": {"wait": False},
    "batch x 2": {"batch": 2, "wait": False},
    "laser": {"attention": "laser"},
    "beta": {"attention": "beta"},
    "SSSSSL": {"heads": "SSSSSL"},
    "SSSSSL laser": {"heads": "SSSSSL", "attention": "laser"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


def new_model(row: dict, dev: str) -> GPT:
    """The model of a row, with the same first weights wherever the sizes are the same."""
    torch.manual_seed(1337)
    fields = SIZES[size][0] | {key: value for key, value in row.items() if key not in PLAIN}
    return GPT(GPTConfig(bias=False, **fields)).to(dev).train()


def measured(
    changes: dict, dev: str, amp: contextlib.AbstractContextManager, peak: float | None
) -> dict:
    """Train a model for a few steps; return tokens/s, MFU, memory, and what `timed` returns."""
    row = PLAIN | changes
    fields, sequences = SIZES[size]
    T = fields["block_size"]
    B = sequences * row["batch"]
    model = new_model(row, dev)
    (adamw,) = OPTIMIZER["adamw"](model, Settings(6e-4, (0.9, 0.95), 0.1))
    vocab_size = min(fields["vocab_size"], 50257)
    tokens = [torch.randint(vocab_size, (B, T + 1)).to(dev) for _ in range(BATCHES)]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x, y)[1]

    fast = torch.compile(loss_of, mode=row["mode"]) if compile else loss_of

    def step(i: int) -> Tensor:
        x = tokens[i % BATCHES]
        with amp:
            loss = fast(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if row["wait"]:
            loss.item()
        return loss.detach()

    cuda = dev.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = timed(step, dev)
    result["tokens_per_s"] = B * T / result["ms"] * 1e3
    result["mfu"] = flops(model) * result["tokens_per_s"] / peak if peak else 0.0
    result["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
    if profile and changes == {}:
        result["kernels"] = longest(step)
    return result


def timed(step: Callable, dev: str) -> dict:
    """Call step(i) for each step.

    "ms": the mean milliseconds of the last two thirds; "loss": the last loss; "first": the seconds
    of the first step.
    """
    began = clock(dev)
    step(0)
    first = clock(dev) - began
    warm = steps // 3
    for i in range(1, warm):
        step(i)
    began = clock(dev)
    for i in range(warm, steps):
        loss = step(i)
    return {"ms": (clock(dev) - began) / (steps - warm) * 1e3, "loss": loss.item(), "first": first}


def longest(step: Callable) -> list[dict]:
    """The kernels of three steps that take longest together, and their share of all kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        for i in range(3):
            step(i)
    # an operation of the host has the time of its kernels once more
    cuda = torch.autograd.DeviceType.CUDA
    times = {}
    for event in profiled.key_averages():
        if event.device_type == cuda and not event.is_user_annotation:
            times[event.key] = event.self_device_time_total
    total = sum(times.values())
    kernels = sorted(times, key=times.get, reverse=True)[:20]
    return [{"kernel": k[:90], "ms": times[k] / 3e3, "share": times[k] / total} for k in kernels]


def show(name: str, row: dict, plain: dict) -> None:
    """Print a row's line, and the kernels that it has."""
    speed = row["tokens_per_s"]
    line = f"{name:24}{row['ms']:12.2f}{speed:12,.0f}{speed / plain['tokens_per_s']:12.2f}"
    line += f"{row['mfu']:12.1%}{row['peak_bytes'] / 2**30:12.1f}"
    print(f"{line}{row['first']:10.0f} s{row['loss']:12.4f}", flush=True)
    for kernel in row.get("kernels", []):
        print(f"{kernel['share']:8.1%}{kernel['ms']:9.2f} ms  {kernel['kernel']}", flush=True)


def main() -> None:
    wanted = names(only, ROWS)
    at_least_one(steps=steps)
    check_writable(out)
    dev, name, amp = pick_device(device, dtype)
    if profile and (dev == "cpu" or "plain" not in wanted):
        raise UserError("--profile is of the row plain, on a GPU")
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    peak = peak_flops(dev, name)
    chip = torch.cuda.get_device_name() if dev.startswith("cuda") else "CPU"
    print(f"{chip}, torch {torch.__version__}, {name}")
    columns = ("ms", "tokens/s", "x plain", "MFU", "GiB", "first step", "loss")
    print(" " * 24 + "".join(f"{column:>12}" for column in columns))
    about = {"chip": chip, "torch": torch.__version__, "dtype": name, "flops": peak}
    rows = {}
    for key in wanted:
        if time.monotonic() - began > budget:
            print(f"{key:24}left out (--budget)")
            continue
        torch._dynamo.reset()
        gc.collect()  # a model that a cycle keeps alive would count as the next one's memory
        measure = functools.partial(measured, ROWS[key], dev, amp, peak)
        row = tried(key, measure, dev)
        if row is not None:
            rows[key] = row
            show(key, row, rows.get("plain", row))
            save(out, {"about": about, "rows": rows})


if __name__ == "__main__":
    run_script(globals())
