"""A model's loss over a whole split, in measures that compare models.

    python eval.py --out_dir=out-shakespeare-char
    python eval.py --init_from=gpt2 --dataset=shakespeare
    torchrun --standalone --nproc_per_node=4 eval.py --out_dir=out --split=test

Every token but the first is predicted once, from at least block_size - stride tokens before it if there are as many.
Loss and perplexity per token compare models of one tokenizer. Perplexity per word (Rae et al. 2020) and bits per byte
divide the same sum of -log p by the words and bytes of the text that was tokenised, so they compare models of
different tokenizers, unless a tokenizer drops some of the text (SentencePiece: line ends, runs of spaces).
"""

import math
from typing import Literal

from configurator import NotFinite, UserError, configure, pick_device, user_errors  # first, as in sample.py

# isort: split
import torch

from text.dataset import Tokens, folder_of, positions
from training.checkpoint import open_model
from training.distributed import by_all, connect, local_rank, rank, say, world

init_from = "resume"  # resume: the checkpoint in out_dir; gpt2, gpt2-xl, ..., owner/model, or a local folder of one
out_dir = "out"  # the folder that train.py wrote
which: Literal["best", "latest"] = "best"  # the lowest validation loss, or the last state
dataset: str | None = None  # a folder of data/; None: the one that the model was trained on
split: Literal["train", "val", "test"] = "val"  # of it
block_size: int | None = None  # tokens that the model sees at once; None: as many as it was trained on
stride: int | None = None  # tokens from one window to the next; None: half of block_size
batch_size = 4  # windows at once
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on a GPU that has it, else float16
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # of torch.distributed


@torch.no_grad()
def nats(model: torch.nn.Module, tokens: Tokens, stride: int, eot: int | None, device: str, amp: object) -> float:
    """The sum of -log p over this process's share of the targets, which are all tokens of the split but the first."""
    total = 0.0
    for x, y in tokens.strided(stride, batch_size, rank=rank, world=world):
        pos = None if eot is None else positions(x, eot).to(device)  # no token sees another document
        with amp:
            loss = model(x.to(device), y.to(device), pos=pos)[1]  # the mean over the targets that are not -1
        total += loss.item() * int((y >= 0).sum())
    return total


def exp(x: float) -> str:
    """e^x in digits, also where it is too large for a float."""
    return f"{math.exp(x):.2f}" if x < 30 else f"10^{x / math.log(10):.2f}"


def main() -> None:
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
    kind, _, amp = pick_device(config["device"], config["dtype"])
    device = f"cuda:{local_rank}" if kind == "cuda" else kind
    torch.set_flush_denormal(True)  # as train.py
    connect(backend)
    model, tok, run, about = open_model(init_from, out_dir, which)
    name = dataset or run.get("dataset")
    if name is None:
        raise UserError(f"--dataset= says on which text {init_from} is measured: a folder of data/")
    if block_size is not None and block_size != model.config.block_size:
        model.crop_block_size(block_size)
    T = model.config.block_size
    step = max(1, T // 2) if stride is None else stride
    if not 1 <= step <= T:
        raise UserError(f"stride={step} must be between 1 and block_size={T}")
    tokens = Tokens(folder_of(name), split, T)
    if tokens.meta["tokenizer"] != tok.meta:
        raise UserError(
            f"{name} is in {tokens.meta['vocab_size']:,} tokens of the kind {tokens.meta['tokenizer']['kind']}, "
            f"which are not those of this model ({tok.n_vocab:,}, {tok.meta['kind']}). To compare models of different "
            f"tokenizers, measure each on its own tokens of one text: bits per byte and perplexity per word compare"
        )
    eot = tok.eot if run.get("pack") == "document" else None
    n = len(tokens) - 1
    say(f"{about}\n{split} of {name}: {n:,} targets; windows of {T} tokens, {step} apart, on {world} process(es)")
    model.eval().to(device)
    total = sum(by_all(lambda: nats(model, tokens, step, eot, device, amp)))
    if not math.isfinite(total):
        raise NotFinite("the loss is not finite; has the model's training diverged?")
    say(f"loss                 {total / n:.4f} nats per token")
    say(f"perplexity           {exp(total / n)} per token")
    entry = tokens.meta["files"][f"{split}.bin"]
    if not entry.get("words"):
        say(f"no words and bytes are counted in {name}: it has none, or was prepared before; prepare it anew for them")
        return
    say(f"perplexity           {exp(total / entry['words'])} per word ({entry['words']:,} words between whitespace)")
    say(f"bits per byte        {total / math.log(2) / entry['bytes']:.4f} ({entry['bytes']:,} bytes)")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
