"""Can a model write more than block_size tokens? Speed and memory of a long text, and the loss far past block_size.

    OMP_NUM_THREADS=1 python -m lab.experiments.endless

The parts (--what):

decode  tokens/s (of the processor's time) and bytes of the cache while a trained model writes
        --tokens characters with `endless`.
far     the loss of the validation split by position, read in one go through a cache, against a
        window of block_size tokens that slides.
show    the tables

The models of TRAINED are trained on Tiny Shakespeare first. Results that are in --out are not measured again, so you
can stop the script and start it again. length.py is about long texts in training.
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

from configurator import names
from lab.experiments.results import measured, saved, show_table, start
from lab.experiments.runs import as_flags, finished
from lab.experiments.times import apart
from model import GPT
from text.dataset import Tokens, folder_of
from text.sampling import stream
from training.checkpoint import open_model

what = "decode,far,show"  # the parts: see above
only = ""  # the models, separated by semicolons; empty: all
dataset = "shakespeare_char"  # what they are trained on
config_file = "config/train_shakespeare_char_cpu.py"  # their sizes and learning rate
steps = 1500  # steps of training
block_size = 64  # tokens of context in training
tokens = 100000  # characters that a model writes
slide = 5000  # characters that it writes for comparison with a window that slides
out = "lab/experiments/endless.json"  # the results
out_dir = "out-endless"  # the folder for the runs, each in a folder of its own

BETA, ROPE, ALIBI = {"attention": "beta"}, {"position": "rope"}, {"position": "alibi"}
MIXED = {"attention": "beta_squared", "short_attention": "softmax", "heads": "SSSL", "window": 16, "conv": 4}
TRAINED = {
    "beta, rope": BETA | ROPE,
    "beta, alibi": BETA | ALIBI,
    "softmax short, beta_squared long, conv, rope": MIXED | ROPE,
    "softmax short, beta_squared long, conv, rope in short heads": MIXED | ROPE | {"nope_long": True},
    "softmax short, beta_squared long, conv, alibi": MIXED | ALIBI,
}
DECODED = ["beta, alibi", "softmax short, beta_squared long, conv, rope in short heads"]
BANDS = [0, 64, 256, 1024, 4096, 16384, 65536, 2**30]  # of positions; each begins here and ends before the next


def trained(name: str) -> str:
    """The folder of a trained model. Trains it, unless it is there."""
    folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name)}-{block_size}")
    flags = {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps, "seed": 1, "dataset": dataset}
    finished(name, [config_file, *as_flags(TRAINED[name] | flags | {"block_size": block_size})], folder)
    return folder


def decode(folder: str, tokens: int, slide: int) -> dict:
    """Speed, and bytes of the cache, in the first and the last tenth of a text that a model writes.

    slides: of `slide` tokens, with a window of block_size that slides; endless: of `tokens` tokens through one cache.
    as_fast: the speed at the end of the endless text, compared with that of a new text: the median of rounds in which
    both take turns.
    """
    torch.set_flush_denormal(True)
    gpt, tok, _, _ = open_model("resume", folder, "latest")
    begin = torch.tensor([tok.start("\n")])
    caches, new_cache = [], gpt.eval().new_cache
    gpt.new_cache = lambda *args: caches.append(new_cache(*args)) or caches[-1]

    def text(n: int, seed: int, **settings: bool) -> Iterator[torch.Tensor]:
        return stream(gpt, begin, n, temperature=0.8, seed=seed, vocab_size=tok.n_vocab, **settings)

    row, rounds = {}, 9
    size = max(1, min(500, tokens // 10))  # tokens of a round
    for name, n, more, settings in (("slides", slide, 0, {}), ("endless", tokens, rounds * size, {"endless": True})):
        gpt.generate(begin, 2 * gpt.config.block_size, seed=0, **settings)  # warm-up
        old = text(n + more, seed=1, **settings)
        tenths = [{"tokens_per_s": speed(old, n // 10), "cache_bytes": caches[-1].nbytes} for _ in range(10)]
        row[name] = {"first": tenths[0], "last": tenths[-1]}
    new = text(rounds * size + 100, seed=2, endless=True)
    speed(new, 100)
    return row | {"as_fast": statistics.median(speed(old, size) / speed(new, size) for _ in range(rounds))}


def speed(text: Iterator[torch.Tensor], n: int) -> float:
    """The tokens per second of processor time of the next n tokens."""
    began = time.process_time()
    written = sum(1 for _ in itertools.islice(text, n))
    return written / (time.process_time() - began)


@torch.no_grad()
def through_a_cache(gpt: GPT, x: torch.Tensor, piece: int = 256) -> torch.Tensor:
    """The loss of each token of x (B, T + 1) after the first, which the model reads through one cache: (B, T)."""
    cache = gpt.new_cache(x.shape[1] - 1)
    parts = zip(x[:, :-1].split(piece, dim=1), x[:, 1:].split(piece, dim=1), strict=True)
    found = [F.cross_entropy(gpt(a, b, cache)[0].mT, b, reduction="none") for a, b in parts]
    return torch.cat(found, dim=1)


@torch.no_grad()
def in_windows(gpt: GPT, text: Tokens) -> torch.Tensor:
    """The same (T) with a window of block_size tokens that slides by a 16th of it: each loss where it is new."""
    batches = text.strided(max(1, text.block_size // 16), 64)
    return torch.cat(
        [F.cross_entropy(gpt(x, y)[0].mT, y, reduction="none", ignore_index=-1)[y != -1] for x, y in batches]
    )


def read_far(folder: str, data: str) -> dict:
    """{"sums" or "slides": {a band of positions: the mean loss in it}}, of the validation split."""
    torch.set_flush_denormal(True)
    gpt = open_model("resume", folder, "latest")[0].eval()
    text = Tokens(data, "val", gpt.config.block_size)
    x = torch.from_numpy(text.ids.astype("int64"))[None]
    losses = {"sums": through_a_cache(gpt, x)[0], "slides": in_windows(gpt, text)}
    n = x.shape[1] - 1
    bands = [(a, min(b, n)) for a, b in itertools.pairwise(BANDS) if a < n]
    return {how: {f"{a}-{b}": loss[a:b].mean().item() for a, b in bands} for how, loss in losses.items()}


def show() -> None:
    """Prints a table for each part."""
    results, cells = saved(out, {}), []
    for name, row in results.get("decode", {}).items():
        found = next(iter(row.values()))
        for how in ("slides", "endless"):
            first, last = found[how]["first"], found[how]["last"]
            faster = f"{found['as_fast']:.2f}x" if how == "endless" else ""
            cache = f"{first['cache_bytes']:,} and {last['cache_bytes']:,}"
            cells.append([name, how, f"{last['tokens_per_s']:.0f}", faster, cache])
    show_table(["model", "text", "tokens/s", "at the end, against a new text", "cache, first and last"], cells)
    rows = [(name, n, row) for name, of in results.get("far", {}).items() for n, row in of.items()]
    bands, cells = [*rows[0][2]["sums"]] if rows else [], []
    for name, n, row in rows:
        cells.append([name, n, *(f"{row['sums'][band]:.3f} ({row['slides'][band]:.3f})" for band in bands)])
    show_table(["loss of sums (sliding)", "block_size", *bands], cells)


def main() -> None:
    parts, data = names(what, ["decode", "far", "show"]), folder_of(dataset)
    for name in names(only, TRAINED, ";") if {"decode", "far"} & {*parts} else []:
        folder = trained(name)
        if "decode" in parts and name in DECODED:
            measured(out, "decode", name, block_size, functools.partial(apart, decode, folder, tokens, slide))
        if "far" in parts:
            measured(out, "far", name, block_size, functools.partial(apart, read_far, folder, data))
    if "show" in parts:
        show()


if __name__ == "__main__":
    start(globals())
