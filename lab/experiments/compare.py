"""Runs of train.py that differ in a few flags: the losses and the times of a table's rows.

    python -m lab.experiments.compare --table=laser,bert                  # all rows of two tables
    python -m lab.experiments.compare --table=choices --only="rope;muon"  # two rows, and the first
    python -m lab.experiments.compare --table=novels --what=show          # what is there
    python -m lab.experiments.compare --rows="softmax; mine: --attention=laser --conv=4"

tables.py has the tables and their flags; --rows makes one. The parts (--what):

train   runs of each row, first all rows with seed 1, then all with seed 2, and so on: an hour in
        which the machine is slow slows all rows alike. Where a table tunes the learning rate, each
        rate first runs with the seeds 101 and 102, and the lowest mean loss decides.
time    milliseconds of a training step on a CPU, and the ratio to the row that the row is compared
        with: medians of rounds, in which each row makes one step.
equal   for tables of attention in linear time: runs of as many steps as fit into the time that the
        row they are compared with takes for the table's steps.
show    prints the tables of losses, and of their differences by the rule of RESULTS.md.

Finished runs are skipped: you can stop the script and start it again. Where --out lacks a run or a
time, show takes the project's own, in lab/experiments/compare.json.
"""

import itertools
import pathlib
import statistics

from configurator import names, run_script

import torch

from lab.experiments.results import add, difference, mean, short, show_table, stored
from lab.experiments.runs import as_flags, final, finals, of_rows, record, settings_of, sooner
from lab.experiments.tables import TABLES, Table, rows_of, steps_of
from lab.experiments.times import step_times, vocab_size_of

# What is measured?
what = "train,time,equal,show"  # the parts to run, separated by commas: see above
table = "laser"  # the tables, separated by commas: a name in TABLES
rows = ""  # a table of one's own in their place: "name: flags of train.py; other name: flags"
only = ""  # the rows to run, separated by semicolons; empty: all
config_file: str | None = None  # the config file of every run; None: the table's
seeds: int | None = None  # runs of each row, with the seeds 1, 2, ...; None: the table's number
against = ""  # show: the row that all rows are compared with; empty: the table's choice
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
jobs = 1  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps of each row
out = "compare.json"  # the results
out_dir = "out-compare"  # the folder for the runs, each in a folder of its own

SHIPPED = str(pathlib.Path(__file__).with_suffix(".json"))  # the project's own results
TUNING = (101, 102)  # the seeds of the runs that decide a learning rate


def chosen(t: Table) -> dict[str, dict]:
    """The flags of each row of --only, and of the rows that they are compared with."""
    wanted = set(names(only, t.rows, ";"))
    wanted |= {base(t, row) for row in wanted}
    return {row: t.flags | flags for row, flags in t.rows.items() if row in wanted}


def base(t: Table, row: str) -> str:
    """The row whose loss a row's is compared with."""
    return against or t.base(row)


def counted(t: Table) -> range:
    """The seeds of the runs that are compared."""
    return range(t.first_seed, t.first_seed + (seeds or t.seeds))


def key_of(t: Table, row: str) -> str:
    """The name of a row in --out, with another config file in it, and the flags of --rows."""
    other = [config_file] if config_file else []
    return ", ".join([t.name, row, *other, *(as_flags(t.rows[row]) if rows else [])])


def run_name(t: Table, row: str, seed: int, steps: int | None, rate: float | None) -> str:
    """The name of a run in --out."""
    of_rate = f"rate {rate:g}" if rate else ""
    of_steps = f"{steps} steps" if steps else ""
    parts = key_of(t, row), of_rate, of_steps, extra, f"seed {seed}"
    return ", ".join(filter(None, parts))


def known_runs() -> dict:
    """The runs of the project's own file, and those in --out, which come first."""
    return stored(SHIPPED, "runs") | stored(out, "runs")


def train(t: Table, steps: dict) -> None:
    """Make the missing runs of each row in `steps` and each seed, at the row's best learning rate.

    steps: {row: its number of steps, or None: as many as the config file says}. The learning rates
    are those of the table's own steps.
    """
    tried = [(row, rate, seed) for seed in TUNING for row in steps for rate in t.tune]
    make(t, dict.fromkeys(steps, t.steps), tried)
    make(t, steps, [(row, tuned(t, row), seed) for seed in counted(t) for row in steps])


def make(t: Table, steps: dict, keys: list[tuple]) -> None:
    """Make the missing runs of keys: (row, learning rate or None for the row's own, seed)."""
    by_row = chosen(t)
    file = config_file or t.file
    runs = {}
    for row, rate, seed in keys:
        flags = dict(by_row[row])
        if steps[row]:
            flags |= steps_of(steps[row])
        if rate:
            flags["learning_rate"] = rate
        command = [file, *as_flags(flags), f"--seed={seed}", *extra.split()]
        runs[run_name(t, row, seed, steps[row], rate)] = command
    record(out, runs, out_dir, jobs, make=True, keep=t.keep)


