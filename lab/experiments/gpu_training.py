"""Where the time of a training step goes on a GPU, and what makes a step shorter: GPT-2 (124M), bfloat16.

    python -m lab.experiments.gpu_training --profile    # all rows; compilation takes longest
    python -m lab.experiments.gpu_training --only="plain,cudnn,chunks"

The row `plain` trains as nanoGPT does: a micro-batch of 12, torch.compile, fused AdamW, the SDPA kernel that PyTorch
chooses, the logits of all tokens at once, and a loss that is read after every step. Each other row changes what its
name says. All rows start from the same weights and see the same few batches of random tokens. So the last column, the
final loss, shows whether two rows compute the same (rows with another batch size or attention do not). MFU is in
percent of the GPU's peak, as in train.py's log (0: the peak is not known). Each row is written to --out as soon as it
is measured.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch._functorch.config
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bench import clock, tried
from configurator import at_least_one, names, pick_device
from errors import UserError
from lab.experiments.results import check_writable, save, start
from model import ATTENTION, GPT, GPTConfig
from training.estimate import flops, peak_flops
from training.optimizers import OPTIMIZER, Settings

# What is measured?
only = ""  # the rows to run, separated by commas; empty: all
size: Literal["gpt2", "shakespeare", "tiny"] = "gpt2"  # of the model: GPT-2 (124M), nanoGPT's Shakespeare, a test
profile = False  # also list the kernels that take most of the time in a step of the row plain
steps = 30  # steps per row; the first third is not timed
budget = 500.0  # seconds; after this time no new row begins, and the skipped rows are named
out = "gpu-training.json"  # the file of results
# What does it run on?
compile = True  # compile the model with torch.compile
device: Literal["cuda", "cpu"] = "cuda"  # cpu: to try the script
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # the precision of autocast

SIZES = {  # of the model, and the sequences of a step
    "gpt2": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}, 12),
    "shakespeare": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65}, 64),
    "tiny": ({"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 97}, 2),
}
BATCHES = 4  # batches of random tokens, which are used again and again
CHUNKS = 8  # number of parts in which the row chunks computes the loss


def in_chunks(model: GPT, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of some tokens at a time, whose logits are computed again in the backward pass."""

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(h).float(), y, reduction="sum")

    h = model.hidden(x).flatten(0, 1)
    y = y.flatten()
    parts = zip(h.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)
    return sum(checkpoint(part, *few, use_reentrant=False) for few in parts) / len(y)


LOSS: dict[str, Callable] = {
    "model": lambda model, x, y: model(x, y)[1],
    "bfloat16": lambda model, x, y: F.cross_entropy(model.lm_head(model.hidden(x)).flatten(0, 1), y.flatten()),
    "chunks": in_chunks,
    "linear": lambda model, x, y: F.linear_cross_entropy(
        model.hidden(x).flatten(0, 1), model.lm_head.weight, y.flatten()
    ),
}

