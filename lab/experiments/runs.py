"""What the experiments share: runs of train.py, and what their logs say. Finished runs are not repeated."""

import ast
import concurrent.futures
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable

from errors import UserError
from lab.experiments.results import save, saved
from text.dataset import ROOT
from text.files import sha256


def finished(
    name: str, command: list[str], folder: str, threads: int | None = None, may_diverge: bool = False
) -> list[dict]:
    """The rows of the log of `train.py command --out_dir=folder`. Runs it, unless folder has this run, finished.

    command: the config file, then flags; if the config file has changed, it runs again. threads: of the run; None: as
    PyTorch chooses. may_diverge: the log of a run that ended because its loss was not finite has
    {"iter": step, "diverged": true} as its last row. Raises UserError for a run that fails.
    """
    command = ["train.py", *command, f"--out_dir={folder}", "--sample_tokens=0"]
    what = f"{' '.join(command)}\n{sha256(os.path.join(ROOT, command[1]))}\n"
    done, log = os.path.join(folder, "done"), os.path.join(folder, "log.jsonl")
    if not os.path.exists(done) or open(done).read() != what:
        print(name, flush=True)
        if os.path.exists(done):
            os.remove(done)
        env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        run = [sys.executable, *command]
        ended = subprocess.run(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        not_finite = re.search(r"^step (\d+): .*stopped before the optimizer used it", ended.stderr, re.MULTILINE)
        if may_diverge and not_finite:
            with open(log, "a") as f:
                f.write(json.dumps({"iter": int(not_finite[1]), "diverged": True}) + "\n")
        else:
            sys.stderr.write(ended.stderr)
            if ended.returncode:
                raise UserError(f"this run failed: python {' '.join(command)}")
        with open(done, "w") as f:
            f.write(what)
    with open(log) as f:
        return [json.loads(line) for line in f]


def logs(runs: dict, jobs: int = 1, then: Callable | None = None, may_diverge: bool = False) -> dict:
    """The log of each run, which is given as {key: (its name, command, folder)} of `finished`.

    jobs: how many run at the same time; they share the cores of the CPU. then(key, log) is called after each.
    """
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    stop, lock = threading.Event(), threading.Lock()

    def run(key: object) -> list[dict] | None:
        if stop.is_set():
            return None
        try:
            log = finished(*runs[key], threads, may_diverge)
            if then is not None:
                with lock:
                    then(key, log)
        except BaseException:
            stop.set()
            raise
        return log

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(run, key) for key in runs}
        try:
            concurrent.futures.wait(futures.values())
        except KeyboardInterrupt:  # the runs get it as well: they save and end
            stop.set()
            raise
    return {key: future.result() for key, future in futures.items()}


def last(log: list[dict], what: str = "val_loss") -> float:
    """The last number of this name in a log."""
    return [row[what] for row in log if what in row][-1]


def curve(log: list[dict], what: str, most: int = 60) -> dict[str, list]:
    """{"iter": steps, what: numbers} of a log. A long log is cut into at most 60 pieces, and each becomes its mean.

    Of numbers that are lists, one for each layer, a piece becomes the largest. Five digits: for a JSON file, a picture.
    """
    rows = [row for row in log if what in row]
    size = max(1, -(-len(rows) // most))
    found = {"iter": [], what: []}
    for part in (rows[i : i + size] for i in range(0, len(rows), size)):
        x = [row[what] for row in part]
        number = max(map(max, x)) if isinstance(x[0], list) else statistics.mean(x)
        found["iter"].append(part[-1]["iter"])
        found[what].append(float(f"{number:.5g}"))
    return found


def record(path: str, runs: dict[str, list[str]], out_dir: str, jobs: int, make: bool, keep: tuple = ("norm",)) -> dict:
    """The results of the runs {name: train.py's arguments} in a JSON file: {name: {...}}. Makes those that are missing.

    make: False: a missing run is an error. A run is missing too if its arguments or its config file have changed.
    Each result has "val": the last validation loss, "best": the lowest, "train": the last training loss; "diverged":
    the step at which a loss was not finite, or None; "spikes": see `spikes`; "first": the first 100 losses in the log;
    "curves": those of the losses and of the names in `keep`, {name: {"iter": steps, name: numbers}}.
    Raises UserError for a missing run, and for a run that fails otherwise than by a loss that is not finite.
    """
    known, missing = saved(path, {"runs": {}})["runs"], {}
    about = {
        name: {"command": " ".join(command), "config": sha256(os.path.join(ROOT, command[0]))[:16]}
        for name, command in runs.items()
    }
    for name, command in runs.items():
        if name not in known or make and known[name] != known[name] | about[name]:
            missing[name] = name, command, os.path.join(out_dir, re.sub("[^a-z0-9.]+", "-", name.lower()))
    if missing and not make:
        raise UserError(f"{path} has no results of {next(iter(missing))!r}: train it first")

    def then(name: str, log: list[dict]) -> None:
        losses = [row["loss"] for row in log if "loss" in row]
        results = saved(path, {"runs": {}})
        results["runs"][name] = about[name] | {
            "val": last(log),
            "train": last(log, "train_loss"),
            "best": min(row["val_loss"] for row in log if "val_loss" in row),
            "diverged": next((row["iter"] for row in log if "diverged" in row), None),
            "spikes": spikes(losses),
            "first": [float(f"{loss:.5g}") for loss in losses[:100]],
            "curves": {what: curve(log, what) for what in ("val_loss", "train_loss", "loss", *keep)},
        }
        save(path, results)

    logs(missing, jobs, then, may_diverge=True)
    known = saved(path, {"runs": {}})["runs"]
    return {name: known[name] for name in runs}


def final(result: dict) -> float:
    """The last validation loss of a run of `record`; infinity if the run diverged."""
    return result["val"] if result["diverged"] is None else math.inf


def spikes(losses: list[float], before: int = 10, by: float = 0.2) -> int:
    """How often a loss is higher than all of the 10 before it, by more than 0.2."""
    return sum(losses[i] > max(losses[max(0, i - before) : i]) + by for i in range(1, len(losses)))


def as_flags(flags: dict) -> list[str]:
    """{"window": 16, "tied": True} as train.py takes it: ["--window=16", "--tied"]."""
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]


def constants(path: str) -> dict:
    """The constants that a script or a config file assigns at its top level, without running it.

    Raises UserError for a file that is not Python, OSError for one that is not there.
    """
    with open(path, encoding="utf-8") as f:
        source = f.read()
    try:
        nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    except SyntaxError as error:
        raise UserError(f"{path} is no config file: {error}") from None
    names = [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) for node in nodes]
    return {name: x.value.value for name, x in zip(names, nodes, strict=True) if isinstance(x.value, ast.Constant)}
