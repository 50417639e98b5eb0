"""What does a longer text cost? Training steps up to n = 65,536, and decoding that goes on after block_size tokens.

    OMP_NUM_THREADS=1 python experiments/length.py              # everything: more than an hour
    OMP_NUM_THREADS=1 python experiments/length.py --what=steps,double,draw  # training steps
    OMP_NUM_THREADS=1 python experiments/length.py --what=train,decode,far   # decoding
    python experiments/length.py --what=draw,print              # picture and tables of --out

The parts (--what):

steps   time and peak memory of a training step for each row of ROWS and each length, in a fresh
        process each. A row ends at a step of more than --patience seconds, or where the next one
        would need more than --most_memory. The time is the processor's, so that other programs
        disturb it less; with one thread it is that of an idle machine.
double  how much longer a step takes when the text gets twice as long, for the last two of
        --double: the median of rounds in which both lengths take turns.
train   trains the models of TRAINED, which the next two parts use, on Tiny Shakespeare.
decode  tokens/s (of the processor's time), cache and memory while a trained model writes --tokens
        characters with `endless`, and how many of its words the training text has.
far     the loss of the validation split by position, read in one go through a cache, against a
        window of block_size tokens that slides.

Every result is written to --out at once. Results that are there are not measured again, so you can stop the script and
start it again.
"""

import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import UserError, configure, user_errors
from experiments.runs import as_flags, finished, timed_step
from model import GPT, GPTConfig
from text.dataset import ROOT, Tokens, folder_of
from text.files import optional, replace
from training.checkpoint import open_model
from training.optimizers import OPTIMIZER, Settings
from training.timing import interleaved, medians, ratios

# What is measured?
what = "steps,double,train,decode,far,draw,print"  # the parts: see above
only = ""  # the rows to measure, separated by semicolons; empty: all
out = "experiments/length.json"  # the results
picture = "docs/length.png"  # the picture
# Training steps
lengths = "1024,4096,8192,16384,65536"  # tokens of the one sequence of a step
double = "8192,16384"  # the two lengths that are compared in rounds
repeats = 5  # rounds of that comparison; a step of the part steps is repeated at most as often
patience = 90.0  # seconds; after a longer step a row gets no longer text
most_memory = 8.0  # GiB; a row ends before a step that would need more
# Trained models
dataset = "shakespeare_char"  # what they are trained on
config_file = "config/train_shakespeare_char_cpu.py"  # their sizes and learning rate
steps = 1500  # steps of training
blocks = "64,256"  # the values of block_size
tokens = 100000  # characters that a model writes
slide = 5000  # characters that it writes for comparison with a window that slides
far = 4096  # length of the pieces of the validation split that are read in one go; the whole split is read as well
out_dir = "out-length"  # the folder for the runs, each in a folder of its own

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 256, "position": "rope"}
SHORT = {"heads": "SSSL", "window": 16}
MIXED = SHORT | {"short_attention": "softmax", "conv": 4}
BETA, BETA2 = {"attention": "beta"}, {"attention": "beta2"}
ROWS = {
    "softmax": {},
    "softmax, LS": SHORT,
    "beta": BETA,
    "beta, decay": BETA | {"decay": "alibi"},
    "beta2": BETA2,
    "beta2, 8 heads": BETA2 | {"n_head": 8},
    "softmax short, beta long, conv": MIXED | BETA,
    "softmax short, beta2 long, conv": MIXED | BETA2,
    "softmax short, beta2 long, conv, 8 heads": MIXED | BETA2 | {"n_head": 8},
}
ROPE, ALIBI = {"position": "rope"}, {"position": "alibi"}
TRAINED = {
    "beta, rope": BETA | ROPE,
    "beta, alibi": BETA | ALIBI,
    "beta, conv, alibi": BETA | ALIBI | {"conv": 4},
    "softmax short, beta2 long, conv, rope": MIXED | BETA2 | ROPE,
    "softmax short, beta2 long, conv, rope in short heads": MIXED | BETA2 | ROPE | {"nope_long": True},
    "softmax short, beta2 long, conv, rope and decay": MIXED | BETA2 | ROPE | {"decay": "alibi"},
    "softmax short, beta2 long, conv, alibi": MIXED | BETA2 | ALIBI,
}
BLOCK = {256: {"block_size": 256, "batch_size": 3, "eval_iters": 145}}  # as many tokens in a step as with 64
DECODED = ["beta, alibi", "softmax short, beta2 long, conv, rope in short heads"]
BANDS = [0, 64, 256, 1024, 4096, 16384, 65536, 2**30]  # of positions; each begins here and ends before the next


# -----------------------------------------------------------------------------
# results


