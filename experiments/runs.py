"""What the experiments share: runs of train.py, times of training steps, and results in a JSON file.

What is finished is not repeated: `finished` and `losses` skip runs, `measured` skips measurements.
"""

import ast
import concurrent.futures
import functools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields

import torch

from configurator import UserError
from model import GPT, GPTConfig
from text.dataset import ROOT
from text.files import replace, sha256
from training.optimizers import OPTIMIZER, Settings
from training.timing import interleaved, medians, ratios, stopwatch


def saved(path: str, new: dict) -> dict:
    """The results in a JSON file; `new` if there is no file. Raises UserError if it has not the keys of `new`."""
    if not os.path.exists(path):
        return new
    try:
        with open(path, encoding="utf-8") as f:
            results = json.load(f)
    except ValueError:
        results = None
    if not isinstance(results, dict) or not new.keys() <= results.keys():
        raise UserError(f"{path} is damaged; delete it, or name another file")
    return results


def save(path: str, results: dict) -> None:
    """Writes results to a JSON file, in one step: a program that is killed leaves the file as it was."""
    replace(path, (json.dumps(results, indent=1) + "\n").encode())


def measured(path: str, part: str, row: str, size: int, measure: Callable[[], dict]) -> dict:
    """The numbers of a row in a JSON file, {part: {row: {size: numbers}}}. Without them, adds those of measure()."""
    found = saved(path, {}).get(part, {}).get(row, {}).get(str(size))
    if found is None:
        found = measure()
        print(f"{part}, {row}, {size}: {json.dumps(found)}", flush=True)
        results = saved(path, {})  # another process may have added to it
        results.setdefault(part, {}).setdefault(row, {})[str(size)] = found
        save(path, results)
    return found


def apart(f: Callable, *args: object) -> object:
    """f(*args) in a fresh process, whose memory is f's alone."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(f, *args).result()


def max_rss() -> int:
    """The most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def finished(name: str, command: list[str], folder: str, threads: int | None = None) -> list[dict]:
    """The rows of the log of `train.py command --out_dir=folder`. Runs it, unless folder has this run, finished.

    command: the config file, then flags; if the config file has changed, it runs again. threads: of the run; None: as
    PyTorch chooses. Raises UserError for a run that fails.
    """
    command = ["train.py", *command, f"--out_dir={folder}", "--sample_tokens=0"]
    what = f"{' '.join(command)}\n{sha256(os.path.join(ROOT, command[1]))}\n"
    done = os.path.join(folder, "done")
    if not os.path.exists(done) or open(done).read() != what:
        print(name, flush=True)
        if os.path.exists(done):
            os.remove(done)
        env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        if subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT, env=env).returncode:
            raise UserError(f"this run failed: python {' '.join(command)}")
        with open(done, "w") as f:
            f.write(what)
    with open(os.path.join(folder, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def losses(runs: dict[object, tuple[str, list[str], str]], jobs: int = 1, then: Callable | None = None) -> dict:
    """The last validation loss of each run, which is given as {key: (its name, command, folder)} of `finished`.

    jobs: how many run at the same time; they share the cores of the CPU. then(key, loss) is called after each.
    """
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    stop, lock = threading.Event(), threading.Lock()

    def run(key: object) -> float | None:
        if stop.is_set():
            return None
        try:
            log = finished(*runs[key], threads)
            loss = [line["val_loss"] for line in log if "val_loss" in line][-1]
            if then is not None:
                with lock:
                    then(key, loss)
        except BaseException:
            stop.set()
            raise
        return loss

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(run, key) for key in runs}
        try:
            concurrent.futures.wait(futures.values())
        except KeyboardInterrupt:  # the runs get it as well: they save and end
            stop.set()
            raise
    return {key: future.result() for key, future in futures.items()}


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


def step_times(config_file: str, rows: dict[str, dict], vocab_size: int, repeats: int) -> dict[str, tuple]:
    """Of each row, {name: flags}: milliseconds of a training step, and their ratio to the first row's in that round."""
    settings = constants("train.py") | constants(config_file)
    model_fields = {field.name for field in fields(GPTConfig)}
    tasks = {}
    for name, flags in rows.items():
        chosen = settings | flags | {"vocab_size": vocab_size}
        gpt = GPT(GPTConfig(**{k: v for k, v in chosen.items() if k in model_fields})).train()
        lr = Settings(chosen["learning_rate"], (0.9, chosen["beta2"]), 0.1)
        x = torch.randint(vocab_size, (chosen["batch_size"], chosen["block_size"]))
        tasks[name] = functools.partial(timed_step, gpt, OPTIMIZER[chosen["optimizer"]](gpt, lr), x)
    interleaved(tasks, "cpu", 3)  # warm-up
    rounds = interleaved(tasks, "cpu", repeats)
    return {name: (medians(rounds[name])[0]["ms"], ratios(rounds, name, next(iter(rows)))["ms"]) for name in rounds}


def timed_step(gpt: GPT, optimizers: list[torch.optim.Optimizer], x: torch.Tensor) -> dict[str, float]:
    """Makes a training step; its milliseconds."""

    def step() -> None:
        gpt(x, x)[1].backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        gpt.zero_grad(set_to_none=True)

    return {"ms": stopwatch("cpu", step)[0]}
