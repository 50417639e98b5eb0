"""What a run will need, for train.py --dry_run: parameters, FLOPs, memory of the weights, time."""

import math
import re

import torch

from attention.forms import linear
from attention.sums import SUMS
from choices import ACTIVATION
from errors import UserError
from model import GPT, GPTConfig

VOCAB_SIZE = {"shakespeare_char": 65, "pg19": 10000}  # of data sets that are not prepared; all others have GPT-2's
ACTIVATIONS = {"float32": (32, 8), "bfloat16": (28, 4), "float16": (28, 4)}  # bytes per token and layer: see report
LAUNCH = 0.01  # seconds that a GPU needs for the launches of a step, roughly
MFU = 0.4  # the share of the peak that is reached; about what nanoGPT reaches on an A100
GPUS = {  # name: FLOP/s of the tensor cores in bfloat16 or float16, dense, from the data sheets; GiB (A100: of 40)
    "A100": (312e12, 40), "H100 PCIe": (756e12, 80), "H100 NVL": (835e12, 94), "H100": (989e12, 80),
    "H200": (989e12, 141), "B200": (2250e12, 180), "L40S": (362e12, 48), "L4": (121e12, 24), "A10": (125e12, 24),
    "V100": (125e12, 16), "T4": (65e12, 16),
}  # fmt: skip


def gpus_of(flag: str) -> tuple[int, str]:
    """(number, name) of a flag such as "8 x H100". Raises UserError for a GPU that is not in GPUS."""
    found = re.fullmatch(r"([1-9]\d*) *x *(.+)", flag)
    if not found or found[2] not in GPUS:
        raise UserError(f'--gpus={flag!r} must be such as "8 x H100"; known GPUs are {", ".join(GPUS)}')
    return int(found[1]), found[2]


def duration(seconds: float) -> str:
    """A time in a unit that fits: 90 s, 2.5 min, 12.0 hours, 11.0 days."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


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
    """The peak rate of a GPU in GPUS, in FLOP/s; None for others and in float32."""
    if not device.startswith("cuda") or dtype == "float32":
        return None
    name = f" {torch.cuda.get_device_name().replace('-', ' ')} "
    return next((rate for known, (rate, _) in GPUS.items() if f" {known} " in name), None)


def report(config: GPTConfig, run: dict, n_tokens: int | None, device: str, dtype: str, world: int) -> str:
    """The lines of a dry run. run: train.py's settings; n_tokens: of the train split, if it is there."""
    world, gpu = gpus_of(run["gpus"]) if run["gpus"] else (world, None)
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
    c, (of_channel, of_hidden) = config.resolved(), ACTIVATIONS[dtype]  # what softmax keeps of a channel, of an MLP's
    layer = of_channel * c.n_embd + of_hidden * c.n_hidden * (1 + ACTIVATION[c.mlp][1])
    kept = 4 * c.n_embd * c.n_layer + layer if c.activation_checkpointing else layer * c.n_layer  # bytes per token
    of_row = config.block_size * (kept + 12 * c.vocab_size) / 2**30  # with the logits and their gradient
    batch_size = min(run["batch_size"], math.ceil(rows / world))
    micro = f"{batch_size * of_row:.2f} for a micro-batch of {batch_size}"
    if gpu:
        micro += f", of {GPUS[gpu][1]} GiB"
        if held + batch_size * of_row > 0.9 * GPUS[gpu][1]:
            micro += (
                ": too much. Try a smaller --batch_size with a larger --gradient_accumulation_steps, --parallel=fsdp"
            )
    rates = {name: GPUS[name][0] for name in ([gpu] if gpu else ["A100", "H100"])}
    if not gpu and (peak := peak_flops(device, dtype)):
        rates = {torch.cuda.get_device_name(): peak} | rates
    work = per_token * total / (MFU * world) * (4 / 3 if c.activation_checkpointing else 1)  # seconds at one FLOP/s
    times = {name: max(work / rate, LAUNCH * run["max_iters"]) for name, rate in rates.items()}
    return "\n".join([
        f"parameters: {n:,}, {num_params(model):,} without position (and untied token) embeddings",
        f"FLOPs: {per_token:,} per token, forward and backward; {per_token * step:.3g} per step; "
        f"{per_token * total:.3g} in all",
        f"tokens: {step:,} per step ({rows} x {config.block_size}), {total:,} in {run['max_iters']:,} steps{epochs}",
        f"memory of a process: {held:.2f} GiB for weights, gradients and {run['optimizer']}, roughly {micro}",
        f"time in half precision, at {MFU:.0%} of the rate of matrix products and at least {LAUNCH:g} s a step: "
        + ", ".join(f"{duration(seconds)} on {world} x {name}" for name, seconds in times.items()),
    ])  # fmt: skip
