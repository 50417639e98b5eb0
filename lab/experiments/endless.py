"""Can a model write more than block_size tokens? Speed, memory, and the loss far past block_size.

    OMP_NUM_THREADS=1 python -m lab.experiments.endless

The parts (--what):

decode  tokens/s (of the processor's time) and bytes of the cache while a trained model writes
        --tokens characters with `endless`.
far     the loss of the validation split by position, read in one go through a cache, against a
        window of block_size tokens that slides.
show    the tables

The models of TRAINED are trained on Tiny Shakespeare first. Results that are in --out are not
measured again, so you can stop the script and start it again. length.py is about long texts in
training.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

from configurator import names, run_script

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.experiments.results import measured, show_table, stored
from lab.experiments.runs import as_flags, finished, identity
from lab.experiments.runs import folder_of as run_folder
from lab.experiments.tables import rows_of, steps_of
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

TRAINED = rows_of("""
beta, rope: --attention=beta --position=rope
beta, alibi: --attention=beta --position=alibi
softmax short, beta_squared long, conv, rope: --attention=beta_squared \
--short_attention=softmax --heads=SSSL --window=16 --conv=4 --position=rope
softmax short, beta_squared long, conv, rope in short heads: --attention=beta_squared \
--short_attention=softmax --heads=SSSL --window=16 --conv=4 --position=rope --nope_long
softmax short, beta_squared long, conv, alibi: --attention=beta_squared \
--short_attention=softmax --heads=SSSL --window=16 --conv=4 --position=alibi
beta, rope, decay: --attention=beta --position=rope --decay=alibi
softmax short, beta_squared long, conv, rope, decay: --attention=beta_squared \
--short_attention=softmax --heads=SSSL --window=16 --conv=4 --position=rope --decay=alibi
""")
DECODED = ("beta, alibi", "softmax short, beta_squared long, conv, rope in short heads")
BANDS = [0, 64, 256, 1024, 4096, 16384, 65536]  # of positions: where each begins


def measure(part: str, name: str, f: Callable, *args: object) -> None:
    """Add f(the folder of a model's run, *args) to --out, if it is missing; and make the run."""
    flags = TRAINED[name] | steps_of(steps) | {"dataset": dataset, "block_size": block_size}
    command = [config_file, *as_flags(flags), "--seed=1"]
    folder = run_folder(name, command, out_dir)
    finished(name, command, folder)
    measured(out, part, name, block_size, apart, f, folder, *args, of=f"{identity(command)} {args}")


def decode(folder: str, tokens: int, slide: int) -> dict:
    """Speed, and bytes of the cache, in the first and the last tenth of a text that a model writes.

    "slides": of `slide` tokens, with a window of block_size that slides; "endless": of `tokens`
    tokens through one cache. "as_fast": the speed at the end of the endless text, compared with
    that of a new text: the median of rounds in which both take turns.
    """
    torch.set_flush_denormal(True)
    gpt, tok, _, _ = open_model("resume", folder, "latest")
    begin = torch.tensor([tok.start("\n")])
    caches = []
    new_cache = gpt.eval().new_cache

    def seen_cache(*args: object) -> object:
        caches.append(new_cache(*args))
        return caches[-1]

    gpt.new_cache = seen_cache

    def text(n: int, seed: int, **settings: bool) -> Iterator[Tensor]:
        return stream(gpt, begin, n, temperature=0.8, seed=seed, vocab_size=tok.n_vocab, **settings)

    rounds = 9
    size = max(1, min(500, tokens // 10))  # tokens of a round
    row = {}
    for name, n, settings in (("slides", slide, {}), ("endless", tokens, {"endless": True})):
        gpt.generate(begin, 2 * gpt.config.block_size, seed=0, **settings)  # warm-up
        old = text(n + rounds * size, seed=1, **settings)
        tenths = []
        for _ in range(10):
            tokens_per_s = speed(old, n // 10)
            tenths.append({"tokens_per_s": tokens_per_s, "cache_bytes": caches[-1].nbytes})
        row[name] = {"first": tenths[0], "last": tenths[-1]}
    new = text(rounds * size + 100, seed=2, endless=True)
    speed(new, 100)
    as_fast = [speed(old, size) / speed(new, size) for _ in range(rounds)]
    return row | {"as_fast": statistics.median(as_fast)}


def speed(text: Iterator[Tensor], n: int) -> float:
    """The tokens per second of processor time of the next n tokens."""
    began = time.process_time()
    written = sum(1 for _ in itertools.islice(text, n))
    return written / (time.process_time() - began)


@torch.no_grad()
def through_a_cache(gpt: GPT, x: Tensor, piece: int = 256) -> Tensor:
    """The loss of each token of x (B, T + 1) after the first, (B, T), read through one cache."""
    cache = gpt.new_cache(x.shape[1] - 1)
    losses = []
    for i in range(0, x.shape[1] - 1, piece):
        part = x[:, i : i + piece + 1]
        logits, _ = gpt(part[:, :-1], part[:, 1:], cache)
        losses.append(F.cross_entropy(logits.mT, part[:, 1:], reduction="none"))
    return torch.cat(losses, dim=1)


@torch.no_grad()
def in_windows(gpt: GPT, text: Tokens) -> Tensor:
    """The loss of each token, (T), in a window of block_size that slides by a 16th of it."""
    losses = []
    for x, y in text.strided(max(1, text.block_size // 16), 64):
        loss = F.cross_entropy(gpt(x, y)[0].mT, y, reduction="none", ignore_index=-1)
        losses.append(loss[y != -1])
    return torch.cat(losses)


def read_far(folder: str) -> dict:
    """{"sums" or "slides": {a band of positions: the mean loss in it}} of the validation split."""
    torch.set_flush_denormal(True)
    gpt, _, run, _ = open_model("resume", folder, "latest")
    text = Tokens(folder_of(run["dataset"]), "val", gpt.eval().config.block_size)
    x = torch.from_numpy(text.ids.astype("int64"))[None]
    losses = {"sums": through_a_cache(gpt, x)[0], "slides": in_windows(gpt, text)}
    n = x.shape[1] - 1
    means = {name: {} for name in losses}
    for a, b in itertools.pairwise([*(band for band in BANDS if band < n), n]):
        for name, loss in losses.items():
            means[name][f"{a}-{b}"] = loss[a:b].mean().item()
    return means


def show() -> None:
    """Print a table for each part."""
    rows = []
    for name, by_size in stored(out, "decode").items():
        by_text = next(iter(by_size.values()))
        for text in ("slides", "endless"):
            first = by_text[text]["first"]["cache_bytes"]
            last = by_text[text]["last"]
            faster = f"{by_text['as_fast']:.2f}x" if text == "endless" else ""
            cells = [name, text, f"{last['tokens_per_s']:.0f}", faster]
            rows.append([*cells, f"{first:,} and {last['cache_bytes']:,}"])
    columns = "model | text | tokens/s | at the end, against a new text | cache, first and last"
    show_table(columns, rows)
    rows = []
    for name, by_size in stored(out, "far").items():
        for n, by_text in by_size.items():
            bands, sums = zip(*by_text["sums"].items(), strict=True)
            pairs = zip(sums, by_text["slides"].values(), strict=True)
            rows.append([name, n, *(f"{a:.3f} ({b:.3f})" for a, b in pairs)])
    show_table(" | ".join(["loss of sums (sliding) | block_size", *bands]), rows)


def main() -> None:
    parts = names(what, ["decode", "far", "show"])
    for name in names(only, TRAINED, ";"):
        if "decode" in parts and name in DECODED:
            measure("decode", name, decode, tokens, slide)
        if "far" in parts:
            measure("far", name, read_far)
    if "show" in parts:
        show()


if __name__ == "__main__":
    run_script(globals())