# What each row changes: backend, loss, mode (of torch.compile), batch (times batch_size), wait, triton; the rest are
# fields of GPTConfig.
ROWS: dict[str, dict] = {
    "plain": {},
    "no wait": {"wait": False},
    "batch x 2": {"batch": 2, "wait": False},
    "batch x 4": {"batch": 4, "wait": False},
    "cudnn": {"backend": SDPBackend.CUDNN_ATTENTION},
    "flash": {"backend": SDPBackend.FLASH_ATTENTION},
    "triton": {"triton": True},
    "logits in bfloat16": {"loss": "bfloat16"},
    "chunks": {"loss": "chunks"},
    "linear cross-entropy": {"loss": "linear"},
    "vocabulary of 50257": {"vocab_size": 50257},
    "laser": {"attention": "laser"},
    "laser triton": {"attention": "laser", "triton": True},
    "beta": {"attention": "beta"},
    "beta triton": {"attention": "beta", "triton": True},
    "SSSSSL": {"heads": "SSSSSL"},
    "SSSSSL triton": {"heads": "SSSSSL", "triton": True},
    "SSSSSL laser": {"heads": "SSSSSL", "attention": "laser"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}

PLAIN = {"batch": 1, "wait": True, "loss": "model", "backend": None, "mode": None, "triton": False}


def new_model(row: dict, dev: str) -> GPT:
    """The model of a row, with the same first weights wherever the sizes are the same."""
    torch.manual_seed(1337)
    fields = SIZES[size][0] | {k: v for k, v in row.items() if k not in PLAIN}
    model = GPT(GPTConfig(bias=False, **fields)).to(dev).train()
    if row["triton"]:
        from attention import kernels  # Triton is not everywhere

        kernels.use(model, ATTENTION[model.config.attention])
    return model


def measured(changes: dict, dev: str, amp: contextlib.AbstractContextManager, peak: float | None) -> dict:
    """Trains a model for a few steps; tokens/s, memory, the last loss."""
    row, (fields, sequences) = PLAIN | changes, SIZES[size]
    model, block_size = new_model(row, dev), fields["block_size"]
    adamw = OPTIMIZER["adamw"](model, Settings(6e-4, (0.9, 0.95), 0.1))[0]
    B = sequences * row["batch"]
    tokens = [torch.randint(min(fields["vocab_size"], 50257), (B, block_size + 1)).to(dev) for _ in range(BATCHES)]
    backend = contextlib.nullcontext if row["backend"] is None else functools.partial(sdpa_kernel, row["backend"])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSS[row["loss"]](model, x, y)

    fast = torch.compile(loss_of, mode=row["mode"]) if compile else loss_of

    def step(i: int) -> torch.Tensor:
        x = tokens[i % BATCHES]
        with amp, backend():
            loss = fast(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if row["wait"]:
            loss.item()
        return loss.detach()

    cuda = dev == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = timed(step, dev)
    result["tokens_per_s"] = B * block_size / result["ms"] * 1e3
    result["mfu"] = flops(model) * result["tokens_per_s"] / peak if peak else 0.0
    result["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
    if profile and changes == {}:
        result["kernels"] = longest(step)
    return result


def timed(step: Callable, dev: str) -> dict[str, float]:
    """Calls step(i) for each step. The mean milliseconds of the last two thirds, the last loss, the first's seconds."""
    began = clock(dev)
    step(0)
    first, warm = clock(dev) - began, steps // 3
    for i in range(1, warm):
        step(i)
    began = clock(dev)
    for i in range(warm, steps):
        loss = step(i)
    return {"ms": (clock(dev) - began) / (steps - warm) * 1e3, "loss": loss.item(), "first": first}


def longest(step: Callable) -> list[dict]:
    """The kernels of three steps that take longest together, and their share of all."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for i in range(3):
            step(i)
    device = torch.autograd.DeviceType.CUDA  # an operation of the host has the time of its kernels once more
    events = [e for e in found.key_averages() if e.device_type == device and not e.is_user_annotation]
    total = sum(e.self_device_time_total for e in events)
    events = sorted(events, key=lambda e: -e.self_device_time_total)[:20]
    return [
        {"kernel": e.key[:90], "ms": e.self_device_time_total / 3e3, "share": e.self_device_time_total / total}
        for e in events
    ]


def main() -> None:
    wanted = names(only, ROWS)
    at_least_one(steps=steps)
    check_writable(out)
    dev, name, amp = pick_device(device, dtype)
    if profile and (dev == "cpu" or "plain" not in wanted):
        raise UserError("--profile is of the row plain, on a GPU")
    torch._functorch.config.enable_autograd_cache = False  # it would not notice that another SDPA kernel is asked for
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    peak = peak_flops(dev, name)
    chip = torch.cuda.get_device_name() if dev == "cuda" else "CPU"
    print(f"{chip}, torch {torch.__version__}, {name}")
    columns = "ms", "tokens/s", "x plain", "MFU", "GiB", "first step", "loss"
    print(f"{'':24}" + "".join(f"{c:>12}" for c in columns))
    results = {"about": {"chip": chip, "torch": torch.__version__, "dtype": name, "flops": peak}, "rows": {}}
    for key in wanted:
        if time.monotonic() - began > budget:
            print(f"{key:24}left out (--budget)")
            continue
        torch._dynamo.reset()
        gc.collect()  # a model that a cycle keeps alive would count as the next one's memory
        row = tried(key, functools.partial(measured, ROWS[key], dev, amp, peak), dev, foreign="backend" in ROWS[key])
        if row is None:
            continue
        results["rows"][key] = row
        times = row["tokens_per_s"] / results["rows"].get("plain", row)["tokens_per_s"]
        print(
            f"{key:24}{row['ms']:12.2f}{row['tokens_per_s']:12,.0f}{times:12.2f}{row['mfu']:12.1%}"
            f"{row['peak_bytes'] / 2**30:12.1f}{row['first']:10.0f} s{row['loss']:12.4f}",
            flush=True,
        )
        for kernel in row.get("kernels", []):
            print(f"{kernel['share']:8.1%}{kernel['ms']:9.2f} ms  {kernel['kernel']}", flush=True)
        save(out, results)


if __name__ == "__main__":
    start(globals())
