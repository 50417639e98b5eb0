"""Runs of train.py that differ in a few flags: the losses and the times of a table's rows.

    python -m lab.experiments.compare --table=cores                       # the README's first
    python -m lab.experiments.compare --table=choices --only="rope;muon"  # two rows, and the first
    python -m lab.experiments.compare --table=novels --what=show          # what is in --out

tables.py has the tables and their flags. The parts (--what):

train   runs of each row, first all rows with seed 1, then all with seed 2, and so on: an hour in
        which the machine is slow slows all rows alike. Where a table tunes the learning rate, each
        rate first runs with the seeds 101 and 102, and the lowest mean loss decides.
time    milliseconds of a training step on a CPU, and the ratio to the row that the row is compared
        with: medians of rounds, in which each row makes one step.
equal   for tables of attention in linear time: runs of as many steps as fit into the time that the
        row they are compared with takes for the table's steps.
show    prints the tables of what is in --out: losses, and their differences by the rule of
        RESULTS.md.

Finished runs are skipped: you can stop the script and start it again.
"""

import statistics

import torch

from configurator import at_least_one, names, run_script
from lab.experiments.results import (
    check_writable,
    difference,
    save,
    saved,
    short,
    show_table,
    spread,
)
from lab.experiments.runs import as_flags, final, record, sooner
from lab.experiments.tables import TABLES, Table, steps_of
from lab.experiments.times import step_times

# What is measured?
what = "train,time,equal,show"  # the parts to run, separated by commas: see above
table = "cores"  # the tables, separated by commas: a name in TABLES
only = ""  # the rows to run, separated by semicolons; empty: all
config_file: str | None = None  # the config file of every run; None: the table's
seeds: int | None = None  # runs of each row, with the seeds 1, 2, ...; None: the table's number
against = ""  # show: the row that all rows are compared with; empty: the table's choice
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
jobs = 1  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps of each row
out = "lab/experiments/compare.json"  # the results
out_dir = "out-compare"  # the folder for the runs, each in a folder of its own

TUNING = (101, 102)  # the seeds of the runs that decide a learning rate


def chosen(t: Table) -> dict[str, dict]:
    """The flags of each row of --only, and of the rows that they are compared with."""
    wanted = set(names(only, t.rows, ";"))
    wanted |= {base(t, row) for row in wanted}
    return {row: t.flags | flags for row, flags in t.rows.items() if row in wanted}


def base(t: Table, row: str) -> str:
    """The row that a row is compared with."""
    return against or t.against.get(row, next(iter(t.rows)))


def counted(t: Table) -> range:
    """The seeds of the runs that are compared."""
    return range(1, (seeds or t.seeds) + 1)


def run_name(t: Table, row: str, seed: int, steps: int | None, rate: float | None) -> str:
    """The name of a run in --out."""
    parts = [t.name, row]
    if rate:
        parts.append(f"rate {rate:g}")
    if steps:
        parts.append(f"{steps} steps")
    if extra:
        parts.append(extra)
    return ", ".join([*parts, f"seed {seed}"])


def train(t: Table, steps: dict) -> None:
    """Make the missing runs of each row in `steps` and each seed, at the row's best learning rate.

    steps: {row: its number of steps, or None: as many as the config file says}.
    """
    make(t, steps, [(row, rate, seed) for seed in TUNING for row in steps for rate in t.tune])
    make(t, steps, [(row, tuned(t, row), seed) for seed in counted(t) for row in steps])


def make(t: Table, steps: dict, keys: list[tuple]) -> None:
    """Make the missing runs of keys: (row, learning rate or None for the row's own, seed)."""
    rows = chosen(t)
    runs = {}
    for row, rate, seed in keys:
        flags = dict(rows[row])
        if steps[row]:
            flags |= steps_of(steps[row])
        if rate:
            flags["learning_rate"] = rate
        command = [config_file or t.file, *as_flags(flags), f"--seed={seed}", *extra.split()]
        runs[run_name(t, row, seed, steps[row], rate)] = command
    record(out, runs, out_dir, jobs, make=True, keep=t.keep)


def tuned(t: Table, row: str) -> float | None:
    """The learning rate with the lowest mean loss over the seeds of TUNING; None: not tuned."""
    runs = saved(out, {"runs": {}})["runs"]
    means = {}
    for rate in t.tune:
        results = [runs.get(run_name(t, row, seed, t.steps, rate)) for seed in TUNING]
        if all(results):
            means[rate] = statistics.mean(map(final, results))
    return min(means, key=means.get, default=None)


