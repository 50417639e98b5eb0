"""What the experiments share: runs of train.py and what is stored of them.

    python -m lab.experiments.runs FOLDER config/train_shakespeare_char_cpu.py --n_layer=2

makes a run as train.py or, with --variant, variants.py does, and notes its identity in FOLDER.
"""

import ast
import concurrent.futures
import contextlib
import importlib
import itertools
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from configurator import PLAIN, at_least_one, cores, user_errors

from filelock import FileLock

from errors import UserError
from lab.experiments.identity import PARSING, of_code, of_data, of_text, parsed
from lab.experiments.results import add, is_current, short, stored

MADE = "identity"  # the file with the identity of the run in a folder
DONE = "done"  # MADE, after the run has ended


def finished(
    name: str,
    command: list[str],
    folder: str,
    threads: int | None = None,
    may_diverge: bool = False,
) -> list[dict]:
    """Return the rows of the log of `train.py command --out_dir=folder`, or of variants.py.

    The run is made unless the folder holds the finished run of the same identity. Another process
    that makes it is waited for. command: the config file, then flags; with --variant, variants.py
    runs in place of train.py. threads: of the run; None: PyTorch chooses. may_diverge: accept a run
    that ended because its loss was not finite; the last row of its log is {"iter": step,
    "diverged": true}. Raises UserError for a run that fails, and for one whose code or data are
    edited while it is made.
    """
    file, *words = command
    path = pathlib.Path(folder)
    of = identity(command)
    with PARSING:
        steps = settings_of(file, flags_of(words))["max_iters"]
    os.makedirs(folder, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        log = rows_of_log(path, steps) if text_of(path / DONE) == of else None
        if log is None:
            print(name, flush=True)
            (path / DONE).unlink(missing_ok=True)
            make(command, folder, threads, may_diverge)
            log = rows_of_log(path, steps)
            identity(command)  # raises an error if code or data have changed
            if text_of(path / MADE) != of:
                raise UserError(f"code or data were edited while {folder} began; it is not kept")
            if log is None:
                raise UserError(f"{folder}: the run ended before its last step")
            os.replace(path / MADE, path / DONE)
    return log


def make(command: list[str], folder: str, threads: int | None, may_diverge: bool) -> None:
    """Make a run; see `finished`. threads: of the run; None: PyTorch chooses."""
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    args = [sys.executable, "-m", "lab.experiments.runs", folder, *command]
    run = subprocess.run(args, capture_output=True, text=True, env=env)
    not_finite = re.search(r"^step (\d+): .*: the training has diverged", run.stderr, re.MULTILINE)
    if run.returncode and may_diverge and not_finite:
        with open(os.path.join(folder, "log.jsonl"), "a") as f:
            f.write(json.dumps({"iter": int(not_finite[1]), "diverged": True}) + "\n")
        return
    sys.stderr.write(run.stderr)
    if run.returncode:
        raise UserError(f"this run failed: python {shlex.join(run.args[1:])}")


def main() -> None:
    """In a process of its own: make the run, with its identity as this process reads its code."""
    folder, *command = sys.argv[1:]
    end_with_parent(os.getppid())
    import_all(imports_of(flags_of(command[1:])))  # one of them may change sys.path
    pathlib.Path(folder, MADE).write_text(identity(command))
    sys.argv = ["train.py", *command, f"--out_dir={folder}", "--sample_tokens=0"]
    if any(arg.startswith("--variant=") for arg in command):
        runpy.run_module("lab.experiments.variants", run_name="__main__")
    else:
        runpy.run_path("train.py", run_name="__main__")


def end_with_parent(parent: int) -> None:
    """End this process when the one that has started it does, however that was killed.

    parent: its number; where that has ended already, another one is this process's parent.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def text_of(path: pathlib.Path) -> str:
    """The text of a file; empty if it is not there."""
    return path.read_text() if path.exists() else ""


def rows_of_log(folder: pathlib.Path, steps: int) -> list[dict] | None:
    """The rows of a run's log.jsonl; None if the run has not made all steps, nor diverged."""
    lines = text_of(folder / "log.jsonl").splitlines()
    with contextlib.suppress(ValueError):  # its last line is half written
        rows = [json.loads(line) for line in lines]
        last = rows[-1] if rows else {}
        if "diverged" in last or ("val_loss" in last and last["iter"] >= steps):
            return rows
    return None


def identity(command: list[str]) -> str:
    """A checksum of what decides a run: its arguments, its code and its data. See identity.py.

    command: a config file, then flags. Results are stored under it.
    """
    with PARSING:
        file, *words = command
        flags = flags_of(words)
        modules = imports_of(flags)
        if "variant" in flags:
            modules.append("lab.experiments.variants")
        settings = settings_of(file, flags)
        settings.pop("wandb_run_name", None)  # nanoGPT's config files put the time into it
        code = of_code(modules, [file, "train.py"])
        return of_text(f"{command} {settings} {code} {of_data(settings['dataset'])}")


def of_rows(script: str, *rows: dict) -> str:
    """A checksum of what a script measures of models with these rows of flags of train.py."""
    modules = sum(map(imports_of, rows), [])
    return of_text(f"{rows} {of_code(modules, [script])}")


def imports_of(flags: dict) -> list[str]:
    """The modules of --import= in flags of train.py."""
    return [module for module in flags.get("import", "").split(",") if module]


def import_all(modules: list[str]) -> None:
    """Import the modules of --import=, which add to the model's tables."""
    for module in modules:
        importlib.import_module(module)


def flags_of(words: list[str]) -> dict:
    """["--window=16", "--tied", "--no-bias"] as {"window": 16, "tied": True, "bias": False}."""
    flags = {}
    for word in words:
        name, equals, text = word.lstrip("-").partition("=")
        value = True
        if equals:
            value = text
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        elif name.startswith(("no-", "no_")):
            name, value = name[3:], False
        if name == "import" and name in flags:
            value = f"{flags[name]},{value}"
        flags[name] = value
    return flags


def constants(path: str) -> dict:
    """The constants that a script assigns at its top level, without running it."""
    values = {}
    for node in parsed(path).body:
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
        if is_assignment and isinstance(node.value, ast.Constant):
            for target in getattr(node, "targets", None) or [node.target]:
                values[ast.unparse(target)] = node.value.value
    return values


def settings_of(file: str, flags: dict) -> dict:
    """All settings of a run: of train.py, of its config file, then its flags."""
    parsed(file)  # raises UserError for a file that is not Python
    values = {k: x for k, x in runpy.run_path(file).items() if isinstance(x, PLAIN) and k[0] != "_"}
    return constants("train.py") | values | flags


def folder_of(name: str, command: list[str], out_dir: str) -> str:
    """The folder in out_dir of a run of `record`."""
    words = re.sub("[^a-z0-9.]+", "-", name.lower())
    return os.path.join(out_dir, f"{words[:60]}-{identity(command)}")


def record(
    path: str,
    runs: dict,
    out_dir: str,
    jobs: int,
    make: bool,
    keep: tuple = (),
    progress: Callable | None = None,
) -> dict:
    """Return the results {name: {...}} of runs, from a JSON file.

    runs: {name: arguments of train.py}. make: first make the runs whose results are missing, or
    whose arguments, config file or code have changed. jobs: how many run at the same time, sharing
    the CPU's cores. keep: see `result_of`. progress(name, seconds) is called after each run. Raises
    UserError for a missing run, and for a run that fails for another reason than a loss that is not
    finite.
    """
    known = stored(path, "runs")
    if make:
        new = {}
        for name, args in runs.items():
            if not is_current(known.get(name), identity(args)):
                new[name] = args
        known |= make_runs(path, new, out_dir, jobs, keep, progress)
    for name in runs:
        if name not in known:
            raise UserError(f"{path} has no results of {name!r}: train it first")
    return {name: known[name] for name in runs}


def by_seed(rows: dict, seeds: Iterable[int], path: str, *args: object) -> dict:
    """{key: the results of its seeds} of rows, {key: (name, config file, flags)}.

    path, args: see `record`.
    """
    runs = {}
    for seed, (name, file, flags) in itertools.product(seeds, rows.values()):
        runs[f"{name}{seed}"] = [file, *as_flags(flags), f"--seed={seed}"]
    results = list(record(path, runs, *args).values())
    return {key: results[i :: len(rows)] for i, key in enumerate(rows)}


def make_runs(
    path: str, runs: dict, out_dir: str, jobs: int, keep: tuple, progress: Callable | None = None
) -> dict:
    """Make the runs: {name: what is stored of it}, added to a JSON file as soon as a run ends."""
    at_least_one(jobs=jobs)
    threads = None if jobs == 1 else max(1, cores() // jobs)
    names = {}
    results = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name, command in runs.items():
            folder = folder_of(name, command, out_dir)
            names[pool.submit(make_run, name, command, folder, threads, keep)] = name
        try:
            for future in concurrent.futures.as_completed(names):
                name = names[future]
                results[name], seconds = future.result()
                add(path, results[name], "runs", name)
                if progress is not None:
                    progress(name, seconds)
        except BaseException:  # a run failed, or Ctrl-C, on which the runs save and end as well
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def make_run(
    name: str, command: list[str], folder: str, threads: int | None, keep: tuple
) -> tuple[dict, float]:
    """Make a run of train.py or variants.py: (what is stored of it, its seconds)."""
    began = time.monotonic()
    of = identity(command)
    log = finished(name, command, folder, threads, may_diverge=True)
    result = result_of(log, keep, "--seed=1" in command)
    identity(command)  # raises an error if code or data have changed
    return {"of": of} | result, time.monotonic() - began


def result_of(log: list[dict], keep: tuple, first_seed: bool) -> dict:
    """What is stored of a run's log.

    "val": the last validation loss; "best": the lowest; "train": the last training loss;
    "spikes": see `spikes`; "curves": {a name in keep: its curve}, but for other seeds than the
    first only those of the evaluations; and where there are any "max_logit", the largest score,
    and "diverged", the step at which a loss was not finite. keep: names in the log.
    """
    losses = [row for row in log if "loss" in row]
    vals = [row["val_loss"] for row in log if "val_loss" in row]
    trains = [row["train_loss"] for row in log if "train_loss" in row]
    curves = {}
    for name in keep:
        if first_seed or name in ("val_loss", "train_loss"):
            curves[name] = curve(log, name)
    result = {
        "val": vals[-1],
        "best": min(vals),
        "train": trains[-1],
        "spikes": spikes([row["loss"] for row in losses]),
        "curves": curves,
    }
    scores = [max(row["max_logit"]) for row in log if "max_logit" in row]
    if scores:
        result["max_logit"] = max(scores)
    if "diverged" in log[-1]:
        result["diverged"] = log[-1]["iter"]
    return short(result)


def curve(log: list[dict], name: str) -> dict:
    """{"iter": steps, name: numbers} of a log. A long log is cut into at most 20 pieces.

    A piece becomes its mean, or the largest number if the log has a list of numbers (one for each
    layer) at each step.
    """
    rows = [row for row in log if name in row]
    size = max(1, math.ceil(len(rows) / 20))
    steps = []
    numbers = []
    for i in range(0, len(rows), size):
        piece = rows[i : i + size]
        x = [row[name] for row in piece]
        steps.append(piece[-1]["iter"])
        numbers.append(max(map(max, x)) if isinstance(x[0], list) else statistics.mean(x))
    return short({"iter": steps, name: numbers}, 4)


def final(result: dict) -> float:
    """The last validation loss of a run of `record`; infinity if the run diverged."""
    return math.inf if "diverged" in result else result["val"]


def finals(results: list[dict]) -> list[float]:
    """The last validation loss of each run."""
    return [final(result) for result in results]


def sooner(results: list[dict], base: list[dict]) -> str:
    """At which share of all steps runs reach the last validation loss of the base's, for a table.

    The median of the seeds, and how many seeds never reach it.
    """
    shares = []
    for result, base_result in zip(results, base, strict=False):
        if "diverged" not in base_result:
            steps = base_result["curves"]["val_loss"]["iter"][-1]
            shares.append(steps_to(final(base_result), result) / steps)
    if not shares or results == base:
        return ""
    median = statistics.median(shares)
    parts = [] if median == math.inf else [f"{median:.2f}"]
    if math.inf in shares:
        parts.append(f"{shares.count(math.inf)} of {len(shares)} never")
    return ", ".join(parts)


def steps_to(goal: float, result: dict) -> float:
    """The step at which a run's validation loss first is at most `goal`; infinity if it never is.

    Between two evaluations the loss is taken to fall on a straight line.
    """
    curve = result["curves"]["val_loss"]
    points = zip(curve["iter"], curve["val_loss"], strict=True)
    for (step, loss), (next_step, next_loss) in itertools.pairwise(points):
        if next_loss <= goal:
            return step + (next_step - step) * (loss - goal) / (loss - next_loss)
    return math.inf


def spikes(losses: list[float]) -> int:
    """How often a loss is higher than all of the 10 before it, by more than 0.2."""
    return sum(losses[i] > max(losses[max(0, i - 10) : i]) + 0.2 for i in range(1, len(losses)))


def as_flags(flags: dict) -> list[str]:
    """{"window": 16, "tied": True} as train.py takes it: ["--window=16", "--tied"].

    Modules of "import" that are separated by commas get a flag each.
    """
    words = []
    for key, value in flags.items():
        values = imports_of(flags) if key == "import" else [value]
        words += [f"--{key}" if x is True else f"--{key}={x}" for x in values]
    return words


if __name__ == "__main__":
    with user_errors():
        main()
