"""Can a model write more than block_size tokens? Speed and memory of a long text, and the loss far past block_size.

    OMP_NUM_THREADS=1 python -m lab.experiments.endless

The parts (--what):

train   trains the models of TRAINED on Tiny Shakespeare, with each block_size of --blocks.
decode  tokens/s (of the processor's time), cache and memory while a trained model writes --tokens
        characters with `endless`, and how many of its words the training text has.
far     the loss of the validation split by position, read in one go through a cache, against a
        window of block_size tokens that slides.
print   the tables

Results that are in --out are not measured again, so you can stop the script and start it again.
lab/experiments/length.py
is about long texts in training.
"""

import functools
import itertools
import os
import re
import statistics
import time
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from configurator import configure, names, positive, user_errors
from lab.experiments.results import measured, saved
from lab.experiments.runs import as_flags, finished
from lab.experiments.times import apart, max_rss
from model import GPT
from text.dataset import ROOT, Tokens, folder_of
from text.sampling import stream
from training.checkpoint import open_model

what = "train,decode,far,print"  # the parts: see above
only = ""  # the models, separated by semicolons; empty: all
dataset = "shakespeare_char"  # what they are trained on
config_file = "config/train_shakespeare_char_cpu.py"  # their sizes and learning rate
steps = 1500  # steps of training
blocks = "64,256"  # the values of block_size
tokens = 100000  # characters that a model writes
slide = 5000  # characters that it writes for comparison with a window that slides
far = 4096  # length of the pieces of the validation split that are read in one go; the whole split is read as well
out = "lab/experiments/endless.json"  # the results
out_dir = "out-endless"  # the folder for the runs, each in a folder of its own

BETA, ROPE, ALIBI = {"attention": "beta"}, {"position": "rope"}, {"position": "alibi"}
MIXED = {"attention": "beta2", "short_attention": "softmax", "heads": "SSSL", "window": 16, "conv": 4}
TRAINED = {
    "beta, rope": BETA | ROPE,
    "beta, alibi": BETA | ALIBI,
    "beta, conv, alibi": BETA | ALIBI | {"conv": 4},
    "softmax short, beta2 long, conv, rope": MIXED | ROPE,
    "softmax short, beta2 long, conv, rope in short heads": MIXED | ROPE | {"nope_long": True},
    "softmax short, beta2 long, conv, rope and decay": MIXED | ROPE | {"decay": "alibi"},
    "softmax short, beta2 long, conv, alibi": MIXED | ALIBI,
}
BLOCK = {256: {"block_size": 256, "batch_size": 3, "eval_iters": 145}}  # as many tokens in a step as with 64
DECODED = ["beta, alibi", "softmax short, beta2 long, conv, rope in short heads"]
BANDS = [0, 64, 256, 1024, 4096, 16384, 65536, 2**30]  # of positions; each begins here and ends before the next