def saved() -> dict:
    """{part: {row: {length or block_size: numbers}}}."""
    if not os.path.exists(out):
        return {}
    with open(out, encoding="utf-8") as f:
        return json.load(f)


def missing(part: str, row: str, size: object, measure: Callable) -> dict:
    """The numbers of a row in the file or, if there are none, those that measure() returns, which are added to it."""
    found = saved().get(part, {}).get(row, {}).get(str(size))
    if found is None:
        found = measure()
        print(f"{part}, {row}, {size}: {json.dumps(found)}", flush=True)
        results = saved()  # another process may have added to it
        results.setdefault(part, {}).setdefault(row, {})[str(size)] = found
        replace(out, (json.dumps(results, indent=1) + "\n").encode())
    return found


def numbers(flag: str) -> list[int]:
    """The integers that a flag lists, the smallest first. Raises UserError for anything but positive integers."""
    words = globals()[flag].split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--{flag} must be positive integers, separated by commas; got {globals()[flag]}")
    return sorted(map(int, words))


def chosen(table: dict[str, dict]) -> dict[str, dict]:
    """The rows of a table that --only names."""
    names = [name.strip() for name in only.split(";") if name.strip()]
    if unknown := [name for name in names if name not in ROWS | TRAINED]:
        raise UserError(f"--only: {unknown[0]!r} is not one of {'; '.join(ROWS | TRAINED)}")
    return {name: flags for name, flags in table.items() if not names or name in names}


def apart(f: Callable, *args: object) -> object:
    """f(*args) in a fresh process, whose memory is f's alone."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(f, *args).result()


def max_rss() -> int:
    """The most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# -----------------------------------------------------------------------------
# training steps


def trainer(flags: dict, block_size: int) -> tuple[GPT, list]:
    """A model, which has made one step of a few tokens, and its optimizers."""
    torch.set_flush_denormal(True)  # as train.py
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES | flags, block_size=block_size)).train()
    adamw = OPTIMIZER["adamw"](gpt, Settings(1e-3, (0.9, 0.99), 0.1))
    timed_step(gpt, adamw, random_tokens(64))
    return gpt, adamw


def random_tokens(n: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (1, n))


def step_in(gpt: GPT, adamw: list, n: int) -> dict[str, float]:
    """Makes a training step on n tokens; its seconds of processor time, and how many of them were the program's own.

    The rest is the operating system's, which hands out memory.
    """
    x, began = random_tokens(n), resource.getrusage(resource.RUSAGE_SELF)
    timed_step(gpt, adamw, x)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    own = ended.ru_utime - began.ru_utime
    return {"s": own + ended.ru_stime - began.ru_stime, "own_s": own}


def step(flags: dict, n: int, repeats: int) -> dict:
    """The median seconds of a training step on n tokens, and the bytes that it needs beyond what the process has.

    The first step is a warm-up and does not count, unless it takes so long that there is no second one.
    """
    gpt, adamw = trainer(flags, n)
    before, all_steps = max_rss(), []
    while not all_steps or (len(all_steps) <= repeats and sum(x["s"] for x in all_steps) + all_steps[-1]["s"] < 60):
        all_steps.append(step_in(gpt, adamw, n))
    counted = all_steps[1:] or all_steps
    s = {key: statistics.median(x[key] for x in counted) for key in counted[0]}
    return s | {"steps": len(counted), "bytes": max_rss() - before}


def doubled(flags: dict, short: int, long: int, repeats: int) -> dict:
    """How many times as long a step on `long` tokens takes as one on `short`: the median of some rounds."""
    gpt, adamw = trainer(flags, long)
    tasks = {n: functools.partial(step_in, gpt, adamw, n) for n in (short, long)}
    interleaved(tasks, "cpu", 1)  # warm-up
    rounds = interleaved(tasks, "cpu", repeats)
    found = {f"s_{n}": medians(rounds[n])[0]["s"] for n in rounds}
    return found | {key.removesuffix("s") + "ratio": x for key, x in ratios(rounds, long, short).items()}


def measure_steps() -> None:
    for name, flags in chosen(ROWS).items():
        ends, before = False, None  # the length before and its numbers
        for n in numbers("lengths"):
            if before and (ends or before[1]["bytes"] * n / before[0] > most_memory * 2**30):
                print(f"steps, {name}: no {n} tokens (--patience, --most_memory)")
                break
            row = missing("steps", name, n, lambda flags=flags, n=n: apart(step, flags, n, repeats))
            before, ends = (n, row), row["s"] > patience


def measure_double() -> None:
    short, long = numbers("double")[-2:]
    for name, flags in chosen(ROWS).items():
        missing("double", name, long, lambda flags=flags: apart(doubled, flags, short, long, repeats))


