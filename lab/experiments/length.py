"""What does a longer text cost in training? Time and memory of a step up to n = 65,536.

    OMP_NUM_THREADS=1 python -m lab.experiments.length  # about an hour

The parts (--what):

steps   time and peak memory of a training step for each row of ROWS and each length, in a fresh
        process each. The time is the processor's, so that other programs disturb it less; with one
        thread it is that of an idle machine.
double  how much longer a step takes on twice as many tokens as --double: the median of rounds in
        which both lengths take turns.
show    the table

Results that are in --out are not measured again, so you can stop the script and start it again.
endless.py is about long texts in decoding.
"""

import functools
import resource
import sys
from collections.abc import Callable

from configurator import names, positive, run_script

import torch

from bench import interleaved, medians, ratios
from lab.experiments.results import measured, show_table, stored
from lab.experiments.runs import of_rows
from lab.experiments.tables import rows_of
from lab.experiments.times import apart, timed_step
from model import GPT, GPTConfig

what = "steps,double,show"  # the parts: see above
only = ""  # the rows to measure, separated by semicolons; empty: all
lengths = "1024,4096,8192,16384,65536"  # tokens of the one sequence of a step
double = 8192  # tokens: the shorter one of the two lengths that are compared in rounds
repeats = 5  # rounds of that comparison; a step of the part steps is repeated at most as often
out = "lab/experiments/length.json"  # the results

SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 256, "position": "rope"}
ROWS = rows_of("""
softmax:
softmax, LS: --heads=SSSL --window=16
beta: --attention=beta
beta, decay: --attention=beta --decay=alibi
beta_squared: --attention=beta_squared
softmax short, beta long, conv: --heads=SSSL --window=16 --short_attention=softmax --conv=4 \
--attention=beta
softmax short, beta_squared long, conv: --heads=SSSL --window=16 --short_attention=softmax \
--conv=4 --attention=beta_squared
""")
# a million tokens fit; only where --only= names them
LONGEST = rows_of("""
beta, recomputed: --attention=beta --activation_checkpointing
softmax short, recomputed: --heads=S --window=16 --activation_checkpointing
""")


def max_rss() -> int:
    """The most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def trainer(flags: dict, block_size: int) -> tuple[GPT, list]:
    """A model, which has made one step of 64 tokens, and its optimizers."""
    torch.set_flush_denormal(True)  # as train.py
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES | flags, block_size=block_size)).train()
    adamw = [torch.optim.AdamW(gpt.parameters(), fused=True)]
    step_in(gpt, adamw, 64)
    return gpt, adamw


def step_in(gpt: GPT, adamw: list, n: int) -> dict[str, float]:
    """Make a training step on n tokens; return its seconds of processor time.

    "s": all of them; "own_s": without the operating system's, which hands out memory.
    """
    x = torch.randint(SIZES["vocab_size"], (1, n))
    began = resource.getrusage(resource.RUSAGE_SELF)
    timed_step(gpt, adamw, x)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    own = ended.ru_utime - began.ru_utime
    return {"s": own + ended.ru_stime - began.ru_stime, "own_s": own}


def step(flags: dict, n: int, repeats: int) -> dict:
    """The median seconds of a training step on n tokens, and the bytes that the steps add.

    The first step is a warm-up and does not count, unless it takes so long that there is no second
    one: steps are repeated while they fit into a minute.
    """
    gpt, adamw = trainer(flags, n)
    before = max_rss()
    steps = [step_in(gpt, adamw, n)]
    while len(steps) <= repeats and sum(x["s"] for x in steps) + steps[-1]["s"] < 60:
        steps.append(step_in(gpt, adamw, n))
    counted = steps[1:] or steps
    times = medians(counted)[0]
    return times | {"steps": len(counted), "bytes": max_rss() - before}


def doubled(flags: dict, n: int, repeats: int) -> dict:
    """The ratio of the times of a step on 2 n tokens and on n: the rounds' median."""
    gpt, adamw = trainer(flags, 2 * n)
    tasks = {size: functools.partial(step_in, gpt, adamw, size) for size in (n, 2 * n)}
    rounds = interleaved(tasks, "cpu", repeats)
    ratio = ratios(rounds, 2 * n, n)
    seconds = {f"s_{size}": medians(rounds[size])[0]["s"] for size in rounds}
    return seconds | {"ratio": ratio["s"], "own_ratio": ratio["own_s"]}


def measure(part: str, name: str, size: int, f: Callable, n: int) -> None:
    """Add f(flags of a row, n, repeats), in a fresh process, to --out, if it is missing."""
    args = apart, f, (ROWS | LONGEST)[name], n, repeats
    measured(out, part, name, size, *args, of=of_rows(__file__, (ROWS | LONGEST)[name]))


def show() -> None:
    """Print the table."""
    steps = stored(out, "steps")
    sizes = sorted({int(n) for row in steps.values() for n in row})
    rows = []
    for name, row in steps.items():
        cells = [name]
        for n in sizes:
            r = row.get(str(n))
            cells.append(f"{r['s']:.2f} s, {r['bytes'] / 2**20:,.0f} MiB" if r else "")
        twice = stored(out, "double", name).values()
        cells.append(", ".join(f"{r['ratio']:.2f}x ({r['own_ratio']:.2f}x)" for r in twice))
        rows.append(cells)
    lengths = " | ".join(f"n = {n:,}" for n in sizes)
    show_table(f"a training step | {lengths} | twice the length", rows)


def main() -> None:
    parts = names(what, ["steps", "double", "show"])
    for name in names(only, ROWS | LONGEST, ";") if only else ROWS:
        if "steps" in parts:
            for n in positive("lengths", lengths):
                measure("steps", name, n, step, n)
        if "double" in parts:
            measure("double", name, 2 * double, doubled, double)
    if "show" in parts:
        show()


if __name__ == "__main__":
    run_script(globals())
