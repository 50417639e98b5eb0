"""What a run will need, for train.py --dry_run: parameters, FLOPs, memory of the weights, time."""

import torch

from attention.cache import heads_of
from errors import UserError
from model import GPT, GPTConfig

MFU = 0.4  # the share of the peak that is reached; about what nanoGPT reaches on an A100
GPUS = {  # name: peak FLOP/s in bfloat16 or float16, without sparsity, from the data sheets
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "T4": 65e12,
}


def duration(seconds: float) -> str:
    """A time in a unit that fits: 90 s, 2.5 min, 12.0 hours, 11.0 days."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def num_params(model: GPT, non_embedding: bool = True) -> int:
    """The number of parameters; non_embedding: without embeddings that are not also the head."""
    embeddings = "transformer.wpe" if model.config.tied else "transformer.w"  # or wpe and wte
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if not (non_embedding and name.startswith(embeddings))
    )


def flops(model: GPT) -> int:
    """FLOPs per token, forward and backward: 6 N + 12 sum D keys (PaLM, appendix B).

    N: num_params. D: the width of a head. keys: block_size for a long head and
    window + 1 for a short one; for a head of linear time, the number of keys that its chunks and
    running sums amount to. Of a layer that is a class of its own only the weights are counted.
    """
    total = 6 * num_params(model)
    c = model.config.resolved()
    D = c.head_dim
    for heads in heads_of(model):
        keys = c.block_size
        sums = heads.sums
        if heads.window is not None:
            keys = min(keys, heads.window + 1)
        elif sums and keys >= sums.linear_from(D) and not c.attn_dropout:
            keys = sums.chunk(D) + 2 * sums.tokens(D)
        total += 12 * heads.n * D * keys
    return int(total)


def mfu(model: GPT, device: str, dtype: str) -> float | None:
    """The share of a GPU's peak rate that one token per second takes.

    None if the GPU is not in GPUS, for other devices, and in float32.
    """
    if device.startswith("cuda") and dtype != "float32":
        name = f" {torch.cuda.get_device_name().replace('-', ' ')} "
        for known, peak in GPUS.items():
            if f" {known} " in name:
                return flops(model) / peak
    return None


def report(config: GPTConfig, settings: dict) -> str:
    """The lines of a dry run. settings: train.py's. Raises UserError for an unknown GPU."""
    number, _, gpu = settings["gpus"].partition(" x ")
    if gpu not in GPUS or not number.lstrip("0").isdecimal():
        raise UserError(
            f"--gpus={settings['gpus']!r} must be such as '8 x H100'; "
            f"known GPUs are {', '.join(GPUS)}"
        )
    with torch.device("meta"):
        model = GPT(config)

    # bytes: a weight, its gradient, two numbers of AdamW's, and a copy in 16 bits for autocast
    n = num_params(model, non_embedding=False)
    held = 18 * n
    if settings["parallel"] == "fsdp":
        held /= int(number)

    rows = settings["batch_size"] * settings["gradient_accumulation_steps"]
    tokens = rows * config.block_size * settings["max_iters"]
    work = flops(model) * tokens

    return f"""\
parameters: {n:,}, {num_params(model):,} without position (and untied token) embeddings; \
vocab_size={config.vocab_size}
FLOPs: {flops(model):,} per token, forward and backward; {work:.3g} in all
tokens: {tokens:,} in {settings["max_iters"]:,} steps of {rows} x {config.block_size}
memory of a process: {held / 2**30:.2f} GiB for weights, gradients and AdamW; \
activations come on top
time in half precision, at {MFU:.0%} of the peak rate: \
{duration(work / (MFU * int(number) * GPUS[gpu]))} on {settings["gpus"]}"""