def trained(name: str, block_size: int) -> str:
    """The folder of a trained model. Trains it, unless it is there."""
    folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name)}-{block_size}")
    flags = TRAINED[name] | BLOCK.get(block_size, {"block_size": block_size})
    flags |= {"dataset": dataset, "max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps, "seed": 1}
    finished(f"{name}, block_size {block_size}", [config_file, *as_flags(flags)], folder)
    return folder


def opened(folder: str) -> tuple:
    """(model, tokenizer) of a run."""
    torch.set_flush_denormal(True)
    gpt, tok, _, _ = open_model("resume", folder, "latest")
    return gpt.eval(), tok


def known(text: str, words: set[str]) -> float:
    """The share of the whole words of a text that are among `words`."""
    found = re.findall(r"[A-Za-z]+", text)[1:-1]
    return sum(word.lower() in words for word in found) / max(1, len(found))


def decode(folder: str, data: str, tokens: int, slide: int) -> dict:
    """Speed, memory and words in the first and the last tenth of a text that a model writes.

    slides: of `slide` tokens, with a window of block_size that slides; endless: of `tokens` tokens through one cache.
    as_fast: the speed at the end of the endless text, compared with that of a new text: the median of rounds in which
    both take turns.
    """
    gpt, tok = opened(folder)
    words = set(re.findall("[a-z]+", tok.decode(Tokens(data, "train", 1).ids[:]).lower()))
    start = torch.tensor([tok.start("\n")])
    caches, new_cache = [], gpt.new_cache
    gpt.new_cache = lambda *args: caches.append(new_cache(*args)) or caches[-1]

    def text(n: int, seed: int, **settings: bool) -> Iterator[torch.Tensor]:
        return stream(gpt, start, n, temperature=0.8, seed=seed, vocab_size=tok.n_vocab, **settings)

    row, rounds = {}, 9
    size = max(1, min(500, tokens // 10))  # tokens of a round
    for name, n, more, settings in (("slides", slide, 0, {}), ("endless", tokens, rounds * size, {"endless": True})):
        gpt.generate(start, 2 * gpt.config.block_size, seed=0, **settings)  # warm-up
        old = text(n + more, seed=1, **settings)
        tenths = []
        for part in [n // 10] * 10:
            speed, ids = written(old, part)
            found = {"tokens_per_s": speed, "known": known(tok.decode(ids), words)}
            tenths.append(found | {"cache_bytes": caches[-1].nbytes, "max_rss": max_rss()})
        row[name] = {"first": tenths[0], "last": tenths[-1]}
    new = text(rounds * size + 100, seed=2, endless=True)
    written(new, 100)
    faster = [written(old, size)[0] / written(new, size)[0] for _ in range(rounds)]
    return row | {"as_fast": statistics.median(faster)}


def written(text: Iterator[torch.Tensor], n: int) -> tuple[float, list[int]]:
    """(tokens per second of processor time, ids) of the next n tokens."""
    began = time.process_time()
    ids = [token.item() for token in itertools.islice(text, n)]
    return n / (time.process_time() - began), ids


@torch.no_grad()
def through_a_cache(gpt: GPT, x: torch.Tensor, piece: int = 256) -> torch.Tensor:
    """The loss of each token of x (B, T + 1) after the first, which the model reads through one cache: (B, T)."""
    cache = gpt.new_cache(x.shape[1] - 1)
    parts = zip(x[:, :-1].split(piece, dim=1), x[:, 1:].split(piece, dim=1), strict=True)
    found = [F.cross_entropy(gpt(a, b, cache)[0].mT, b, reduction="none") for a, b in parts]
    return torch.cat(found, dim=1)


@torch.no_grad()
def in_windows(gpt: GPT, x: torch.Tensor) -> torch.Tensor:
    """The same with a window of block_size tokens that slides by a 16th of it: each token's loss where it sees most."""
    T, block = x.shape[1] - 1, gpt.config.block_size
    hop = max(1, block // 16)
    found = torch.empty(len(x), T)
    starts = [*range(0, T - block, hop), T - block]
    for some in (starts[i : i + 64] for i in range(0, len(starts), 64)):
        for row, losses in zip(x, found, strict=True):
            window = torch.stack([row[at : at + block + 1] for at in some])
            new = window[:, 1:]
            part = F.cross_entropy(gpt(window[:, :-1], new)[0].mT, new, reduction="none")
            for at, loss in zip(some, part, strict=True):
                first = 0 if at == 0 else min(at + block - hop, T - hop) - at
                losses[at + first : at + block] = loss[first:]
    return found


def by_bands(loss: torch.Tensor) -> dict[str, float]:
    """The mean of losses (B, T) in each of BANDS that T reaches."""
    bands = [(a, min(b, loss.shape[1])) for a, b in itertools.pairwise(BANDS) if a < loss.shape[1]]
    return {f"{a}-{b}": loss[:, a:b].mean().item() for a, b in bands}


def read_far(folder: str, data: str, far: int) -> dict:
    """{how the text is cut: {"sums" or "slides": the loss in each band of positions}}, of the validation split."""
    gpt, _ = opened(folder)
    ids = torch.from_numpy(Tokens(data, "val", far).ids[:].astype("int64"))
    pieces = ids[: len(ids) // (far + 1) * (far + 1)].view(-1, far + 1)
    row = {}
    for name, x in (("pieces", pieces), ("whole", ids[None])):
        row[name] = {"sums": by_bands(through_a_cache(gpt, x)), "slides": by_bands(in_windows(gpt, x))}
    return row


def measure(part: str) -> None:
    data, sizes = folder_of(dataset), sorted(positive("blocks", blocks))
    for block_size, name in itertools.product(sizes, names(only, TRAINED, ";")):
        folder = trained(name, block_size)
        if part == "decode" and name in DECODED and block_size == sizes[0]:
            measured(out, part, name, block_size, functools.partial(apart, decode, folder, data, tokens, slide))
        if part == "far":
            measured(out, part, name, block_size, functools.partial(apart, read_far, folder, data, far))


def show() -> None:
    """Prints a table for each part."""
    results = saved(out, {})
    if rows := results.get("decode"):
        print("\n| model | text | tokens/s | at the end, against a new text | cache | memory | known words |")
        print("|---" * 7 + "|")
        for name, row in rows.items():
            found = next(iter(row.values()))
            for how in ("slides", "endless"):
                first, last = found[how]["first"], found[how]["last"]
                cells = [f"{last['tokens_per_s']:.0f}", f"{found['as_fast']:.2f}x" if how == "endless" else ""]
                cells += [f"{first['cache_bytes']:,} and {last['cache_bytes']:,}"]
                cells += [f"{first['max_rss'] / 2**20:.1f} and {last['max_rss'] / 2**20:.1f} MiB"]
                print(f"| {name} | {how} | " + " | ".join(cells) + f" | {first['known']:.1%}, {last['known']:.1%} |")
    for cut in ("pieces", "whole"):
        by_size = [(int(n), name, row[cut]) for name, of in results.get("far", {}).items() for n, row in of.items()]
        for i, (n, name, row) in enumerate(sorted(by_size, key=lambda x: x[0])):
            if i == 0:
                print(f"\n| {cut}: loss of sums (sliding) | block_size | positions {' | '.join(row['sums'])} |")
                print("|---" * (len(row["sums"]) + 2) + "|")
            cells = [f"{row['sums'][band]:.3f} ({row['slides'][band]:.3f})" for band in row["sums"]]
            print(f"| {name} | {n} | " + " | ".join(cells) + " |")


def main() -> None:
    os.chdir(ROOT)
    for part in names(what, ["train", "decode", "far", "print"]):
        show() if part == "print" else measure(part)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
