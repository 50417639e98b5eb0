"""The first half hour on a new GPU: is everything right there, how fast is it, does it train?

    python -m lab.first_gpu_run                        # all parts, about 40 minutes
    python -m lab.first_gpu_run --parts=right,speed    # some of them
    python -m lab.first_gpu_run --tiny                 # a rehearsal on a CPU

There are five parts, the most useful one first:

    right       tests/test_gpu.py; bench.py compares each attention with its definition
    speed       bench.py; forward passes, training steps and decoding of whole models
    training    steps of GPT-2 (124M) and of a small model, by lab/experiments/gpu_training.py
    learning    nanoGPT's Shakespeare model; the beta post's run; long texts, LS and long heads
    faults      the tests of disturbed runs, on the GPU; float16; a run that is stopped and goes on

A part takes at most nine minutes. The program `timeout` (of the GNU tools) sends SIGTERM to a
command at its own limit, and SIGKILL 20 seconds later. Each part writes two files to the folder
--out. PART.log has the output of its commands; every line begins with the seconds since its command
was started. PART.json has the result of each command, with all losses of its evaluations. No
network is needed if data/shakespeare_char has its input.txt.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, TextIO

import torch

from configurator import names, run_script
from errors import UserError
from lab.experiments.results import save

parts = ""  # the parts to run, separated by commas; empty: all
texts = "shakespeare_char"  # the data of the runs on long texts: a folder in data/, or its path
out = "gpu-run"  # the folder for results
out_dir = "out-gpu-run"  # the folder for the runs' checkpoints
tiny = False  # the smallest sizes, on the CPU: a rehearsal of all commands

PATIENCE = 20.0  # seconds between SIGTERM and SIGKILL
SHAKESPEARE = "config/train_shakespeare_char.py"
LONG_TEXTS = "config/train_pg19_ls.py"
LONG_RUN = (
    "--gradient_accumulation_steps=1 --max_iters=2000 --lr_decay_iters=2000 --warmup_iters=100 "
    "--learning_rate=2e-3 --min_lr=2e-4 --eval_interval=250 --eval_iters=20"
)
TINY_BENCH = (
    "--only=sdpa,softmax --heads=SL --n_head=2 --head_dim=8 --lengths=16 --tokens=32 --repeats=1"
)
TINY_MODELS = "--lengths=16 --tokens=32 --repeats=1 --device=cpu"
TINY_STEPS = "--only=plain --size=tiny --steps=6 --no-compile --device=cpu --dtype=float32"
TINY_TRAIN = (
    "--n_layer=1 --n_head=6 --n_embd=24 --block_size=16 --batch_size=2 --max_iters=4 "
    "--eval_interval=2 --eval_iters=1 --sample_tokens=9 --device=cpu"
)


class Command(NamedTuple):
    argv: list[str]  # of python
    seconds: float  # its limit


Groups = Iterator[dict[str, Command]]  # a group's commands run at the same time


def run(name: str, command: Command, log: TextIO, running: list[subprocess.Popen]) -> dict:
    """Run a command and return its result. Its output goes to the log and to the terminal.

    running: the list to which the command's process is added.
    """
    argv = ["timeout", f"--kill-after={PATIENCE}", str(command.seconds), sys.executable]
    environment = {
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "disabled",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "TEST_DEVICE": "cpu" if tiny else "cuda",
    }
    began = time.monotonic()
    process = subprocess.Popen(
        [*argv, *command.argv],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    running.append(process)
    lines = []
    losses = []
    for line in process.stdout:
        seconds = time.monotonic() - began
        for file in (log, sys.stdout):
            print(f"{name} {seconds:6.1f}  {line}", end="", file=file, flush=True)
        lines.append(line.rstrip())
        if match := re.match(r"step (\d+): train loss (\S+), val loss (\S+)", line):
            step, train_loss, val_loss = map(float, match.groups())
            row = {"s": round(seconds, 1), "iter": int(step), "train": train_loss, "val": val_loss}
            losses.append(row)
    code = process.wait()
    seconds = round(time.monotonic() - began, 1)
    wrong = [line for line in lines if " is WRONG: " in line]  # bench.py goes on without this row
    return {
        "command": " ".join(command.argv),
        "code": code,
        "seconds": seconds,
        "wrong": wrong,
        "stopped": seconds >= command.seconds,
        "last lines": lines[-5:],
        "losses": losses,
    }


def train(name: str, config: str, *flags: str) -> list[str]:
    """The command of a run of train.py, in its own folder."""
    sizes = TINY_TRAIN.split() if tiny else []
    return ["train.py", config, *sizes, *flags, f"--out_dir={os.path.join(out_dir, name)}"]


def tests(*files: str, names: str) -> list[str]:
    """The command of the tests in these files whose names fit (pytest -k)."""
    return ["-m", "pytest", "-q", "-n", "0" if tiny else "6", *files, "-k", names]


def out_flag(name: str) -> str:
    """The flag for a file of results."""
    return f"--out={os.path.join(out, name)}.json"


def bench(name: str, seconds: float, flags: str) -> Command:
    """A run of bench.py, which first compares each attention with its definition."""
    sizes = f"{TINY_BENCH} --device=cpu" if tiny else "--device=cuda"
    return Command(["bench.py", *flags.split(), *sizes.split(), out_flag(name)], seconds)


def right() -> Groups:
    gpu = tests("tests/test_gpu.py", names="alone" if tiny else "")
    flags = "--quick --head_dim=64 --lengths=512 --dtype="
    yield {
        "tests": Command(gpu, 510),
        "float32": bench("right-float32", 510, flags + "float32"),
        "bfloat16": bench("right-bfloat16", 510, flags + "bfloat16"),
    }


def models(name: str, seconds: float, flags: str) -> Command:
    """A run of lab/experiments/model_times.py."""
    sizes = TINY_MODELS if tiny else "--device=cuda --dtype=bfloat16 --repeats=7"
    argv = ["-m", "lab.experiments.model_times", *flags.split(), *sizes.split(), out_flag(name)]
    return Command(argv, seconds)


def speed() -> Groups:
    flags = (
        "--dtype=bfloat16 --head_dim=64,128,32 --tokens=32768 --lengths=2048,8192,32768 --repeats=7"
    )
    yield {"bench": bench("bench-gpu", 280, flags)}
    yield {"models": models("models-gpu", 100, "--what=forward,step --tokens=32768")}
    yield {"decode": models("decode-gpu", 100, "--what=decode --lengths=512")}


def gpu_training(name: str, seconds: float, *flags: str) -> Command:
    """A run of lab/experiments/gpu_training.py."""
    sizes = TINY_STEPS.split() if tiny else ["--profile", *flags]
    return Command(["-m", "lab.experiments.gpu_training", *sizes, out_flag(name)], seconds)


def training() -> Groups:
    rows = "--only=plain,no wait,beta,reduce-overhead"
    small = ("--size=shakespeare", "--budget=60", rows)
    yield {"gpt2": gpu_training("gpt2", 400, "--budget=340")}
    yield {"shakespeare": gpu_training("shakespeare", 100, *small)}


def learning() -> Groups:
    yield {"shakespeare": Command(train("shakespeare", SHAKESPEARE), 150)}
    steps = [] if tiny else ["--max_iters=10000"]
    long = [f"--dataset={texts}", "--wandb_log=False"]
    if not tiny:
        long += LONG_RUN.split()
    yield {
        "softmax": Command(train("softmax", SHAKESPEARE, *steps), 340),
        "beta": Command(train("beta", SHAKESPEARE, "--attention=beta", *steps), 340),
        "LS": Command(train("LS", LONG_TEXTS, *long), 340),
        "long": Command(train("long", LONG_TEXTS, "--heads=L", *long), 340),
    }


def faults() -> Groups:
    names = "resume" if tiny else "resume or saved or restarts"
    often = [] if tiny else ["--eval_interval=100", "--eval_iters=20"]
    steps = [] if tiny else ["--max_iters=300"]
    endless = ["--save_interval=50", *often, "--max_iters=1000000"]
    stopped = Command(train("stopped", SHAKESPEARE, *endless), 20 if tiny else 90)
    yield {
        "tests": Command(tests("tests/test_faults.py", names=names), 300),
        "float16": Command(train("float16", SHAKESPEARE, "--dtype=float16", *often, *steps), 300),
        "stopped": stopped,
    }
    yield {"resumed": stopped._replace(argv=[*stopped.argv, "--init_from=resume"])}


PARTS = {
    "right": right,
    "speed": speed,
    "training": training,
    "learning": learning,
    "faults": faults,
}


def run_part(part: str) -> dict[str, dict]:
    """Run a part; return {command's name: its result}, which is also saved after each group."""
    results = {}
    running = []
    with (
        open(os.path.join(out, f"{part}.log"), "w", encoding="utf-8") as log,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        for group in PARTS[part]():
            futures = {}
            for name, command in group.items():
                futures[name] = pool.submit(run, name, command, log, running)
            try:
                for name, future in futures.items():
                    results[name] = future.result()
            except KeyboardInterrupt:  # the commands do not get Ctrl-C, and would run on
                for process in running:
                    process.terminate()
                raise
            save(os.path.join(out, f"{part}.json"), results)
    return results


def in_words(result: dict) -> str:
    """How a command ended."""
    if result["stopped"]:
        return f"stopped at its limit, {result['seconds']:.0f} s"
    ending = "FAILED" if result["code"] or result["wrong"] else "done"
    return f"{ending} after {result['seconds']:.0f} s"


def main() -> None:
    chosen = names(parts, PARTS)
    if not tiny and not torch.cuda.is_available():
        raise UserError(
            "there is no CUDA GPU here (or this PyTorch is built without CUDA): "
            "--tiny is a rehearsal"
        )
    os.makedirs(out, exist_ok=True)
    results = {part: run_part(part) for part in chosen}
    failed = False
    for part in chosen:
        print(f"\n{part}")
        for name, result in results[part].items():
            ending = in_words(result)
            lowest = min((row["val"] for row in result["losses"]), default=None)
            loss = "" if lowest is None else f"; lowest validation loss {lowest:.4f}"
            print(f"  {name:24}{ending}{loss}")
            if ending.startswith("FAILED"):
                failed = True
                for line in (*result["wrong"], *result["last lines"]):
                    print(f"      {line}")
    if failed:
        raise UserError(f"not everything worked: the logs are in {out}")


if __name__ == "__main__":
    run_script(globals())
