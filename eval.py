"""Prints a model's loss over a whole split, in measures that compare models.

    python eval.py --out_dir=out-shakespeare-char
    python eval.py --init_from=gpt2 --dataset=shakespeare
    torchrun --standalone --nproc_per_node=4 eval.py --out_dir=out --split=test

Every token except the first is predicted once, from at least block_size - stride tokens (at the
start, from fewer).

Loss and perplexity per token compare models with the same tokenizer. Perplexity per word (Rae et
al. 2020) and bits per byte divide the same sum of -log p by the number of words or bytes of the
text. So they also compare models with different tokenizers, unless a tokenizer drops a part of the
text (SentencePiece drops line ends and repeated spaces).
"""

import math
from typing import Literal

from configurator import DTYPE, at_least_one, pick_device, run_script

import torch

from errors import UserError
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model
from training.distributed import connect, count, rank, say, summed, world

# Which model?
init_from = "resume"  # resume: the checkpoint in out_dir; gpt2, ..., a model of the hub, a folder
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the checkpoint: the lowest validation loss, or latest

# Which text?
dataset: str | None = None  # a folder in data/; None: the data that the model was trained on
split: Literal["train", "val", "test"] = "val"  # the part of the data set

# How much text does the model see at once?
block_size: int | None = None  # tokens per window; None: as in training; learned positions: no more
stride: int | None = None  # tokens between the starts of two windows; None: half of block_size

# What does it run on?
batch_size = 4  # windows that are computed together
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: DTYPE = "auto"  # auto: 16 bits on CUDA, else 32
backend = "auto"  # auto, nccl: nccl for tensors on CUDA, else gloo; or gloo, mpi


@torch.no_grad()
def main() -> None:
    at_least_one(batch_size=batch_size)
    dev, _, amp = pick_device(device, dtype)
    connect(backend)

    # the model
    model, tok, settings, about = open_model(init_from, out_dir, which)
    T = block_size or model.config.block_size
    model.crop_block_size(T)
    model.eval().to(dev)

    # the text
    name = dataset or settings.get("dataset")
    if not name:
        raise UserError(f"{init_from} names no data set: give one as --dataset=, a folder in data/")
    tokens = Tokens(folder_of(name), split, T)
    if tokens.meta["tokenizer"] != tok.meta:
        raise UserError(
            f"{name} was prepared with another tokenizer than this model's: prepare the text for it"
        )

    # the windows
    step = stride or T // 2 or 1
    if not 1 <= step <= T:
        raise UserError(f"stride={step} must be between 1 and block_size={T}")
    n = len(tokens) - 1
    say(
        f"{about}\n{split} of {name}: {n:,} targets; "
        f"windows of {T} tokens, {step} apart, on {count(world, 'process')}"
    )

    # the sum of -log p over the targets of this process, then of all
    nats = 0.0
    for x, y in tokens.strided(step, batch_size, rank=rank, world=world):
        with amp:
            _, loss = model(x.to(dev), y.to(dev))
        nats += loss.item() * int((y >= 0).sum())  # the loss is a mean over the targets
    nats = summed(torch.tensor(nats, dtype=torch.float64))

    say(
        f"loss                 {nats / n:.4f} nats per token\n"
        f"perplexity           {(nats / n).exp():.2f} per token"
    )
    entry = tokens.meta["files"][f"{split}.bin"]
    if words := entry.get("words"):  # not for prompts and answers
        say(
            f"perplexity           {(nats / words).exp():.2f} per word "
            f"({words:,} words between whitespace)\n"
            f"bits per byte        {nats / math.log(2) / entry['bytes']:.4f} "
            f"({entry['bytes']:,} bytes)"
        )


if __name__ == "__main__":
    run_script(globals())
    if world > 1:
        torch.distributed.destroy_process_group()