def take_times(t: Table) -> None:
    """Add each row's milliseconds and their ratio to --out."""
    rows = chosen(t)
    bases = {row: base(t, row) for row in rows}
    times = step_times(config_file or t.file, rows, t.vocab_size, repeats, bases)
    results = saved(out, {"times": {}})
    for row, ms in times.items():
        results["times"][f"{t.name}, {row}"] = short(ms)
    save(out, results)


def in_equal_time(t: Table) -> dict[str, int]:
    """How many steps each row makes in the time in which its base makes the table's steps."""
    times = saved(out, {"times": {}})["times"]
    steps = {}
    for row in chosen(t):
        if t.steps and f"{t.name}, {row}" in times:
            steps[row] = round(t.steps / times[f"{t.name}, {row}"][1])
    return steps


def paired(x: dict, y: dict) -> tuple[list, list]:
    """What x and y, {seed: ...}, have for the seeds that are in both."""
    both = [seed for seed in x if seed in y]
    return [x[seed] for seed in both], [y[seed] for seed in both]


def show(t: Table) -> None:
    """Print a table. Of losses: the mean of the seeds, the lowest and the highest."""
    results = saved(out, {"runs": {}, "times": {}})
    equal = in_equal_time(t)

    def runs_of(row: str, steps: int | None) -> dict:
        rate = tuned(t, row)
        keys = {seed: run_name(t, row, seed, steps, rate) for seed in counted(t)}
        return {n: results["runs"][key] for n, key in keys.items() if key in results["runs"]}

    def losses(row: str, steps: int | None) -> dict:
        loss = final if t.loss == "val" else lambda run: run["best"]
        return {seed: loss(run) for seed, run in runs_of(row, steps).items()}

    lines = []
    for row in chosen(t):
        other = base(t, row)
        rate = tuned(t, row)
        flags = " ".join(as_flags(t.rows[row] | ({"learning_rate": rate} if rate else {})))
        x = losses(row, t.steps)
        cells = [row, f"`{flags}`" if flags else "", spread([*x.values()])]
        cells.append("" if row == other else difference(*paired(x, losses(other, t.steps))))
        if "val_loss" in t.keep:
            pairs = paired(runs_of(row, t.steps), runs_of(other, t.steps))
            cells.append("" if row == other else sooner(*pairs))
        ms, ratio = results["times"].get(f"{t.name}, {row}", (None, None))
        cells += [f"{ms:.1f}", f"{ratio:.2f}x"] if ms else ["", ""]
        if t.steps:
            same = losses(row, equal[row]) if row in equal and row != other else {}
            cells += [equal.get(row, ""), spread([*same.values()])]
            cells.append(difference(*paired(same, losses(other, equal[other]))) if same else "")
        lines.append(cells)
    show_table(columns(t), lines)


def columns(t: Table) -> str:
    """The head of a table."""
    loss = {"val": "last val loss", "best": "lowest val loss"}[t.loss]
    if t.file.startswith("lab/"):
        loss = "error"
    other = "its base" if t.against else base(t, "")
    head = f"{t.name} | flags | {loss}, mean (range) | against {other}: mean (95% interval)"
    if "val_loss" in t.keep:
        head += " | share of the steps to its loss"
    head += " | ms per step | ratio"
    if t.steps:
        head += " | steps | loss in equal time | against its base"
    return head


def main() -> None:
    torch.set_flush_denormal(True)  # as train.py
    at_least_one(jobs=jobs, seeds=1 if seeds is None else seeds, repeats=repeats)
    check_writable(out)
    parts = names(what, ["train", "time", "equal", "show"])
    for name in names(table, TABLES):
        t = TABLES[name]
        names(against, t.rows, ";")  # raises UserError for an unknown row
        if "train" in parts:
            train(t, dict.fromkeys(chosen(t), t.steps))
        if "time" in parts and not t.file.startswith("lab/"):  # no example has a step of train.py
            take_times(t)
        if "equal" in parts:
            train(t, in_equal_time(t))
        if "show" in parts:
            show(t)


if __name__ == "__main__":
    run_script(globals())
