"""What a run will need, for train.py --dry_run: parameters, FLOPs, memory, time."""

import time
from dataclasses import replace

import torch

from configurator import pick_device
from model import GPT, GPTConfig

VOCAB_SIZE = {"shakespeare_char": 65, "pg19": 10000}  # of data that are not prepared; the others have GPT-2's
MFU = 0.4  # of the peak: what nanoGPT reaches on an A100, about
PEAK_FLOPS = {  # of the tensor cores in bfloat16 or float16, dense, from the data sheets
    "A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
MEASURED = 512  # tokens of one row, about and at most, on which activations are measured


def peak_flops(device: str, dtype: str) -> float | None:
    """The peak rate of a GPU that is known, in FLOP/s; None for others and in float32."""
    if not device.startswith("cuda") or dtype == "float32":
        return None
    name = f" {torch.cuda.get_device_name().replace('-', ' ')} "
    return next((flops for known, flops in PEAK_FLOPS.items() if f" {known} " in name), None)


def kept_bytes(config: GPTConfig, dtype: str) -> int:
    """Bytes that autograd keeps of a forward pass over a row of block_size tokens, in dtype (autocast), on a CPU.

    Without weights, or their copies in dtype.
    """
    model, kept = GPT(config).train(), {}
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    linears = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    copies = 0 if dtype == "float32" else 2 * sum(p.numel() for p in linears)

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    idx = torch.randint(config.vocab_size, (1, config.block_size))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), pick_device("cpu", dtype)[2]:
        _, loss = model(idx, idx)
    del loss
    return sum(kept.values()) - copies


def activation_bytes(config: GPTConfig, dtype: str) -> float:
    """Bytes per token of a micro-batch that a training step needs beside weights, gradients and optimizer.

    What autograd keeps of one layer and of two is measured, layer by layer of each kind, and of two small
    vocabularies, so it holds for any core (but where attention weights are dropped, which takes more the longer the
    text is, and on a GPU less than here, as do biases by distance of several long rows); then two gradients of the
    logits in float32, when the backward pass begins.
    """
    most = MEASURED * (4 if config.position == "t5" else 1)  # whose bias is kept up to some length
    T = min(config.block_size, most - 64 + config.block_size % 64)  # as many more than chunks of 64
    small = replace(config, block_size=T, window=config.span, nope_long=False, vocab_size=64)
    kinds, layers = {}, 0.0
    for letters in map(config.layer_heads, range(config.n_layer)):
        if letters not in kinds:
            alike = {
                "heads": letters,
                "window": config.span if "S" in letters else None,
                "activation_checkpointing": False,
            }
            one, two = (kept_bytes(replace(small, n_layer=n, **alike), dtype) for n in (1, 2))
            more = kept_bytes(replace(small, n_layer=1, vocab_size=128, **alike), dtype) - one
            kinds[letters] = (two - one) / T
            rest = (2 * one - two + more * (config.vocab_size - 64) / 64) / T
        layers += kinds[letters]
    if config.activation_checkpointing:  # what goes into each layer, and one layer as a whole
        layers = 4 * config.n_embd * config.n_layer + max(kinds.values())
    return layers + rest + 8 * config.vocab_size


def matmul_rate(device: str, dtype: str) -> float:
    """FLOP/s of a large matrix product of random numbers on this device, in a quarter of a second."""
    size, at_once = (8192, 10) if device.startswith("cuda") else (1024, 1)
    x, n = torch.randn(size, size, device=device, dtype=getattr(torch, dtype)), 0
    (x @ x)[0, 0].item()
    began = time.perf_counter()
    while time.perf_counter() - began < 0.25:
        for _ in range(at_once):
            y = x @ x
        y[0, 0].item()  # waits for it
        n += at_once
    return n * 2 * size**3 / (time.perf_counter() - began)


def duration(seconds: float) -> str:
    """For people: 1.2 s, 34 s, 5.6 min, 78 days, 9,012 years."""
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("h", 3600), ("min", 60), ("s", 0.5)):
        if seconds >= 2 * size:
            n = seconds / max(1, size)
            return f"{n:,.{0 if n >= 10 else 1}f} {unit}"
    return "less than 1 s"


def report(config: GPTConfig, run: dict, n_tokens: int | None, device: str, dtype: str, world: int) -> str:
    """The lines of a dry run. run: train.py's settings; n_tokens: of the train split, if it is there."""
    with torch.device("meta"):
        model = GPT(config)
    n, matrices = model.num_params(False), sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    rows = run["batch_size"] * run["gradient_accumulation_steps"]
    micro = min(run["batch_size"], rows // world) * config.block_size
    step = rows * config.block_size
    total = step * run["max_iters"]
    state = 2 * n - (matrices if run["optimizer"] == "muon" else 0)  # numbers of the optimizer: Muon has one for them
    share = world if run["parallel"] == "fsdp" else 1
    copies = 0 if dtype == "float32" else 2 * n  # which autocast makes of the weights
    fixed, acts = (4 * (2 * n + state) + copies) / share, activation_bytes(config, dtype) * micro
    flops = model.flops()
    gib = 2**30
    lines = [
        f"parameters: {n:,}, {model.num_params():,} without position (and untied token) embeddings",
        f"FLOPs: {flops:,} per token, forward and backward; {flops * step:.3g} per step; {flops * total:.3g} in all",
        f"tokens: {step:,} per step ({rows} x {config.block_size}), {total:,} in {run['max_iters']:,} steps"
        + (f", {total / n_tokens:.2f} epochs of {n_tokens:,}" if n_tokens else ""),
        f"memory of a process, about: {(fixed + acts) / gib:.2f} GiB = {fixed / gib:.2f} for weights, gradients and "
        f"{run['optimizer']}{f', a share of {world},' if share > 1 else ''} + {acts / gib:.2f} for {micro:,} tokens "
        f"at a time, in {dtype}",
    ]
    peak = peak_flops(device, dtype)
    rate = peak or matmul_rate(device, dtype)
    here = (
        f"{world} x {torch.cuda.get_device_name()}" if peak else f"{world} process(es) on this {device.split(':')[0]}"
    )
    mine = duration(flops * total / (MFU * rate * world))
    lines.append(f"time, at {MFU:.0%} of the rate of matrix products: {mine} on {here} ({rate / 1e12:.3g} TFLOP/s)")
    others = [
        f"{duration(flops * total / (MFU * PEAK_FLOPS[gpu] * world))} on {world} x {gpu}" for gpu in ("A100", "H100")
    ]
    return "\n".join([*lines, f"                                             {', '.join(others)}"])
