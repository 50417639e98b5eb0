"""What does a longer text cost in training? Time and memory of a step up to n = 65,536, as a table and a picture.

    OMP_NUM_THREADS=1 python -m lab.experiments.length  # about an hour

The parts (--what):

steps   time and peak memory of a training step for each row of ROWS and each length, in a fresh
        process each. A row ends at a step of more than --patience seconds, or where the next one
        would need more than --most_memory. The time is the processor's, so that other programs
        disturb it less; with one thread it is that of an idle machine.
double  how much longer a step takes when the text gets twice as long, for the last two of
        --double: the median of rounds in which both lengths take turns.
draw    the picture
show    the table

Results that are in --out are not measured again, so you can stop the script and start it again. endless.py is
about long texts in decoding.
"""

import functools
import resource
import statistics
from collections.abc import Callable

import torch

from bench import interleaved, medians, ratios
from configurator import names, positive
from lab.experiments.results import drawing, measured, saved, show_table, start
from lab.experiments.times import apart, max_rss, timed_step
from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER, Settings

what = "steps,double,draw,show"  # the parts: see above
only = ""  # the rows to measure, separated by semicolons; empty: all
lengths = "1024,4096,8192,16384,65536"  # tokens of the one sequence of a step
double = "8192,16384"  # the two lengths that are compared in rounds
repeats = 5  # rounds of that comparison; a step of the part steps is repeated at most as often
patience = 90.0  # seconds; after a longer step a row gets no longer text
most_memory = 8.0  # GiB; a row ends before a step that would need more
out = "lab/experiments/length.json"  # the results
picture = "lab/pictures/length.png"  # the picture

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 256, "position": "rope"}
SHORT = {"heads": "SSSL", "window": 16}
MIXED = SHORT | {"short_attention": "softmax", "conv": 4}
BETA, SQUARED = {"attention": "beta"}, {"attention": "beta_squared"}
ROWS = {
    "softmax": {},
    "softmax, LS": SHORT,
    "beta": BETA,
    "beta, decay": BETA | {"decay": "alibi"},
    "beta_squared": SQUARED,
    "beta_squared, 8 heads": SQUARED | {"n_head": 8},
    "softmax short, beta long, conv": MIXED | BETA,
    "softmax short, beta_squared long, conv": MIXED | SQUARED,
    "softmax short, beta_squared long, conv, 8 heads": MIXED | SQUARED | {"n_head": 8},
}


def trainer(flags: dict, block_size: int) -> tuple[GPT, list]:
    """A model, which has made one step of a few tokens, and its optimizers."""
    torch.set_flush_denormal(True)  # as train.py
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES | flags, block_size=block_size)).train()
    adamw = OPTIMIZER["adamw"](gpt, Settings(1e-3, (0.9, 0.99), 0.1))
    step_in(gpt, adamw, 64)
    return gpt, adamw


def step_in(gpt: GPT, adamw: list, n: int) -> dict[str, float]:
    """Makes a training step on n tokens; its seconds of processor time, and how many of them were the program's own.

    The rest is the operating system's, which hands out memory.
    """
    x, began = torch.randint(SIZES["vocab_size"], (1, n)), resource.getrusage(resource.RUSAGE_SELF)
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
    rounds = interleaved(tasks, "cpu", repeats)
    found = {f"s_{n}": medians(rounds[n])[0]["s"] for n in rounds}
    return found | {key.removesuffix("s") + "ratio": x for key, x in ratios(rounds, long, short).items()}


def measure_steps() -> None:
    for name in names(only, ROWS, ";"):
        ends, before = False, None  # the length before and its numbers
        for n in sorted(positive("lengths", lengths)):
            if before and (ends or before[1]["bytes"] * n / before[0] > most_memory * 2**30):
                print(f"steps, {name}: no {n} tokens (--patience, --most_memory)")
                break
            row = measured(out, "steps", name, n, functools.partial(apart, step, ROWS[name], n, repeats))
            before, ends = (n, row), row["s"] > patience


def measure_double() -> None:
    short, long = sorted(positive("double", double))[-2:]
    for name in names(only, ROWS, ";"):
        measured(out, "double", name, long, functools.partial(apart, doubled, ROWS[name], short, long, repeats))


def draw() -> None:
    """Time and memory of a training step against the length, on log axes."""
    rows = saved(out, {}).get("steps", {})
    ticks = sorted({int(n) for row in rows.values() for n in row})
    panels = (("s", 1, "seconds of a training step"), ("bytes", 2**20, "peak memory of a step, MiB"))
    with drawing(picture, 1, 2, 12, 5) as axes:
        for ax, (key, unit, label) in zip(axes, panels, strict=True):
            for i, (name, row) in enumerate(rows.items()):
                style = {"label": name if ax is axes[-1] else None, "marker": "o", "markersize": 4}
                style |= {"linestyle": "--" if "8 heads" in name else "-"}
                color = "black" if name == "softmax" else f"C{i}"
                ax.plot([int(n) for n in row], [x[key] / unit for x in row.values()], color=color, **style)
            ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
            ax.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
            ax.minorticks_off()
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def show() -> None:
    """Prints the table."""
    results = saved(out, {"steps": {}})
    sizes = sorted({int(n) for row in results["steps"].values() for n in row})
    rows = []
    for name, row in results["steps"].items():
        cells = [x and f"{x['s']:.2f} s, {x['bytes'] / 2**20:,.0f} MiB" for x in map(row.get, map(str, sizes))]
        twice = results.get("double", {}).get(name, {}).values()
        cells.append(", ".join(f"{x['ratio']:.2f}x ({x['own_ratio']:.2f}x)" for x in twice))
        rows.append([name, *(cell or "" for cell in cells)])
    show_table(["a training step", *(f"n = {n:,}" for n in sizes), "twice the length"], rows)


def main() -> None:
    parts: dict[str, Callable] = {"steps": measure_steps, "double": measure_double, "draw": draw, "show": show}
    for part in names(what, parts):
        parts[part]()


if __name__ == "__main__":
    start(globals())
