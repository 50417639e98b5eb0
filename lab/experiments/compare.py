"""Runs of train.py that differ in a few flags: the losses and the times of a table's rows.

    python -m lab.experiments.compare --table=cores                       # the README's first
    python -m lab.experiments.compare --table=choices --only="rope;muon"  # two rows, and the first
    python -m lab.experiments.compare --table=novels --what=show          # what is in --out

tables.py has the tables and their flags. The parts (--what):

train   runs of each row, first all rows with seed 1, then all with seed 2, and so on: an hour in
        which the machine is slow slows all rows alike. Before them, where a table tunes the learning
        rate: runs of each rate with the seeds 101 and 102, whose mean loss decides it.
time    milliseconds of a training step on a CPU, and the ratio to the row that the row is compared
        with: medians of rounds, in which each row makes one step.
equal   for tables of attention in linear time: runs of as many steps as fit into the time that the
        row they are compared with takes for the table's steps.
show    prints the tables of what is in --out: losses, and their differences by the rule of RESULTS.md.

Finished runs are not repeated: you can stop the script and start it again.
"""

import statistics

import torch

from configurator import at_least_one, names
from lab.experiments.results import check_writable, difference, save, saved, short, show_table, spread, start
from lab.experiments.runs import as_flags, final, record, sooner
from lab.experiments.tables import TABLES, Table
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
    known = {name: t.flags | flags for name, flags in t.rows.items()}
    wanted = names(only, known, ";")
    return {row: flags for row, flags in known.items() if row in wanted or row in (base(t, x) for x in wanted)}


def base(t: Table, row: str) -> str:
    """The row that a row is compared with."""
    return against or t.against.get(row, next(iter(t.rows)))


def run_name(name: str, row: str, seed: int, steps: int | None, rate: float | None) -> str:
    """The name of a run in --out."""
    parts = [name, row, *([f"rate {rate:g}"] if rate else []), *([f"{steps} steps"] if steps else [])]
    return ", ".join([*parts, *([extra] if extra else []), f"seed {seed}"])


def train(name: str, t: Table, rows: dict[str, dict], steps: dict[str, int | None]) -> None:
    """Makes the runs of each row and seed that are missing, of so many steps; None: as many as the config says."""
    tried = [(row, rate, seed) for seed in TUNING for row in steps for rate in t.tune]
    make(name, t, rows, steps, tried)
    make(name, t, rows, steps, [(row, tuned(name, t, row), seed) for seed in counted(t) for row in steps])


def make(name: str, t: Table, rows: dict[str, dict], steps: dict, keys: list[tuple[str, float | None, int]]) -> None:
    """Makes the runs (row, learning rate or None for the row's own, seed) that are missing."""
    runs = {}
    for row, rate, seed in keys:
        n = steps[row]
        flags = rows[row] | ({"max_iters": n, "lr_decay_iters": n, "eval_interval": n} if n else {})
        flags |= {"learning_rate": rate} if rate else {}
        command = [config_file or t.file, *as_flags(flags), f"--seed={seed}", *extra.split()]
        runs[run_name(name, row, seed, n, rate)] = command
    record(out, runs, out_dir, jobs, make=True, keep=t.keep)


def counted(t: Table) -> range:
    """The seeds of the runs that are compared."""
    return range(1, (seeds or t.seeds) + 1)


def tuned(name: str, t: Table, row: str) -> float | None:
    """The learning rate of a row that has the lowest mean loss over the seeds of TUNING; None: it is not tuned."""
    runs, mean = saved(out, {"runs": {}})["runs"], {}
    for rate in t.tune:
        made = [runs.get(run_name(name, row, seed, t.steps, rate)) for seed in TUNING]
        if all(made):
            mean[rate] = statistics.mean(map(final, made))
    return min(mean, key=mean.get) if mean else None


