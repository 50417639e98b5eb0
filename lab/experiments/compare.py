"""Runs of train.py that differ in a few flags: the losses and the times of a table's rows.

    python -m lab.experiments.compare --table=cores                       # the README's first
    python -m lab.experiments.compare --table=choices --only="rope;muon"  # two rows, and the first
    python -m lab.experiments.compare --table=novels --what=show          # what is in --out

tables.py has the tables and their flags. The parts (--what):

train   runs of each row, first all rows with seed 1, then all with seed 2, and so on: an hour in
        which the machine is slow slows all rows alike.
time    milliseconds of a training step on a CPU, and the ratio to the row that the row is compared
        with: medians of rounds, in which each row makes one step.
equal   for tables of attention in linear time: runs of as many steps as fit into the time that the
        row they are compared with takes for the table's steps.
show    prints the tables of what is in --out.

Finished runs are not repeated: you can stop the script and start it again.
"""

import statistics

import torch

from configurator import at_least_one, names
from lab.experiments.results import check_writable, save, saved, short, show_table, spread, start
from lab.experiments.runs import as_flags, final, record
from lab.experiments.tables import TABLES, Table
from lab.experiments.times import step_times

# What is measured?
what = "train,time,equal,show"  # the parts to run, separated by commas: see above
table = "cores"  # the tables, separated by commas: a name in TABLES
only = ""  # the rows to run, separated by semicolons; empty: all
config_file: str | None = None  # the config file of every run; None: the table's
seeds = 3  # runs of each row, with the seeds 1, 2, ...
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
jobs = 1  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps of each row
out = "lab/experiments/compare.json"  # the results
out_dir = "out-compare"  # the folder for the runs, each in a folder of its own


def chosen(t: Table) -> dict[str, dict]:
    """The flags of each row of --only, and of the rows that they are compared with."""
    known = {name: t.flags | flags for name, flags in t.rows.items()}
    wanted = names(only, known, ";")
    return {row: flags for row, flags in known.items() if row in wanted or row in (base(t, x) for x in wanted)}


def base(t: Table, row: str) -> str:
    """The row that a row is compared with."""
    return t.against.get(row, next(iter(t.rows)))


def run_name(name: str, row: str, seed: int, steps: int | None) -> str:
    """The name of a run in --out."""
    return ", ".join([name, row, *([f"{steps} steps"] if steps else []), *([extra] if extra else []), f"seed {seed}"])


def train(name: str, t: Table, rows: dict[str, dict], steps: dict[str, int | None]) -> None:
    """Makes the runs of each row and seed that are missing, of so many steps; None: as many as the config says."""
    runs = {}
    for seed in range(1, seeds + 1):
        for row, n in steps.items():
            flags = rows[row] | ({"max_iters": n, "lr_decay_iters": n, "eval_interval": n} if n else {})
            command = [config_file or t.file, *as_flags(flags), f"--seed={seed}", *extra.split()]
            runs[run_name(name, row, seed, n)] = command
    record(out, runs, out_dir, jobs, make=True)


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


def show(name: str, t: Table, rows: dict[str, dict]) -> None:
    """Prints a table. Of losses: the mean of the seeds, the lowest to the highest."""
    results, equal = saved(out, {"runs": {}}), in_equal_time(name, t, rows)

    def losses(row: str, steps: int | None) -> list[float]:
        runs = (results["runs"].get(run_name(name, row, seed, steps)) for seed in range(1, seeds + 1))
        return [run["best"] if t.loss == "best" else final(run) for run in runs if run]

    cells = {}
    for row in rows:
        x, theirs = losses(row, t.steps), losses(base(t, row), t.steps)
        changes = [a - b for a, b in zip(x, theirs, strict=False)]
        each = f"{statistics.mean(changes):+.3f} ({', '.join(f'{c:+.3f}' for c in changes)})" if changes else ""
        ms, ratio = results.get("times", {}).get(f"{name}, {row}", ("", ""))
        flags = " ".join(as_flags(t.rows[row]))
        cells[row] = [
            row,
            f"`{flags}`" if flags else "",
            spread(x),
            each,
            ms and f"{ms:.1f}",
            ratio and f"{ratio:.2f}x",
        ]
        cells[row] += [equal.get(row, ""), spread(losses(row, equal[row])) if row in equal else ""] if t.steps else []
    columns = [name, "flags", f"{'lowest' if t.loss == 'best' else 'last'} val loss, mean (range)"]
    columns += [f"against {'softmax' if t.against else base(t, '')}: mean (each seed)", "ms per step", "ratio"]
    show_table(columns + (["steps", "loss in equal time"] if t.steps else []), cells.values())


def main() -> None:
    torch.set_flush_denormal(True)  # as train.py
    at_least_one(jobs=jobs, seeds=seeds, repeats=repeats)
    check_writable(out)
    parts, tables = names(what, ["train", "time", "equal", "show"]), names(table, TABLES)
    for name in tables:
        rows = chosen(TABLES[name])
        if "train" in parts:
            train(name, TABLES[name], rows, dict.fromkeys(rows, TABLES[name].steps))
        if "time" in parts:
            take_times(name, TABLES[name], rows)
        if "equal" in parts:
            train(name, TABLES[name], rows, in_equal_time(name, TABLES[name], rows))
        if "show" in parts:
            show(name, TABLES[name], rows)


if __name__ == "__main__":
    start(globals())
