"""Do short heads keep the training of long texts stable? (long-short paper, figures 1 and 3 to 6)

    OMP_NUM_THREADS=1 python -m lab.experiments.long_short --jobs=2  # on two cores
    python -m lab.experiments.long_short --scale=paper               # the paper's model, on a GPU
    python -m lab.experiments.long_short --what=show                 # picture and tables of --out

The part `lengths` trains, at each length, long heads, short heads and one long head (LS), short
heads alone, and long heads with normalised queries and keys; with 2 heads the first two. `border`
trains long heads and LS on long texts with higher and higher learning rates, up to one that breaks
both.
`bfloat16` does both again in bfloat16, as the paper trains: products in bfloat16 (mixed precision),
and weights in it too. Finished runs are skipped: you can stop and start again.
"""

import itertools
import math
import statistics
from typing import Literal

from configurator import names, run_script

from lab.experiments.results import difference, drawing, mean, measured, show_table, stored
from lab.experiments.runs import by_seed, constants, final, finals, of_rows, sooner
from lab.experiments.tables import rows_of, steps_of
from lab.experiments.times import step_times

# What is measured?
what = "lengths,border,bfloat16,show"  # the parts to run; show: the picture and the tables
scale: Literal["pocket", "paper"] = "pocket"  # pocket: for two CPU cores; paper: the paper's
seeds = 3  # runs of each row, and of each learning rate of the border
jobs = 1  # runs at the same time; they share the cores of the CPU
out = "lab/experiments/long_short.json"  # the results
picture = "lab/experiments/pictures/long_short.png"  # the picture
out_dir = "out-long-short"  # the folder for the runs, each in a folder of its own

MODELS = rows_of("""
long: --heads=L
LS: --heads=SSSSSL
short: --heads=S
QK-norm: --heads=L --qk_norm=l2
long, float32: --heads=L --dtype=float32 --tf32=False
""")
COMPARED = ("long", "LS")  # the models with 2 heads, of the border and of bfloat16
# in products alone; and in weights too
PRECISIONS = rows_of("""
bfloat16: --dtype=bfloat16
bfloat16 weights: --dtype=float32 --variant=bfloat16
""")
CPU = "config/train_shakespeare_char_cpu.py"
POCKET = steps_of(400, 4) | {"eval_iters": 20}
# lengths: {length: sequences in a batch}
# border: its length, and its learning rates above the usual one
# bfloat16: learning rates at the border's length
# two: with 2 heads the MLP gets the weights that attention loses (section 5.1)
SCALES = {
    "pocket": {
        "file": CPU,
        "flags": POCKET,
        "two": {"n_head": 2, "head_dim": 16, "n_hidden": 512},
        "models": ("long", "LS", "short", "QK-norm"),
        "lengths": {128: 16, 512: 4, 2048: 1, 8192: 1},
        "border": (2048, [2e-2, 6e-2, 0.2, 0.6]),
        "bfloat16": [6e-3, 6e-2],
    },
    "paper": {
        "file": "config/train_pg19_ls.py",
        "flags": {"gradient_accumulation_steps": 16, "eval_interval": 1000},
        "two": {"n_head": 2, "head_dim": 32, "n_hidden": 1024},
        "models": tuple(MODELS),
        "lengths": {128: 256, 512: 64, 2048: 16, 8192: 4},
        "border": (2048, [1.2e-3, 2.4e-3, 4.8e-3]),
        "bfloat16": [],  # all models but one are in bfloat16
    },
}


def flags(n: int, heads: int, model: str) -> dict:
    """The flags of a run. The default window is the paper's."""
    s = SCALES[scale]
    chosen = s["flags"] | MODELS[model] | {"block_size": n, "batch_size": s["lengths"][n]}
    if heads == 2:
        chosen |= s["two"]
        chosen["heads"] = chosen["heads"].replace("SSSSSL", "SL")
    return chosen | {"import": "lab.ideas.norms,lab.loggers.logits"}


def models(heads: int) -> tuple:
    """The models that have so many heads."""
    return SCALES[scale]["models"] if heads == 6 else COMPARED


def usual_rate() -> float:
    """The config file's learning rate."""
    return constants(SCALES[scale]["file"])["learning_rate"]


def results(rows: dict, make: bool) -> dict:
    """The results of the seeds of each row, {key: flags of train.py}. make: see runs.record."""
    named = {}
    for key, row in rows.items():
        named[key] = ", ".join(map(str, (scale, *key, ""))), SCALES[scale]["file"], row
    keep = ("val_loss", "loss", "max_logit")
    return by_seed(named, range(1, seeds + 1), out, out_dir, jobs, make, keep)


def lengths(make: bool) -> dict:
    """{(n, heads, model): results of the seeds}."""
    s = SCALES[scale]
    keys = [(n, heads, model) for heads in (6, 2) for n in s["lengths"] for model in models(heads)]
    return results({key: flags(*key) for key in keys}, make)


def time_steps(n: int, heads: int) -> None:
    """Add to --out {model: (milliseconds of a training step, their ratio to long heads')}."""
    rows = {model: flags(n, heads, model) for model in models(heads)}
    args = step_times, CPU, rows, 65, 15, dict.fromkeys(rows, "long")
    of = of_rows(__file__, *rows.values())
    measured(out, "times", f"{scale}, {heads} heads", n, *args, of=of)


