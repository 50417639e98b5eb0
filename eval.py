"""Prints a model's loss over a whole split, in measures that compare models.

    python eval.py --out_dir=out-shakespeare-char
    python eval.py --init_from=gpt2 --dataset=shakespeare
    torchrun --standalone --nproc_per_node=4 eval.py --out_dir=out --split=test

Every token except the first is predicted once, from at least block_size - stride tokens (at the start, from fewer).

Loss and perplexity per token compare models with the same tokenizer. Perplexity per word (Rae et al. 2020) and bits per
byte divide the same sum of -log p by the number of words or bytes of the text. So they also compare models with
different tokenizers, unless a tokenizer drops a part of the text (SentencePiece drops line ends and repeated spaces).
"""

import math
from typing import Literal

from configurator import at_least_one, configure, pick_device, user_errors  # first: see train.py
from errors import NotFinite, UserError

# isort: split
import torch

from text.dataset import Tokens, folder_of, positions
from training.checkpoint import open_model
from training.distributed import by_all, connect, count, local_rank, rank, say, world

# Which model?
init_from = "resume"  # resume: the checkpoint in out_dir; or gpt2, gpt2-xl, ..., a model of the hub, a local folder
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the checkpoint with the lowest validation loss, or the latest one
# Which text?
dataset: str | None = None  # the data set: a folder in data/; None: the one that the model was trained on
split: Literal["train", "val", "test"] = "val"  # the part of the data set
# How much text does the model see at once?
block_size: int | None = None  # tokens per window; None: as in training; more only if the positions are not learned
stride: int | None = None  # tokens from the start of a window to the start of the next one; None: half of block_size
# What does it run on?
batch_size = 4  # windows that are computed together
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 or float16 on CUDA, else float32
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # of communication; auto, nccl: nccl on CUDA, else gloo


@torch.no_grad()
def nats(model: torch.nn.Module, tokens: Tokens, stride: int, eot: int | None, device: str, amp: object) -> float:
    """The sum of -log p over this process's share of the targets: all tokens of the split but the first."""
    total = 0.0
    for x, y in tokens.strided(stride, batch_size, rank=rank, world=world):
        pos = None if eot is None else positions(x, eot).to(device)  # so that no token sees another document
        with amp:
            loss = model(x.to(device), y.to(device), pos=pos)[1]  # the mean over the targets that are not -1
        total += loss.item() * int((y >= 0).sum())
    return total


def main() -> None:
    at_least_one(batch_size=batch_size)
    kind, _, amp = pick_device(config["device"], config["dtype"])
    device = f"cuda:{local_rank}" if kind == "cuda" else kind
    torch.set_flush_denormal(True)  # as train.py: on a CPU the tiniest numbers become zeros
    connect(backend)
    model, tok, run, about = open_model(init_from, out_dir, which)
    name = dataset or run.get("dataset")
    if name is None:
        raise UserError(f"{init_from} names no data set: give one as --dataset=, a folder in data/")
    if block_size is not None and block_size != model.config.block_size:
        model.crop_block_size(block_size)
    T = model.config.block_size
    step = max(1, T // 2) if stride is None else stride
    if not 1 <= step <= T:
        raise UserError(f"stride={step} must be between 1 and block_size={T}")
    tokens = Tokens(folder_of(name), split, T)
    if tokens.meta["tokenizer"] != tok.meta:
        theirs = f"a {tokens.meta['tokenizer']['kind']} tokenizer of {tokens.meta['vocab_size']:,} tokens"
        ours = f"this model has another one ({tok.meta['kind']}, {tok.n_vocab:,} tokens)"
        raise UserError(f"{name} was prepared with {theirs}, {ours}: prepare the text for it")
    eot = tok.eot if run.get("pack") == "document" else None
    n = len(tokens) - 1
    say(f"{about}\n{split} of {name}: {n:,} targets; windows of {T} tokens, {step} apart, on {count(world, 'process')}")
    model.eval().to(device)
    total = sum(by_all(lambda: nats(model, tokens, step, eot, device, amp)))
    if not math.isfinite(total):
        raise NotFinite("the loss is not finite; has the model's training diverged?")
    say(f"loss                 {total / n:.4f} nats per token")
    say(f"perplexity           {math.exp(total / n):.2f} per token")
    entry = tokens.meta["files"][f"{split}.bin"]
    if words := entry.get("words"):  # earlier versions did not count them
        say(f"perplexity           {math.exp(total / words):.2f} per word ({words:,} words between whitespace)")
        say(f"bits per byte        {total / math.log(2) / entry['bytes']:.4f} ({entry['bytes']:,} bytes)")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
    if world > 1:
        torch.distributed.destroy_process_group()
