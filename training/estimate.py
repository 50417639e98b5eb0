"""What a run will need, for train.py --dry_run: parameters, FLOPs, memory of the weights, time."""

import torch

from attention.forms import linear
from attention.sums import SUMS
from model import GPT, GPTConfig

VOCAB_SIZE = {"shakespeare_char": 65, "pg19": 10000}  # of data sets that are not prepared; all others have GPT-2's
MFU = 0.4  # the share of the peak that is reached; about what nanoGPT reaches on an A100
PEAK_FLOPS = {  # of the tensor cores in bfloat16 or float16, dense, from the data sheets
    "A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def num_params(model: GPT, non_embedding: bool = True) -> int:
    """How many parameters a model has; non_embedding: not counting embeddings that are not also the head."""
    embeddings = ("transformer.wpe.",) if model.config.tied else ("transformer.wpe.", "transformer.wte.")
    left_out = embeddings if non_embedding else ()
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(left_out))


def flops(model: GPT) -> int:
    """FLOPs per token, forward and backward: 6 N + 6 (D + Dv) sum over heads of keys (PaLM, appendix B).

    N: num_params. D, Dv: widths of a head's keys and values. keys: block_size for a long head and window + 1 for a
    short one; for a long head of linear time, the number of keys that its chunks and running sums amount to.
    """
    c = model.config.resolved()
    D = c.head_dim
    Dv = 2 * D if c.differential else D
    long = c.block_size
    if linear(c):
        long = min(long, SUMS[c.attention].chunk(D) + 2 * SUMS[c.attention].state_size(D, Dv) / (D + Dv))
    short = min(c.block_size, (c.window or 0) + 1)
    letters = "".join(c.layer_heads(layer) for layer in range(c.n_layer))
    keys = letters.count("L") * long + letters.count("S") * short
    return int(6 * num_params(model) + 6 * (D + Dv) * keys)


def peak_flops(device: str, dtype: str) -> float | None:
    """The peak rate of a GPU in PEAK_FLOPS, in FLOP/s; None for others and in float32."""
    if not device.startswith("cuda") or dtype == "float32":
        return None
    name = f" {torch.cuda.get_device_name().replace('-', ' ')} "
    return next((rate for known, rate in PEAK_FLOPS.items() if f" {known} " in name), None)


def report(config: GPTConfig, run: dict, n_tokens: int | None, device: str, dtype: str, world: int) -> str:
    """The lines of a dry run. run: train.py's settings; n_tokens: of the train split, if it is there."""
    with torch.device("meta"):
        model = GPT(config)
    n, per_token = num_params(model, non_embedding=False), flops(model)
    rows = run["batch_size"] * run["gradient_accumulation_steps"]
    step = rows * config.block_size  # tokens, as total
    total = step * run["max_iters"]
    epochs = f", {total / n_tokens:.2f} epochs of {n_tokens:,}" if n_tokens else ""
    matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    per_weight = 16 if dtype == "float32" else 18  # bytes: itself, its gradient, two of AdamW's; autocast's copy
    saved = 4 * matrices if run["optimizer"] == "muon" else 0  # Muon has one number per weight, the others two
    held = (per_weight * n - saved) / (world if run["parallel"] == "fsdp" else 1) / 2**30  # GiB
    rates = {gpu: PEAK_FLOPS[gpu] for gpu in ("A100", "H100")}
    if peak := peak_flops(device, dtype):
        rates = {torch.cuda.get_device_name(): peak} | rates
    work = per_token * total / (MFU * world)  # seconds at a rate of one FLOP/s
    return "\n".join([
        f"parameters: {n:,}, {num_params(model):,} without position (and untied token) embeddings",
        f"FLOPs: {per_token:,} per token, forward and backward; {per_token * step:.3g} per step; "
        f"{per_token * total:.3g} in all",
        f"tokens: {step:,} per step ({rows} x {config.block_size}), {total:,} in {run['max_iters']:,} steps{epochs}",
        f"memory of a process: {held:.2f} GiB for weights, gradients and {run['optimizer']}; what a micro-batch needs "
        "comes on top",
        f"time, at {MFU:.0%} of the rate of matrix products: "
        + ", ".join(f"{work / rate / 3600:,.2f} hours on {world} x {gpu}" for gpu, rate in rates.items()),
    ])  # fmt: skip