def tuned(t: Table, row: str) -> float | None:
    """The learning rate with the lowest mean loss over the seeds of TUNING; None: not tuned."""
    runs = known_runs()
    means = {}
    for rate in t.tune:
        results = [runs.get(run_name(t, row, seed, t.steps, rate)) for seed in TUNING]
        if all(results):
            means[rate] = statistics.mean(map(final, results))
    return min(means, key=means.get, default=None)


def take_times(t: Table) -> None:
    """Add each row's milliseconds to --out, with their ratio to another row's, and that row."""
    bases = {row: t.base(row) for row in chosen(t)}
    bases |= {other: t.base(other) for other in bases.values()}  # --against may leave them out
    flags = {row: t.flags | t.rows[row] for row in t.rows if row in bases}
    file = config_file or t.file
    vocab_size = vocab_size_of(settings_of(file, {})["dataset"])
    times = step_times(file, flags, vocab_size, repeats, bases)
    of = of_times(t)
    for row, numbers in times.items():
        add(out, [*short(numbers), bases[row], of], "times", key_of(t, row))


def of_times(t: Table) -> str:
    """A checksum of what the times of a table's steps are measured of."""
    settings = settings_of(config_file or t.file, {})
    return of_rows(__file__, settings, t.flags, *t.rows.values())


def times_of(t: Table) -> dict[str, tuple[float, float]]:
    """{row: (milliseconds of a step, their ratio to the row that the table compares it with)}."""
    times = {}
    known = stored(SHIPPED, "times"), stored(out, "times")
    for table, row in itertools.product(known, t.rows):
        ms, ratio, *made = table.get(key_of(t, row), (None, None))
        if ms and made[:1] in ([], [t.base(row)]):  # two numbers: older ones
            times[row] = ms, ratio
    return times


def has_times(t: Table) -> bool:
    """Whether --out has the times of all chosen rows, of their code as it is now."""
    times = stored(out, "times")
    of = of_times(t)
    return all(times.get(key_of(t, row), [""])[-1] == of for row in chosen(t))


def in_equal_time(t: Table) -> dict[str, int]:
    """How many steps each row makes in the time in which its base makes the table's steps."""
    times = times_of(t) if t.steps else {}
    return {row: round(t.steps / times[row][1]) for row in chosen(t) if row in times}


def paired(x: dict, y: dict) -> tuple[list, list]:
    """What x and y, {seed: ...}, have for the seeds that are in both."""
    both = [seed for seed in x if seed in y]
    return [x[seed] for seed in both], [y[seed] for seed in both]


def show(t: Table) -> None:
    """Print a table of the means of the seeds, and of their differences."""
    runs = known_runs()
    times = times_of(t)
    equal = in_equal_time(t)

    def results(row: str, steps: int | None) -> dict:
        rate = tuned(t, row)
        keys = {seed: run_name(t, row, seed, steps, rate) for seed in counted(t)}
        return {seed: runs[key] for seed, key in keys.items() if key in runs}

    lines = []
    for row in chosen(t):
        other = base(t, row)
        own = results(row, t.steps)
        pair = paired(own, {} if row == other else results(other, t.steps))
        cells = [row, mean(finals(own.values())), difference(*map(finals, pair))]
        cells.append(f"{tuned(t, row):g}" if t.tune else "")
        cells.append(sooner(*pair) if "val_loss" in t.keep else "")
        cells.append(f"{times[row][1]:.2f}x" if row in times else "")
        own = {} if row == other or not t.steps else results(row, equal.get(row))
        pair = paired(own, results(other, equal.get(other)))
        cells += [mean(finals(own.values())), difference(*map(finals, pair))]
        lines.append(cells)
    other = "its base" if t.against else base(t, "")
    show_table(
        f"{t.name} | last val loss | against {other}: mean (95% interval) | learning rate "
        "| share of the steps to its loss | time of a step | loss in equal time | against its base",
        lines,
    )


def main() -> None:
    torch.set_flush_denormal(True)  # as train.py
    parts = names(what, ["train", "time", "equal", "show"])
    tables = [TABLES[name] for name in names(table, TABLES)]
    if rows:
        tables = [Table(rows_of(rows), name="rows")]
    for t in tables:
        names(against, t.rows, ";")  # raises UserError for an unknown row
        if "train" in parts:
            train(t, dict.fromkeys(chosen(t), t.steps))
        if "time" in parts:
            take_times(t)
        if "equal" in parts:
            if t.steps and not has_times(t):
                take_times(t)
            train(t, in_equal_time(t))
        if "show" in parts:
            show(t)


if __name__ == "__main__":
    run_script(globals())
