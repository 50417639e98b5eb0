"""What does a longer text cost in training? Time and memory of a step up to n = 65,536.

    OMP_NUM_THREADS=1 python -m lab.experiments.length  # about an hour

The parts (--what):

steps   time and peak memory of a training step for each row of ROWS and each length, in a fresh
        process each. A row ends at a step of more than --patience seconds, or where the next one
        would need more than --most_memory. The time is the processor's, so that other programs
        disturb it less; with one thread it is that of an idle machine.
double  how much longer a step takes when the text gets twice as long, for the last two of
        --double: the median of rounds in which both lengths take turns.
show    the table

Results that are in --out are not measured again, so you can stop the script and start it again.
endless.py is about long texts in decoding.
"""

import functools
import resource
import statistics

import torch

from bench import interleaved, medians, ratios
from configurator import names, positive, run_script
from lab.experiments.results import measured, saved, show_table
from lab.experiments.runs import of_rows
from lab.experiments.tables import rows_of
from lab.experiments.times import apart, max_rss, timed_step
from model import GPT, GPTConfig

what = "steps,double,show"  # the parts: see above
only = ""  # the rows to measure, separated by semicolons; empty: all
lengths = "1024,4096,8192,16384,65536"  # tokens of the one sequence of a step
double = "8192,16384"  # the two lengths that are compared in rounds
repeats = 5  # rounds of that comparison; a step of the part steps is repeated at most as often
patience = 90.0  # seconds; after a longer step a row gets no longer text
most_memory = 8.0  # GiB; a row ends before a step that would need more
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
    times = {key: statistics.median(x[key] for x in counted) for key in ("s", "own_s")}
    return times | {"steps": len(counted), "bytes": max_rss() - before}


def doubled(flags: dict, short: int, long: int, repeats: int) -> dict:
    """The ratio of the times of a step on `long` tokens and on `short` ones: the rounds' median."""
    gpt, adamw = trainer(flags, long)
    tasks = {n: functools.partial(step_in, gpt, adamw, n) for n in (short, long)}
    rounds = interleaved(tasks, "cpu", repeats)
    ratio = ratios(rounds, long, short)
    seconds = {f"s_{n}": medians(rounds[n])[0]["s"] for n in rounds}
    return seconds | {"ratio": ratio["s"], "own_ratio": ratio["own_s"]}


def measure_steps() -> None:
    """Measure each row at each length, until a step takes too long or too much memory."""
    for name in names(only, ROWS, ";"):
        seconds = 0.0
        bytes_per_token = 0.0
        for n in sorted(positive("lengths", lengths)):
            if seconds > patience or bytes_per_token * n > most_memory * 2**30:
                print(f"steps, {name}: no {n} tokens (--patience, --most_memory)")
                break
            args = apart, step, ROWS[name], n, repeats
            row = measured(out, "steps", name, n, *args, of=of_rows(__file__, ROWS[name]))
            seconds = row["s"]
            bytes_per_token = row["bytes"] / n


def measure_double() -> None:
    """Compare the two lengths of --double for each row."""
    short, long = sorted(positive("double", double))[-2:]
    for name in names(only, ROWS, ";"):
        args = apart, doubled, ROWS[name], short, long, repeats
        measured(out, "double", name, long, *args, of=of_rows(__file__, ROWS[name]))


def show() -> None:
    """Print the table."""
    results = saved(out, {"steps": {}, "double": {}})
    sizes = sorted({int(n) for row in results["steps"].values() for n in row})
    rows = []
    for name, row in results["steps"].items():
        cells = [name]
        for n in sizes:
            r = row.get(str(n))
            cells.append(f"{r['s']:.2f} s, {r['bytes'] / 2**20:,.0f} MiB" if r else "")
        twice = results["double"].get(name, {}).values()
        cells.append(", ".join(f"{r['ratio']:.2f}x ({r['own_ratio']:.2f}x)" for r in twice))
        rows.append(cells)
    lengths = " | ".join(f"n = {n:,}" for n in sizes)
    show_table(f"a training step | {lengths} | twice the length", rows)


def main() -> None:
    parts = {"steps": measure_steps, "double": measure_double, "show": show}
    for part in names(what, parts):
        parts[part]()


if __name__ == "__main__":
    run_script(globals())