def border(make: bool, by_length: dict) -> dict:
    """{("border", learning rate, model): results of the seeds}, from the usual rate on."""
    n, rates = SCALES[scale]["border"]
    rows = {}
    for rate, model in itertools.product(rates, COMPARED):
        rows["border", rate, model] = flags(n, 6, model) | {"learning_rate": rate}
    usual = {("border", usual_rate(), model): by_length[n, 6, model] for model in COMPARED}
    return usual | results(rows, make)


def bfloat16(make: bool) -> dict:
    """{(n, learning rate, model, precision): results of the seeds}."""
    s = SCALES[scale]
    n, _ = s["border"]
    rows = {}
    for rate, precision, model in itertools.product(s["bfloat16"], PRECISIONS, COMPARED):
        row = flags(n, 6, model) | {"learning_rate": rate}
        rows[n, rate, model, precision] = row | PRECISIONS[precision]
    return results(rows, make)


def breaks(result: dict, usual: list[dict]) -> bool:
    """Whether a run's loss is not finite, or ends half a nat above the lowest of `usual`.

    usual: the results of LS at the usual learning rate.
    """
    return not final(result) < min(finals(usual)) + 0.5


def largest(results: list[dict]) -> float:
    """The largest absolute score of whole runs, the mean of the seeds."""
    return statistics.mean(result.get("max_logit", math.nan) for result in results)


def perplexity(results: list[dict]) -> float:
    """The mean of the seeds."""
    return statistics.mean(map(math.exp, finals(results)))


def draw(by_length: dict) -> None:
    """Losses and scores over steps (figures 1, 3, 4), and over lengths (5, 6)."""
    s = SCALES[scale]
    n = max(s["lengths"])
    x = [*map(str, s["lengths"])]
    with drawing(picture, 2, 2, 12, 8) as (loss, score, end, score_end):
        for heads, line in ((6, "-"), (2, ":")):
            for i, model in enumerate(models(heads)):
                color = f"C{i - 1}" if i else "black"
                style = {"color": color, "ls": line, "label": f"{model}, {heads} heads"}
                for ax, key in ((loss, "loss"), (score, "max_logit")):
                    curve = by_length[n, heads, model][0]["curves"][key]
                    ax.plot(curve["iter"], curve[key], **style)
                rows = [by_length[length, heads, model] for length in s["lengths"]]
                end.plot(x, [*map(perplexity, rows)], marker="o", **style)
                score_end.plot(x, [*map(largest, rows)], marker="o", **style)
        loss.set(title=f"training loss, n = {n} (figures 1a, 3b, 4a, 4b)", xlabel="step")
        score.set(title=f"largest score, n = {n} (figures 1b, 4c)", xlabel="step", yscale="log")
        end.set(title="perplexity (figures 5, 6: LS 36, short 42, QK-norm 112)", xlabel="n")
        score_end.set(title="largest score of the whole run (figure 4c)", xlabel="n", yscale="log")


def show_lengths(by_length: dict) -> None:
    """Print the table of the lengths."""
    rows = []
    for (n, heads, model), runs in by_length.items():
        long = by_length[n, heads, "long"]
        losses = finals(runs)
        against = "" if model == "long" else difference(losses, finals(long))
        cells = [n, heads, model, mean(losses), against, sooner(runs, long)]
        times = stored(out, "times", f"{scale}, {heads} heads", str(n))
        time = f"{times[model][1]:.2f}x" if times else ""
        rows.append([*cells, f"{largest(runs):.1f}", time])
    columns = "n | heads |  | val loss | against long | share of the steps to long's last loss"
    show_table(f"{columns} | largest score | time of a step", rows)


def show_border(by_rate: dict) -> None:
    """Print the table of the learning rates."""
    usual = by_rate["border", usual_rate(), "LS"]
    rows = []
    for (_, rate, model), runs in by_rate.items():
        broken = sum(breaks(run, usual) for run in runs)
        cells = [f"{rate:g}", model, mean(finals(runs)), f"{largest(runs):.1f}"]
        rows.append([*cells, f"{broken} of {len(runs)}"])
    show_table("learning rate |  | last val loss | largest score | breaks", rows)


def show_bfloat16(in_bfloat16: dict, by_rate: dict) -> None:
    """Print the table of bfloat16."""
    rows = []
    for (n, rate, model, precision), runs in in_bfloat16.items():
        losses = finals(runs)
        change = difference(losses, finals(by_rate["border", rate, model]))
        lost = f"{losses.count(math.inf)} of {len(runs)}"
        cells = [n, f"{rate:g}", f"{model}, {precision}", mean(losses), change]
        rows.append([*cells, f"{largest(runs):.1f}", lost])
    columns = "n | learning rate |  | last val loss | against float32 | largest score | not finite"
    show_table(columns, rows)


def main() -> None:
    parts = names(what, ["lengths", "border", "bfloat16", "show"])
    by_length = lengths("lengths" in parts)
    if "lengths" in parts and scale == "pocket":
        for n, heads in itertools.product(SCALES[scale]["lengths"], (6, 2)):
            time_steps(n, heads)
    by_rate = border("border" in parts, by_length)
    in_bfloat16 = bfloat16("bfloat16" in parts)
    if "show" in parts:
        draw(by_length)
        show_lengths(by_length)
        show_border(by_rate)
        show_bfloat16(in_bfloat16, by_rate)


if __name__ == "__main__":
    run_script(globals())