def take_times(name: str, t: Table, rows: dict[str, dict]) -> None:
    """Adds each row's milliseconds and their ratio to --out."""
    against = {row: base(t, row) for row in rows}
    times = step_times(config_file or t.file, rows, t.vocab_size, repeats, against)
    results = saved(out, {"runs": {}})
    results.setdefault("times", {}).update({f"{name}, {row}": short(x) for row, x in times.items()})
    save(out, results)


def in_equal_time(name: str, t: Table, rows: dict[str, dict]) -> dict[str, int]:
    """How many steps each row makes in the time that the row it is compared with takes for the table's steps."""
    times = saved(out, {}).get("times", {})
    found = {row: times.get(f"{name}, {row}") for row in rows} if t.steps else {}
    return {row: round(t.steps / ms[1]) for row, ms in found.items() if ms}


def pairs(x: dict[int, object], y: dict[int, object]) -> tuple[list, list]:
    """What x and y have for the seeds that are in both."""
    return [x[seed] for seed in x if seed in y], [y[seed] for seed in x if seed in y]


def show(name: str, t: Table, rows: dict[str, dict]) -> None:
    """Prints a table. Of losses: the mean of the seeds, the lowest to the highest."""
    results, equal = saved(out, {"runs": {}}), in_equal_time(name, t, rows)

    def made(row: str, steps: int | None) -> dict[int, dict]:
        rate = tuned(name, t, row)
        runs = {seed: results["runs"].get(run_name(name, row, seed, steps, rate)) for seed in counted(t)}
        return {seed: run for seed, run in runs.items() if run}

    def losses(row: str, steps: int | None) -> dict[int, float]:
        return {seed: run["best"] if t.loss == "best" else final(run) for seed, run in made(row, steps).items()}

    lines = []
    for row in rows:
        of, x, rate = base(t, row), losses(row, t.steps), tuned(name, t, row)
        flags = " ".join(as_flags(t.rows[row] | ({"learning_rate": rate} if rate else {})))
        cells = [row, f"`{flags}`" if flags else "", spread([*x.values()])]
        cells.append("" if row == of else difference(*pairs(x, losses(of, t.steps))))
        if "val_loss" in t.keep:
            cells.append("" if row == of else sooner(*pairs(made(row, t.steps), made(of, t.steps))))
        ms, ratio = results.get("times", {}).get(f"{name}, {row}", (None, None))
        cells += [f"{ms:.1f}", f"{ratio:.2f}x"] if ms else ["", ""]
        if t.steps:
            same = losses(row, equal[row]) if row in equal and row != of else {}
            cells += [equal.get(row, ""), spread([*same.values()])]
            cells.append(difference(*pairs(same, losses(of, equal[of]))) if same else "")
        lines.append(cells)
    measured = "error" if t.file.startswith("lab/") else f"{'lowest' if t.loss == 'best' else 'last'} val loss"
    columns = [name, "flags", f"{measured}, mean (range)"]
    columns.append(f"against {'its base' if t.against else base(t, '')}: mean (95% interval)")
    columns += ["share of the steps to its loss"] if "val_loss" in t.keep else []
    columns += ["ms per step", "ratio"] + (["steps", "loss in equal time", "against its base"] if t.steps else [])
    show_table(columns, lines)


def main() -> None:
    torch.set_flush_denormal(True)  # as train.py
    at_least_one(jobs=jobs, seeds=1 if seeds is None else seeds, repeats=repeats)
    check_writable(out)
    parts, tables = names(what, ["train", "time", "equal", "show"]), names(table, TABLES)
    for name in tables:
        names(against, TABLES[name].rows, ";")
        rows = chosen(TABLES[name])
        if "train" in parts:
            train(name, TABLES[name], rows, dict.fromkeys(rows, TABLES[name].steps))
        if "time" in parts and not TABLES[name].file.startswith("lab/"):  # an example has no step of train.py
            take_times(name, TABLES[name], rows)
        if "equal" in parts:
            train(name, TABLES[name], rows, in_equal_time(name, TABLES[name], rows))
        if "show" in parts:
            show(name, TABLES[name], rows)


if __name__ == "__main__":
    start(globals())
