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

import torch

from configurator import at_least_one, pick_device, run_script
from errors import NotFinite, UserError
from text.dataset import Tokens, folder_of, positions
from training.checkpoint import open_model
from training.distributed import by_all, connect, count, rank, say, world

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
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits on CUDA, else 32
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # auto, nccl: nccl on CUDA, else gloo


@torch.no_grad()
def _nats(model, tokens, stride, eot, dev, amp):
    """Return the sum of -log p over this process's share of the targets: all tokens but the first.

    eot: the token between documents, which do not see each other; None: they do.
    """
    total = 0.0
    for x, y in tokens.strided(stride, batch_size, rank=rank, world=world):
        pos = None if eot is None else positions(x, eot).to(dev)
        with amp:
            _, loss = model(x.to(dev), y.to(dev), pos=pos)
        total += loss.item() * int((y >= 0).sum())  # the loss is a mean over the targets
    return total


def perplexity(nats: float) -> str:
    """exp(nats), in digits. A text without spaces is one word, whose perplexity is too large."""
    return f"{math.exp(nats):.2f}" if nats < 690 else "above 1e299"


def main() -> None:
    at_least_one(batch_size=batch_size)
    dev, _, amp = pick_device(device, dtype)
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest numbers become zeros
    connect(backend)
    model, tok, settings, about = open_model(init_from, out_dir, which)
    name = dataset or settings.get("dataset")
    if name is None:
        raise UserError(f"{init_from} names no data set: give one as --dataset=, a folder in data/")
    if block_size is not None:
        model.crop_block_size(block_size)
    T = model.config.block_size
    step = max(1, T // 2) if stride is None else stride
    if not 1 <= step <= T:
        raise UserError(f"stride={step} must be between 1 and block_size={T}")
    tokens = Tokens(folder_of(name), split, T)
    meta = tokens.meta
    if meta["tokenizer"] != tok.meta:
        raise UserError(
            f"{name} was prepared with a {meta['tokenizer']['kind']} tokenizer of "
            f"{meta['vocab_size']:,} tokens, this model has another one "
            f"({tok.meta['kind']}, {tok.n_vocab:,} tokens): prepare the text for it"
        )
    eot = tok.eot if settings.get("pack") == "document" else None
    n = len(tokens) - 1
    say(
        f"{about}\n{split} of {name}: {n:,} targets; "
        f"windows of {T} tokens, {step} apart, on {count(world, 'process')}"
    )
    model.eval().to(dev)
    total = sum(by_all(lambda: _nats(model, tokens, step, eot, dev, amp)))
    if not math.isfinite(total):
        raise NotFinite("the loss is not finite; has the model's training diverged?")
    say(
        f"loss                 {total / n:.4f} nats per token\n"
        f"perplexity           {perplexity(total / n)} per token"
    )
    entry = meta["files"][f"{split}.bin"]
    if words := entry.get("words"):  # not for prompts and answers
        say(
            f"perplexity           {perplexity(total / words)} per word "
            f"({words:,} words between whitespace)\n"
            f"bits per byte        {total / math.log(2) / entry['bytes']:.4f} "
            f"({entry['bytes']:,} bytes)"
        )


if __name__ == "__main__":
    run_script(globals())
    if world > 1:
        torch.distributed.destroy_process_group()
