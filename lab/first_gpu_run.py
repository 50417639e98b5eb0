"""The first half hour on a new GPU: is everything right there, how fast is it, does it train?

    python -m lab.first_gpu_run                        # all parts, about 40 minutes
    python -m lab.first_gpu_run --parts=right,speed    # some of them
    python -m lab.first_gpu_run --tiny                 # a rehearsal on a CPU

There are five parts, the most useful one first:

    right       the tests of the Triton kernels on the GPU; every form of every attention
    speed       bench.py --suite=gpu
    training    steps of GPT-2 (124M) and of a small model, by lab/experiments/gpu_training.py
    learning    nanoGPT's Shakespeare model; the beta post's run; long texts, LS and long heads
    faults      the tests of disturbed runs, on the GPU; float16; a run that is stopped and goes on

A part takes at most nine minutes. What runs longer than its own limit is stopped by SIGTERM and, 20 seconds later,
killed. The folder --out gets two files for each part: PART.log, in which every line begins with the seconds since its
command was started, and PART.json: the result of each command, with all losses of its evaluations. No network is
needed if data/shakespeare_char has its input.txt.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

import torch

from configurator import check_writable, configure, names, user_errors
from errors import UserError
from lab.experiments.results import save
from model import ATTENTION
from text.dataset import ROOT

parts = ""  # the parts to run, separated by commas; empty: all
texts = "shakespeare_char"  # the data of the runs on long texts: the name of a folder in data/, or the path of a folder
out = "gpu-run"  # the folder for results
out_dir = "out-gpu-run"  # the folder for the runs' checkpoints
tiny = False  # the smallest sizes, on the CPU: a rehearsal of all commands

PATIENCE = 20.0  # seconds between SIGTERM and SIGKILL
SHAKESPEARE = "config/train_shakespeare_char.py"
TINY_MODEL = "--n_layer=1 --n_head=6 --n_embd=24 --block_size=16".split()
TINY_RUN = "--batch_size=2 --max_iters=4 --eval_interval=2 --eval_iters=1 --sample_tokens=9 --device=cpu".split()


@dataclass
class Command:
    """What is run, for how many seconds at most, and what is known of it afterwards."""

    argv: list[str]  # of python
    seconds: float
    result: dict = field(default_factory=dict)  # exit code, seconds, whether it was stopped, last lines, losses
    process: subprocess.Popen | None = None

    def run(self, name: str, log: TextIO, lock: threading.Lock) -> None:
        """Runs it. Its output goes to the log and, line by line, to the terminal."""
        env = os.environ | {"PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        env |= {"TRITON_INTERPRET": str(int(tiny)), "TEST_DEVICE": "cpu" if tiny else "cuda"}
        began = time.monotonic()
        self.process = process = subprocess.Popen(
            [sys.executable, *self.argv], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        clocks = [
            threading.Timer(seconds, kill, (process, number))
            for seconds, number in ((self.seconds, signal.SIGTERM), (self.seconds + PATIENCE, signal.SIGKILL))
        ]
        for clock in clocks:
            clock.start()
        lines, losses = [], []
        for line in process.stdout:
            at = time.monotonic() - began
            with lock:
                for file in (log, sys.stdout):
                    print(f"{name} {at:6.1f}  {line}", end="", file=file, flush=True)
            lines = [*lines, line.rstrip()][-5:]
            if found := re.match(r"step (\d+): train loss (\S+), val loss (\S+)", line):
                step, train_loss, val_loss = found.groups()
                losses.append(
                    {"s": round(at, 1), "iter": int(step), "train": float(train_loss), "val": float(val_loss)}
                )
        code, at = process.wait(), time.monotonic() - began
        for clock in clocks:
            clock.cancel()
        self.result = {"command": " ".join(self.argv), "code": code, "seconds": round(at, 1)}
        self.result |= {"stopped": at >= self.seconds, "last lines": lines, "losses": losses}


def kill(process: subprocess.Popen | None, number: int) -> None:
    """Sends a signal to a process that still runs, and to all that it has started."""
    if process is not None and process.poll() is None:
        os.killpg(process.pid, number)


def train(name: str, config: str, *flags: str) -> list[str]:
    """A run of train.py into a folder of its own."""
    return [
        "train.py",
        config,
        *([*TINY_RUN, *TINY_MODEL] if tiny else ()),
        *flags,
        f"--out_dir={os.path.join(out_dir, name)}",
    ]


def tests(*files: str, names: str) -> list[str]:
    """The tests in these files whose names fit (pytest -k)."""
    return ["-m", "pytest", "-q", "-n", "0" if tiny else "6", *files, "-k", names]


def right() -> Iterator[dict[str, Command]]:
    small = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=1 --vocab_size=9 --no-compile --device=cpu"
    few = small.split() if tiny else ["--budget=450"]
    commands = {"kernels": tests("tests/test_kernels.py", names="without_positions" if tiny else "")}
    for core in ["softmax"] if tiny else ATTENTION:
        file = f"--out={os.path.join(out, f'{core}.json')}"
        commands[f"forms of {core}"] = ["lab/experiments/forms.py", f"--only={core}", file, *few]
    yield {name: Command(argv, 510) for name, argv in commands.items()}


def speed() -> Iterator[dict[str, Command]]:
    small = (
        "--what=attention --only=sdpa,softmax --heads=SL --n_head=2 --head_dim=8 --lengths=16 --tokens=32 --repeats=1"
    )
    few = [*small.split(), "--device=cpu", "--dtype=float32"] if tiny else []
    yield {"bench": Command(["bench.py", "--suite=gpu", f"--out={os.path.join(out, 'bench-gpu.json')}", *few], 520)}


def training() -> Iterator[dict[str, Command]]:
    small = "--only=plain --batch_size=2 --steps=6 --vocab_size=97 --no-compile --device=cpu --dtype=float32"
    shakespeare = "--n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --vocab_size=65 --batch_size=64 --budget=60"
    rows = "--only=plain,no wait,triton,beta,beta triton,reduce-overhead"
    commands = {
        "gpt2": ([*small.split(), *TINY_MODEL] if tiny else ["--profile", "--budget=340"], 400),
        "shakespeare": ([*small.split(), *TINY_MODEL] if tiny else ["--profile", *shakespeare.split(), rows], 100),
    }
    for name, (flags, seconds) in commands.items():
        file = f"--out={os.path.join(out, f'{name}.json')}"
        yield {name: Command(["lab/experiments/gpu_training.py", file, *flags], seconds)}


def learning() -> Iterator[dict[str, Command]]:
    yield {"shakespeare": Command(train("shakespeare", SHAKESPEARE), 150)}
    long = [f"--dataset={texts}", "--wandb_log=False"]
    if not tiny:
        long += ["--gradient_accumulation_steps=1", "--max_iters=2000", "--lr_decay_iters=2000", "--warmup_iters=100"]
        long += ["--learning_rate=2e-3", "--min_lr=2e-4", "--eval_interval=250", "--eval_iters=20"]
    steps = [] if tiny else ["--max_iters=10000"]
    yield {
        "softmax": Command(train("softmax", SHAKESPEARE, *steps), 340),
        "beta": Command(train("beta", SHAKESPEARE, "--attention=beta", *steps), 340),
        "LS": Command(train("LS", "config/train_pg19_ls.py", *long), 340),
        "long": Command(train("long", "config/train_pg19_ls.py", "--heads=L", *long), 340),
    }


def faults() -> Iterator[dict[str, Command]]:
    often = [] if tiny else ["--eval_interval=100", "--eval_iters=20"]
    endless = train("stopped", SHAKESPEARE, "--save_interval=50", *often)
    endless = [*(flag for flag in endless if "max_iters" not in flag), "--max_iters=1000000"]
    which = "resume or background or saved or signal or restarts or alone or wait"
    half = ["--dtype=float16", *often, *([] if tiny else ["--max_iters=300"])]
    yield {
        "tests": Command(tests("tests/test_gpu.py", "tests/test_faults.py", names="alone" if tiny else which), 300),
        "float16": Command(train("float16", SHAKESPEARE, *half), 300),
        "stopped": Command(endless, 20 if tiny else 90),
    }
    yield {"resumed": Command([*endless, "--init_from=resume"], 20 if tiny else 90)}


PARTS = {"right": right, "speed": speed, "training": training, "learning": learning, "faults": faults}


def run(part: str) -> dict[str, dict]:
    """Runs a part; returns {command's name: its result}, which is also in PART.json after each command's end."""
    results, lock = {}, threading.Lock()
    with open(os.path.join(out, f"{part}.log"), "w", encoding="utf-8") as log:
        for together in PARTS[part]():
            threads = [threading.Thread(target=c.run, args=(name, log, lock)) for name, c in together.items()]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:  # the commands do not get Ctrl-C, and would run on
                for command in together.values():
                    kill(command.process, signal.SIGTERM)
                for thread in threads:
                    thread.join()
                raise
            results |= {name: command.result for name, command in together.items()}
            save(os.path.join(out, f"{part}.json"), results)
    return results


def in_words(result: dict) -> str:
    """How a command ended."""
    if result["stopped"]:
        return f"stopped at its limit, {result['seconds']:.0f} s"
    return f"{'done' if result['code'] == 0 else 'FAILED'} after {result['seconds']:.0f} s"


def main() -> None:
    os.chdir(ROOT)
    chosen = names(parts, PARTS)
    if not tiny and not torch.cuda.is_available():
        raise UserError("there is no CUDA GPU here (or this PyTorch is built without CUDA): --tiny is a rehearsal")
    os.makedirs(out, exist_ok=True)
    check_writable(*(os.path.join(out, f"{part}.log") for part in chosen))
    found = {part: run(part) for part in chosen}
    for part, results in found.items():
        print(f"\n{part}")
        for name, result in results.items():
            least = min((row["val"] for row in result["losses"]), default=None)
            lowest = "" if least is None else f"; lowest validation loss {least:.4f}"
            print(f"  {name:24}{in_words(result)}{lowest}")
            print("".join(f"      {line}\n" for line in result["last lines"] if "FAILED" in in_words(result)), end="")
    if any("FAILED" in in_words(result) for results in found.values() for result in results.values()):
        raise UserError(f"not everything worked: the logs are in {out}")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
