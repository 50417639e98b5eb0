"""What the experiments share: runs of train.py, and what their logs say. Finished runs are not repeated."""

import ast
import concurrent.futures
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys

from errors import UserError
from lab.experiments.results import save, saved, short

TRAIN, VARIANTS = ("train.py",), ("-m", "lab.experiments.variants")  # the scripts of runs: for --variant the second


def finished(
    name: str,
    command: list[str],
    folder: str,
    threads: int | None = None,
    may_diverge: bool = False,
    script: tuple = TRAIN,
) -> list[dict]:
    """The rows of the log of `train.py command --out_dir=folder`. Runs it, unless folder has this run, finished.

    command: the config file, then flags; if the config file has changed, it runs again. threads: of the run; None: as
    PyTorch chooses. may_diverge: the log of a run that ended because its loss was not finite has
    {"iter": step, "diverged": true} as its last row. script: python's arguments for another script than train.py.
    Raises UserError for a run that fails.
    """
    done, log, about = os.path.join(folder, "done"), os.path.join(folder, "log.jsonl"), identity(command)
    if not os.path.exists(done) or open(done).read() != about:
        print(name, flush=True)
        if os.path.exists(done):
            os.remove(done)
        env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        run = [sys.executable, *script, *command, f"--out_dir={folder}", "--sample_tokens=0"]
        ended = subprocess.run(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
        not_finite = re.search(r"^step (\d+): .*\b(?:nan|inf)\b", ended.stderr, re.MULTILINE)
        if may_diverge and ended.returncode and not_finite:
            with open(log, "a") as f:
                f.write(json.dumps({"iter": int(not_finite[1]), "diverged": True}) + "\n")
        else:
            sys.stderr.write(ended.stderr)
            if ended.returncode:
                raise UserError(f"this run failed: python {' '.join(run[1:])}")
        with open(done, "w") as f:
            f.write(about)
    with open(log) as f:
        return [json.loads(line) for line in f]


def example(name: str, command: list[str], threads: int | None = None) -> dict[str, float]:
    """The numbers in the last "result:" line of an example, by their names, and "val", the first of them, an error.

    command: its file, then flags. "diverged": its loss was not finite. Raises UserError for a run that fails otherwise.
    """
    print(name, flush=True)
    env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    run = [sys.executable, "-m", command[0][:-3].replace("/", "."), *command[1:]]
    ended = subprocess.run(run, capture_output=True, text=True, env=env)
    if ended.returncode and ": the loss is " in ended.stderr:
        return {"diverged": True}
    if ended.returncode:
        raise UserError(f"python {' '.join(run[1:])}: {ended.stderr.strip()}")
    found = re.findall(r"^result: .*?seed=\d+ (.*)$", ended.stdout, re.MULTILINE)[-1].split(", ")
    numbers = {name: float(number) for name, number in (part.rsplit(" ", 1) for part in found)}
    return {"val": next(iter(numbers.values()))} | numbers


def identity(command: list[str]) -> str:
    """A checksum of train.py's arguments and of the config file, which is the first of them, without its comments."""
    return hashlib.sha256(f"{command} {ast.unparse(parsed(command[0]))}".encode()).hexdigest()[:10]


def parsed(path: str) -> ast.Module:
    """The code of a script or a config file. Raises UserError for a file that is not Python."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{path} is no config file: {error}") from None


def constants(path: str) -> dict:
    """The constants that a script or a config file assigns at its top level, without running it."""
    nodes = [node for node in parsed(path).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    names = [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) for node in nodes]
    return {name: x.value.value for name, x in zip(names, nodes, strict=True) if isinstance(x.value, ast.Constant)}


def record(path: str, runs: dict[str, list[str]], out_dir: str, jobs: int, make: bool, keep: tuple = ()) -> dict:
    """The results of the runs {name: train.py's arguments} in a JSON file: {name: {...}}. Makes those that are missing.
    If the first argument is an example's file, and no config file, it is a run of that.

    jobs: how many run at the same time; they share the cores of the CPU. make: False: a missing run is an error. A run
    is missing too if its arguments or its config file have changed. keep: see `result_of`. A run with
    --variant is one of lab/experiments/variants.py. Raises UserError for a missing run, and for a run that fails
    otherwise than by a loss that is not finite.
    """
    known = saved(path, {"runs": {}})["runs"]
    missing = [name for name in runs if name not in known or make and known[name]["of"] != identity(runs[name])]
    if missing and not make:
        raise UserError(f"{path} has no results of {missing[0]!r}: train it first")
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {}
        for name in missing:
            folder = f"{re.sub('[^a-z0-9.]+', '-', name.lower())[:60]}-{identity(runs[name])}"
            futures[pool.submit(made, name, runs[name], os.path.join(out_dir, folder), threads, keep)] = name
        try:
            for future in concurrent.futures.as_completed(futures):
                name = futures[future]
                row = future.result()
                results = saved(path, {"runs": {}})  # another process may have added to it
                results["runs"][name] = {"of": identity(runs[name])} | row
                save(path, results)
        except BaseException:  # a run has failed, or Ctrl-C, which the runs get as well: they save and end
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    known = saved(path, {"runs": {}})["runs"]
    return {name: known[name] for name in runs}


def made(name: str, command: list[str], folder: str, threads: int | None, keep: tuple) -> dict:
    """The results of a run of train.py, variants.py (with --variant) or an example, which may diverge."""
    if command[0].startswith("lab/examples/"):
        return example(name, command, threads)
    script = VARIANTS if any(x.startswith("--variant=") for x in command) else TRAIN
    return result_of(finished(name, command, folder, threads, True, script), keep, "--seed=1" in command)


def result_of(log: list[dict], keep: tuple, drawn: bool) -> dict:
    """What is kept of a run: "val", its last validation loss; "best", the lowest; "train", the last training loss;
    "spikes", see `spikes`; "curves", those of the evaluations in `keep` and, if drawn, of the other series in it; and,
    where there are any, "max_logit", the largest score, and "diverged", the step at which a loss was not finite.

    keep: names in the log, and "first": the first 100 losses, of which a curve has the largest of each five.
    """
    losses = [row for row in log if "loss" in row]
    vals = [row["val_loss"] for row in log if "val_loss" in row]
    first = [{"iter": row["iter"], "first": [row["loss"]]} for row in losses[:100]]
    series = [what for what in keep if drawn or what in ("val_loss", "train_loss")]
    found = {"val": vals[-1], "best": min(vals), "train": last(log, "train_loss")}
    found["spikes"] = spikes([row["loss"] for row in losses])
    found["curves"] = {what: curve(first if what == "first" else log, what) for what in series}
    if scores := [max(row["max_logit"]) for row in log if "max_logit" in row]:
        found["max_logit"] = max(scores)
    if "diverged" in log[-1]:
        found["diverged"] = log[-1]["iter"]
    return short(found)


def last(log: list[dict], what: str = "val_loss") -> float:
    """The last number of this name in a log."""
    return [row[what] for row in log if what in row][-1]


def curve(log: list[dict], what: str, most: int = 20) -> dict[str, list]:
    """{"iter": steps, what: numbers} of a log. A long log is cut into at most 20 pieces, and each becomes its mean.

    Of numbers that are lists, one for each layer, a piece becomes the largest.
    """
    rows = [row for row in log if what in row]
    size = max(1, -(-len(rows) // most))
    found = {"iter": [], what: []}
    for part in (rows[i : i + size] for i in range(0, len(rows), size)):
        x = [row[what] for row in part]
        found["iter"].append(part[-1]["iter"])
        found[what].append(max(map(max, x)) if isinstance(x[0], list) else statistics.mean(x))
    return short(found, 4)


def final(result: dict) -> float:
    """The last validation loss of a run of `record`; infinity if the run diverged."""
    return math.inf if "diverged" in result else result["val"]


def sooner(results: list[dict], base: list[dict]) -> str:
    """At which share of all steps each run's validation loss reaches the last one of the base's run, as tables show it:
    the median of the seeds, or how many of them never reach it.
    """
    share = [steps_to(final(b), r) / b["curves"]["val_loss"]["iter"][-1] for r, b in zip(results, base, strict=False)]
    if not share or results == base:
        return ""
    never = f", {share.count(math.inf)} of {len(share)} never" if math.inf in share else ""
    return f"{statistics.median(share):.2f}{never}".replace("inf, ", "")


def steps_to(goal: float, result: dict) -> float:
    """The step at which a run's validation loss first is at most `goal`, between two evaluations on a straight line;
    infinity if it never is."""
    at, losses = result["curves"]["val_loss"].values()
    for i in range(1, len(at)):
        if losses[i] <= goal:
            return at[i - 1] + (at[i] - at[i - 1]) * (losses[i - 1] - goal) / (losses[i - 1] - losses[i])
    return math.inf


def spikes(losses: list[float], before: int = 10, by: float = 0.2) -> int:
    """How often a loss is higher than all of the 10 before it, by more than 0.2."""
    return sum(losses[i] > max(losses[max(0, i - before) : i]) + by for i in range(1, len(losses)))


def as_flags(flags: dict) -> list[str]:
    """{"window": 16, "tied": True} as train.py takes it: ["--window=16", "--tied"]."""
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]
