"""What a run will need, for train.py --dry_run: parameters, FLOPs, memory of the weights, time."""

import re

import torch

from attention.cache import groups_of
from errors import UserError
from model import GPT, GPTConfig

# Vocabularies of data sets that are not prepared; all others have GPT-2's
VOCAB_SIZE = {"shakespeare_char": 65, "pg19": 10000}
MFU = 0.4  # the share of the peak that is reached; about what nanoGPT reaches on an A100
GPUS = {  # name: peak FLOP/s in bfloat16 or float16, without sparsity, from the data sheets
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}


def gpus_of(flag: str) -> tuple[int, str]:
    """(number, name) of a flag such as "8 x H100". Raises UserError for an unknown GPU."""
    match = re.fullmatch(r"([1-9]\d*) *x *(.+)", flag)
    if not match or match[2] not in GPUS:
        raise UserError(
            f"--gpus={flag!r} must be such as '8 x H100'; known GPUs are {', '.join(GPUS)}"
        )
    return int(match[1]), match[2]


def duration(seconds: float) -> str:
    """A time in a unit that fits: 90 s, 2.5 min, 12.0 hours, 11.0 days."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def num_params(model: GPT, non_embedding: bool = True) -> int:
    """The number of parameters; non_embedding: without embeddings that are not also the head."""
    embeddings = ["transformer.wpe."]
    if not model.config.tied:
        embeddings.append("transformer.wte.")
    left_out = tuple(embeddings) if non_embedding else ()
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(left_out))


def flops(model: GPT) -> int:
    """FLOPs per token, forward and backward: 6 N + 6 sum (D + Dv) keys (PaLM, appendix B).

    N: num_params. D, Dv: widths of a head's keys and values. keys: block_size for a long head and
    window + 1 for a short one; for a head of linear time, the number of keys that its chunks and
    running sums amount to. A layer that is a class of its own has its own flops_per_token (of the
    forward pass); what it does not say is not counted.
    """
    total = 6 * num_params(model)
    for block in model.transformer.h:
        total += 3 * getattr(block.attn, "flops_per_token", 0)
    for group in groups_of(model):
        D, Dv = group.widths
        keys = model.config.block_size
        if group.window is not None:
            keys = min(keys, group.window + 1)
        elif group.linear is not None:
            sums = 2 * group.linear.state_size(D, Dv) / (D + Dv)
            keys = min(keys, group.linear.chunk(D) + sums)
        total += 6 * len(group.heads) * (D + Dv) * keys
    return int(total)


def peak_flops(device: str, dtype: str) -> float | None:
    """The peak rate of a GPU in GPUS, in FLOP/s; None for other devices and in float32."""
    if not device.startswith("cuda") or dtype == "float32":
        return None
    name = f" {torch.cuda.get_device_name().replace('-', ' ')} "
    return next((rate for known, rate in GPUS.items() if f" {known} " in name), None)


def report(config: GPTConfig, settings: dict, n_tokens: int | None, world: int) -> str:
    """The lines of a dry run. settings: train.py's; n_tokens: of the train split, or None."""
    with torch.device("meta"):
        model = GPT(config)
    n = num_params(model, non_embedding=False)
    per_token = flops(model)
    rows = settings["batch_size"] * settings["gradient_accumulation_steps"]
    per_step = rows * config.block_size  # tokens
    total = per_step * settings["max_iters"]  # tokens
    epochs = f", {total / n_tokens:.2f} epochs of {n_tokens:,}" if n_tokens else ""
    gpus = ["A100", "H100"]
    if settings["gpus"]:
        world, gpu = gpus_of(settings["gpus"])
        gpus = [gpu]

    # bytes: a weight, its gradient, two numbers of AdamW's (Muon has one), and autocast's copy
    # (dtype=auto is 16 bits)
    held = (16 if settings["dtype"] == "float32" else 18) * n
    if settings["optimizer"] == "muon":
        held -= 4 * sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    if settings["parallel"] == "fsdp":
        held /= world
    work = per_token * total / (MFU * world)
    if config.activation_checkpointing:
        work *= 4 / 3  # a second forward pass
    times = [f"{duration(work / GPUS[gpu])} on {world} x {gpu}" for gpu in gpus]
    return "\n".join([
        f"parameters: {n:,}, {num_params(model):,} without position (and untied token) embeddings",
        f"FLOPs: {per_token:,} per token, forward and backward; "
        f"{per_token * per_step:.3g} per step; {per_token * total:.3g} in all",
        f"tokens: {per_step:,} per step ({rows} x {config.block_size}), "
        f"{total:,} in {settings['max_iters']:,} steps{epochs}",
        f"memory of a process: {held / 2**30:.2f} GiB for weights, gradients "
        f"and {settings['optimizer']}; activations come on top",
        f"time in half precision, at {MFU:.0%} of the peak rate: {', '.join(times)}",
    ])  # fmt: skip