# -----------------------------------------------------------------------------
# trained models


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
        return gpt.stream(start, n, temperature=0.8, seed=seed, vocab_size=tok.n_vocab, **settings)

    row, rounds = {}, 9
    size = max(1, min(500, tokens // 10))  # tokens of a round
    for name, n, more, settings in (("slides", slide, 0, {}), ("endless", tokens, rounds * size, {"endless": True})):
        gpt.generate(start, 2 * gpt.config.block_size, seed=0, **settings)  # warm-up
        stream = text(n + more, seed=1, **settings)
        tenths = []
        for part in [n // 10] * 10:
            speed, ids = written(stream, part)
            measured = {"tokens_per_s": speed, "known": known(tok.decode(ids), words)}
            tenths.append(measured | {"cache_bytes": caches[-1].nbytes, "max_rss": max_rss()})
        row[name] = {"first": tenths[0], "last": tenths[-1]}
    new = text(rounds * size + 100, seed=2, endless=True)
    written(new, 100)
    faster = [written(stream, size)[0] / written(new, size)[0] for _ in range(rounds)]
    return row | {"as_fast": statistics.median(faster)}


def written(stream: Iterator[torch.Tensor], n: int) -> tuple[float, list[int]]:
    """(tokens per second of processor time, ids) of the next n tokens."""
    began = time.process_time()
    ids = [token.item() for token in itertools.islice(stream, n)]
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


def measure_trained(part: str) -> None:
    data = folder_of(dataset)
    for block_size, (name, _) in itertools.product(numbers("blocks"), chosen(TRAINED).items()):
        folder = trained(name, block_size)
        if part == "decode" and name in DECODED and block_size == numbers("blocks")[0]:
            missing("decode", name, block_size, lambda folder=folder: apart(decode, folder, data, tokens, slide))
        if part == "far":
            missing("far", name, block_size, lambda folder=folder: apart(read_far, folder, data, far))


# -----------------------------------------------------------------------------
# the picture and the tables


def draw() -> None:
    """Time and memory of a training step against the length, on log axes."""
    optional("matplotlib", "a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    rows = saved().get("steps", {})
    ticks = sorted({int(n) for row in rows.values() for n in row})
    panels = (("s", 1, "seconds of a training step"), ("bytes", 2**20, "peak memory of a step, MiB"))
    for ax, (key, unit, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for i, (name, row) in enumerate(rows.items()):
            style = {"marker": "o", "markersize": 4, "linestyle": "--" if "8 heads" in name else "-"}
            color = "black" if name == "softmax" else f"C{i}"
            ax.plot([int(n) for n in row], [x[key] / unit for x in row.values()], color=color, label=name, **style)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(picture, dpi=110)
    print(f"wrote {picture}")


def show() -> None:
    """Prints a table for each part."""
    results = saved()
    if rows := results.get("steps"):
        sizes = sorted({int(n) for row in rows.values() for n in row})
        print("\n| a training step | " + " | ".join(f"n = {n:,}" for n in sizes) + " | twice the length |")
        print("|---" * (len(sizes) + 2) + "|")
        for name, row in rows.items():
            cells = [x and f"{x['s']:.2f} s, {x['bytes'] / 2**20:,.0f} MiB" for x in map(row.get, map(str, sizes))]
            doubled_row = results.get("double", {}).get(name, {}).values()
            twice = [f"{x['ratio']:.2f}x ({x['own_ratio']:.2f}x)" for x in doubled_row]
            print(f"| {name} | " + " | ".join(cell or "" for cell in cells) + f" | {', '.join(twice)} |")
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
        table = [
            (name, size, row[cut]) for name, sizes in results.get("far", {}).items() for size, row in sizes.items()
        ]
        for i, (name, size, row) in enumerate(sorted(table, key=lambda x: int(x[1]))):
            if i == 0:
                print(f"\n| {cut}: loss of sums (sliding) | block_size | positions {' | '.join(row['sums'])} |")
                print("|---" * (len(row["sums"]) + 2) + "|")
            cells = [f"{row['sums'][band]:.3f} ({row['slides'][band]:.3f})" for band in row["sums"]]
            print(f"| {name} | {size} | " + " | ".join(cells) + " |")


def main() -> None:
    os.chdir(ROOT)
    run: dict[str, Callable] = {"steps": measure_steps, "double": measure_double}
    run |= {part: lambda part=part: measure_trained(part) for part in ("train", "decode", "far")}
    run |= {"draw": draw, "print": show}
    parts = what.split(",")
    if unknown := [part for part in parts if part not in run]:
        raise UserError(f"--what: {unknown[0]!r} is not one of {', '.join(run)}")
    for part in parts:
        run[part]()


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
