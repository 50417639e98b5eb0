"""The times in docs/benchmarks.md and docs/speedrun.md, each with the command that it is from.

    python -m lab.experiments.speeds                   # prints the project's own
    python -m lab.experiments.speeds --out=mine.json   # measures: about an hour on two cores

COMMANDS write files, of which the medians are kept, and the medians of the ratios to the first row.
RUNS are whole processes of train.py, from start to end, in turns: the medians of their seconds.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

from configurator import run_script

from lab.experiments.results import measured, show_table
from lab.experiments.runs import as_flags
from lab.experiments.tables import TABLES

out = "lab/experiments/speeds.json"  # the results

SOME = 'bench.py --only="sdpa,beta,softmax SSSSSL"'
MODELS = "-m lab.experiments.model_times"
COMMANDS = (
    "bench.py",
    SOME + " --lengths=4096,8192,16384 --repeats=5",
    "bench.py --import=lab.ideas.positions --only=sdpa,alibi,t5,relative --lengths=1024",
    MODELS,
    MODELS + " --what=step --dtype=bfloat16",
)
RUNS = ("nanogpt", "records", "in_nanogpts_time")  # tables of tables.py
REPEATS = 3


def tables_of(command: str) -> dict[str, dict]:
    """{"attention, both": {row: {"n = 512": [milliseconds, their ratio to the first row's]}}}.

    And "attention, bytes", of the peak of memory or of a cache, with numbers.
    """
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "times.json")
        subprocess.run([sys.executable, *shlex.split(command), f"--out={path}"], check=True)
        with open(path) as f:
            results = json.load(f)
    results.pop("about")
    for part, rows in results.items():
        for row in rows:
            cells = {name: [ms, row["ratio"][name]] for name, ms in row["median"].items()}
            cells["bytes"] = row.get("peak bytes", row.get("cache, bytes"))
            for measure, cell in cells.items():
                if measure not in ("forward", "backward") and cell is not None:
                    table = tables.setdefault(f"{part}, {measure}", {})
                    table.setdefault(row["subject"], {})[f"n = {row['n']}"] = cell
    return tables


def seconds(runs: dict) -> dict[str, float]:
    """{run: the median of the seconds that its command takes}."""
    taken = {name: [] for name in runs}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(REPEATS):
            for name, command in runs.items():
                began = time.perf_counter()
                args = [sys.executable, "train.py", *command, f"--out_dir={folder}/out"]
                subprocess.run(args, check=True)
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(x) for name, x in taken.items()}


def cell(x: list | int) -> str:
    """A median with its ratio, or a number of bytes."""
    if isinstance(x, int):
        return f"{x:,}"
    return f"{x[0]:.4g}, {x[1]:.2f}x"


def main() -> None:
    for command in COMMANDS:
        found = measured(out, "times", command, "", tables_of, command)
        for title, table in found.items():
            columns = list(next(iter(table.values())))
            rows = [[row, *map(cell, cells.values())] for row, cells in table.items()]
            show_table(" | ".join([title, *columns]), rows)
    runs = {}
    for t in map(TABLES.get, RUNS):
        for row, flags in t.rows.items():
            runs[row] = [t.file, *as_flags(t.flags | flags | {"eval_iters": 1, "seed": 1})]
    taken = measured(out, "seconds", "train.py", "", seconds, runs)
    first, *_ = taken.values()
    rows = [[name, f"{x:.1f}", f"{x / first:.3f}"] for name, x in taken.items()]
    show_table("run | seconds | ratio to the first run's", rows)


if __name__ == "__main__":
    run_script(globals())
