"""Attentions in the models of lab/examples, over several seeds: BERT, a vision transformer, a Conformer and others.

    python -m lab.experiments.other_models
    python -m lab.experiments.other_models --only="bert" --jobs=2
    python -m lab.experiments.other_models --only="vit, softmax; vit, laser" --tune --seeds=8
    python -m lab.experiments.other_models --what=show  # the table of what is in --out

A run is a command of an example, such as

    python -m lab.examples.bert --attention=laser --learning_rate=0.002 --seed=3

ROWS has the rows of the table. Where a row's learning rate is tuned, the mean over the runs with the seeds 101 and 102
decides it. What is compared is the first number of an example's last "result:" line, an error: the lower, the better.
Runs that finished are not repeated: you can stop the script and start it again.
"""

import concurrent.futures
import math
import os
import re
import statistics
import subprocess
import sys

from configurator import at_least_one, names
from errors import UserError
from lab.experiments.results import check_writable, difference, save, saved, show_table, spread, start

# What is measured?
what = "train,show"  # the parts to run, separated by commas: train makes the runs, show prints the table
only = ""  # models, or rows such as "bert, laser", separated by semicolons; empty: all
tune = False  # tune the learning rate of every row; False: only of BERT's
rates = "1e-3,2e-3,4e-3"  # the learning rates to try where a row is tuned, separated by commas
seeds: int | None = None  # runs of each row, with the seeds 1, 2, ...; None: 8 of BERT, 3 of the others
extra = ""  # more flags of the example for every run, separated by spaces
jobs = 1  # runs at the same time; they share the cores of the CPU
out = "lab/experiments/other_models.json"  # the results

ROWS = {  # the attentions of each model: the others are compared with the first one
    "bert": ("softmax", "laser"),
    "vit": ("softmax", "laser", "beta"),
    "conformer": ("softmax", "laser"),
    "seq2seq": ("softmax", "laser"),
    "before_attention": ("softmax", "mean", "bahdanau", "lecture", "laser"),
}
SEEDS = {"bert": 8}  # of the other models 3
TUNING = (101, 102)  # the seeds of the runs that decide a learning rate

Row = tuple[str, str]  # (model, attention)


def chosen() -> list[Row]:
    """The rows of --only, and those that they are compared with."""
    rows = {f"{model}, {attention}": (model, attention) for model, kinds in ROWS.items() for attention in kinds}
    wanted = names(only, [*ROWS, *rows], ";")
    models = [name.split(", ")[0] for name in wanted]
    return [row for name, row in rows.items() if {name, row[0]} & {*wanted} or row in map(base, models)]


def base(model: str) -> Row:
    """The row that a model's other rows are compared with."""
    return model, ROWS[model][0]


def command(row: Row, seed: int, rate: float | None) -> str:
    """What stands after `python -m lab.examples.` for a run, and its name in --out. rate None: the example's own."""
    model, attention = row
    flags = [f"--attention={attention}", *([f"--learning_rate={rate:g}"] if rate else [])]
    flags += ["--picture="] if model in ("seq2seq", "before_attention") else []
    return " ".join([model, *flags, *extra.split(), f"--seed={seed}"])


def make(commands: list[str]) -> None:
    """Makes the runs that are missing in --out, and adds their numbers to it."""
    done = saved(out, {"runs": {}})["runs"]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(numbers, x): x for x in commands if x not in done}
        try:
            for run in concurrent.futures.as_completed(runs):
                found = run.result()
                results = saved(out, {"runs": {}})  # another process may have added to it
                results["runs"][runs[run]] = found
                save(out, results)
        except BaseException:  # a run has failed, or Ctrl-C, which the runs get as well
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def numbers(command: str) -> dict[str, float]:
    """The numbers of the last result line of an example's run, by their names; none if its loss was not finite.

    Raises UserError for a run that fails otherwise.
    """
    print(command, flush=True)
    env = os.environ | ({} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))})
    run = [sys.executable, "-m", *f"lab.examples.{command}".split(" ")]
    ended = subprocess.run(run, capture_output=True, text=True, env=env)
    if ended.returncode and ": the loss is " in ended.stderr:
        return {}
    if ended.returncode:
        raise UserError(f"python -m lab.examples.{command}: {ended.stderr.strip()}")
    found = re.findall(r"^result: .*?seed=\d+ (.*)$", ended.stdout, re.MULTILINE)[-1].split(", ")
    return {name: float(number) for name, number in (part.rsplit(" ", 1) for part in found)}


def tried(row: Row) -> list[float]:
    """The learning rates among which a row's is tuned; none where it is not tuned."""
    found = rates.split(",") if tune or row[0] == "bert" else []
    if not all(re.fullmatch(r"\s*[\d.]+(e-?\d+)?\s*", rate) for rate in found):
        raise UserError(f"--rates={rates} must be positive numbers, separated by commas")
    return [float(rate) for rate in found]


def tuned(row: Row) -> float | None:
    """The learning rate of a row with the lowest mean over the seeds of TUNING; None: the example's own."""
    runs, mean = saved(out, {"runs": {}})["runs"], {}
    for rate in tried(row):
        made = [runs.get(command(row, seed, rate)) for seed in TUNING]
        if None not in made:
            mean[rate] = statistics.mean(next(iter(run.values()), math.inf) for run in made)
    return min(mean, key=mean.get) if mean else None


def counted(row: Row) -> list[str]:
    """The commands of the runs that are compared."""
    return [command(row, seed, tuned(row)) for seed in range(1, (seeds or SEEDS.get(row[0], 3)) + 1)]


def show(rows: list[Row]) -> None:
    """Prints the table: for each number of a row its mean, its range, and the difference to the first attention."""
    runs, cells = saved(out, {"runs": {}})["runs"], []
    for row in rows:
        first, rate = base(row[0]), tuned(row)
        own = [runs[x] for x in counted(row) if x in runs]
        pairs = [(runs.get(x), runs.get(y)) for x, y in zip(counted(row), counted(first), strict=True)]
        pairs = [pair for pair in pairs if None not in pair]
        for name in dict.fromkeys(name for run in own for name in run):
            x = [run.get(name, math.inf) for run in own]
            changes = zip(*([run.get(name, math.inf) for run in pair] for pair in pairs), strict=True)
            cells.append([*row, f"{rate:g}" if rate else "", name, len(x), spread(x)])
            cells[-1].append("" if row == first or not pairs else difference(*changes))
    columns = "model,attention,learning rate,measured,seeds,mean (range),against the model's first: mean (95% interval)"
    show_table(columns.split(","), cells)


def main() -> None:
    at_least_one(jobs=jobs, seeds=1 if seeds is None else seeds)
    check_writable(out)
    parts, rows = names(what, ["train", "show"]), chosen()
    if "train" in parts:
        make([command(row, seed, rate) for seed in TUNING for row in rows for rate in tried(row)])
        by_row = [counted(row) for row in rows]  # each seed of all rows, before the next seed
        make([runs[i] for i in range(max(map(len, by_row))) for runs in by_row if i < len(runs)])
    if "show" in parts:
        show(rows)


if __name__ == "__main__":
    start(globals())
